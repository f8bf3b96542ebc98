"""What a run hears and answers: its plan, the words of its scenarios, and its life step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    node_hex,
)
from swactor_core.machines.pool import PlanCommitted, PoolAborted, PoolReady
from swactor_core.machines.run import RunBounds
from swactor_core.machines.run_effects import (
    BuildPlan,
    Continue,
    DeliverToken,
    FinishRun,
    OpenEndpoints,
    PlanBuilt,
    ReportProgress,
    RunMoved,
    RunOutcome,
    RunState,
)
from swactor_core.messages import (
    Address,
    EndpointsFailed,
    EndpointsReady,
    InboundEdgeProvision,
    InjectTokens,
    LoadPhase,
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
from swactor_testing.scripts import Steps

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
    done = StageProgress(RUN_ID, stage, LoadPhase.READY, 1, 1)
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


BROKEN = Fault(FaultReason.STREAM_FAULT, Component.DRIVER, "reset", stage_index=FIRST, edge_id=EdgeId(2))
BROKEN_FAR = f"reset; its other end is at {node_hex(B)}"


# What is told, the fault that it is, and what more a plan says of it.
EVIDENCE: dict[str, tuple[object, Fault, dict[str, Any]]] = {
    "a node faults": (NodeFaulted(B, NODE_FAULT), NODE_FAULT, {"stage_index": LAST}),
    "the endpoints fail": (
        EndpointsFailed(EDGE_FAULT),
        EDGE_FAULT,
        {"detail": f"reset; its other end is at {node_hex(A)}"},
    ),
    "the pool aborts": (PoolAborted(NODE_FAULT), NODE_FAULT, {"stage_index": LAST}),
    "a node is lost": (LOST, lost_fault(None), {"stage_index": LAST}),
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
    (StageProgress(RunId(4), FIRST, LoadPhase.WEIGHTS, 1, 2), ()),
    (stopped(FIRST, RunId(4)), ()),
]
