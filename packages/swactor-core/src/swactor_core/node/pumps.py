"""Pump tasks (spec sections 25 and 34): `machines/pumps.py`'s effects on one ring and one transport edge.

The hot path of a node: spans and cursors, no actor, no JSON. A pump's ring end belongs to it alone. A hint
is acknowledged before cursors are loaded, and cursors are looked at before every wait, so that a hint sent
before the pump existed is not needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from swactor_core.errors import EdgeBroken, EdgeClosed, RingError, TransportError
from swactor_core.faults import StreamFaultReason
from swactor_core.fsm import Effect, Machine, Send
from swactor_core.ids import EdgeId, NodeId
from swactor_core.machines.pumps import (
    AwaitReadable,
    AwaitRoom,
    AwaitWritable,
    BytesAccepted,
    BytesRead,
    CloseRing,
    CommitRing,
    Connected,
    EndPump,
    EnsureConnection,
    NoFreeSpace,
    NothingCommitted,
    OpenEdgeStream,
    Paired,
    ReadStream,
    RecvPump,
    ReleaseBytes,
    SendPump,
    StreamBroke,
    StreamEnded,
    StreamOpened,
    WritePending,
    WriteStream,
)
from swactor_core.messages import EstablishRecv, EstablishSend, RingReadable, RingWritable, StopEdge
from swactor_core.spi.arena import Ring, RingState
from swactor_core.spi.transport import RecvEdge, SendEdge, Transport

CONNECT_DEADLINE = 15.0
"""Seconds until the peer of an edge is known and connected, and again until its stream is open."""
GOODBYE_BOUND = 1.0


_TURN_BYTES = 512 * 1024
"""A pump that never has to wait lets the loop turn after this much."""

_IMMEDIATE = (ReadStream, AwaitWritable, AwaitReadable, WriteStream, AwaitRoom)
"""Effects that are answered without waiting, or not yet: the pump advances in the callback that wakes it."""


class Met(Protocol):
    """Returns when membership has told of a node, or after `deadline` seconds."""

    async def __call__(self, node_id: NodeId, *, deadline: float) -> None: ...


class _PumpTask:
    """Drives one pump machine until its EndPump; `stop()` may come at any time.

    Bytes move in the very callback that makes them movable, a hint or the transport's news: no task has to
    be woken for them. The task of `run()` waits for what takes time, connecting and saying goodbye.
    """

    def __init__(
        self,
        ring: Ring,
        machine: Machine[Any],
        *,
        edge_id: EdgeId,
        now: Callable[[], float],
        tell: Callable[[Send], None],
        hint: Callable[[RingReadable | RingWritable], None],
    ) -> None:
        self.ring = ring
        self.ring_id = ring.layout.ring_id
        self.machine = machine
        self._edge_id = edge_id
        self._now = now
        self._tell = tell
        self._hint = hint
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._due: Effect | None = None
        self._left: asyncio.Future[Effect | None] | None = None
        self._advancing = False
        self._woken = False
        self._moved = 0
        self._turn: asyncio.Handle | None = None

    def stop(self) -> None:
        """Ends the pump; its task is over when nothing touches the ring any more."""
        self._stopping = True
        if self._due is not None:
            self.wake()
        elif self._task is not None and self._left is None:
            self._task.cancel()

    def wake(self) -> None:
        """The other end of the ring has sent its hint, or the edge has news."""
        if self._advancing:
            self._woken = True  # from inside of an effect: looked at when that is over
        elif self._due is not None:
            self._advance()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        effect: Effect | None = self._first()
        try:
            while effect is not None:
                if isinstance(effect, _IMMEDIATE):
                    self._due = effect
                    self._left = asyncio.get_running_loop().create_future()
                    self._advance()
                    effect = await self._left
                    self._left = None
                else:
                    effect = self._perform(await self._answer(effect))
        except Exception:  # a defect of its own: the other end must not wait for what never comes
            await self._end(EndPump(orderly=False))
            raise
        finally:
            self._task = self._due = None
            if self._turn is not None:
                self._turn.cancel()

    def _first(self) -> Effect | None:
        raise NotImplementedError

    def _advance(self) -> None:
        """Answers immediate effects until one has no answer yet, or something else is due."""
        assert self._left is not None
        self._advancing = True
        try:
            while self._due is not None and not self._left.done():
                self._woken = False
                event = self._answer_now(self._due)
                if event is None:
                    if self._woken:
                        continue
                    return
                following = self._perform(event)
                if isinstance(following, _IMMEDIATE):
                    self._due = following
                    if self._moved >= _TURN_BYTES:
                        self._yield()
                        return
                else:
                    self._due = None
                    self._left.set_result(following)
        except Exception as error:  # raised where the pump is awaited, not in whoever woke it
            self._due = None
            self._left.set_exception(error)
        finally:
            self._advancing = False

    def _yield(self) -> None:
        self._moved = 0
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self._turn = None
        self.wake()

    def _answer_now(self, effect: Effect) -> object | None:
        """The event that answers an immediate effect, None while there is none."""
        if self._stopping:
            return StopEdge(self._edge_id)
        try:
            return self._do_now(effect)
        except (RingError, EdgeBroken, EdgeClosed, TransportError) as error:
            return _broken(error)

    async def _answer(self, effect: Effect) -> object:
        """The event that answers `effect`; transport and ring errors become StreamBroke."""
        if isinstance(effect, EndPump):
            await self._end(effect)
            return None
        try:
            if self._stopping:
                return StopEdge(self._edge_id)
            return await self._do(effect)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._stopping or task is None:
                raise
            task.uncancel()
            return StopEdge(self._edge_id)
        except (RingError, EdgeBroken, EdgeClosed, TransportError) as error:
            return _broken(error)

    async def _end(self, effect: EndPump) -> None:
        """Says goodbye to the other end, in bounded time; whatever comes of it, the pump has ended."""
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(GOODBYE_BOUND):
                await self._say_goodbye(orderly=effect.orderly)

    async def _say_goodbye(self, *, orderly: bool) -> None:
        raise NotImplementedError

    def _perform(self, event: object) -> Effect | None:
        """Steps the machine, performs what is immediate, returns the one effect to answer next, if any."""
        following: Effect | None = None
        if event is None:  # EndPump was carried out: there is nothing more to say
            return None
        for action in self.machine.step(event, self._now()):
            if isinstance(action, CommitRing):
                if self.ring.advance_commit(action.count):
                    self._hint(RingReadable(self.ring_id))
            elif isinstance(action, ReleaseBytes):
                if self.ring.advance_consume(action.count):
                    self._hint(RingWritable(self.ring_id))
            elif isinstance(action, CloseRing):
                self.ring.set_state(RingState.CLOSED)
                self._hint(RingReadable(self.ring_id))
            elif isinstance(action, Send):
                self._tell(action)
            elif isinstance(action, Effect):
                following = action
        return following

    def _do_now(self, effect: Effect) -> object | None:
        raise NotImplementedError

    async def _do(self, effect: Effect) -> object:
        raise AssertionError(f"{self.machine.NAME} cannot {effect}")


def _broken(error: RingError | EdgeBroken | EdgeClosed | TransportError) -> StreamBroke:
    match error:
        case RingError():
            return StreamBroke(StreamFaultReason.RING_FAULT, error.message)
        case EdgeBroken() | EdgeClosed():
            return StreamBroke(StreamFaultReason.STREAM_BROKEN, error.message)
        case _:
            return StreamBroke(StreamFaultReason.PEER_UNREACHABLE, error.message)


class RecvPumpTask(_PumpTask):
    """QUIC ingress stream to host ingress ring."""

    def __init__(self, spec: EstablishRecv, ring: Ring, edge: RecvEdge, **hooks: Any) -> None:
        super().__init__(ring, RecvPump(spec.edge_id), edge_id=spec.edge_id, **hooks)
        self._edge = edge
        self._capacity = ring.layout.data_capacity
        self._damage: RingError | None = None

    def _first(self) -> Effect | None:
        self._edge.watch(super().wake)
        return self._perform(Paired())

    def wake(self) -> None:
        # Credit follows the consume cursor, before each wait: every byte that may arrive fits the ring. Also
        # while the pump waits for bytes and not for room.
        if self._due is not None and self._damage is None:
            try:
                self.ring.acknowledge_writable()
                self._edge.grant(self.ring.consume + self._capacity)
            except RingError as error:
                self._damage = error
        super().wake()

    def _do_now(self, effect: Effect) -> object | None:
        if self._damage is not None:
            raise self._damage
        match effect:
            case ReadStream():
                span = self.ring.writable_span()
                if not len(span):
                    return NoFreeSpace()
                count = self._edge.take(span)
                if count is None:
                    self._edge.grant(self.ring.consume + self._capacity)
                    return None
                if not count:
                    return StreamEnded()
                self._moved += count
                return BytesRead(count)
            case AwaitWritable():
                self.ring.acknowledge_writable()
                return RingWritable(self.ring_id) if len(self.ring.writable_span()) else None
        raise AssertionError(f"recv-pump cannot {effect}")

    async def _say_goodbye(self, *, orderly: bool) -> None:
        await self._edge.stop()


class SendPumpTask(_PumpTask):
    """Host egress ring to QUIC egress stream."""

    def __init__(
        self, spec: EstablishSend, ring: Ring, transport: Transport, *, met: Met | None = None, **hooks: Any
    ) -> None:
        """Waits until the peer is `met` before it dials; None: all peers are known from the first on."""
        super().__init__(ring, SendPump(spec.edge_id), edge_id=spec.edge_id, **hooks)
        self._spec = spec
        self._transport = transport
        self._met = met
        self._edge: SendEdge | None = None

    def _first(self) -> Effect | None:
        return EnsureConnection()

    async def _do(self, effect: Effect) -> object:
        match effect:
            case EnsureConnection():
                await self._connect(self._spec.rx_node_id)
                return Connected()
            case OpenEdgeStream():
                self._edge = await self._transport.open_edge(
                    self._spec.rx_node_id, self._spec.edge_id, deadline=CONNECT_DEADLINE
                )
                self._edge.watch(self.wake)
                return StreamOpened()
        return await super()._do(effect)

    async def _connect(self, peer: NodeId) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + CONNECT_DEADLINE
        if self._met is not None:
            await self._met(peer, deadline=CONNECT_DEADLINE)
        await self._transport.connect(peer, deadline=max(0.0, until - loop.time()))

    def _do_now(self, effect: Effect) -> object | None:
        match effect:
            case AwaitReadable():
                self.ring.acknowledge_readable()
                return RingReadable(self.ring_id) if len(self.ring.readable_span()) else None
            case WriteStream():
                span = self.ring.readable_span()
                if not len(span):
                    return NothingCommitted()
                return self._write(span) or WritePending()
            case AwaitRoom():
                return self._write(self.ring.readable_span())
        raise AssertionError(f"send-pump cannot {effect}")

    def _write(self, span: memoryview) -> BytesAccepted | None:
        assert self._edge is not None
        count = self._edge.offer(span)
        self._moved += count
        return BytesAccepted(count) if count else None

    async def _say_goodbye(self, *, orderly: bool) -> None:
        if self._edge is not None:
            await (self._edge.finish() if orderly else self._edge.abort())


PumpTask = RecvPumpTask | SendPumpTask
