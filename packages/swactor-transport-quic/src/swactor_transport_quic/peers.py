"""Who may talk to us, and the ready links by (peer, ALPN). Decides; performs nothing.

Knows links only as values with a state, an epoch and a direction, and no socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from swactor_core.ids import NodeId, node_id_of
from swactor_core.spi.transport import Peer

from swactor_transport_quic.identity import Claim
from swactor_transport_quic.link import Alpn, Link, LinkState

logger = logging.getLogger(__name__)

LinkKey = tuple[NodeId, Alpn]


class PeerTable:
    """`own_id` breaks ties between two sides that dial each other; `authorise` judges unknown keys."""

    def __init__(self, own_id: NodeId, authorise: Callable[[bytes], bool]) -> None:
        self._own_id = own_id
        self._authorise = authorise
        self._peers: dict[NodeId, Peer] = {}
        self._links: dict[LinkKey, list[Link]] = {}

    # Identities

    def get(self, node_id: NodeId) -> Peer | None:
        return self._peers.get(node_id)

    def put(self, peer: Peer) -> None:
        self._peers[peer.node_id] = peer

    def discard(self, node_id: NodeId) -> None:
        self._peers.pop(node_id, None)

    def node_of(self, key: bytes) -> NodeId:
        """The node id under which a key is known, else the one derived from it."""
        for peer in self._peers.values():
            if peer.public_key == key:
                return peer.node_id
        return node_id_of(key)

    def judge_dialler(self, claim: Claim) -> str:
        """Why someone who dials us is refused, or an empty string."""
        peer = self._peers.get(self.node_of(claim.public_key))
        if peer is not None and peer.public_key == claim.public_key:
            if claim.epoch < peer.epoch:
                return f"epoch {claim.epoch} is a former life, epoch {peer.epoch} is known"
            return ""
        try:
            allowed = self._authorise(claim.public_key)
        except Exception:
            logger.exception("authorise failed; the dialler is refused")
            allowed = False
        return "" if allowed else f"key {claim.public_key.hex()} is not authorised"

    @staticmethod
    def judge_answer(peer: Peer, claim: Claim) -> str:
        """Why the one who answered our dial is not `peer`, or an empty string."""
        if claim.public_key != peer.public_key:
            return f"answers with key {claim.public_key.hex()}, expected {peer.public_key.hex()}"
        if claim.epoch < peer.epoch:
            return f"answers as epoch {claim.epoch}, expected {peer.epoch} or later"
        return ""

    # Links

    def links_of(self, node_id: NodeId) -> list[Link]:
        return [link for alpn in Alpn for link in self._links.get((node_id, alpn), ())]

    def outdated(self, peer: Peer) -> Iterable[tuple[Link, str]]:
        """Links that the new record of a peer ends, each with the reason."""
        for link in self.links_of(peer.node_id):
            if link.peer_key != peer.public_key:
                yield link, "the peer now has another key"
            elif link.epoch < peer.epoch:
                yield link, f"the peer was restarted (epoch {peer.epoch})"

    def newest_epoch(self, node_id: NodeId) -> int:
        return max((link.epoch for link in self.links_of(node_id)), default=0)

    def replaced_by(self, link: Link) -> Iterable[tuple[Link, str]]:
        """Links that the new `link` proves dead, each with the reason."""
        assert link.peer is not None
        for other in self.links_of(link.peer):
            if other.epoch < link.epoch:
                yield other, f"the peer was restarted (epoch {link.epoch})"
            elif other.alpn == link.alpn and other.dialled == link.dialled:
                # A side dials again only when its former connection is gone.
                yield other, "the peer has made a new connection"

    def add(self, link: Link) -> None:
        self._links.setdefault(_key(link), []).append(link)

    def remove(self, link: Link) -> None:
        """Nothing when the link never became ready."""
        if link.peer is None or link.alpn is None:
            return
        links = self._links.get(_key(link), [])
        if link in links:
            links.remove(link)
            if not links:
                del self._links[_key(link)]

    def usable(self, key: LinkKey) -> Link | None:
        """Of two that were dialled at once, the one dialled by the smaller node id."""
        we_dial = self._own_id < key[0]
        ready = [link for link in self._links.get(key, ()) if link.state is LinkState.READY]
        return max(ready, key=lambda link: (link.dialled == we_dial, link.ready_at), default=None)

    def to_retire(self, key: LinkKey) -> Iterable[Link]:
        """Own connections that a simultaneous dial made superfluous; only their dialler closes them."""
        if key[0] == self._own_id:
            return []  # both ends of a connection to oneself are here
        best = self.usable(key)
        return [link for link in self._links.get(key, ()) if link.dialled and link is not best]


def _key(link: Link) -> LinkKey:
    assert link.peer is not None
    assert link.alpn is not None
    return link.peer, link.alpn
