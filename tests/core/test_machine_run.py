"""The run (spec sections 12, 13, 36): barrier, tokens in order, one outcome in any order of events."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_run_words import (
    ACTIVE,
    AGAIN,
    BARRIER,
    BOUNDS,
    BROKEN,
    BROKEN_FAR,
    COMPLETED,
    END_OF_TEXT,
    ENDPOINT,
    EVIDENCE,
    FAULTED,
    FIRST,
    FOREIGN,
    GIVEN_UP,
    LAST,
    LOST,
    NODE_FAULT,
    NODES,
    OPERATED,
    PLAN,
    PLANNED,
    POOL_READY,
    PROVISIONED,
    READY_A,
    READY_B,
    RUN_ID,
    RUNNING,
    SHOW_A,
    SHOW_B,
    STAGE_FAULT,
    STAGE_FAULTED,
    TEARING,
    UNREACHABLE,
    UNTIMED,
    A,
    B,
    S,
    bound,
    delivered,
    faulted,
    finished,
    fired,
    inject,
    lost_fault,
    moved,
    operator,
    stop_run,
    stopped,
    tearing,
    tearing_but,
    token,
)
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Action, Emit, Send
from swactor_core.ids import (
    EdgeId,
    NodeId,
    RunId,
    Sequence,
    StageIndex,
)
from swactor_core.machines.pool import PlanCommitted, PoolAborted, PoolReady
from swactor_core.machines.run import Run
from swactor_core.machines.run_effects import (
    BuildPlan,
    Continue,
    DeliverToken,
    FinishRun,
    OpenEndpoints,
    PlanBuilt,
    PlanFailed,
    ReportProgress,
    RunOutcome,
    RunState,
)
from swactor_core.messages import (
    EndpointsFailed,
    EndpointsReady,
    EndpointsStopped,
    InjectTokens,
    LoadPhase,
    NodeFaulted,
    NodeLost,
    OperatorStop,
    ProvisionStage,
    StageFault,
    StageProgress,
    StageReady,
    StageStopped,
    StopEndpoints,
    TimerFired,
    TokenReceived,
)
from swactor_testing.scripts import Script, Steps, event_strategies, step_or_refuse, walk

SCENARIOS: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], S.PLANNING),
    "planned": (PLANNED, S.PROVISIONING),
    "provisioned": (PROVISIONED, S.WAITING_READY),
    "running": (RUNNING, S.RUNNING),
    "completed": (COMPLETED, S.COMPLETED),
    "faulted": (FAULTED, S.FAULTED),
    "operator-stopped": (OPERATED, S.OPERATOR_STOPPED),
    "tearing down": (TEARING, S.TEARING_DOWN),
    "the whole run: end of generation": (
        [
            *TEARING,
            (stopped(LAST), ()),
            (EndpointsStopped(), ()),
            (stopped(FIRST), finished(RunOutcome.COMPLETED)),
        ],
        S.DONE,
    ),
    "max_tokens ends it; the endpoints stop last": (
        [
            *RUNNING,
            (token(0), (*delivered(0), inject(1, 42), bound(3, 300.0))),
            (token(1), (*delivered(1), inject(2, 42), bound(4, 300.0))),
            (
                token(2),
                (
                    *delivered(2),
                    UNTIMED,
                    Emit(EventName.RUN_COMPLETED, {"tokens": 3}),
                    moved(S.COMPLETED),
                    AGAIN,
                ),
            ),
            (Continue(), tearing(5)),
            (stopped(FIRST), ()),
            (stopped(LAST), ()),
            (EndpointsStopped(), finished(RunOutcome.COMPLETED)),
        ],
        S.DONE,
    ),
    "the barrier is passed by the endpoints, last": (
        [*PROVISIONED, (READY_A, (SHOW_A,)), (READY_B, (SHOW_B,)), (EndpointsReady(), BARRIER)],
        S.RUNNING,
    ),
    "what people hear before the barrier": (
        [
            *PROVISIONED,
            (
                StageProgress(RUN_ID, FIRST, LoadPhase.WEIGHTS, 1, 2),
                (ReportProgress(StageProgress(RUN_ID, FIRST, LoadPhase.WEIGHTS, 1, 2)),),
            ),
        ],
        S.WAITING_READY,
    ),
    "ready twice while the plan is made: one plan": ([*POOL_READY, (PoolReady(NODES), ())], S.PLANNING),
    # --- words of another run ---
    "words of an earlier run while planning": ([*POOL_READY, *FOREIGN], S.PLANNING),
    "words of an earlier run when planned": ([*PLANNED, *FOREIGN], S.PROVISIONING),
    "words of an earlier run before the barrier": ([*PROVISIONED, *FOREIGN], S.WAITING_READY),
    "words of an earlier run while running": ([*RUNNING, *FOREIGN], S.RUNNING),
    "words of an earlier run in each way to the end": (
        [*FAULTED, (stopped(FIRST, RunId(4)), ()), (Continue(), tearing(3)), (stopped(LAST, RunId(4)), ())],
        S.TEARING_DOWN,
    ),
    "a stage that the plan does not have": (
        [*PROVISIONED, (StageReady(RUN_ID, StageIndex(9)), ())],
        S.WAITING_READY,
    ),
    # --- the one fault ---
    **{
        f"{what}: {name}": (
            [*steps, (event, faulted(replace(fault, **(planned if timed else {})), timed=timed))],
            S.FAULTED,
        )
        for what, (event, fault, planned) in EVIDENCE.items()
        for name, (steps, timed) in ACTIVE.items()
    },
    **{
        f"the operator stops: {name}": ([*steps, (OperatorStop(), operator(timed=timed))], S.OPERATOR_STOPPED)
        for name, (steps, timed) in ACTIVE.items()
    },
    "a stage faults before the barrier": (
        [*PROVISIONED, (StageFault(RUN_ID, LAST, STAGE_FAULT), STAGE_FAULTED)],
        S.FAULTED,
    ),
    "a stream breaks: the node at its other end is told too": (
        [
            *RUNNING,
            (
                StageFault(RUN_ID, FIRST, BROKEN),
                faulted(replace(BROKEN, node_id=A, detail=BROKEN_FAR)),
            ),
        ],
        S.FAULTED,
    ),
    "the stream of a token edge breaks at its stage": (
        [
            *RUNNING,
            (
                StageFault(RUN_ID, FIRST, replace(BROKEN, edge_id=EdgeId(1))),
                faulted(replace(BROKEN, edge_id=EdgeId(1), node_id=A)),
            ),
        ],
        S.FAULTED,
    ),
    "a stage stops by itself before the barrier": (
        [*PROVISIONED, (stopped(FIRST), faulted(GIVEN_UP))],
        S.FAULTED,
    ),
    "a stage stops by itself": ([*RUNNING, (stopped(FIRST), faulted(GIVEN_UP))], S.FAULTED),
    "no plan": (
        [
            *POOL_READY,
            (
                PlanFailed("more nodes than layers"),
                faulted(
                    Fault(FaultReason.PLAN_INVALID, Component.PLANNER, "more nodes than layers"), timed=False
                ),
            ),
        ],
        S.FAULTED,
    ),
    "stages are not ready in time": (
        [
            *PROVISIONED,
            (READY_A, (SHOW_A,)),
            (
                fired(1),
                faulted(
                    Fault(FaultReason.READINESS_TIMEOUT, Component.RUN, "stages [1] not ready within 900 s"),
                    timed=False,
                ),
            ),
        ],
        S.FAULTED,
    ),
    "a token out of order": (
        [
            *RUNNING,
            (
                token(1),
                faulted(
                    Fault(FaultReason.SEQUENCE_VIOLATION, Component.RUN, "token of sequence 1, expected 0")
                ),
            ),
        ],
        S.FAULTED,
    ),
    "no token in time; the readiness timer is late": (
        [
            *RUNNING,
            (fired(1), ()),
            (
                fired(2),
                faulted(
                    Fault(
                        FaultReason.EXECUTION_TIMEOUT, Component.RUN, "no token of sequence 0 within 300 s"
                    ),
                    timed=False,
                ),
            ),
        ],
        S.FAULTED,
    ),
    # --- teardown ---
    "nothing to tear down": (
        [
            *POOL_READY,
            (OperatorStop(), operator(timed=False)),
            (Continue(), finished(RunOutcome.OPERATOR_STOPPED, timed=False, stats=())),
        ],
        S.DONE,
    ),
    "a fault between the plan and its provisioning: the second Continue finds the run done": (
        [
            *PLANNED,
            (NodeFaulted(B, NODE_FAULT), faulted(NODE_FAULT, timed=False)),
            (Continue(), finished(RunOutcome.FAULTED, NODE_FAULT, timed=False, stats=())),
            (Continue(), ()),
        ],
        S.DONE,
    ),
    "a completed run with nothing left to wait for": (
        [
            *COMPLETED,
            (stopped(FIRST), ()),
            (stopped(LAST), ()),
            (Continue(), (Send(ENDPOINT, StopEndpoints()), bound(4, 15.0), moved(S.TEARING_DOWN))),
            (EndpointsStopped(), finished(RunOutcome.COMPLETED)),
        ],
        S.DONE,
    ),
    "the operator stops a run, which ends": (
        [
            *OPERATED,
            (stopped(FIRST), ()),
            (
                Continue(),
                (
                    *stop_run(LAST, B),
                    Send(ENDPOINT, StopEndpoints()),
                    bound(3, 15.0),
                    moved(S.TEARING_DOWN),
                ),
            ),
            (EndpointsStopped(("ring 9: its pump did not stop",)), ()),
            (
                stopped(LAST, unproven=("ring 4: its ring did not quiesce",)),
                finished(
                    RunOutcome.OPERATOR_STOPPED,
                    unproven=("ring 9: its pump did not stop", "ring 4: its ring did not quiesce"),
                ),
            ),
        ],
        S.DONE,
    ),
    "a lost node is not waited for": (
        [
            *RUNNING,
            (LOST, faulted(lost_fault(LAST))),
            (
                Continue(),
                (
                    *stop_run(FIRST, A),
                    Send(ENDPOINT, StopEndpoints()),
                    bound(3, 15.0),
                    moved(S.TEARING_DOWN),
                ),
            ),
            (EndpointsStopped(), ()),
            (
                stopped(FIRST),
                finished(
                    RunOutcome.FAULTED,
                    lost_fault(LAST),
                    stats=(FIRST,),
                    unproven=("stage 1 went with its node",),
                ),
            ),
        ],
        S.DONE,
    ),
    "a node that is lost after the outcome is not waited for either": (
        [
            *COMPLETED,
            (UNREACHABLE, ()),
            (
                Continue(),
                (
                    *stop_run(FIRST, A),
                    Send(ENDPOINT, StopEndpoints()),
                    bound(4, 15.0),
                    moved(S.TEARING_DOWN),
                ),
            ),
        ],
        S.TEARING_DOWN,
    ),
    "a node is lost during teardown": ([*TEARING, (UNREACHABLE, ())], S.TEARING_DOWN),
    "a node is lost during teardown, last of all": (
        [
            *TEARING,
            (stopped(FIRST), ()),
            (EndpointsStopped(), ()),
            (
                UNREACHABLE,
                finished(RunOutcome.COMPLETED, stats=(FIRST,), unproven=("stage 1 went with its node",)),
            ),
        ],
        S.DONE,
    ),
    "a node is lost after the operator stopped": (
        [*OPERATED, (UNREACHABLE, ()), (Continue(), tearing_but(LAST))],
        S.TEARING_DOWN,
    ),
    "a node is lost after the fault": (
        [*FAULTED, (UNREACHABLE, ()), (Continue(), tearing_but(LAST))],
        S.TEARING_DOWN,
    ),
    "a stage stops after the fault": (
        [*FAULTED, (stopped(FIRST), ()), (Continue(), tearing_but(FIRST))],
        S.TEARING_DOWN,
    ),
    "teardown has a bound, and what is missing is named": (
        [
            *TEARING,
            (stopped(FIRST), ()),
            (
                fired(4),
                finished(
                    RunOutcome.COMPLETED,
                    timed=False,
                    stats=(FIRST,),
                    unproven=(
                        "stage 1 did not say StageStopped within 15 s",
                        "the token endpoints did not stop within 15 s",
                    ),
                    overdue=Fault(
                        FaultReason.TEARDOWN_TIMEOUT,
                        Component.RUN,
                        "stage 1 did not say StageStopped within 15 s; "
                        "the token endpoints did not stop within 15 s",
                    ),
                ),
            ),
        ],
        S.DONE,
    ),
    "a faulted run tears down": ([*FAULTED, (Continue(), tearing(3))], S.TEARING_DOWN),
    "an operator-stopped run tears down": ([*OPERATED, (Continue(), tearing(3))], S.TEARING_DOWN),
}


def make() -> Run:
    return Run(RUN_ID, bounds=BOUNDS, prefill_chunk=32)


# What each state expects and ignores, stated here and not read from the table.
PLANNING = (PoolReady, PlanBuilt, PlanFailed)
READINESS = (StageReady, StageProgress, EndpointsReady)
# Once the outcome is recorded, whatever else goes wrong changes nothing, and no new run work is accepted.
AFTER_OUTCOME = (
    *PLANNING,
    *READINESS,
    StageFault,
    NodeFaulted,
    EndpointsFailed,
    PoolAborted,
    OperatorStop,
    TokenReceived,
)
LATE: dict[StrEnum, tuple[type[Any], ...]] = {
    S.PROVISIONING: PLANNING,
    S.WAITING_READY: PLANNING,
    S.RUNNING: (*PLANNING, *READINESS),
    S.COMPLETED: AFTER_OUTCOME,
    S.FAULTED: AFTER_OUTCOME,
    S.OPERATOR_STOPPED: AFTER_OUTCOME,
    S.TEARING_DOWN: (*AFTER_OUTCOME, Continue),
    S.DONE: (*AFTER_OUTCOME, Continue, NodeLost, StageStopped, EndpointsStopped),
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


def test_broken_host_fires_every_old_timer_and_repeats_the_barrier() -> None:
    machine = SCRIPT.play("running")
    for event in (fired(1), fired(0), READY_A, EndpointsReady(), PlanBuilt(PLAN), PoolReady(NODES)):
        assert machine.step(event, 0.0) == ()
    assert step_or_refuse(machine, Continue()) is None
    assert machine.late_timers == 2


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (TokenReceived(Sequence(1), END_OF_TEXT), "eog"),
        (TokenReceived(Sequence(1), END_OF_TEXT, enough=True), "eog"),
        (TokenReceived(Sequence(1), 42, enough=True), "stop"),
        (TokenReceived(Sequence(1), 42), None),
    ],
)
def test_why_there_is_no_further_token(last: TokenReceived, reason: str | None) -> None:
    machine = SCRIPT.play("running")
    assert isinstance(machine, Run)
    machine.step(token(0), 0.0)
    machine.step(last, 0.0)
    assert machine.finish_reason == reason
    assert (machine.state is RunState.COMPLETED) is (reason is not None)
    if reason is None:
        machine.step(token(2), 0.0)
        assert machine.finish_reason == "length"


@pytest.mark.parametrize("when", ["while planning", "when planned", "before the barrier", "while running"])
def test_words_of_another_run_are_counted(when: str) -> None:
    machine = SCRIPT.play(f"words of an earlier run {when}")
    assert isinstance(machine, Run)
    assert machine.foreign_messages == (4 if when != "while running" else 2)  # two are late there, of any run


OUTCOMES = {
    EventName.RUN_COMPLETED: RunOutcome.COMPLETED,
    EventName.RUN_FAULTED: RunOutcome.FAULTED,
    EventName.RUN_STOPPED: RunOutcome.OPERATOR_STOPPED,
}
EVENTS = event_strategies(
    Run,
    {
        RunId: st.sampled_from((RUN_ID, RUN_ID, RUN_ID, RunId(4))),
        NodeId: st.sampled_from((A, B)),
        StageIndex: st.sampled_from((FIRST, LAST)),
        PlanBuilt: st.just(PlanBuilt(PLAN)),
        TokenReceived: st.builds(token, st.integers(0, 2), st.sampled_from((42, END_OF_TEXT))),
    },
)


class Judge:
    """What a run may do, whatever happens: one outcome, no work after it, one FinishRun that agrees."""

    def __init__(self) -> None:
        self.outcome: RunOutcome | None = None
        self.finished: list[FinishRun] = []
        self.injected: list[int] = []
        self.consumed = 0

    def __call__(self, event: object, actions: tuple[Action, ...]) -> None:
        for action in actions:
            assert not self.finished, f"{action} after FinishRun"
            match action:
                case Emit(name) if name in OUTCOMES:
                    assert self.outcome is None, "a second outcome"
                    self.outcome = OUTCOMES[name]
                case DeliverToken(sequence):
                    assert self.outcome is None
                    assert sequence == self.consumed
                    self.consumed += 1
                case Send(_, InjectTokens(sequence)):
                    assert self.outcome is None
                    assert sequence == self.consumed, "injected before the last token was consumed"
                    self.injected.append(sequence)
                case Send(_, ProvisionStage() | PlanCommitted()) | BuildPlan() | OpenEndpoints():
                    assert self.outcome is None
                case FinishRun(outcome):
                    assert outcome is self.outcome
                    self.finished.append(action)


def end(machine: Run, judge: Judge) -> None:
    """Delivers what a run tells itself and lets its timer fire, until nothing is left to happen."""
    for _ in range(4):
        for name, generation in list(machine._timers.items()):
            judge(None, machine.step(TimerFired(name, generation), 0.0))
        while machine.accepts(Continue) and machine.state is not S.DONE:
            before = machine.state
            judge(None, machine.step(Continue(), 0.0))
            if machine.state is before:
                break


@settings(max_examples=150)
@given(st.data())
def test_exactly_one_outcome_whatever_happens_in_whatever_order(data: st.DataObject) -> None:
    judge = Judge()
    machine = SCRIPT.somewhere(data, judge)
    assert isinstance(machine, Run)
    walk(data, machine, EVENTS, check=judge)
    if machine.state is S.PLANNING:
        judge(None, machine.step(OperatorStop(), 0.0))
    end(machine, judge)
    assert machine.state is S.DONE
    assert len(judge.finished) == 1
    assert judge.finished[0].outcome is machine.outcome
    assert (machine.outcome is RunOutcome.FAULTED) == (machine.fault is not None)
