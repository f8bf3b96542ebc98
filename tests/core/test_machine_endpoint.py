"""Token endpoint (spec sections 10, 13): both local token edges, one object in, one token out, in order."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Action, CancelTimer, Emit, Send, SetTimer
from swactor_core.ids import (
    INPUT_PORT,
    OUTPUT_PORT,
    DeviceObjectHandle,
    EdgeId,
    NodeId,
    ObjectId,
    RingId,
    Sequence,
    WorkerGeneration,
)
from swactor_core.machines.endpoint import (
    EndpointState,
    OpenTokenEdges,
    ReadToken,
    TokenDecoded,
    TokenEndpoint,
    TokenUndecodable,
    WriteTokens,
)
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
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingSpec
from swactor_testing.scripts import Script, Steps, event_strategies, step_or_refuse, walk

S = EndpointState
IN, OUT, IN_RING, OUT_RING = EdgeId(6), EdgeId(7), RingId(8), RingId(9)
RUN, ESTABLISHER = Address(Component.RUN), Address(Component.EDGE_ESTABLISHER)
ME, TX, RX = (
    Address(Component.TOKEN_ENDPOINT),
    Address(Component.TX_EDGE, IN),
    Address(Component.RX_EDGE, OUT),
)
TOKENS = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
OPEN = OpenTokenEdges(
    ProvisionTx(IN, OUTPUT_PORT, NodeId(1), TOKENS, RingSpec(4096, RingDirection.EGRESS)),
    ProvisionRx(OUT, INPUT_PORT, NodeId(2), TOKENS, RingSpec(4096, RingDirection.INGRESS)),
)


def loaded(sequence: int) -> ObjectLoaded:
    handle = DeviceObjectHandle(WorkerGeneration(0), sequence)
    return ObjectLoaded(OUT_RING, OUT, INPUT_PORT, ObjectId(sequence), Sequence(sequence), 4, handle)


def inject(sequence: int) -> tuple[object, tuple[Action, ...]]:
    tokens = (10, 11)
    write = WriteTokens(IN_RING, Sequence(sequence), tokens)
    return InjectTokens(Sequence(sequence), tokens), (Send(TX, ProduceObject(IN)), write)


def token(sequence: int) -> TokenDecoded:
    return TokenDecoded(Sequence(sequence), 42)


def received(sequence: int) -> tuple[Action, ...]:
    return Send(RX, ObjectConsumed(OUT)), Send(RUN, TokenReceived(Sequence(sequence), 42))


def failed(reason: FaultReason, detail: str, **where: Any) -> tuple[Action, ...]:
    return (Send(RUN, EndpointsFailed(Fault(reason, Component.TOKEN_ENDPOINT, detail, **where))),)


def unexpected(sequence: int, state: EndpointState, at: int) -> tuple[Action, ...]:
    detail = f"token object of sequence {sequence} while {state} at sequence {at}"
    return failed(FaultReason.SEQUENCE_VIOLATION, detail)


def stopping(*again: Action) -> tuple[Action, ...]:
    return Send(TX, StopEdge(IN)), Send(RX, StopEdge(OUT)), SetTimer("teardown", 1, 10.0), *again


def stopped(*unproven: str) -> Send:
    return Send(RUN, EndpointsStopped(unproven))


PRODUCED = ObjectProduced(IN_RING, IN, OUTPUT_PORT, ObjectId(0), Sequence(0), 8)
UNTIMED = CancelTimer("teardown")
BROKEN_EDGE = EdgeFailed(OUT, Fault(FaultReason.STREAM_FAULT, Component.DRIVER, "reset"))
BROKEN = (Send(RUN, EndpointsFailed(BROKEN_EDGE.fault)),)
STOPPED_EARLY = failed(FaultReason.STREAM_FAULT, "token edge 7 stopped during the run", edge_id=OUT)
GARBLED = TokenUndecodable(Sequence(0), "3 bytes")
UNDECODABLE = failed(FaultReason.STEP_FAILED, "3 bytes")

OPENED: Steps = [(OPEN, (Send(ESTABLISHER, OPEN.token_in), Send(ESTABLISHER, OPEN.token_out)))]
READY: Steps = [
    *OPENED,
    (EdgeReady(IN, IN_RING), ()),
    (EdgeReady(OUT, OUT_RING), (Send(RUN, EndpointsReady()),)),
]
INJECTING: Steps = [*READY, inject(0)]
AWAITING: Steps = [*INJECTING, (PRODUCED, ())]
READING: Steps = [*AWAITING, (loaded(0), (ReadToken(loaded(0)),))]
TURNED: Steps = [*READING, (token(0), received(0))]
STOPPING: Steps = [*READY, (StopEndpoints(), stopping())]

SCENARIOS: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], S.IDLE),
    "opened": (OPENED, S.PROVISIONING),
    "ready": (READY, S.READY),
    "injecting": (INJECTING, S.INJECTING),
    "awaiting": (AWAITING, S.AWAITING_TOKEN),
    "reading": (READING, S.AWAITING_TOKEN),
    "two tokens, one after the other": (
        [
            *TURNED,
            inject(1),
            (PRODUCED, ()),
            (loaded(1), (ReadToken(loaded(1)),)),
            (token(1), received(1)),
        ],
        S.READY,
    ),
    "the answer comes before the word that the question is out": (
        [
            *INJECTING,
            (loaded(0), (ReadToken(loaded(0)),)),
            (token(0), ()),
            (PRODUCED, received(0)),
            inject(1),
            (PRODUCED, ()),
        ],
        S.AWAITING_TOKEN,
    ),
    "its whole life": (
        [
            *TURNED,
            (StopEndpoints(), stopping()),
            (EdgeStopped(OUT), ()),
            (EdgeStopped(IN), (UNTIMED, stopped())),
        ],
        S.STOPPED,
    ),
    "nothing to stop": ([(StopEndpoints(), (stopped(),))], S.STOPPED),
    # --- faults ---
    "a token before it is ready": ([*OPENED, (loaded(0), unexpected(0, S.PROVISIONING, -1))], S.FAULTED),
    "a token that nobody asked for": ([*TURNED, (loaded(1), unexpected(1, S.READY, 0))], S.FAULTED),
    "a token of another sequence while injecting": (
        [*INJECTING, (loaded(1), unexpected(1, S.INJECTING, 0))],
        S.FAULTED,
    ),
    "a token of another sequence": (
        [*AWAITING, (loaded(1), unexpected(1, S.AWAITING_TOKEN, 0))],
        S.FAULTED,
    ),
    "a token that cannot be read": ([*READING, (GARBLED, UNDECODABLE)], S.FAULTED),
    "an early token that cannot be read": (
        [*INJECTING, (loaded(0), (ReadToken(loaded(0)),)), (GARBLED, UNDECODABLE)],
        S.FAULTED,
    ),
    **{
        f"an edge fails: {name}": ([*steps, (BROKEN_EDGE, BROKEN)], S.FAULTED)
        for name, steps in {
            "opened": OPENED,
            "ready": READY,
            "injecting": INJECTING,
            "awaiting": AWAITING,
        }.items()
    },
    **{
        f"an edge ends: {name}": ([*steps, (EdgeStopped(OUT), STOPPED_EARLY)], S.FAULTED)
        for name, steps in {
            "opened": OPENED,
            "ready": READY,
            "injecting": INJECTING,
            "awaiting": AWAITING,
        }.items()
    },
    # --- stops ---
    "stopping": (STOPPING, S.STOPPING),
    **{
        f"stopped when: {name}": ([*steps, (StopEndpoints(), stopping())], S.STOPPING)
        for name, steps in {"opened": OPENED, "injecting": INJECTING, "awaiting": AWAITING}.items()
    },
    "stopped after a fault": ([*READY, (BROKEN_EDGE, BROKEN), (StopEndpoints(), stopping())], S.STOPPING),
    "everything had stopped already, and not all of it was proved": (
        [
            *READY,
            (EdgeStopped(OUT, "ring 9: its pump did not stop"), STOPPED_EARLY),
            (EdgeStopped(IN, "ring 8: its ring did not quiesce"), ()),
            (StopEndpoints(), stopping(Send(ME, EdgeStopped(IN, "ring 8: its ring did not quiesce")))),
            (
                EdgeStopped(IN, "ring 8: its ring did not quiesce"),
                (UNTIMED, stopped("ring 9: its pump did not stop", "ring 8: its ring did not quiesce")),
            ),
            (EdgeStopped(OUT), (stopped("ring 8: its ring did not quiesce"),)),
            (EdgeStopped(OUT), ()),
            (EdgeStopped(IN), (stopped(),)),
        ],
        S.STOPPED,
    ),
    "an edge does not stop in time": (
        [
            *STOPPING,
            (EdgeStopped(IN, "ring 8: its pump did not stop"), ()),
            (
                TimerFired("teardown", 1),
                (
                    Emit(
                        EventName.TEARDOWN_TIMED_OUT,
                        {
                            "reason": "TeardownTimeout",
                            "component": "TokenEndpoint",
                            "detail": "token edge 7 did not stop within 10 s",
                        },
                    ),
                    stopped("ring 8: its pump did not stop", "token edge 7 did not stop within 10 s"),
                ),
            ),
            (EdgeStopped(OUT, "ring 9: its pump did not stop"), ()),
            (EdgeStopped(IN), (stopped("ring 9: its pump did not stop"),)),
            (EdgeStopped(OUT), (stopped(),)),
        ],
        S.STOPPED,
    ),
}


def make() -> TokenEndpoint:
    return TokenEndpoint(teardown_bound=10.0)


# What each state expects and ignores, stated here and not read from the table.
ANY_WORD = (
    EdgeReady,
    EdgeFailed,
    ObjectProduced,
    ObjectLoaded,
    TokenDecoded,
    TokenUndecodable,
    InjectTokens,
)
LATE: dict[StrEnum, tuple[type[Any], ...]] = {
    S.FAULTED: ANY_WORD,
    S.STOPPING: (*ANY_WORD, StopEndpoints),
    S.STOPPED: (*ANY_WORD, StopEndpoints),
}
SCRIPT = Script(make, SCENARIOS, LATE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


@pytest.mark.parametrize(("state", "event"), SCRIPT.ignored())
def test_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT.play_ignored(state, event)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


def test_broken_host_injects_before_the_last_token_came() -> None:
    for name in ("opened", "injecting", "awaiting"):
        assert step_or_refuse(SCRIPT.play(name), InjectTokens(Sequence(1), (1,))) is None


def test_broken_host_tells_the_token_twice_and_the_run_hears_it_once() -> None:
    machine = SCRIPT.play("reading")
    assert machine.step(token(0), 0.0) == received(0)
    assert step_or_refuse(machine, token(0)) is None


def test_broken_host_takes_a_proof_back_and_nothing_is_said_of_it() -> None:
    machine = SCRIPT.reach(EndpointState.STOPPED)
    said = [machine.step(EdgeStopped(OUT, unproven), 0.0) for unproven in ("no proof", "", "")]
    assert said == [(), (), ()]


EVENTS = event_strategies(
    TokenEndpoint,
    {
        OpenTokenEdges: st.just(OPEN),
        EdgeId: st.sampled_from((IN, OUT)),
        ObjectLoaded: st.builds(loaded, st.integers(0, 2)),
    },
)


@settings(max_examples=100)
@given(st.data())
def test_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject) -> None:
    told: list[object] = []

    def check(event: object, actions: tuple[Action, ...]) -> None:
        told.extend(a.message for a in actions if isinstance(a, Send) and a.to == RUN)

    machine = SCRIPT.somewhere(data, check)
    walk(data, machine, EVENTS, steps=25, check=check)
    kinds = [type(message) for message in told]
    assert kinds.count(EndpointsReady) <= 1
    assert kinds.count(EndpointsFailed) <= 1
    assert (EndpointsStopped in kinds) == (machine.state is S.STOPPED)
    left = [len(message.unproven) for message in told if isinstance(message, EndpointsStopped)]
    assert left == sorted(set(left), reverse=True), "it is said again only when a proof has come"


def test_a_proof_is_not_taken_back_and_is_told_once() -> None:
    machine = SCRIPT.play("fresh")
    machine.step(StopEndpoints(), 0.0)
    assert machine.step(EdgeStopped(IN, "why"), 0.0) == (), "it never opened that edge"
    assert machine.step(EdgeStopped(IN), 0.0) == ()
    machine = SCRIPT.reach(EndpointState.STOPPING)
    machine.step(EdgeStopped(IN, "why"), 0.0)
    assert Send(RUN, EndpointsStopped(("why",))) in machine.step(EdgeStopped(OUT), 0.0)
    assert machine.step(EdgeStopped(IN), 0.0) == (Send(RUN, EndpointsStopped()),)
    assert machine.step(EdgeStopped(IN, "why"), 0.0) == ()
    assert machine.step(EdgeStopped(IN), 0.0) == ()


def test_that_the_reader_has_enough_is_passed_on() -> None:
    machine = SCRIPT.reach(EndpointState.AWAITING_TOKEN)
    sent = machine.step(TokenDecoded(Sequence(0), 42, enough=True), 0.0)
    assert Send(RUN, TokenReceived(Sequence(0), 42, enough=True)) in sent
