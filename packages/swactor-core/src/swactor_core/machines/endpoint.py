"""Token endpoint of the orchestrator (spec sections 10, 13): producer of token-in, consumer of token-out.

A producer and consumer like any other: its rings are leased, its edges established and torn down by the same
records and gates as a stage's. Knows ids and sequences; the adapter writes and reads the records. Must not
know when the run ends.
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Effect, Machine, Outcome, Row, Send
from swactor_core.ids import EdgeId, RingId, Sequence
from swactor_core.machines.bounds import teardown_timed_out
from swactor_core.machines.edge_ends import EdgeEnds
from swactor_core.machines.gates import ObjectConsumed, ProduceObject
from swactor_core.messages import (
    Address,
    EdgeFailed,
    EdgeReady,
    EdgeStopped,
    EndpointsFailed,
    EndpointsReady,
    EndpointsStopped,
    InjectTokens,
    ObjectLoaded,
    ObjectProduced,
    ProvisionRx,
    ProvisionTx,
    StopEdge,
    StopEndpoints,
    TimerFired,
    TokenReceived,
)
from swactor_core.values import frozen, value


class EndpointState(StrEnum):
    IDLE = "Idle"
    PROVISIONING = "Provisioning"
    READY = "Ready"
    INJECTING = "Injecting"
    AWAITING_TOKEN = "AwaitingToken"
    FAULTED = "Faulted"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


@frozen
class OpenTokenEdges:
    """From the run's adapter: provision both local token edges."""

    token_in: ProvisionTx
    token_out: ProvisionRx


@value
class WriteTokens(Effect):
    """Write these ids as one object record into the token-in ring."""

    ring_id: RingId
    sequence: Sequence
    token_ids: tuple[int, ...]


@value
class ReadToken(Effect):
    """Decode the loaded token-out object, free it, and tell TokenDecoded."""

    loaded: ObjectLoaded


@value
class TokenDecoded:
    """`enough` as in TokenReceived."""

    sequence: Sequence
    token_id: int
    enough: bool = False


@frozen
class TokenUndecodable:
    sequence: Sequence
    detail: str


S = EndpointState
RUN = Address(Component.RUN)
ESTABLISHER = Address(Component.EDGE_ESTABLISHER)
_LIVE = (S.PROVISIONING, S.READY, S.INJECTING, S.AWAITING_TOKEN)


class TokenEndpoint(Machine[EndpointState]):
    NAME = "TokenEndpoint"
    INITIAL = S.IDLE
    TABLE = (
        Row(S.IDLE, OpenTokenEdges, "_open", (S.PROVISIONING,)),
        Row(S.IDLE, StopEndpoints, "_nothing_to_stop", (S.STOPPED,)),
        Row(S.PROVISIONING, EdgeReady, "_edge_ready", (S.PROVISIONING, S.READY)),
        Row(S.READY, InjectTokens, "_inject", (S.INJECTING,)),
        Row(S.INJECTING, ObjectProduced, "_produced", (S.AWAITING_TOKEN, S.READY)),
        # A fast pipeline may answer before the produced event has come round.
        Row(S.INJECTING, ObjectLoaded, "_loaded", (S.INJECTING, S.FAULTED)),
        Row(S.INJECTING, TokenDecoded, "_decoded_early", (S.INJECTING,)),
        Row(S.AWAITING_TOKEN, ObjectLoaded, "_loaded", (S.AWAITING_TOKEN, S.FAULTED)),
        Row(S.AWAITING_TOKEN, TokenDecoded, "_decoded", (S.READY,)),
        *(
            Row(state, TokenUndecodable, "_undecodable", (S.FAULTED,))
            for state in (S.INJECTING, S.AWAITING_TOKEN)
        ),
        *(Row(state, ObjectLoaded, "_unexpected", (S.FAULTED,)) for state in (S.PROVISIONING, S.READY)),
        *(Row(state, EdgeFailed, "_edge_failed", (S.FAULTED,)) for state in _LIVE),
        *(Row(state, EdgeStopped, "_edge_stopped_early", (S.FAULTED,)) for state in _LIVE),
        *(Row(state, StopEndpoints, "_stop", (S.STOPPING,)) for state in (*_LIVE, S.FAULTED)),
        *(
            Row(state, late, None, (state,))
            for state in (S.FAULTED, S.STOPPING)
            for late in (
                EdgeReady,
                EdgeFailed,
                ObjectProduced,
                ObjectLoaded,
                TokenDecoded,
                TokenUndecodable,
                InjectTokens,
            )
        ),
        Row(S.FAULTED, EdgeStopped, "_note_stopped", (S.FAULTED,)),
        Row(S.STOPPING, EdgeStopped, "_edge_stopped", (S.STOPPING, S.STOPPED)),
        Row(S.STOPPING, TimerFired, "_teardown_timeout", (S.STOPPED,)),
        Row(S.STOPPING, StopEndpoints, None, (S.STOPPING,)),
        *(
            Row(S.STOPPED, late, None, (S.STOPPED,))
            for late in (
                EdgeReady,
                EdgeFailed,
                ObjectProduced,
                ObjectLoaded,
                TokenDecoded,
                TokenUndecodable,
                InjectTokens,
                StopEndpoints,
            )
        ),
        Row(S.STOPPED, EdgeStopped, "_proved_late", (S.STOPPED,)),
    )

    def __init__(self, *, teardown_bound: float) -> None:
        super().__init__()
        self._teardown_bound = teardown_bound
        self._edges: OpenTokenEdges | None = None
        self._ready: set[EdgeId] = set()
        self._token_in_ring: RingId | None = None
        self._sequence = Sequence(-1)
        self._early: TokenDecoded | None = None
        self._ends = EdgeEnds()

    def _ids(self) -> tuple[EdgeId, EdgeId]:
        assert self._edges is not None
        return self._edges.token_in.edge_id, self._edges.token_out.edge_id

    def _open(self, event: OpenTokenEdges, now: float) -> Outcome[EndpointState]:
        self._edges = event
        self._ends.edges = frozenset(self._ids())
        return S.PROVISIONING, (Send(ESTABLISHER, event.token_in), Send(ESTABLISHER, event.token_out))

    def _edge_ready(self, event: EdgeReady, now: float) -> Outcome[EndpointState]:
        self._ready.add(event.edge_id)
        if event.edge_id == self._ids()[0]:
            self._token_in_ring = event.ring_id
        if self._ready != self._ends.edges:
            return S.PROVISIONING, ()
        return S.READY, (Send(RUN, EndpointsReady()),)

    def _inject(self, event: InjectTokens, now: float) -> Outcome[EndpointState]:
        assert self._token_in_ring is not None
        token_in = self._ids()[0]
        self._sequence = event.sequence
        return S.INJECTING, (
            Send(Address(Component.TX_EDGE, token_in), ProduceObject(token_in)),
            WriteTokens(self._token_in_ring, event.sequence, event.token_ids),
        )

    def _loaded(self, event: ObjectLoaded, now: float) -> Outcome[EndpointState]:
        if event.sequence != self._sequence:
            return self._unexpected(event, now)
        return self.state, (ReadToken(event),)

    def _decoded_early(self, event: TokenDecoded, now: float) -> Outcome[EndpointState]:
        self._early = event
        return S.INJECTING, ()

    def _produced(self, event: ObjectProduced, now: float) -> Outcome[EndpointState]:
        early, self._early = self._early, None
        return self._decoded(early, now) if early is not None else (S.AWAITING_TOKEN, ())

    def _decoded(self, event: TokenDecoded, now: float) -> Outcome[EndpointState]:
        token_out = self._ids()[1]
        return S.READY, (
            Send(Address(Component.RX_EDGE, token_out), ObjectConsumed(token_out)),
            Send(RUN, TokenReceived(event.sequence, event.token_id, event.enough)),
        )

    def _undecodable(self, event: TokenUndecodable, now: float) -> Outcome[EndpointState]:
        return self._fail(Fault(FaultReason.STEP_FAILED, Component.TOKEN_ENDPOINT, event.detail))

    def _unexpected(self, event: ObjectLoaded, now: float) -> Outcome[EndpointState]:
        detail = f"token object of sequence {event.sequence} while {self.state} at sequence {self._sequence}"
        return self._fail(Fault(FaultReason.SEQUENCE_VIOLATION, Component.TOKEN_ENDPOINT, detail))

    def _edge_failed(self, event: EdgeFailed, now: float) -> Outcome[EndpointState]:
        return self._fail(event.fault)

    def _edge_stopped_early(self, event: EdgeStopped, now: float) -> Outcome[EndpointState]:
        self._ends.note(event)
        detail = f"token edge {event.edge_id} stopped during the run"
        return self._fail(
            Fault(FaultReason.STREAM_FAULT, Component.TOKEN_ENDPOINT, detail, edge_id=event.edge_id)
        )

    def _fail(self, fault: Fault) -> Outcome[EndpointState]:
        return S.FAULTED, (Send(RUN, EndpointsFailed(fault)),)

    # --- teardown ---

    def _stop(self, event: StopEndpoints, now: float) -> Outcome[EndpointState]:
        token_in, token_out = self._ids()
        said = self._ends.said(token_in)  # everything may have stopped already: told again, this ends it
        again = () if said is None else (Send(Address(Component.TOKEN_ENDPOINT), said),)
        return S.STOPPING, (
            Send(Address(Component.TX_EDGE, token_in), StopEdge(token_in)),
            Send(Address(Component.RX_EDGE, token_out), StopEdge(token_out)),
            self.set_timer("teardown", now + self._teardown_bound),
            *again,
        )

    def _nothing_to_stop(self, event: StopEndpoints, now: float) -> Outcome[EndpointState]:
        return S.STOPPED, (Send(RUN, EndpointsStopped()),)

    def _note_stopped(self, event: EdgeStopped, now: float) -> Outcome[EndpointState]:
        self._ends.note(event)
        return S.FAULTED, ()

    def _edge_stopped(self, event: EdgeStopped, now: float) -> Outcome[EndpointState]:
        self._ends.note(event)
        if not self._ends.complete:
            return S.STOPPING, ()
        return S.STOPPED, (*self.cancel_timer("teardown"), self._report())

    def _teardown_timeout(self, event: TimerFired, now: float) -> Outcome[EndpointState]:
        missing = self._ends.give_up(f"within {self._teardown_bound:g} s", kind="token edge")
        return S.STOPPED, (teardown_timed_out(Component.TOKEN_ENDPOINT, missing), self._report())

    def _proved_late(self, event: EdgeStopped, now: float) -> Outcome[EndpointState]:
        before = len(self._ends.unproven)
        self._ends.note(event)
        return S.STOPPED, (self._report(),) if len(self._ends.unproven) < before else ()

    def _report(self) -> Send:
        return Send(RUN, EndpointsStopped(self._ends.unproven))
