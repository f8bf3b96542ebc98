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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from swactor_core.errors import EdgeClosed, TransportError
from swactor_core.ids import EdgeId, NodeId, node_hex
from swactor_core.spi.transport import ControlChannel, Peer, RecvEdge, SendEdge, TransportContext

from swactor_transport_quic.admission import Admitted
from swactor_transport_quic.compat import Connection
from swactor_transport_quic.connections import ConnectionMaker
from swactor_transport_quic.control import ChannelArrival, QuicControlChannel
from swactor_transport_quic.edges import EdgeArrival, QuicRecvEdge, QuicSendEdge
from swactor_transport_quic.endpoint import Endpoint, is_unspecified
from swactor_transport_quic.identity import Claim, public_key
from swactor_transport_quic.link import Alpn, CloseCode, Link, LinkState, StreamHandler
from swactor_transport_quic.opening import open_channel, open_edge, reached, stream_slot
from swactor_transport_quic.peers import LinkKey, PeerTable
from swactor_transport_quic.settings import parse_settings
from swactor_transport_quic.udp import Address
from swactor_transport_quic.waiting import Signal

logger = logging.getLogger(__name__)

StreamT = TypeVar("StreamT", QuicSendEdge, QuicControlChannel)


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
        self._peers = PeerTable(context.node_id, context.authorise)
        self._dialling: dict[LinkKey, _Dialling] = {}
        self._incoming: set[tuple[Link, EdgeId]] = set()
        self._edges: deque[tuple[Link, EdgeId, QuicRecvEdge]] = deque()
        self._channels: deque[tuple[Link, QuicControlChannel]] = deque()
        self._edge_arrived = Signal()
        self._channel_arrived = Signal()
        self._changed = Signal()
        self._address: tuple[str, int] | None = None
        self._closing = False
        self._closed = asyncio.Event()

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
        if self._address is not None or self._closing:
            raise TransportError("a transport starts once", hint="create a new one")
        self._endpoint.open(self._context.bind_host, self._context.bind_port)
        self._maker.receive_buffer = self._endpoint.receive_buffer
        self._address = self._endpoint.address

    # Peers and links

    def set_peer(self, peer: Peer) -> None:
        changed = self._peers.get(peer.node_id) != peer
        self._peers.put(peer)
        for alpn in Alpn:
            dialling = self._dialling.get((peer.node_id, alpn))
            if dialling is not None and changed:
                if dialling.link is not None:
                    dialling.link.close(CloseCode.REMOVED, "the peer's record changed")
                dialling.not_before = 0.0
        for link, reason in list(self._peers.outdated(peer)):
            link.close(CloseCode.FORMER_LIFE, reason)
        self._changed.fire()

    def remove_peer(self, node_id: NodeId) -> None:
        """Forgets the peer and ends its connections; one that `authorise` accepts may still dial."""
        self._peers.discard(node_id)
        for alpn in Alpn:
            dialling = self._dialling.pop((node_id, alpn), None)
            if dialling is not None and dialling.link is not None:
                dialling.link.close(CloseCode.REMOVED, "it gave the other side up as gone")
        for link in self._peers.links_of(node_id):
            link.close(CloseCode.REMOVED, "it gave the other side up as gone")
        self._changed.fire()

    def _accept(self, admitted: Admitted, address: Address) -> Link:
        local = self._endpoint.is_local(address)
        quic = self._maker.accepting(admitted, self._peers.judge_dialler, local=local)
        return self._link(quic, address, alpn=None, expected=None)

    def _dial(self, peer: Peer, alpn: Alpn, address: Address) -> Link:
        def judge(claim: Claim) -> str:
            return self._peers.judge_answer(peer, claim)

        quic = self._maker.dialling(alpn, judge, local=self._endpoint.is_local(address))
        link = self._link(quic, address, alpn=alpn, expected=peer.node_id)
        self._endpoint.add_id(quic.host_cid, link)
        now = asyncio.get_running_loop().time()
        quic.connect(address, now)
        link.flush(now)
        return link

    def _link(
        self, quic: Connection, address: Address, *, alpn: Alpn | None, expected: NodeId | None
    ) -> Link:
        return Link(
            quic,
            carrier=self._endpoint,
            owner=self,
            settings=self._settings,
            address=address,
            dialled=expected is not None,
            alpn=alpn,
            expected=expected,
        )

    async def _link_to(self, key: LinkKey, until: float, *, deadline: float) -> Link:
        """A ready link; dials with growing pauses `until` a time of the loop. `deadline`, seconds, is what to
        name when that has come."""
        loop = asyncio.get_running_loop()
        node_id, alpn = key
        while True:
            self._check_open()
            link = self._peers.usable(key)
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
                raise TransportError(
                    f"{where} cannot be reached in {deadline:.3g} s: {state.last}",
                    hint="check that it runs, its address, and that UDP passes",
                )
            if state.link is None and now >= state.not_before:
                address = await self._resolve(peer, where, until - now)
                # Meanwhile the peer may have got another record, or been removed.
                current = self._peers.get(node_id) == peer and self._dialling.get(key) is state
                if current and state.link is None and not self._closing and self._peers.usable(key) is None:
                    state.link = self._dial(peer, alpn, address)
                continue
            attempt = state.link
            await self._changed.wait((until if attempt is not None else min(until, state.not_before)) - now)
            if attempt is not None and attempt.fatal:
                raise TransportError(f"{where} {attempt.reason}", hint="check who listens at that address")

    async def _resolve(self, peer: Peer, where: str, left: float) -> Address:
        if not 0 < peer.port < 65536:
            raise TransportError(f"{where}: no such port", hint="check the peer's address")
        try:
            address = await asyncio.wait_for(self._endpoint.resolve(peer.host, peer.port), left)
        except TimeoutError:
            raise TransportError(f"{where}: no address for {peer.host!r} within {left:.3g} s") from None
        except OSError as error:
            raise TransportError(f"{where}: {error}", hint="check the peer's address") from error
        if is_unspecified(address[0]):
            # A reply would come from another address than the one dialled, and be dropped.
            raise TransportError(f"{where}: a wildcard address cannot be dialled", hint="give a real address")
        return address

    def link_ready(self, link: Link) -> None:
        self._endpoint.ready(link)
        if link.peer is None:
            link.peer = self._peers.node_of(link.peer_key)
        assert link.alpn is not None
        key = (link.peer, link.alpn)
        if link.dialled:
            self._dialling.pop(key, None)
        newest = self._peers.newest_epoch(link.peer)
        if link.epoch < newest:
            link.close(CloseCode.FORMER_LIFE, f"epoch {link.epoch} is a former life, epoch {newest} is known")
            return
        for other, reason in list(self._peers.replaced_by(link)):
            other.lose(reason)
        self._peers.add(link)
        for superfluous in self._peers.to_retire(key):
            superfluous.supersede()
        self._changed.fire()

    def has_better(self, link: Link) -> bool:
        assert link.peer is not None
        assert link.alpn is not None
        return self._peers.usable((link.peer, link.alpn)) is not link

    def link_ended(self, link: Link, lost: bool) -> None:
        self._peers.remove(link)
        if link.peer is not None and link.alpn is not None:
            state = self._dialling.get((link.peer, link.alpn))
            if state is not None and state.link is link:
                self._dial_failed(state, link.reason)
        # What nobody has accepted yet, nobody will miss.
        self._edges = deque(entry for entry in self._edges if entry[0] is not link)
        self._channels = deque(entry for entry in self._channels if entry[0] is not link)
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
        if link.alpn is Alpn.CONTROL:
            return ChannelArrival(link, stream_id, self._channel_opened)
        return EdgeArrival(link, stream_id, self._edge_opened)

    def _edge_opened(self, link: Link, stream_id: int, edge_id: EdgeId) -> QuicRecvEdge | None:
        entry = (link, edge_id)
        if entry in self._incoming:
            return None
        half = link.quic.receive_half(stream_id)
        assert half is not None
        self._incoming.add(entry)
        edge = QuicRecvEdge(link, half, edge_id, lambda: self._incoming.discard(entry))
        link.handlers[stream_id] = edge
        self._edges.append((link, edge_id, edge))
        self._edge_arrived.fire()
        return edge

    def _channel_opened(self, link: Link, stream_id: int) -> QuicControlChannel:
        send, receive = link.quic.send_half(stream_id), link.quic.receive_half(stream_id)
        assert send is not None
        assert receive is not None
        channel = QuicControlChannel(link, send, receive, opener=False)
        self._channels.append((link, channel))
        self._channel_arrived.fire()
        return channel

    async def connect(self, peer: NodeId, *, deadline: float) -> None:
        until = asyncio.get_running_loop().time() + deadline
        await self._link_to((peer, Alpn.EDGE), until, deadline=deadline)

    async def open_edge(self, peer: NodeId, edge_id: EdgeId, *, deadline: float) -> SendEdge:
        return await self._open(
            (peer, Alpn.EDGE),
            f"edge {edge_id}",
            lambda link: open_edge(link, peer, edge_id),
            deadline=deadline,
        )

    async def open_control(self, peer: NodeId, *, deadline: float) -> ControlChannel:
        return await self._open((peer, Alpn.CONTROL), "a control channel", open_channel, deadline=deadline)

    async def _open(
        self, key: LinkKey, what: str, attempt: Callable[[Link], StreamT | str], *, deadline: float
    ) -> StreamT:
        """A stream that the peer has, on whatever link that takes."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline
        while True:
            link = await self._link_to(key, until, deadline=deadline)
            stream = attempt(link)
            if isinstance(stream, str):
                await stream_slot(link, until - loop.time(), what, stream)
            elif await reached(link, stream, until, what, deadline=deadline):
                return stream
            else:
                logger.info("%r ended before it had %s: %s", link, what, link.reason)
                self._pause_dialling(key, link.reason)

    def _pause_dialling(self, key: LinkKey, reason: str) -> None:
        """Whoever takes each connection and ends it at once is dialled no faster than one who takes none."""
        if self._peers.get(key[0]) is None:
            return
        state = self._dialling.setdefault(key, _Dialling())
        if state.link is None and asyncio.get_running_loop().time() >= state.not_before:
            self._dial_failed(state, reason)

    async def accept_edge(self) -> tuple[NodeId, EdgeId, RecvEdge]:
        self._check_open()
        while not self._edges:
            await self._edge_arrived.wait()
            self._check_open()
        link, edge_id, edge = self._edges.popleft()
        assert link.peer is not None
        return link.peer, edge_id, edge

    async def accept_control(self) -> ControlChannel:
        self._check_open()
        while not self._channels:
            await self._channel_arrived.wait()
            self._check_open()
        return self._channels.popleft()[1]

    def _check_open(self) -> None:
        if self._closing:
            raise EdgeClosed("the transport is closed")
        if self._address is None:
            raise TransportError("the transport is not started", hint="await start() first")

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
                        while not self._settled(link):
                            await link.activity.wait()
        finally:
            for link in self._endpoint.links:
                link.close(CloseCode.SHUTDOWN, "the node is shutting down")
            self._endpoint.close()
            self._edges.clear()
            self._channels.clear()
            self._closed.set()

    @staticmethod
    def _settled(link: Link) -> bool:
        """Whether finished edges, and all that control channels sent, are acknowledged."""
        if link.state is not LinkState.READY:
            return True
        senders = (h for h in link.handlers.values() if isinstance(h, QuicSendEdge | QuicControlChannel))
        return all(sender.settled for sender in senders)


class QuicPlugin:
    """Implements `swactor_core.spi.transport.TransportPlugin`."""

    def public_key(self, seed: bytes) -> bytes:
        return public_key(seed)

    def create(self, context: TransportContext) -> QuicTransport:
        """Raises ConfigError for a bad seed, epoch or setting."""
        return QuicTransport(context)
