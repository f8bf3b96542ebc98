"""Endpoints of the memory transport: peers by key and epoch, dialling, acceptance, and the end.

One connection of each kind between two endpoints, whoever dialled. Knows no socket: another endpoint is found
in the hub, and what a handshake would prove is read from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b

from swactor_core.errors import ConfigError, EdgeClosed, TransportError
from swactor_core.ids import EdgeId, NodeId, node_hex, node_id_of
from swactor_core.spi.transport import Peer, TransportContext

from swactor_testing.memory.control import MemoryControlChannel
from swactor_testing.memory.edges import MemoryRecvEdge, MemorySendEdge
from swactor_testing.memory.hub import HUB, MemoryHub
from swactor_testing.memory.link import Lane, Link, LinkEnd, LinkKind
from swactor_testing.memory.settings import parse_settings
from swactor_testing.memory.waiting import Signal

log = logging.getLogger(__name__)

SEED_BYTES = 32


def public_key(seed: bytes) -> bytes:
    """A 32-byte stand-in for a public key. Raises ConfigError for a seed of another length."""
    if len(seed) != SEED_BYTES:
        raise ConfigError(
            f"the node's seed has {len(seed)} bytes, expected {SEED_BYTES}", hint="make a new key"
        )
    return blake2b(seed, digest_size=32, person=b"swactor-memory").digest()


class MemoryTransport:
    """`swactor_core.spi.transport.Transport`."""

    def __init__(self, context: TransportContext, hub: MemoryHub = HUB) -> None:
        """Raises ConfigError for a bad seed or setting."""
        self.settings = parse_settings(context.settings)
        self.epoch = context.epoch
        self._context = context
        self._hub = hub
        self._public_key = public_key(context.seed)
        self._peers: dict[NodeId, Peer] = {}
        self._ends: dict[tuple[NodeId, LinkKind], LinkEnd] = {}
        self._edges: deque[tuple[LinkEnd, EdgeId, MemoryRecvEdge]] = deque()
        self._channels: deque[tuple[LinkEnd, MemoryControlChannel]] = deque()
        self._edge_arrived, self._channel_arrived, self._changed = Signal(), Signal(), Signal()
        self._address: tuple[str, int] | None = None
        self._closing = False
        self._closed = asyncio.Event()

    @property
    def node_id(self) -> NodeId:
        return self._context.node_id

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
        host = self._context.bind_host
        self._address = host, self._hub.bind(host, self._context.bind_port, self)

    # peers

    def set_peer(self, peer: Peer) -> None:
        self._peers[peer.node_id] = peer
        for end in self._ends_of(peer.node_id):
            if end.peer_key != peer.public_key:
                end.link.end("the peer now has another key")
            elif end.peer_epoch < peer.epoch:
                end.link.end(f"the peer was restarted (epoch {peer.epoch})")
        self._changed.fire()

    def remove_peer(self, node_id: NodeId) -> None:
        """Forgets the peer and ends its connections; one that `authorise` accepts may still dial."""
        self._peers.pop(node_id, None)
        for end in self._ends_of(node_id):
            end.link.end("it gave the other side up as gone")
        self._changed.fire()

    def _ends_of(self, node_id: NodeId) -> list[LinkEnd]:
        return [self._ends[node_id, kind] for kind in LinkKind if (node_id, kind) in self._ends]

    def _node_of(self, key: bytes) -> NodeId:
        known = (peer.node_id for peer in self._peers.values() if peer.public_key == key)
        return next(known, node_id_of(key))

    def _judge_dialler(self, dialler: MemoryTransport) -> str:
        """Why someone who dials us is refused, or an empty string."""
        peer = self._peers.get(self._node_of(dialler.public_key))
        if peer is not None and peer.public_key == dialler.public_key:
            if dialler.epoch < peer.epoch:
                return f"epoch {dialler.epoch} is a former life, epoch {peer.epoch} is known"
            return ""
        try:
            allowed = self._context.authorise(dialler.public_key)
        except Exception:
            log.exception("authorise failed; the dialler is refused")
            allowed = False
        return "" if allowed else f"key {dialler.public_key.hex()} is not authorised"

    # what the hub's script reaches

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(end.link for end in self._ends.values())

    def links_to(self, node_id: NodeId) -> Iterable[Link]:
        return [end.link for end in self._ends_of(node_id)]

    def lanes_to(self, node_id: NodeId | None) -> Iterable[Lane]:
        return [end.out for end in self._ends.values() if node_id in (None, end.peer)]

    def vanish(self, reason: str) -> None:
        """As a killed process: the address is free, others lose their connections, nobody here is told."""
        host, port = self._bound
        self._closing = True
        for end in tuple(self._ends.values()):
            end.link.end(reason, lost_by=(end.other,))
        self._leave(host, port)

    # connections

    async def connect(self, peer: NodeId, *, deadline: float) -> None:
        await self._link_to(peer, LinkKind.EDGES, deadline)

    async def _link_to(self, node_id: NodeId, kind: LinkKind, deadline: float) -> LinkEnd:
        """The end of a live connection; dials again and again until `deadline`, seconds from now."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline
        while True:
            self._check_open()
            end = self._ends.get((node_id, kind))
            if end is not None:
                return end
            peer = self._peers.get(node_id)
            if peer is None:
                raise TransportError(
                    f"peer {node_hex(node_id)} is not known and has not dialled", hint="set_peer first"
                )
            where = f"peer {node_hex(node_id)} at {peer.host}:{peer.port}"
            other = self._hub.endpoints.get((peer.host, peer.port))
            if isinstance(other, MemoryTransport) and other.public_key != peer.public_key:
                raise TransportError(
                    f"{where} answers with key {other.public_key.hex()}, expected {peer.public_key.hex()}",
                    hint="check who listens at that address",
                )
            why = self._why_not(peer, other)
            left = until - loop.time()
            if not why and isinstance(other, MemoryTransport):
                trip = self._latency_to(node_id) + other._latency_to(self.node_id)
                if trip < left:
                    if trip:
                        await asyncio.sleep(trip)
                    if not self._why_not(peer, self._hub.endpoints.get((peer.host, peer.port))):
                        self._meet(other, node_id, kind)
                    continue
                why = f"its answer takes {trip:g} s"
            if left <= 0:
                raise TransportError(
                    f"{where} cannot be reached in {deadline:.3g} s: {why}",
                    hint="check that it runs and its address",
                )
            await self._changed.wait(min(left, self.settings.redial))

    def _why_not(self, peer: Peer, other: object) -> str:
        """Why a dial to `peer` fails now, or an empty string."""
        if not isinstance(other, MemoryTransport) or other._closing:
            return "nobody listens there"
        if refused := self._hub.refusal(self.node_id, other.node_id):
            return refused
        if self._hub.holds(self.node_id, other.node_id) or self._hub.holds(other.node_id, self.node_id):
            return "no answer"
        if other.public_key != peer.public_key:
            return "another key answers"
        if other.epoch < peer.epoch:
            return f"answers as epoch {other.epoch}, expected {peer.epoch} or later"
        return other._judge_dialler(self)

    def _latency_to(self, node_id: NodeId) -> float:
        return self._hub.latency(self.node_id, node_id, self.settings.latency)

    def _meet(self, other: MemoryTransport, node_id: NodeId, kind: LinkKind) -> None:
        """The handshake: both ends stand at once."""
        if (node_id, kind) in self._ends:
            return
        link = Link(kind)
        mine = LinkEnd(
            link,
            self,
            peer=node_id,
            peer_key=other.public_key,
            peer_epoch=other.epoch,
            latency=self._latency_to(other.node_id),
        )
        theirs = LinkEnd(
            link,
            other,
            peer=other._node_of(self.public_key),
            peer_key=self.public_key,
            peer_epoch=self.epoch,
            latency=other._latency_to(self.node_id),
        )
        mine.other, theirs.other = theirs, mine
        link.ends = (mine, theirs)
        if other is self:  # both ends of a connection to oneself are here, one is found by dialling
            mine.on_ended = self._ended
            self._ends[node_id, kind] = mine
        else:
            other._admit(theirs)
            self._admit(mine)

    def _admit(self, end: LinkEnd) -> None:
        former = self._ends.get((end.peer, end.link.kind))
        for other in self._ends_of(end.peer):
            if other.peer_epoch < end.peer_epoch or other is former:
                why = f"the peer was restarted (epoch {end.peer_epoch})"
                other.link.end(why, lost_by=(other,))
        end.on_ended = self._ended
        self._ends[end.peer, end.link.kind] = end
        self._changed.fire()

    def _ended(self, end: LinkEnd, reason: str, lost: bool) -> None:
        if self._ends.get((end.peer, end.link.kind)) is end:
            del self._ends[end.peer, end.link.kind]
        # What nobody has accepted yet, nobody will miss.
        self._edges = deque(entry for entry in self._edges if entry[0].link is not end.link)
        self._channels = deque(entry for entry in self._channels if entry[0].link is not end.link)
        self._changed.fire()
        if lost and not self._closing:
            try:
                self._context.on_peer_lost(end.peer, reason)
            except Exception:
                log.exception("on_peer_lost failed")

    # streams

    async def open_edge(self, peer: NodeId, edge_id: EdgeId, *, deadline: float) -> MemorySendEdge:
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline
        while True:
            end = await self._link_to(peer, LinkKind.EDGES, until - loop.time())
            senders = [stream for stream in end.streams if isinstance(stream, MemorySendEdge)]
            acceptor = self._acceptor(end)
            same = next((sender for sender in senders if sender.edge_id == edge_id), None)
            if same is not None and not same.finished:
                raise TransportError(
                    f"edge {edge_id} to peer {node_hex(peer)} is already open",
                    hint="finish or abort it first, or take another id",
                )
            if same is None and len(senders) < acceptor.settings.max_edges:
                break
            left = until - loop.time()
            if left <= 0:
                why = (
                    "allows no more streams on this connection"
                    if same is None
                    else "has not taken the end of the former one"
                )
                raise TransportError(
                    f"peer {node_hex(peer)} {why}, edge {edge_id} stays shut",
                    hint="close finished edges, or raise max_edges of that peer",
                )
            await self._changed.wait(min(left, self.settings.redial))
        edge = MemorySendEdge(
            end,
            edge_id,
            send_bound=self.settings.send_bound,
            break_after=self._hub.break_after(edge_id),
            damage=self._hub.damage(edge_id),
        )
        edge.reader = MemoryRecvEdge(end.other, edge_id, edge)
        arrival = (end.other, edge_id, edge.reader)
        end.out.carry(lambda: acceptor._edge_opened(arrival))
        return edge

    def _acceptor(self, end: LinkEnd) -> MemoryTransport:
        owner = end.other.owner
        assert isinstance(owner, MemoryTransport)
        return owner

    def _edge_opened(self, arrival: tuple[LinkEnd, EdgeId, MemoryRecvEdge]) -> None:
        self._edges.append(arrival)
        self._edge_arrived.fire()

    async def accept_edge(self) -> tuple[NodeId, EdgeId, MemoryRecvEdge]:
        self._check_open()
        while not self._edges:
            await self._edge_arrived.wait()
            self._check_open()
        end, edge_id, edge = self._edges.popleft()
        return end.peer, edge_id, edge

    async def open_control(self, peer: NodeId, *, deadline: float) -> MemoryControlChannel:
        end = await self._link_to(peer, LinkKind.CONTROL, deadline)
        acceptor = self._acceptor(end)
        mine = MemoryControlChannel(end, window=acceptor.settings.control_window)
        theirs = MemoryControlChannel(end.other, window=self.settings.control_window)
        mine.twin, theirs.twin = theirs, mine
        end.out.carry(lambda: acceptor._channel_opened(end.other, theirs))
        return mine

    def _channel_opened(self, end: LinkEnd, channel: MemoryControlChannel) -> None:
        self._channels.append((end, channel))
        self._channel_arrived.fire()

    async def accept_control(self) -> MemoryControlChannel:
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

    # the end

    async def close(self) -> None:
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._wake()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.drain_timeout):
                    for end in tuple(self._ends.values()):
                        while end.link.up and not self._drained(end):
                            await end.out.delivered.wait(self.settings.redial)
        finally:
            for end in tuple(self._ends.values()):
                end.link.end("the node is shutting down")
            if self._address is None:
                self._closed.set()
            else:
                self._leave(*self._address)

    @staticmethod
    def _drained(end: LinkEnd) -> bool:
        """Whether all that was sent has arrived, and finished edges were read to their end."""
        return end.out.empty and all(stream.settled for stream in end.streams)

    def _leave(self, host: str, port: int) -> None:
        self._hub.unbind(host, port)
        self._edges.clear()
        self._channels.clear()
        self._closed.set()
        self._wake()

    def _wake(self) -> None:
        for signal in (self._edge_arrived, self._channel_arrived, self._changed):
            signal.fire()


class MemoryPlugin:
    """`swactor_core.spi.transport.TransportPlugin`."""

    def public_key(self, seed: bytes) -> bytes:
        return public_key(seed)

    def create(self, context: TransportContext) -> MemoryTransport:
        """Raises ConfigError for a bad seed or setting."""
        return MemoryTransport(context)
