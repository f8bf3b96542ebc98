"""Receive rendezvous (spec section 25): pairs an edge's local spec with its arriving stream, in either order.

One record per edge id. A stream that nobody asked for waits, unread, for a bounded time; a second stream or
one from the wrong peer is refused and counted and never harms the edge. Knows stream numbers, no streams.
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.events import EventName
from swactor_core.faults import Component, StreamFaultReason
from swactor_core.fsm import Action, Effect, Emit, Machine, Outcome, Row, Send
from swactor_core.ids import EdgeId, node_hex
from swactor_core.messages import (
    Address,
    DriverEdgeReady,
    EstablishRecv,
    PumpStopped,
    StopEdge,
    StreamArrived,
    TimerFired,
)
from swactor_core.values import frozen


class RendezvousState(StrEnum):
    EMPTY = "Empty"
    PENDING_STREAM = "PendingStream"
    RECV_SPEC = "RecvSpec"
    PAIRED = "Paired"
    CLOSED = "Closed"


@frozen
class StartRecvPump(Effect):
    """Both halves are here: spawn the recv-pump."""

    spec: EstablishRecv
    stream: int


@frozen
class StopRecvPump(Effect):
    """Stop the pump; its adapter tells PumpStopped when it has ended."""

    edge_id: EdgeId


@frozen
class RefuseStream(Effect):
    """Tell the sender to stop and forget the stream."""

    stream: int
    reason: StreamFaultReason


S = RendezvousState


class Rendezvous(Machine[RendezvousState]):
    NAME = "Rendezvous"
    INITIAL = S.EMPTY
    TABLE = (
        Row(S.EMPTY, EstablishRecv, "_spec_first", (S.RECV_SPEC,)),
        Row(S.EMPTY, StreamArrived, "_stream_first", (S.PENDING_STREAM,)),
        Row(S.PENDING_STREAM, EstablishRecv, "_spec_second", (S.PAIRED, S.RECV_SPEC)),
        Row(S.PENDING_STREAM, StreamArrived, "_duplicate", (S.PENDING_STREAM,)),
        Row(S.EMPTY, StopEdge, None, (S.EMPTY,)),
        # An edge that this end only sends on: whoever opened a stream for it is told so.
        Row(S.PENDING_STREAM, StopEdge, "_stop_pending", (S.CLOSED,)),
        Row(S.PENDING_STREAM, TimerFired, "_unknown_edge", (S.CLOSED,)),
        Row(S.RECV_SPEC, StreamArrived, "_stream_second", (S.PAIRED, S.RECV_SPEC)),
        Row(S.RECV_SPEC, StopEdge, "_stop_unpaired", (S.CLOSED,)),
        Row(S.PAIRED, StreamArrived, "_duplicate", (S.PAIRED,)),
        Row(S.PAIRED, StopEdge, "_stop_paired", (S.CLOSED,)),
        # Refused as unknown, and only now asked for: a slow start is no reason to lose the edge.
        Row(S.CLOSED, EstablishRecv, "_spec_late", (S.RECV_SPEC,)),
        Row(S.CLOSED, StreamArrived, "_closed", (S.CLOSED,)),
        Row(S.CLOSED, StopEdge, None, (S.CLOSED,)),
    )

    def __init__(self, edge_id: EdgeId, *, pending_bound: float) -> None:
        super().__init__()
        self.edge_id = edge_id
        self.refused = 0
        self._pending_bound = pending_bound
        self._spec: EstablishRecv | None = None
        self._pending: StreamArrived | None = None

    @property
    def unasked(self) -> bool:
        """Its streams were refused, and nobody here ever asked for them: there is nothing to remember."""
        return self.state is S.CLOSED and self._spec is None

    def _spec_first(self, event: EstablishRecv, now: float) -> Outcome[RendezvousState]:
        self._spec = event
        return S.RECV_SPEC, (self._ready(),)

    def _spec_late(self, event: EstablishRecv, now: float) -> Outcome[RendezvousState]:
        if self._spec is not None:  # this edge has lived and was stopped
            raise self.invalid(event)
        return self._spec_first(event, now)

    def _stream_first(self, event: StreamArrived, now: float) -> Outcome[RendezvousState]:
        self._pending = event
        return S.PENDING_STREAM, (self.set_timer("pending", now + self._pending_bound),)

    def _spec_second(self, event: EstablishRecv, now: float) -> Outcome[RendezvousState]:
        assert self._pending is not None
        self._spec, pending, self._pending = event, self._pending, None
        target, actions = self._pair(pending)
        return target, (*self.cancel_timer("pending"), self._ready(), *actions)

    def _stream_second(self, event: StreamArrived, now: float) -> Outcome[RendezvousState]:
        return self._pair(event)

    def _pair(self, stream: StreamArrived) -> Outcome[RendezvousState]:
        assert self._spec is not None
        if stream.peer != self._spec.tx_node_id:
            return S.RECV_SPEC, self._refuse(stream, StreamFaultReason.WRONG_PEER)
        return S.PAIRED, (StartRecvPump(self._spec, stream.stream),)

    def _duplicate(self, event: StreamArrived, now: float) -> Outcome[RendezvousState]:
        return self.state, self._refuse(event, StreamFaultReason.DUPLICATE_STREAM)

    def _unknown_edge(self, event: TimerFired, now: float) -> Outcome[RendezvousState]:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return S.CLOSED, self._refuse(pending, StreamFaultReason.UNKNOWN_EDGE)

    def _stop_pending(self, event: StopEdge, now: float) -> Outcome[RendezvousState]:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        refused = self._refuse(pending, StreamFaultReason.UNKNOWN_EDGE)
        return S.CLOSED, (*self.cancel_timer("pending"), *refused)

    def _closed(self, event: StreamArrived, now: float) -> Outcome[RendezvousState]:
        return S.CLOSED, self._refuse(event, StreamFaultReason.UNKNOWN_EDGE)

    def _stop_unpaired(self, event: StopEdge, now: float) -> Outcome[RendezvousState]:
        assert self._spec is not None
        stopped = PumpStopped(self.edge_id, self._spec.ring_id)
        return S.CLOSED, (Send(Address(Component.EDGE_ESTABLISHER), stopped),)

    def _stop_paired(self, event: StopEdge, now: float) -> Outcome[RendezvousState]:
        return S.CLOSED, (StopRecvPump(self.edge_id),)

    def _ready(self) -> Send:
        return Send(Address(Component.EDGE_ESTABLISHER), DriverEdgeReady(self.edge_id))

    def _refuse(self, stream: StreamArrived, reason: StreamFaultReason) -> tuple[Action, ...]:
        self.refused += 1
        fields = {"edge_id": self.edge_id, "peer": node_hex(stream.peer), "reason": str(reason)}
        return RefuseStream(stream.stream, reason), Emit(EventName.EDGE_REFUSED, fields)
