"""The run (spec sections 12, 13, 36): barrier, tokens in order, one outcome in any order of events."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.agreement import agreement, shared_of
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Action, CancelTimer, Emit, Send, SetTimer
from swactor_core.ids import (
    INPUT_PORT,
    OUTPUT_PORT,
    EdgeId,
    NodeId,
    RingId,
    RoleId,
    RunId,
    Sequence,
    StageIndex,
)
from swactor_core.machines.pool import PlanCommitted, PoolAborted, PoolReady
from swactor_core.machines.run import Run, RunBounds
from swactor_core.machines.run_effects import (
    BuildPlan,
    Continue,
    DeliverToken,
    FinishRun,
    OpenEndpoints,
    PlanBuilt,
    PlanFailed,
    ReportProgress,
    RunMoved,
    RunOutcome,
    RunState,
)
from swactor_core.messages import (
    Address,
    EndpointsFailed,
    EndpointsReady,
    EndpointsStopped,
    InboundEdgeProvision,
    InjectTokens,
    NodeAvailable,
    NodeFaulted,
    NodeLost,
    OperatorStop,
    OutboundEdgeProvision,
    ProvisionRx,
    ProvisionStage,
    ProvisionTx,
    StageFault,
    StageModelFacts,
    StageProgress,
    StageReady,
    StageRuntimeFacts,
    StageStats,
    StageStopped,
    StopEndpoints,
    StopRun,
    TimerFired,
    TokenReceived,
)
from swactor_core.plan import (
    EdgeEndpoint,
    EdgeKind,
    EdgePlan,
    GgufModelPlan,
    GgufSource,
    RunPlan,
    RuntimePlan,
    SamplingPolicy,
    StagePlan,
    TokenOutputPolicy,
)
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingSpec
from swactor_testing.scripts import Script, Steps, event_strategies, step_or_refuse, walk

S = RunState
RUN_ID, ORCHESTRATOR, A, B = RunId(5), NodeId(70), NodeId(71), NodeId(72)
ME, POOL, ENDPOINT = Address(Component.RUN), Address(Component.POOL), Address(Component.TOKEN_ENDPOINT)
FIRST, LAST = StageIndex(0), StageIndex(1)
END_OF_TEXT = 2
TOKENS = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
ACTIVATION = ObjectSpec(ObjectKind.ACTIVATION, 1024, DTypeFamily.FLOAT, 4, 2)
SOURCE = GgufSource("model.gguf", "digest")
BOUNDS = RunBounds(readiness=900.0, execution=300.0, teardown=15.0)
TEACHES = SamplingPolicy(temperature=0.7, seed=3)


def edge(number: int, kind: EdgeKind, producer: EdgeEndpoint, consumer: EdgeEndpoint) -> EdgePlan:
    spec = ACTIVATION if kind is EdgeKind.ACTIVATION else TOKENS
    return EdgePlan(RUN_ID, EdgeId(number), kind, producer, consumer, spec, 4096)


PLAN = RunPlan(
    run_id=RUN_ID,
    model=GgufModelPlan("tiny", SOURCE, 6, 2, 100, DTypeFamily.FLOAT, 4, 128, (END_OF_TEXT,)),
    runtime=RuntimePlan((10, 11, 12), TEACHES, TokenOutputPolicy.TOKEN_IDS),
    stages=(
        StagePlan(RUN_ID, FIRST, 2, A, SOURCE, 0, 3, EdgeId(1), EdgeId(2)),
        StagePlan(RUN_ID, LAST, 2, B, SOURCE, 3, 6, EdgeId(2), EdgeId(3)),
    ),
    edges=(
        edge(1, EdgeKind.TOKEN_IN, EdgeEndpoint(ORCHESTRATOR), EdgeEndpoint(A, FIRST)),
        edge(2, EdgeKind.ACTIVATION, EdgeEndpoint(A, FIRST), EdgeEndpoint(B, LAST)),
        edge(3, EdgeKind.TOKEN_OUT, EdgeEndpoint(B, LAST), EdgeEndpoint(ORCHESTRATOR)),
    ),
    max_tokens=3,
)


def provision(stage: StagePlan, inbound: EdgePlan, outbound: EdgePlan) -> Send:
    message = ProvisionStage(
        run_id=RUN_ID,
        stage_index=stage.stage_index,
        stage_count=2,
        gguf_source=SOURCE,
        layer_start=stage.layer_start,
        layer_end_exclusive=stage.layer_end_exclusive,
        inbound=InboundEdgeProvision(
            inbound.edge_id,
            inbound.kind,
            inbound.producer.node_id,
            inbound.object_spec,
            RingSpec(4096, RingDirection.INGRESS),
        ),
        outbound=OutboundEdgeProvision(
            outbound.edge_id,
            outbound.kind,
            outbound.consumer.node_id,
            outbound.object_spec,
            RingSpec(4096, RingDirection.EGRESS),
        ),
        model=StageModelFacts("tiny", 6, 2, DTypeFamily.FLOAT, 4, 128),
        runtime=StageRuntimeFacts(
            RoleId(5),
            INPUT_PORT,
            OUTPUT_PORT,
            TEACHES if stage.stage_index == LAST else None,
            TokenOutputPolicy.TOKEN_IDS,
            32,
        ),
        layer_bounds=(0, 3, 6),
    )
    agreed = agreement(SOURCE.digest, shared_of(message))
    return Send(Address(Component.NODE, stage.node_id), replace(message, agreement=agreed))


def available(node: NodeId) -> NodeAvailable:
    return NodeAvailable(node, 1, f"node-{node}", None)


def moved(state: RunState) -> RunMoved:
    return RunMoved(state)


def bound(generation: int, at: float) -> SetTimer:
    return SetTimer("bound", generation, at)


def fired(generation: int) -> TimerFired:
    return TimerFired("bound", generation)


def inject(sequence: int, *tokens: int) -> Send:
    return Send(ENDPOINT, InjectTokens(Sequence(sequence), tokens))


def token(sequence: int, token_id: int = 42) -> TokenReceived:
    return TokenReceived(Sequence(sequence), token_id)


def delivered(sequence: int, token_id: int = 42) -> tuple[Action, ...]:
    fields = {"sequence": sequence, "token_id": token_id}
    return Emit(EventName.TOKEN_RECEIVED, fields), DeliverToken(Sequence(sequence), token_id)


def stopped(stage: StageIndex, run: RunId = RUN_ID, unproven: tuple[str, ...] = ()) -> StageStopped:
    return StageStopped(run, stage, StageStats(3, 0.5, 0.25), unproven)


def stop_run(stage: StageIndex, node: NodeId) -> tuple[Action, ...]:
    return (
        Send(Address(Component.NODE, node), StopRun(RUN_ID)),
        Emit(EventName.STOP_RUN_SENT, {"stage_index": stage}),
    )


UNTIMED, AGAIN = CancelTimer("bound"), Send(ME, Continue())
STOP_ALL = (*stop_run(FIRST, A), *stop_run(LAST, B), Send(ENDPOINT, StopEndpoints()))


def faulted(fault: Fault, *, timed: bool = True) -> tuple[Action, ...]:
    fields = {
        "reason": str(fault.reason),
        "component": str(fault.component),
        "cause": fault.cause,
        "detail": fault.detail,
        "stage_index": fault.stage_index,
    }
    known = {"edge_id": fault.edge_id, "ring_id": fault.ring_id}
    fields |= {name: value for name, value in known.items() if value is not None}
    if fault.node_id is not None:
        fields["fault_node_id"] = {A: "0000000000000047", B: "0000000000000048"}[fault.node_id]
    first = (UNTIMED,) if timed else ()
    return (*first, Emit(EventName.RUN_FAULTED, fields), moved(S.FAULTED), AGAIN)


def finished(
    outcome: RunOutcome,
    fault: Fault | None = None,
    *,
    timed: bool = True,
    stats: tuple[StageIndex, ...] = (FIRST, LAST),
    unproven: tuple[str, ...] = (),
    overdue: Fault | None = None,
) -> tuple[Action, ...]:
    late = {} if overdue is None else overdue.fields()
    return (
        *((UNTIMED,) if timed else ()),
        Emit(EventName.RUN_TORN_DOWN, {"outcome": str(outcome), "unproven": list(unproven), **late}),
        FinishRun(outcome, fault, tuple((i, StageStats(3, 0.5, 0.25)) for i in stats), unproven),
    )


def operator(*, timed: bool = True, tokens: int = 0) -> tuple[Action, ...]:
    first = (UNTIMED,) if timed else ()
    stopped_event = Emit(EventName.RUN_STOPPED, {"tokens": tokens})
    return (*first, stopped_event, moved(S.OPERATOR_STOPPED), AGAIN)


def tearing(generation: int) -> tuple[Action, ...]:
    return (*STOP_ALL, bound(generation, 15.0), moved(S.TEARING_DOWN))


def tearing_but(stage: StageIndex) -> tuple[Action, ...]:
    """As `tearing`, with nobody told at this stage."""
    other = stop_run(LAST, B) if stage is FIRST else stop_run(FIRST, A)
    return (*other, Send(ENDPOINT, StopEndpoints()), bound(3, 15.0), moved(S.TEARING_DOWN))


NODES = (available(A), available(B))
POOL_READY: Steps = [(PoolReady(NODES), (BuildPlan(NODES),))]
PLANNED: Steps = [
    *POOL_READY,
    (
        PlanBuilt(PLAN),
        (
            Emit(
                EventName.RUN_PLANNED,
                {
                    "stages": [
                        {"stage_index": 0, "node_id": f"{A:016x}", "layers": [0, 3]},
                        {"stage_index": 1, "node_id": f"{B:016x}", "layers": [3, 6]},
                    ],
                    "edges": [1, 2, 3],
                },
            ),
            Send(POOL, PlanCommitted()),
            moved(S.PROVISIONING),
            AGAIN,
        ),
    ),
]
PROVISIONED: Steps = [
    *PLANNED,
    (
        Continue(),
        (
            provision(PLAN.stages[0], PLAN.edges[0], PLAN.edges[1]),
            provision(PLAN.stages[1], PLAN.edges[1], PLAN.edges[2]),
            OpenEndpoints(
                ProvisionTx(EdgeId(1), OUTPUT_PORT, A, TOKENS, RingSpec(4096, RingDirection.EGRESS)),
                ProvisionRx(EdgeId(3), INPUT_PORT, B, TOKENS, RingSpec(4096, RingDirection.INGRESS)),
            ),
            bound(1, 900.0),
            moved(S.WAITING_READY),
        ),
    ),
]


def stage_ready(stage: StageIndex) -> tuple[object, Action]:
    done = StageProgress(RUN_ID, stage, "ready", 1, 1)
    return StageReady(RUN_ID, stage), ReportProgress(done)


BARRIER = (
    Emit(EventName.READINESS_BARRIER_PASSED, {}),
    Emit(EventName.PROMPT_INJECTED, {"sequence": 0, "tokens": 3}),
    moved(S.RUNNING),
    inject(0, 10, 11, 12),
    bound(2, 300.0),
)
READY_A, SHOW_A = stage_ready(FIRST)
READY_B, SHOW_B = stage_ready(LAST)
RUNNING: Steps = [
    *PROVISIONED,
    (READY_B, (SHOW_B,)),
    (EndpointsReady(), ()),
    (READY_A, (SHOW_A, *BARRIER)),
]
COMPLETED: Steps = [
    *RUNNING,
    (token(0), (*delivered(0), inject(1, 42), bound(3, 300.0))),
    (
        token(1, END_OF_TEXT),
        (
            *delivered(1, END_OF_TEXT),
            UNTIMED,
            Emit(EventName.RUN_COMPLETED, {"tokens": 2}),
            moved(S.COMPLETED),
            AGAIN,
        ),
    ),
]
STAGE_FAULT = Fault(FaultReason.STEP_FAILED, Component.WORKER, "nan", stage_index=LAST)
NODE_FAULT = Fault(FaultReason.WORKER_FATAL, Component.GPU_WORKER_CTL, "no device", node_id=B)
EDGE_FAULT = Fault(FaultReason.STREAM_FAULT, Component.DRIVER, "reset", edge_id=EdgeId(1), ring_id=RingId(9))
STAGE_FAULTED = faulted(replace(STAGE_FAULT, node_id=B))
LOST = NodeLost(B, True, "node-72 is Dead in membership")
UNREACHABLE = NodeLost(B, False, "the link broke")


def lost_fault(stage: StageIndex | None) -> Fault:
    return Fault(FaultReason.MEMBERSHIP_LOST, Component.MEMBERSHIP, LOST.detail, node_id=B, stage_index=stage)


# What is told, the fault that it is, and the stage where a plan says what that node does.
EVIDENCE: dict[str, tuple[object, Fault, StageIndex | None]] = {
    "a node faults": (NodeFaulted(B, NODE_FAULT), NODE_FAULT, LAST),
    "the endpoints fail": (EndpointsFailed(EDGE_FAULT), EDGE_FAULT, None),
    "the pool aborts": (PoolAborted(NODE_FAULT), NODE_FAULT, LAST),
    "a node is lost": (LOST, lost_fault(None), LAST),
}
ACTIVE = {
    "planning": (POOL_READY, False),
    "planned": (PLANNED, False),
    "provisioned": (PROVISIONED, True),
    "running": (RUNNING, True),
}
GIVEN_UP = Fault(
    FaultReason.NODE_UNAVAILABLE,
    Component.RUN,
    "stage 0 stopped before the run did",
    stage_index=FIRST,
    node_id=A,
)
FAULTED: Steps = [*RUNNING, (StageFault(RUN_ID, LAST, STAGE_FAULT), STAGE_FAULTED)]
TEARING: Steps = [*COMPLETED, (Continue(), tearing(4))]
OPERATED: Steps = [*RUNNING, (OperatorStop(), operator())]
FOREIGN: Steps = [
    (StageReady(RunId(4), FIRST), ()),
    (StageFault(RunId(4), FIRST, STAGE_FAULT), ()),
    (StageProgress(RunId(4), FIRST, "load", 1, 2), ()),
    (stopped(FIRST, RunId(4)), ()),
]

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
                StageProgress(RUN_ID, FIRST, "load", 1, 2),
                (ReportProgress(StageProgress(RUN_ID, FIRST, "load", 1, 2)),),
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
            [*steps, (event, faulted(replace(fault, stage_index=stage if timed else None), timed=timed))],
            S.FAULTED,
        )
        for what, (event, fault, stage) in EVIDENCE.items()
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
