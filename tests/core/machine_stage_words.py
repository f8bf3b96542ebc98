"""What a stage controller hears and answers: the words of its scenarios, and its life step by step."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from swactor_core.events import EventName
from swactor_core.faults import (
    Component,
    Fault,
    FaultReason,
)
from swactor_core.fsm import Action, CancelTimer, Emit, Send, SetTimer
from swactor_core.ids import (
    INPUT_PORT,
    OUTPUT_PORT,
    DeviceObjectHandle,
    EdgeId,
    NodeId,
    ObjectId,
    RingId,
    RoleId,
    RunId,
    Sequence,
    StageIndex,
    StepId,
    WorkerGeneration,
)
from swactor_core.machines.gates import ObjectConsumed, ProduceObject
from swactor_core.machines.stage import StageState
from swactor_core.machines.stage_effects import ModelOpened, OpenModel
from swactor_core.messages import (
    Address,
    ConfigureRole,
    EdgeFailed,
    EdgeReady,
    EdgeStopped,
    ExecuteStep,
    InboundEdgeProvision,
    InputBinding,
    ObjectLoaded,
    ObjectProduced,
    OutboundEdgeProvision,
    OutputBinding,
    ProvisionRx,
    ProvisionStage,
    ProvisionTx,
    ResetRole,
    RoleConfigured,
    RoleReset,
    StageFault,
    StageModelFacts,
    StageProgress,
    StageReady,
    StageRuntimeFacts,
    StageStats,
    StageStopped,
    StepCompleted,
    StepRuntime,
    StopEdge,
    StopRun,
    WorkerCrashed,
)
from swactor_core.plan import EdgeKind, GgufSource, SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingSpec
from swactor_testing.scripts import Steps

S = StageState
RUN_ID, STAGE, ROLE, OTHER_ROLE = RunId(5), StageIndex(1), RoleId(5), RoleId(4)
IN, OUT, IN_RING, OUT_RING = EdgeId(6), EdgeId(7), RingId(8), RingId(9)
RUN, ESTABLISHER = Address(Component.RUN), Address(Component.EDGE_ESTABLISHER)
WORKER, ME = Address(Component.GPU_WORKER_CTL), Address(Component.STAGE_CONTROLLER)
RX, TX = Address(Component.RX_EDGE, IN), Address(Component.TX_EDGE, OUT)
ACTIVATION = ObjectSpec(ObjectKind.ACTIVATION, 1024, DTypeFamily.FLOAT, 4, 2)
TOKENS = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
IN_RINGS, OUT_RINGS = RingSpec(4096, RingDirection.INGRESS), RingSpec(4096, RingDirection.EGRESS)


def provision(out: EdgeKind = EdgeKind.ACTIVATION) -> ProvisionStage:
    spec = ACTIVATION if out is EdgeKind.ACTIVATION else TOKENS
    return ProvisionStage(
        run_id=RUN_ID,
        stage_index=STAGE,
        stage_count=3,
        gguf_source=GgufSource("model.gguf", "digest"),
        layer_start=2,
        layer_end_exclusive=4,
        inbound=InboundEdgeProvision(IN, EdgeKind.ACTIVATION, NodeId(70), ACTIVATION, IN_RINGS),
        outbound=OutboundEdgeProvision(OUT, out, NodeId(71), spec, OUT_RINGS),
        model=StageModelFacts("tiny", 6, 2, DTypeFamily.FLOAT, 4, 128),
        runtime=StageRuntimeFacts(
            ROLE, INPUT_PORT, OUTPUT_PORT, SamplingPolicy(), TokenOutputPolicy.TOKEN_IDS, 32
        ),
    )


PROVISION = provision()


def handle(sequence: int) -> DeviceObjectHandle:
    return DeviceObjectHandle(WorkerGeneration(1), 100 + sequence)


def loaded(sequence: int, rows: int = 1) -> ObjectLoaded:
    identity = (ObjectId(40 + sequence), Sequence(sequence))
    return ObjectLoaded(IN_RING, IN, INPUT_PORT, *identity, 8 * rows, handle(sequence))


def produced(sequence: int) -> ObjectProduced:
    return ObjectProduced(OUT_RING, OUT, OUTPUT_PORT, ObjectId(40 + sequence), Sequence(sequence), 8)


def completed(step: int, seconds: float = 0.0, role: RoleId = ROLE) -> StepCompleted:
    return StepCompleted(role, StepId(step), seconds)


def execute(sequence: int, *, rows: int, position: int, extent: int) -> tuple[Action, ...]:
    """What follows an expected object: the events, the gate's notice, the one ExecuteStep."""
    step = ExecuteStep(
        role_id=ROLE,
        step_id=StepId(sequence + 1),
        inputs=(InputBinding(INPUT_PORT, ObjectId(40 + sequence), Sequence(sequence), handle(sequence)),),
        outputs=(OutputBinding(OUTPUT_PORT, OUT_RING, ObjectId(40 + sequence), Sequence(sequence), extent),),
        runtime=StepRuntime(position),
        release_inputs_after=True,
    )
    identity = {"edge_id": IN, "ring_id": IN_RING, "object_id": 40 + sequence, "sequence": sequence}
    return (
        Emit(EventName.OBJECT_LOADED, identity),
        Emit(EventName.EXECUTE_STEP_STARTED, {"sequence": sequence, "step_id": sequence + 1}),
        Send(WORKER, step),
        Send(TX, ProduceObject(OUT)),
    )


def output(sequence: int) -> Emit:
    fields = {"edge_id": OUT, "ring_id": OUT_RING, "object_id": 40 + sequence, "sequence": sequence}
    return Emit(EventName.OBJECT_PRODUCED, fields)


def done(sequence: int) -> tuple[Action, ...]:
    return (
        Emit(EventName.STEP_COMPLETED, {"sequence": sequence, "step_id": sequence + 1}),
        Send(RX, ObjectConsumed(IN)),
    )


def faulted(
    reason: FaultReason,
    detail: str = "",
    *,
    component: Component = Component.STAGE_CONTROLLER,
    cause: str = "",
    **where: Any,
) -> tuple[Action, ...]:
    fault = Fault(reason, component, detail, cause, stage_index=STAGE, **where)
    fields = {
        "reason": str(reason),
        "component": str(component),
        "cause": cause,
        "detail": detail,
        "stage_index": STAGE,
        **where,
    }
    return Emit(EventName.STAGE_FAULTED, fields), Send(RUN, StageFault(RUN_ID, STAGE, fault))


def stopping(*between: Action, timer: int = 1) -> tuple[Action, ...]:
    return (
        Send(RX, StopEdge(IN)),
        Send(TX, StopEdge(OUT)),
        *between,
        SetTimer("teardown", timer, 10.0),
    )


NO_STEPS = StageStats()


def reported(*unproven: str) -> Send:
    """Said again, for a proof has come after its time."""
    return Send(RUN, StageStopped(RUN_ID, STAGE, NO_STEPS, unproven))


def stopped(stats: StageStats = NO_STEPS, unproven: tuple[str, ...] = ()) -> tuple[Action, ...]:
    return (
        Emit(EventName.STAGE_STOPPED, {"unproven": list(unproven)}),
        Send(RUN, StageStopped(RUN_ID, STAGE, stats, unproven)),
    )


def progress(phase: str, count: int, total: int) -> tuple[Action, ...]:
    return (Send(RUN, StageProgress(RUN_ID, STAGE, phase, count, total)),)


RESET = Send(WORKER, ResetRole(ROLE))
UNTIMED = CancelTimer("teardown")
STOP = StopRun(RUN_ID)
BROKEN_EDGE = EdgeFailed(IN, Fault(FaultReason.STREAM_FAULT, Component.DRIVER, "reset", edge_id=IN))
BROKEN = faulted(FaultReason.STREAM_FAULT, "reset", component=Component.DRIVER, edge_id=IN)
CRASH = WorkerCrashed(WorkerGeneration(1), "exited with 1", cause="ModelContentChanged")
CRASHED = faulted(
    FaultReason.WORKER_CRASHED,
    "exited with 1",
    component=Component.GPU_WORKER_CTL,
    cause="ModelContentChanged",
)
STOPPED_EARLY = faulted(FaultReason.STREAM_FAULT, "edge 6 stopped during the run")


def step_fault(reason: FaultReason, cause: StrEnum) -> tuple[Action, ...]:
    return faulted(reason, "why", component=Component.WORKER, cause=str(cause))


PREPARING: Steps = [
    (
        PROVISION,
        (
            Emit(EventName.STAGE_PROVISION_STARTED, {}),
            Emit(EventName.WEIGHTS_DOWNLOAD_STARTED, {}),
            OpenModel(PROVISION),
            Send(ESTABLISHER, ProvisionRx(IN, INPUT_PORT, NodeId(70), ACTIVATION, IN_RINGS)),
            Send(ESTABLISHER, ProvisionTx(OUT, OUTPUT_PORT, NodeId(71), ACTIVATION, OUT_RINGS)),
        ),
    )
]
OPENED: Steps = [
    *PREPARING,
    (
        ModelOpened({"layers": 2}),
        (Emit(EventName.WEIGHTS_DOWNLOADED, {}), Send(WORKER, ConfigureRole(ROLE, {"layers": 2}))),
    ),
]
IS_READY = (Emit(EventName.STAGE_READY, {}), Send(RUN, StageReady(RUN_ID, STAGE)))
LOADED_WEIGHTS = Emit(EventName.WEIGHTS_LOADED, {})
READY: Steps = [
    *OPENED,
    (EdgeReady(IN, IN_RING), ()),
    (EdgeReady(OUT, OUT_RING), ()),
    (RoleConfigured(ROLE), (LOADED_WEIGHTS, *IS_READY)),
]
PREFILL: Steps = [*READY, (loaded(0, rows=3), execute(0, rows=3, position=0, extent=24))]
DECODED: Steps = [*PREFILL, (produced(0), (output(0),)), (completed(1, 0.5), done(0))]
FAULTED: Steps = [*READY, (BROKEN_EDGE, BROKEN)]
STOPPING: Steps = [*READY, (STOP, stopping(RESET))]
ENDED: Steps = [
    *STOPPING,
    (EdgeStopped(IN), ()),
    (EdgeStopped(OUT), ()),
    (RoleReset(ROLE), (UNTIMED, *stopped())),
]
