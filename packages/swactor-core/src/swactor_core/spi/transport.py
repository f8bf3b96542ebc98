"""Transport interface (spec sections 23 and 24): edges, control channels, and peers by key.

Provider factory of kind `transport`: `factory() -> TransportPlugin`.

What nobody reads, nobody can send: a sender can have at most `granted - sent` payload bytes accepted beyond
what the reader has taken, so a stalled reader stops its sender and no other edge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Protocol

from swactor_core.ids import EdgeId, NodeId
from swactor_core.values import frozen

MAX_CONTROL_FRAME = 4 * 1024 * 1024


@frozen
class Peer:
    """Whom a transport may talk to: identity, its pinned public key, and where it listens."""

    node_id: NodeId
    public_key: bytes
    host: str
    port: int
    epoch: int = 0


@frozen
class TransportContext:
    """`seed` is the node's 32-byte secret. `node_id` is `ids.node_id_of` its public key, as everybody's is: a
    dialler's too that `set_peer` did not name. `epoch`: nanoseconds since 1970, 64 bits.

    `authorise(public_key)` says whether an unknown dialler may complete its handshake. `on_peer_lost(node_id,
    why)` hears, in the loop's thread and once for each connection, when an authenticated connection ends
    without either side having closed it, whoever had dialled: the peer's process has ended, or it answers
    nothing any more, in a time that the transport bounds by itself. Nobody else notices a machine or a
    network that is gone while an edge waits. Whatever waits on such a connection raises EdgeBroken."""

    seed: bytes
    node_id: NodeId
    epoch: int
    bind_host: str
    bind_port: int
    authorise: Callable[[bytes], bool]
    on_peer_lost: Callable[[NodeId, str], None]
    settings: Mapping[str, Any] = field(default_factory=dict)


class SendEdge(Protocol):
    def room(self) -> int:
        """Bytes that `write` would take now without waiting."""

    def offer(self, view: memoryview) -> int:
        """`write` without waiting: takes 0..min(len(view), room()) bytes, copied before return, and 0 only
        when there is no room. Raises as `write` does."""

    def watch(self, wake: Callable[[], None]) -> None:
        """`wake` is called from now on, in the loop's thread, when an offer that took nothing may fare better
        or would raise, whoever ended the edge. There is one watcher, the last. It may be called without
        cause, though not over and over while nothing happens on the connection, and from inside of a call to
        this edge."""

    async def write(self, view: memoryview) -> int:
        """Takes 1..len(view) bytes and returns how many; waits while the peer has no room. The bytes are
        copied before return. At most `send_bound` accepted bytes per edge are not yet acknowledged.
        Raises EdgeBroken (peer stopped it, or the connection is gone) or EdgeClosed. A cancelled call
        has taken nothing."""

    async def finish(self) -> None:
        """Ends the stream after all accepted bytes. Idempotent."""

    async def abort(self) -> None:
        """Resets the stream at once; the peer's reader sees EdgeBroken. Idempotent."""


class RecvEdge(Protocol):
    def grant(self, total: int) -> None:
        """The reader can hold payload bytes up to the absolute count `total` (bytes consumed plus ring
        capacity): it grows with every byte of a run, beyond 32 bits too. Never lowered. The sender learns it
        promptly, also on an idle connection."""

    def take(self, view: memoryview) -> int | None:
        """`read_into` without waiting: None when there is nothing yet, 0 at the end of stream. Grants nothing
        by itself. Raises as `read_into` does."""

    def watch(self, wake: Callable[[], None]) -> None:
        """`wake` is called from now on, in the loop's thread, when a take that gave None may fare better or
        would raise, whoever ended the edge; bytes that arrive together may be told together. There is one
        watcher, the last. It may be called without cause, though not over and over while nothing happens on
        the connection, and from inside of a call to this edge."""

    async def read_into(self, view: memoryview) -> int:
        """Waits for bytes, copies at most len(view) of them, returns how many; 0 is end of stream.
        Grants nothing by itself. Raises EdgeBroken or EdgeClosed. A cancelled call has lost nothing."""

    async def stop(self) -> None:
        """Tells the sender to stop and discards what is buffered. Idempotent."""


class ControlChannel(Protocol):
    """An ordered, reliable channel of whole frames to one authenticated peer."""

    @property
    def peer(self) -> NodeId: ...
    @property
    def peer_key(self) -> bytes: ...
    async def send(self, frame: bytes) -> None:
        """Sends one frame of 1..MAX_CONTROL_FRAME bytes; waits while the peer does not read. Raises
        EdgeBroken, EdgeClosed, or ValueError for a frame out of bounds."""

    async def receive(self) -> bytes | None:
        """The next frame; None when the peer closed in order, or this side did. Raises EdgeBroken."""

    async def close(self) -> None:
        """Ends the channel after all frames that `send` has taken. Idempotent."""


class Transport(Protocol):
    """One endpoint on one port for both roles. Made and used in one event loop.

    After `close` whatever connects, opens or accepts raises EdgeClosed, as do such calls that wait then."""

    @property
    def host(self) -> str:
        """What it is bound to, once it is started, as `port`; a wildcard address as it was given."""

    @property
    def port(self) -> int: ...
    @property
    def public_key(self) -> bytes: ...
    async def start(self) -> None:
        """Binds. Raises ResourceError naming address and reason."""

    def set_peer(self, peer: Peer) -> None:
        """Adds or replaces a peer; a newer epoch ends connections to its former life at once, and nothing
        else ends any: a host sets a peer again whenever its membership says something of it."""

    def remove_peer(self, node_id: NodeId) -> None:
        """Forgets a peer and ends its connections, which is no loss; streams break on both sides. If it dials
        again it is unknown: `authorise` is asked."""

    async def connect(self, peer: NodeId, *, deadline: float) -> None:
        """Ensures the cached edge connection to `peer` is up and authenticated, within `deadline` seconds,
        where nothing answers too. Raises TransportError naming the peer. Both sides may
        dial at the same moment, and several callers may wait for one connection: one that is cancelled
        disturbs no other."""

    async def open_edge(self, peer: NodeId, edge_id: EdgeId, *, deadline: float) -> SendEdge:
        """One persistent uni-stream whose preamble is `edge_id`, on the cached connection to `peer`.
        Returns when the peer has the stream, on a new connection where it had ended the cached one unheard;
        `deadline` in seconds. Raises TransportError naming the peer, and naming `edge_id` too where an edge
        of that id is open to that peer: until its `finish`, its `abort` or its break an id is taken. The open
        edge is not disturbed and the peer hears of no second stream. Other peers, and edges from the peer,
        have ids of their own."""

    async def accept_edge(self) -> tuple[NodeId, EdgeId, RecvEdge]:
        """The next stream that arrived with a whole preamble, with its authenticated sender. One whose id is
        open from that sender already, on that connection, never comes out of here: it is stopped, as by
        `RecvEdge.stop`. Raises EdgeClosed when the transport was closed, and nothing else: a host accepts for
        as long as it lives."""

    async def open_control(self, peer: NodeId, *, deadline: float) -> ControlChannel:
        """A new channel to `peer`, within `deadline` seconds. The peer has it when this returns, as it has
        an edge. Raises TransportError naming the peer."""

    async def accept_control(self) -> ControlChannel:
        """The next channel that a peer has opened. Raises as `accept_edge` does."""

    async def close(self) -> None:
        """Ends every edge, channel and connection and frees the port. What was finished or closed in order
        before arrives whole, where its reader takes it within the bound. Idempotent, bounded by 2 s,
        and leaves no task, thread or descriptor."""


class TransportPlugin(Protocol):
    def public_key(self, seed: bytes) -> bytes:
        """The public key of a 32-byte seed."""

    def create(self, context: TransportContext) -> Transport:
        """Binds nothing yet. Raises ConfigError naming a setting that it does not know, or whose value it
        does not take."""
        ...
