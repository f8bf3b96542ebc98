"""Recv-pump FSM and Send-pump FSM (spec section 25): one ring, one stream, one way, no object boundaries.

Each step ends with at most one effect that the adapter must carry out next and answer with one event, so a
pump never has two reads, writes or waits in flight. Knows counts of bytes, never bytes.
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.faults import Component, StreamFaultReason
from swactor_core.fsm import Effect, Machine, Outcome, Row, Send
from swactor_core.ids import EdgeId
from swactor_core.messages import (
    Address,
    DriverEdgeReady,
    RingReadable,
    RingWritable,
    StopEdge,
    StreamClosed,
    StreamFault,
)
from swactor_core.values import value

ESTABLISHER = Address(Component.EDGE_ESTABLISHER)


class RecvPumpState(StrEnum):
    WAITING_FOR_SPEC_AND_STREAM = "WaitingForSpecAndStream"
    STREAMING = "Streaming"
    BACKPRESSURED = "Backpressured"
    CLOSED = "Closed"
    FAULTED = "Faulted"


class SendPumpState(StrEnum):
    WAITING_FOR_CONNECTION = "WaitingForConnection"
    WAITING_FOR_BYTES = "WaitingForBytes"
    OPEN_STREAM = "OpenStream"
    STREAMING = "Streaming"
    BACKPRESSURED = "Backpressured"
    CLOSED = "Closed"
    FAULTED = "Faulted"


# --- events from the adapter ---


@value
class Paired:
    """Ring and stream are both present."""


@value
class BytesRead:
    count: int


@value
class NoFreeSpace:
    """The ring had no writable span."""


@value
class StreamEnded:
    """End of stream after the last byte that was read."""


@value
class StreamBroke:
    reason: StreamFaultReason
    detail: str


@value
class Connected:
    pass


@value
class StreamOpened:
    pass


@value
class NothingCommitted:
    """The ring had no readable span."""


@value
class WritePending:
    """The transport has no room for the next span: network or peer is slow."""


@value
class BytesAccepted:
    count: int


# --- effects ---


@value
class ReadStream(Effect):
    """Take a free ring span, read stream bytes into it."""


@value
class CommitRing(Effect):
    """Publish `count` bytes and send or coalesce RingReadable."""

    count: int


@value
class CloseRing(Effect):
    """Mark the ring closed by its producer and send RingReadable."""


@value
class AwaitWritable(Effect):
    pass


@value
class EnsureConnection(Effect):
    pass


@value
class AwaitReadable(Effect):
    pass


@value
class OpenEdgeStream(Effect):
    """Open the uni-stream and write the edge_id preamble."""


@value
class WriteStream(Effect):
    """Take the committed span, hand it to the transport."""


@value
class AwaitRoom(Effect):
    """Keep the bytes in the ring until the pending write is accepted."""


@value
class ReleaseBytes(Effect):
    """Advance consume by `count` and send or coalesce RingWritable."""

    count: int


@value
class EndPump(Effect):
    """Leave the loop. `orderly` finishes the stream, otherwise it is reset."""

    orderly: bool


R = RecvPumpState


class RecvPump(Machine[RecvPumpState]):
    NAME = "RecvPump"
    INITIAL = R.WAITING_FOR_SPEC_AND_STREAM
    TABLE = (
        Row(R.WAITING_FOR_SPEC_AND_STREAM, Paired, "_read", (R.STREAMING,)),
        Row(R.STREAMING, BytesRead, "_commit", (R.STREAMING,)),
        Row(R.STREAMING, NoFreeSpace, "_full", (R.BACKPRESSURED,)),
        Row(R.STREAMING, StreamEnded, "_ended", (R.CLOSED,)),
        Row(R.STREAMING, StreamBroke, "_broke", (R.FAULTED,)),
        Row(R.BACKPRESSURED, RingWritable, "_read", (R.STREAMING,)),
        Row(R.BACKPRESSURED, StreamBroke, "_broke", (R.FAULTED,)),
        *(
            Row(state, StopEdge, "_stop", (R.CLOSED,))
            for state in (R.WAITING_FOR_SPEC_AND_STREAM, R.STREAMING, R.BACKPRESSURED)
        ),
        *(Row(state, StopEdge, None, (state,)) for state in (R.CLOSED, R.FAULTED)),
    )

    def __init__(self, edge_id: EdgeId) -> None:
        super().__init__()
        self.edge_id = edge_id
        self.received = 0

    def _read(self, event: object, now: float) -> Outcome[RecvPumpState]:
        return R.STREAMING, (ReadStream(),)

    def _commit(self, event: BytesRead, now: float) -> Outcome[RecvPumpState]:
        self.received += event.count
        return R.STREAMING, (CommitRing(event.count), ReadStream())

    def _full(self, event: NoFreeSpace, now: float) -> Outcome[RecvPumpState]:
        return R.BACKPRESSURED, (AwaitWritable(),)

    def _ended(self, event: StreamEnded, now: float) -> Outcome[RecvPumpState]:
        return R.CLOSED, (CloseRing(), Send(ESTABLISHER, StreamClosed(self.edge_id)), EndPump(orderly=True))

    def _broke(self, event: StreamBroke, now: float) -> Outcome[RecvPumpState]:
        fault = StreamFault(self.edge_id, event.reason, event.detail)
        return R.FAULTED, (Send(ESTABLISHER, fault), EndPump(orderly=False))

    def _stop(self, event: StopEdge, now: float) -> Outcome[RecvPumpState]:
        return R.CLOSED, (EndPump(orderly=False),)


P = SendPumpState
_SEND_LIVE = (P.WAITING_FOR_CONNECTION, P.WAITING_FOR_BYTES, P.OPEN_STREAM, P.STREAMING, P.BACKPRESSURED)


class SendPump(Machine[SendPumpState]):
    NAME = "SendPump"
    INITIAL = P.WAITING_FOR_CONNECTION
    TABLE = (
        Row(P.WAITING_FOR_CONNECTION, Connected, "_connected", (P.WAITING_FOR_BYTES,)),
        Row(P.WAITING_FOR_BYTES, RingReadable, "_readable", (P.OPEN_STREAM, P.STREAMING)),
        Row(P.OPEN_STREAM, StreamOpened, "_opened", (P.STREAMING,)),
        Row(P.STREAMING, BytesAccepted, "_accepted", (P.STREAMING,)),
        Row(P.STREAMING, WritePending, "_pending", (P.BACKPRESSURED,)),
        Row(P.STREAMING, NothingCommitted, "_drained", (P.WAITING_FOR_BYTES,)),
        Row(P.BACKPRESSURED, BytesAccepted, "_accepted", (P.STREAMING,)),
        *(Row(state, StreamBroke, "_broke", (P.FAULTED,)) for state in _SEND_LIVE),
        *(Row(state, StopEdge, "_stop", (P.CLOSED,)) for state in _SEND_LIVE),
        *(Row(state, StopEdge, None, (state,)) for state in (P.CLOSED, P.FAULTED)),
    )

    def __init__(self, edge_id: EdgeId) -> None:
        super().__init__()
        self.edge_id = edge_id
        self.sent = 0
        self._open = False

    def _connected(self, event: Connected, now: float) -> Outcome[SendPumpState]:
        return P.WAITING_FOR_BYTES, (Send(ESTABLISHER, DriverEdgeReady(self.edge_id)), AwaitReadable())

    def _readable(self, event: RingReadable, now: float) -> Outcome[SendPumpState]:
        return (P.STREAMING, (WriteStream(),)) if self._open else (P.OPEN_STREAM, (OpenEdgeStream(),))

    def _opened(self, event: StreamOpened, now: float) -> Outcome[SendPumpState]:
        self._open = True
        return P.STREAMING, (WriteStream(),)

    def _accepted(self, event: BytesAccepted, now: float) -> Outcome[SendPumpState]:
        self.sent += event.count
        return P.STREAMING, (ReleaseBytes(event.count), WriteStream())

    def _pending(self, event: WritePending, now: float) -> Outcome[SendPumpState]:
        return P.BACKPRESSURED, (AwaitRoom(),)

    def _drained(self, event: NothingCommitted, now: float) -> Outcome[SendPumpState]:
        return P.WAITING_FOR_BYTES, (AwaitReadable(),)

    def _broke(self, event: StreamBroke, now: float) -> Outcome[SendPumpState]:
        fault = StreamFault(self.edge_id, event.reason, event.detail)
        return P.FAULTED, (Send(ESTABLISHER, fault), EndPump(orderly=False))

    def _stop(self, event: StopEdge, now: float) -> Outcome[SendPumpState]:
        return P.CLOSED, (EndPump(orderly=self._open),)
