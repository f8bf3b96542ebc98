"""The transport: peers, the cache of links per (peer, ALPN), dialling, and the queues of what arrived.

Everything runs in callbacks of one loop and in the callers' own coroutines; no task is made here. Knows
sockets only through its endpoint and aioquic only through its connection maker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from dataclasses import dataclass

from swactor_core.errors import EdgeClosed, TransportError
from swactor_core.ids import EdgeId, NodeId, node_hex, node_id_of
from swactor_core.spi.transport import ControlChannel, Peer, RecvEdge, SendEdge, TransportContext
from swactor_core.wire import encode_preamble

from swactor_transport_quic.admission import Admitted
from swactor_transport_quic.connections import ConnectionMaker
from swactor_transport_quic.control import CHANNEL_HELLO, ChannelArrival, QuicControlChannel
from swactor_transport_quic.edges import EdgeArrival, QuicRecvEdge, QuicSendEdge
from swactor_transport_quic.endpoint import Endpoint
from swactor_transport_quic.identity import Claim, public_key
from swactor_transport_quic.link import Address, Alpn, CloseCode, Link, LinkState, StreamHandler
from swactor_transport_quic.settings import parse_settings
from swactor_transport_quic.waiting import Signal

logger = logging.getLogger(__name__)

_DUPLICATE_LINGER = 1.0
"""Seconds that the weaker of two simultaneous connections stays, for whoever has not yet seen the other."""

_Key = tuple[NodeId, str]


@dataclass(slots=True)
class _Dialling:
    """The state of dialling one (peer, ALPN)."""

    link: Link | None = None
    failures: int = 0
    not_before: float = 0.0
    last: str = "no answer"


class QuicTransport:
    """Implements `swactor_core.spi.transport.Transport`."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._settings = parse_settings(context.settings)
        self._public_key = public_key(context.seed)
        self._maker = ConnectionMaker(seed=context.seed, epoch=context.epoch, settings=self._settings)
        self._endpoint = Endpoint(self._settings, self._accept)
        self._peers: dict[NodeId, Peer] = {}
        self._links: dict[_Key, list[Link]] = {}
        self._dialling: dict[_Key, _Dialling] = {}
        self._incoming: set[tuple[Link, EdgeId]] = set()
        self._edges: deque[tuple[NodeId, EdgeId, QuicRecvEdge]] = deque()
        self._channels: deque[QuicControlChannel] = deque()
        self._edge_arrived = Signal()
        self._channel_arrived = Signal()
        self._changed = Signal()
        self._address: tuple[str, int] | None = None
        self._closing = False
        self._closed: asyncio.Event = asyncio.Event()

    @property
    def host(self) -> str:
        return self._bound[0]

    @property
    def port(self) -> int:
        return self._bound[1]

    @property
    def _bound(self) -> tuple[str, int]:
        if self._address is None:
            raise TransportError("the transport is not started", hint="await start() first")
        return self._address

    @property
    def public_key(self) -> bytes:
        return self._public_key

    async def start(self) -> None:
        self._endpoint.open(self._context.bind_host, self._context.bind_port)
        self._maker.receive_buffer = self._endpoint.receive_buffer
        self._address = self._endpoint.address

    # Peers

    def set_peer(self, peer: Peer) -> None:
        self._peers[peer.node_id] = peer
        for alpn in Alpn.ALL:
            dialling = self._dialling.get((peer.node_id, alpn))
            if dialling is not None:
                dialling.not_before = 0.0
        for link in self._links_of(peer.node_id):
            if link.peer_key != peer.public_key:
                link.close(CloseCode.REMOVED, f"peer {node_hex(peer.node_id)} now has another key")
            elif link.epoch < peer.epoch:
                link.close(
                    CloseCode.FORMER_LIFE, f"peer {node_hex(peer.node_id)} was restarted (epoch {peer.epoch})"
                )
        self._changed.fire()

    def remove_peer(self, node_id: NodeId) -> None:
        """Forgets the peer and ends its connections; one that `authorise` accepts may still dial."""
        self._peers.pop(node_id, None)
        for link in self._links_of(node_id):
            link.close(CloseCode.REMOVED, f"peer {node_hex(node_id)} was removed")
        self._changed.fire()

    def _links_of(self, node_id: NodeId) -> list[Link]:
        return [link for alpn in Alpn.ALL for link in self._links.get((node_id, alpn), ())]

    def _node_of(self, key: bytes) -> NodeId | None:
        return next((p.node_id for p in self._peers.values() if p.public_key == key), None)

    def _judge_dialler(self, claim: Claim) -> str:
        node_id = self._node_of(claim.public_key)
        if node_id is not None:
            known = self._peers[node_id].epoch
            return f"epoch {claim.epoch} is a former life of epoch {known}" if claim.epoch < known else ""
        try:
            allowed = self._context.authorise(claim.public_key)
        except Exception:
            logger.exception("authorise failed; the dialler is refused")
            allowed = False
        return "" if allowed else f"key {claim.public_key.hex()} is not authorised"

    @staticmethod
    def _judge_answer(peer: Peer, claim: Claim) -> str:
        if claim.public_key != peer.public_key:
            return f"answers with key {claim.public_key.hex()}, expected {peer.public_key.hex()}"
        if claim.epoch < peer.epoch:
            return f"answers as epoch {claim.epoch}, expected {peer.epoch} or later"
        return ""

    # Links

    def _accept(self, admitted: Admitted, address: Address) -> Link:
        local = self._endpoint.is_local(address)
        quic = self._maker.accepting(admitted, self._judge_dialler, local=local)
        return Link(
            quic,
            carrier=self._endpoint,
            owner=self,
            settings=self._settings,
            address=address,
            dialled=False,
            alpn=None,
            expected=None,
        )

    def _dial(self, peer: Peer, alpn: str, address: Address) -> Link:
        quic = self._maker.dialling(
            alpn, lambda claim: self._judge_answer(peer, claim), local=self._endpoint.is_local(address)
        )
        link = Link(
            quic,
            carrier=self._endpoint,
            owner=self,
            settings=self._settings,
            address=address,
            dialled=True,
            alpn=alpn,
            expected=peer.node_id,
        )
        self._endpoint.add_id(quic.host_cid, link)
        now = asyncio.get_running_loop().time()
        quic.connect(address, now)
        link.flush(now)
        return link

    def _usable(self, key: _Key) -> Link | None:
        """Of several, the one dialled by the smaller node id; of those, the newest."""
        node_id, _ = key
        we_dial = self._context.node_id < node_id
        ready = [link for link in self._links.get(key, ()) if link.state is LinkState.READY]
        return max(ready, key=lambda link: (link.dialled == we_dial, link.ready_at), default=None)

    async def _link_to(self, node_id: NodeId, alpn: str, deadline: float) -> Link:
        """A ready link; dials with growing pauses until `deadline`, seconds from now."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline
        key = (node_id, alpn)
        while True:
            if self._closing or self._address is None:
                raise EdgeClosed(
                    "the transport is closed" if self._closing else "the transport is not started"
                )
            link = self._usable(key)
            if link is not None:
                return link
            peer = self._peers.get(node_id)
            if peer is None:
                raise TransportError(
                    f"peer {node_hex(node_id)} is not known and has not dialled", hint="set_peer first"
                )
            state = self._dialling.setdefault(key, _Dialling())
            where = f"peer {node_hex(node_id)} at {peer.host}:{peer.port}"
            now = loop.time()
            if now >= until:
                raise TransportError(f"{where} cannot be reached in {deadline:g} s: {state.last}")
            if state.link is None and now >= state.not_before:
                try:
                    address = await asyncio.wait_for(
                        self._endpoint.resolve(peer.host, peer.port), until - now
                    )
                except TimeoutError:
                    state.last = f"resolving {peer.host!r} took too long"
                    continue
                except OSError as error:
                    raise TransportError(f"{where}: {error}", hint="check the peer's address") from error
                if state.link is None and not self._closing and self._usable(key) is None:
                    state.link = self._dial(peer, alpn, address)
                continue
            attempt = state.link
            pause = until - now if attempt is not None else min(until, state.not_before) - now
            await self._changed.wait(pause)
            if attempt is not None and attempt.fatal:
                raise TransportError(f"{where} {attempt.reason}", hint="check who listens at that address")

    def link_ready(self, link: Link) -> None:
        self._endpoint.ready(link)
        node_id = link.peer
        if node_id is None:
            node_id = link.peer = self._node_of(link.peer_key) or node_id_of(link.peer_key)
        assert link.alpn is not None
        key = (node_id, link.alpn)
        self._dialling.pop(key, None) if link.dialled else None
        newest = max((other.epoch for other in self._links_of(node_id)), default=0)
        if link.epoch < newest:
            link.close(CloseCode.FORMER_LIFE, f"epoch {link.epoch} is a former life of epoch {newest}")
            return
        for other in self._links_of(node_id):
            if other.epoch < link.epoch:
                other.lose(f"the peer was restarted (epoch {link.epoch})")
            elif other.alpn == link.alpn and other.dialled == link.dialled:
                # A side dials again only when its former connection is gone.
                other.lose("the peer has made a new connection")
        self._links.setdefault(key, []).append(link)
        if len(self._links[key]) > 1:
            self._retire_duplicate(key)
        self._changed.fire()

    def _retire_duplicate(self, key: _Key) -> None:
        """Both sides dialled at once: the larger node id closes its own connection once it has no streams."""
        if self._context.node_id > key[0]:
            loop = asyncio.get_running_loop()
            for link in self._links[key]:
                if link.dialled:
                    loop.call_later(_DUPLICATE_LINGER, self._close_duplicate, key, link)

    def _close_duplicate(self, key: _Key, link: Link) -> None:
        others = [o for o in self._links.get(key, ()) if o is not link and o.state is LinkState.READY]
        if self._closing or link.state is not LinkState.READY or not others:
            return
        if link.busy:
            asyncio.get_running_loop().call_later(_DUPLICATE_LINGER, self._close_duplicate, key, link)
        else:
            link.close(CloseCode.DUPLICATE, "duplicate connection")

    def link_ended(self, link: Link, lost: bool) -> None:
        if link.peer is not None and link.alpn is not None:
            key = (link.peer, link.alpn)
            links = self._links.get(key, [])
            if link in links:
                links.remove(link)
                if not links:
                    del self._links[key]
            state = self._dialling.get(key)
            if state is not None and state.link is link:
                self._dial_failed(state, link.reason)
        self._changed.fire()
        if lost and link.peer is not None and not self._closing:
            try:
                self._context.on_peer_lost(link.peer, link.reason)
            except Exception:
                logger.exception("on_peer_lost failed")

    def _dial_failed(self, state: _Dialling, reason: str) -> None:
        state.link = None
        state.last = reason
        pause = min(self._settings.redial_first * 2**state.failures, self._settings.redial_longest)
        # Jitter, so that two sides that dial each other do not stay in step.
        pause *= 0.5 + random.random() / 2  # noqa: S311 - spreads retries, decides nothing secret
        state.failures = min(state.failures + 1, 16)
        state.not_before = asyncio.get_running_loop().time() + pause

    # Streams

    def stream_opened(self, link: Link, stream_id: int) -> StreamHandler:
        if link.alpn == Alpn.CONTROL:
            return ChannelArrival(link, stream_id, self._channel_opened)
        return EdgeArrival(link, stream_id, self._edge_opened)

    def _edge_opened(self, link: Link, stream_id: int, edge_id: EdgeId) -> str:
        if (link, edge_id) in self._incoming:
            return f"edge {edge_id} is already open on this connection"
        half = link.quic.receive_half(stream_id)
        assert half is not None
        assert link.peer is not None
        self._incoming.add((link, edge_id))
        edge = QuicRecvEdge(link, half, edge_id, lambda: self._incoming.discard((link, edge_id)))
        link.handlers[stream_id] = edge
        self._edges.append((link.peer, edge_id, edge))
        self._edge_arrived.fire()
        return ""

    def _channel_opened(self, link: Link, stream_id: int) -> QuicControlChannel:
        send, receive = link.quic.send_half(stream_id), link.quic.receive_half(stream_id)
        assert send is not None
        assert receive is not None
        channel = QuicControlChannel(link, send, receive, opener=False)
        self._channels.append(channel)
        self._channel_arrived.fire()
        return channel

    async def connect(self, peer: NodeId, *, deadline: float) -> None:
        await self._link_to(peer, Alpn.EDGE, deadline)

    async def open_edge(self, peer: NodeId, edge_id: EdgeId, *, deadline: float) -> SendEdge:
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline
        while True:
            link = await self._link_to(peer, Alpn.EDGE, until - loop.time())
            half = link.quic.open_stream(encode_preamble(edge_id), is_unidirectional=True)
            if half is not None:
                edge = QuicSendEdge(link, half, edge_id)
                link.flush()
                return edge
            await self._stream_slot(link, until - loop.time(), f"edge {edge_id}")

    async def open_control(self, peer: NodeId, *, deadline: float) -> ControlChannel:
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline
        while True:
            link = await self._link_to(peer, Alpn.CONTROL, until - loop.time())
            half = link.quic.open_stream(CHANNEL_HELLO, is_unidirectional=False)
            if half is not None:
                receive = link.quic.receive_half(half.stream_id)
                assert receive is not None
                channel = QuicControlChannel(link, half, receive, opener=True)
                link.flush()
                return channel
            await self._stream_slot(link, until - loop.time(), "a control channel")

    @staticmethod
    async def _stream_slot(link: Link, left: float, what: str) -> None:
        """Waits until something happened on the link that may let one more stream open."""
        assert link.peer is not None
        if left <= 0 or not await link.activity.wait(left):
            raise TransportError(
                f"peer {node_hex(link.peer)} allows no more streams on this connection, {what} stays shut",
                hint="close finished edges, or raise max_edges or max_channels of that peer",
            )

    async def accept_edge(self) -> tuple[NodeId, EdgeId, RecvEdge]:
        while not self._edges:
            self._check_open()
            await self._edge_arrived.wait()
        self._check_open()
        return self._edges.popleft()

    async def accept_control(self) -> ControlChannel:
        while not self._channels:
            self._check_open()
            await self._channel_arrived.wait()
        self._check_open()
        return self._channels.popleft()

    def _check_open(self) -> None:
        if self._closing:
            raise EdgeClosed("the transport is closed")

    # The end

    async def close(self) -> None:
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._edge_arrived.fire()
        self._channel_arrived.fire()
        self._changed.fire()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.drain_timeout):
                    for link in self._endpoint.links:
                        while not self._delivered(link):
                            await link.activity.wait()
        finally:
            for link in self._endpoint.links:
                link.close(CloseCode.SHUTDOWN, "the node is shutting down")
            self._endpoint.close()
            self._edges.clear()
            self._channels.clear()
            self._closed.set()

    @staticmethod
    def _delivered(link: Link) -> bool:
        """Whether every finished stream of the link is acknowledged to its end."""
        if link.state is not LinkState.READY:
            return True
        senders = (h for h in link.handlers.values() if isinstance(h, QuicSendEdge | QuicControlChannel))
        return all(sender.delivered for sender in senders)


class QuicPlugin:
    """Implements `swactor_core.spi.transport.TransportPlugin`."""

    def public_key(self, seed: bytes) -> bytes:
        return public_key(seed)

    def create(self, context: TransportContext) -> QuicTransport:
        """Raises ConfigError for a bad seed, epoch or setting."""
        return QuicTransport(context)
