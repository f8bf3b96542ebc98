"""Pump tasks (spec sections 25 and 34): `machines/pumps.py`'s effects on one ring and one transport edge.

The hot path of a node: spans, cursors and awaits, no actor, no JSON. A pump's ring end belongs to its task
alone. A hint is acknowledged before cursors are loaded, and cursors are looked at before every wait, so that
a hint sent before the pump existed is not needed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from swactor_core.errors import EdgeBroken, EdgeClosed, RingError, TransportError
from swactor_core.faults import StreamFaultReason
from swactor_core.fsm import Effect, Machine, Send
from swactor_core.ids import EdgeId
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
GOODBYE_BOUND = 1.0


class _PumpTask:
    """Drives one pump machine until its EndPump; `stop()` may come at any await."""

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
        self._hinted = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Ends the pump at its next await; its task is over when nothing touches the ring any more."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()

    def wake(self) -> None:
        """The other end of the ring has sent its hint."""
        self._hinted.set()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        effect: Effect | None = self._first()
        try:
            while effect is not None:
                effect = self._perform(await self._answer(effect))
        finally:
            self._task = None

    def _first(self) -> Effect | None:
        raise NotImplementedError

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
        except RingError as error:
            return StreamBroke(StreamFaultReason.RING_FAULT, error.message)
        except (EdgeBroken, EdgeClosed) as error:
            return StreamBroke(StreamFaultReason.STREAM_BROKEN, error.message)
        except TransportError as error:
            return StreamBroke(StreamFaultReason.PEER_UNREACHABLE, error.message)

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
            match action:
                case Send():
                    self._tell(action)
                case CommitRing(count):
                    if self.ring.advance_commit(count):
                        self._hint(RingReadable(self.ring_id))
                case ReleaseBytes(count):
                    if self.ring.advance_consume(count):
                        self._hint(RingWritable(self.ring_id))
                case CloseRing():
                    self.ring.set_state(RingState.CLOSED)
                    self._hint(RingReadable(self.ring_id))
                case Effect():
                    following = action
        return following

    async def _do(self, effect: Effect) -> object:
        raise NotImplementedError


class RecvPumpTask(_PumpTask):
    """QUIC ingress stream to host ingress ring."""

    def __init__(self, spec: EstablishRecv, ring: Ring, edge: RecvEdge, **hooks: Any) -> None:
        super().__init__(ring, RecvPump(spec.edge_id), edge_id=spec.edge_id, **hooks)
        self._edge = edge
        self._capacity = ring.layout.data_capacity

    def _first(self) -> Effect | None:
        return self._perform(Paired())

    def wake(self) -> None:
        self._grant()
        super().wake()

    def _grant(self) -> None:
        # Credit follows the consume cursor: every byte that may arrive fits the ring.
        try:
            self.ring.acknowledge_writable()
            self._edge.grant(self.ring.consume + self._capacity)
        except RingError:
            self.stop()

    async def _do(self, effect: Effect) -> object:
        match effect:
            case ReadStream():
                span = self.ring.writable_span()
                if not len(span):
                    return NoFreeSpace()
                self._edge.grant(self.ring.consume + self._capacity)
                count = await self._edge.read_into(span)
                return BytesRead(count) if count else StreamEnded()
            case AwaitWritable():
                await _hinted(
                    self._hinted, self.ring.acknowledge_writable, lambda: len(self.ring.writable_span())
                )
                return RingWritable(self.ring_id)
        raise AssertionError(f"recv-pump cannot {effect}")

    async def _say_goodbye(self, *, orderly: bool) -> None:
        await self._edge.stop()


class SendPumpTask(_PumpTask):
    """Host egress ring to QUIC egress stream."""

    def __init__(self, spec: EstablishSend, ring: Ring, transport: Transport, **hooks: Any) -> None:
        super().__init__(ring, SendPump(spec.edge_id), edge_id=spec.edge_id, **hooks)
        self._spec = spec
        self._transport = transport
        self._edge: SendEdge | None = None

    def _first(self) -> Effect | None:
        return EnsureConnection()

    async def _do(self, effect: Effect) -> object:
        match effect:
            case EnsureConnection():
                await self._transport.connect(self._spec.rx_node_id, deadline=CONNECT_DEADLINE)
                return Connected()
            case AwaitReadable():
                await _hinted(
                    self._hinted, self.ring.acknowledge_readable, lambda: len(self.ring.readable_span())
                )
                return RingReadable(self.ring_id)
            case OpenEdgeStream():
                self._edge = await self._transport.open_edge(
                    self._spec.rx_node_id, self._spec.edge_id, deadline=CONNECT_DEADLINE
                )
                return StreamOpened()
            case WriteStream():
                assert self._edge is not None
                span = self.ring.readable_span()
                if not len(span):
                    return NothingCommitted()
                if self._edge.room() <= 0:
                    return WritePending()
                return BytesAccepted(await self._edge.write(span))
            case AwaitRoom():
                assert self._edge is not None
                return BytesAccepted(await self._edge.write(self.ring.readable_span()))
        raise AssertionError(f"send-pump cannot {effect}")

    async def _say_goodbye(self, *, orderly: bool) -> None:
        if self._edge is not None:
            await (self._edge.finish() if orderly else self._edge.abort())


async def _hinted(event: asyncio.Event, acknowledge: Callable[[], None], ready: Callable[[], int]) -> None:
    """Returns when `ready()` is not 0: acknowledge, look, and only then wait for the next hint."""
    while True:
        event.clear()
        acknowledge()
        if ready():
            return
        await event.wait()


PumpTask = RecvPumpTask | SendPumpTask
