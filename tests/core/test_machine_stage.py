"""StageController (spec sections 14 to 16): prepare, one step at a time, report, give everything back."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.events import EventName
from swactor_core.faults import (
    Component,
    Fault,
    FaultReason,
    ReleaseFailure,
    RoleFailure,
    StepFailure,
    WorkerFatalReason,
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
from swactor_core.machines.stage import StageController, StageState
from swactor_core.machines.stage_effects import ModelFetch, ModelOpened, ModelRefused, OpenModel
from swactor_core.messages import (
    Address,
    ConfigureRole,
    DeviceObjectReleased,
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
    ReleaseDeviceObject,
    ReleaseFailed,
    ResetRole,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    RoleReset,
    StageFault,
    StageModelFacts,
    StageProgress,
    StageReady,
    StageRuntimeFacts,
    StageStats,
    StageStopped,
    StepCompleted,
    StepFailed,
    StepRuntime,
    StopEdge,
    StopRun,
    TimerFired,
    WorkerCrashed,
)
from swactor_core.plan import EdgeKind, GgufSource, SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingSpec
from swactor_testing.scripts import Script, Steps, event_strategies, walk

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
        Send(TX, ProduceObject(OUT)),
        Send(WORKER, step),
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

SCENARIOS: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], S.UNPROVISIONED),
    "preparing": (PREPARING, S.PREPARING),
    "ready": (READY, S.READY),
    "prefill": (PREFILL, S.EXECUTING),
    "faulted": (FAULTED, S.FAULTED),
    "stopping": (STOPPING, S.STOPPING),
    # --- preparing ---
    "what people hear while it prepares": (
        [
            *PREPARING,
            (ModelFetch(1, 9), progress("download", 1, 9)),
            *OPENED[-1:],
            (RoleProgress(ROLE, "load", 2, 9), progress("load", 2, 9)),
        ],
        S.PREPARING,
    ),
    "ready in another order: weights before edges": (
        [
            *OPENED,
            (RoleConfigured(ROLE), (LOADED_WEIGHTS,)),
            (EdgeReady(OUT, OUT_RING), ()),
            (EdgeReady(IN, IN_RING), IS_READY),
        ],
        S.READY,
    ),
    "the model cannot be had": (
        [
            *PREPARING,
            (ModelRefused("404"), faulted(FaultReason.WEIGHT_LOAD_FAILED, "404", cause="ModelRefused")),
        ],
        S.FAULTED,
    ),
    "the weights cannot be loaded": (
        [
            *OPENED,
            (
                RoleFailed(ROLE, RoleFailure.WEIGHTS_UNREADABLE, "why"),
                step_fault(FaultReason.WEIGHT_LOAD_FAILED, RoleFailure.WEIGHTS_UNREADABLE),
            ),
        ],
        S.FAULTED,
    ),
    "the weights do not fit the device": (
        [
            *OPENED,
            (
                RoleFailed(ROLE, RoleFailure.DEVICE_OUT_OF_MEMORY, "why"),
                step_fault(FaultReason.DEVICE_OUT_OF_MEMORY, RoleFailure.DEVICE_OUT_OF_MEMORY),
            ),
        ],
        S.FAULTED,
    ),
    "an object before it is ready": (
        [
            *PREPARING,
            (
                loaded(0),
                faulted(
                    FaultReason.SEQUENCE_VIOLATION,
                    "object of sequence 0 while Preparing, next expected is 0",
                ),
            ),
        ],
        S.FAULTED,
    ),
    "an edge fails while it prepares": ([*PREPARING, (BROKEN_EDGE, BROKEN)], S.FAULTED),
    "an edge ends while it prepares": ([*PREPARING, (EdgeStopped(IN), STOPPED_EARLY)], S.FAULTED),
    "the worker dies while it prepares": ([*PREPARING, (CRASH, CRASHED)], S.FAULTED),
    # --- words of an earlier run's role ---
    "late words of an earlier role while it prepares": (
        [
            *OPENED,
            (RoleProgress(OTHER_ROLE, "load", 1, 2), ()),
            (RoleConfigured(OTHER_ROLE), ()),
            (RoleFailed(OTHER_ROLE, RoleFailure.BACKEND_ERROR), ()),
            (completed(9, role=OTHER_ROLE), ()),
            (StepFailed(OTHER_ROLE, StepId(9), StepFailure.TINYGRAD_ERROR), ()),
        ],
        S.PREPARING,
    ),
    "late words of an earlier role when it is ready": (
        [
            *READY,
            (RoleFailed(OTHER_ROLE, RoleFailure.BACKEND_ERROR), ()),
            (completed(9, role=OTHER_ROLE), ()),
            (StepFailed(OTHER_ROLE, StepId(9), StepFailure.TINYGRAD_ERROR), ()),
        ],
        S.READY,
    ),
    "late words of an earlier role while it executes": (
        [
            *PREFILL,
            (RoleFailed(OTHER_ROLE, RoleFailure.BACKEND_ERROR), ()),
            (completed(1, role=OTHER_ROLE), ()),
            (StepFailed(OTHER_ROLE, StepId(1), StepFailure.TINYGRAD_ERROR), ()),
        ],
        S.EXECUTING,
    ),
    "an earlier role's reset is not this role's": ([*STOPPING, (RoleReset(OTHER_ROLE), ())], S.STOPPING),
    # --- executing ---
    "prefill and decode, with the position of each": (
        [
            *DECODED,
            (DeviceObjectReleased(handle(0)), ()),
            (loaded(1), execute(1, rows=1, position=3, extent=8)),
            (produced(1), (output(1),)),
            (completed(2, 0.25), done(1)),
            (STOP, stopping(RESET)),
            (EdgeStopped(IN), ()),
            (EdgeStopped(OUT), ()),
            (RoleReset(ROLE), (UNTIMED, *stopped(StageStats(2, 0.5, 0.25)))),
        ],
        S.STOPPED,
    ),
    "how the role computes goes into the figures": (
        [
            *READY[:-1],
            (
                RoleConfigured(ROLE, {"numerics": "exact"}),
                (Emit(EventName.WEIGHTS_LOADED, {"numerics": "exact"}), *IS_READY),
            ),
            (STOP, stopping(RESET)),
            (EdgeStopped(IN), ()),
            (EdgeStopped(OUT), ()),
            (RoleReset(ROLE), (UNTIMED, *stopped(StageStats(facts={"numerics": "exact"})))),
        ],
        S.STOPPED,
    ),
    "decoded": (DECODED, S.READY),
    "the completion comes before the gate's word of the output": (
        [*PREFILL, (completed(1), ()), (produced(0), (output(0), *done(0)))],
        S.READY,
    ),
    "the completion is there, the output is not": ([*PREFILL, (completed(1), ())], S.EXECUTING),
    "the output is there, the completion is not": ([*PREFILL, (produced(0), (output(0),))], S.EXECUTING),
    "a wrong sequence": (
        [
            *READY,
            (
                loaded(1),
                faulted(
                    FaultReason.SEQUENCE_VIOLATION, "object of sequence 1 while Ready, next expected is 0"
                ),
            ),
        ],
        S.FAULTED,
    ),
    "an object during a step": (
        [
            *PREFILL,
            (
                loaded(1),
                faulted(
                    FaultReason.SEQUENCE_VIOLATION,
                    "object of sequence 1 while Executing, next expected is 0",
                ),
            ),
        ],
        S.FAULTED,
    ),
    "a completion of another step": (
        [
            *PREFILL,
            (
                completed(7),
                faulted(
                    FaultReason.STEP_FAILED,
                    "step 7 completed, step 1 was running",
                    component=Component.WORKER,
                ),
            ),
        ],
        S.FAULTED,
    ),
    "the last step's words come after the stop": (
        [
            *PREFILL,
            (STOP, stopping(RESET)),
            (produced(0), (output(0),)),
            (completed(1, 0.5), done(0)[:1]),
            (EdgeStopped(IN), ()),
            (EdgeStopped(OUT), ()),
            (RoleReset(ROLE), (UNTIMED, *stopped(StageStats(1, 0.5, 0.0)))),
        ],
        S.STOPPED,
    ),
    "the last step's words come after the stop, in the other order": (
        [
            *PREFILL,
            (STOP, stopping(RESET)),
            (completed(1, 0.5), ()),
            (produced(0), (output(0), *done(0)[:1])),
        ],
        S.STOPPING,
    ),
    "one of the last step's words comes before the stop": (
        [*PREFILL, (produced(0), (output(0),)), (STOP, stopping(RESET)), (completed(1), done(0)[:1])],
        S.STOPPING,
    ),
    "words of no step in flight, after the stop": (
        [
            *PREFILL,
            (STOP, stopping(RESET)),
            (produced(1), ()),
            (completed(7), ()),
            (completed(1, role=OTHER_ROLE), ()),
            (produced(0), (output(0),)),
            (produced(0), ()),
            (completed(1), done(0)[:1]),
            (completed(1), ()),
        ],
        S.STOPPING,
    ),
    "words of no step at all, after the stop": (
        [*READY, (STOP, stopping(RESET)), (produced(0), ()), (completed(0), ())],
        S.STOPPING,
    ),
    "the step fails; its input is given back with the role": (
        [
            *PREFILL,
            (
                StepFailed(ROLE, StepId(1), StepFailure.TINYGRAD_ERROR, "why"),
                step_fault(FaultReason.STEP_FAILED, StepFailure.TINYGRAD_ERROR),
            ),
            (STOP, stopping(Send(WORKER, ReleaseDeviceObject(handle(0))), RESET)),
        ],
        S.STOPPING,
    ),
    "the step does not fit the device": (
        [
            *PREFILL,
            (
                StepFailed(ROLE, StepId(1), StepFailure.DEVICE_OUT_OF_MEMORY, "why"),
                step_fault(FaultReason.DEVICE_OUT_OF_MEMORY, StepFailure.DEVICE_OUT_OF_MEMORY),
            ),
        ],
        S.FAULTED,
    ),
    "a step ends that nobody asked for: before it is ready": (
        [
            *OPENED,
            (
                completed(1),
                faulted(
                    FaultReason.STEP_FAILED,
                    "StepCompleted of step 1, no step was running",
                    component=Component.WORKER,
                ),
            ),
        ],
        S.FAULTED,
    ),
    "a step fails that nobody asked for: before it is ready": (
        [
            *OPENED,
            (
                StepFailed(ROLE, StepId(1), StepFailure.TINYGRAD_ERROR),
                faulted(
                    FaultReason.STEP_FAILED,
                    "StepFailed of step 1, no step was running",
                    component=Component.WORKER,
                ),
            ),
        ],
        S.FAULTED,
    ),
    "a step ends that nobody asked for": (
        [
            *READY,
            (
                completed(1),
                faulted(
                    FaultReason.STEP_FAILED,
                    "StepCompleted of step 1, no step was running",
                    component=Component.WORKER,
                ),
            ),
        ],
        S.FAULTED,
    ),
    "a step fails that nobody asked for": (
        [
            *READY,
            (
                StepFailed(ROLE, StepId(1), StepFailure.TINYGRAD_ERROR),
                faulted(
                    FaultReason.STEP_FAILED,
                    "StepFailed of step 1, no step was running",
                    component=Component.WORKER,
                ),
            ),
        ],
        S.FAULTED,
    ),
    "the role fails after it was ready": (
        [
            *READY,
            (
                RoleFailed(ROLE, RoleFailure.BACKEND_ERROR, "why"),
                step_fault(FaultReason.WEIGHT_LOAD_FAILED, RoleFailure.BACKEND_ERROR),
            ),
        ],
        S.FAULTED,
    ),
    "the role fails during a step": (
        [
            *PREFILL,
            (
                RoleFailed(ROLE, RoleFailure.BACKEND_ERROR, "why"),
                step_fault(FaultReason.WEIGHT_LOAD_FAILED, RoleFailure.BACKEND_ERROR),
            ),
        ],
        S.FAULTED,
    ),
    "an input is not released": (
        [
            *DECODED,
            (
                ReleaseFailed(handle(0), ReleaseFailure.UNKNOWN_HANDLE),
                faulted(FaultReason.STEP_FAILED, "input handle not released", cause="UnknownHandle"),
            ),
        ],
        S.FAULTED,
    ),
    "an input is not released during the next step": (
        [
            *PREFILL,
            (
                ReleaseFailed(handle(0), ReleaseFailure.STALE_GENERATION),
                faulted(FaultReason.STEP_FAILED, "input handle not released", cause="StaleGeneration"),
            ),
        ],
        S.FAULTED,
    ),
    "an edge fails during a step": ([*PREFILL, (BROKEN_EDGE, BROKEN)], S.FAULTED),
    "an edge ends when it is ready": ([*READY, (EdgeStopped(IN), STOPPED_EARLY)], S.FAULTED),
    "an edge ends during a step": ([*PREFILL, (EdgeStopped(IN), STOPPED_EARLY)], S.FAULTED),
    "the worker dies when it is ready": ([*READY, (CRASH, CRASHED)], S.FAULTED),
    "the worker dies during a step: no role to reset, no handle to release": (
        [
            *PREFILL,
            (CRASH, CRASHED),
            (STOP, stopping()),
            (EdgeStopped(OUT), ()),
            (EdgeStopped(IN), (UNTIMED, *stopped())),
        ],
        S.STOPPED,
    ),
    "the worker ends itself when it is ready": (
        [
            *READY,
            (
                WorkerCrashed(WorkerGeneration(1), "why", WorkerFatalReason.UNHANDLED_EXCEPTION),
                step_fault(FaultReason.WORKER_FATAL, WorkerFatalReason.UNHANDLED_EXCEPTION),
            ),
            (STOP, stopping()),
        ],
        S.STOPPING,
    ),
    "there is no worker for the step": (
        [
            *PREFILL,
            (
                StepFailed(ROLE, StepId(1), StepFailure.WORKER_PROCESS_EXITED, "why"),
                step_fault(FaultReason.WORKER_CRASHED, StepFailure.WORKER_PROCESS_EXITED),
            ),
        ],
        S.FAULTED,
    ),
    "the worker dies after the fault": ([*FAULTED, (CRASH, ()), (STOP, stopping())], S.STOPPING),
    # --- stopping ---
    "stopped while the model is being opened: no role was touched": (
        [
            *PREPARING,
            (STOP, stopping()),
            (EdgeStopped(IN), ()),
            (EdgeStopped(OUT), (UNTIMED, *stopped())),
        ],
        S.STOPPED,
    ),
    "stopped during a step, which gives its own input back": (
        [*PREFILL, (STOP, stopping(RESET))],
        S.STOPPING,
    ),
    "the role is reset first": (
        [
            *STOPPING,
            (RoleReset(ROLE), ()),
            (EdgeStopped(IN), ()),
            (EdgeStopped(OUT), (UNTIMED, *stopped())),
        ],
        S.STOPPED,
    ),
    "the whole life without a step": (ENDED, S.STOPPED),
    "the worker dies while it stops, last of all": (
        [*STOPPING, (EdgeStopped(IN), ()), (EdgeStopped(OUT), ()), (CRASH, (UNTIMED, *stopped()))],
        S.STOPPED,
    ),
    "the worker dies while it stops": ([*STOPPING, (CRASH, ())], S.STOPPING),
    "everything had stopped before StopRun came": (
        [
            *PREFILL,
            (EdgeStopped(IN, "edge 6, ring 8: its pump did not stop"), STOPPED_EARLY),
            (EdgeStopped(OUT, "edge 7, ring 9: its ring did not quiesce"), ()),
            (CRASH, ()),
            (STOP, (*stopping(), Send(ME, EdgeStopped(IN, "edge 6, ring 8: its pump did not stop")))),
            (
                EdgeStopped(IN, "edge 6, ring 8: its pump did not stop"),
                (
                    UNTIMED,
                    *stopped(
                        unproven=(
                            "edge 6, ring 8: its pump did not stop",
                            "edge 7, ring 9: its ring did not quiesce",
                        )
                    ),
                ),
            ),
            (EdgeStopped(OUT), (reported("edge 6, ring 8: its pump did not stop"),)),
            (EdgeStopped(OUT), ()),
            (EdgeStopped(IN), (reported(),)),
        ],
        S.STOPPED,
    ),
    "nothing stops in time: each is named": (
        [
            *STOPPING,
            (EdgeStopped(OUT, "edge 7, ring 9: its pump did not stop"), ()),
            (
                TimerFired("teardown", 1),
                (
                    Emit(
                        EventName.TEARDOWN_TIMED_OUT,
                        {
                            "reason": "TeardownTimeout",
                            "component": "StageController",
                            "detail": "edge 6 did not stop within 10 s; "
                            "the worker did not reset its role within 10 s",
                        },
                    ),
                    *stopped(
                        unproven=(
                            "edge 7, ring 9: its pump did not stop",
                            "edge 6 did not stop within 10 s",
                            "the worker did not reset its role within 10 s",
                        )
                    ),
                ),
            ),
            (RoleReset(RoleId(99)), ()),
            (EdgeStopped(IN, "edge 6, ring 8: its pump did not stop"), ()),
            (
                RoleReset(ROLE),
                (reported("edge 7, ring 9: its pump did not stop", "edge 6, ring 8: its pump did not stop"),),
            ),
            (EdgeStopped(OUT), (reported("edge 6, ring 8: its pump did not stop"),)),
            (CRASH, ()),
        ],
        S.STOPPED,
    ),
    "a worker that does not reset its role in time is reaped": (
        [
            *STOPPING,
            (EdgeStopped(OUT), ()),
            (EdgeStopped(IN), ()),
            (
                TimerFired("teardown", 1),
                (
                    Emit(
                        EventName.TEARDOWN_TIMED_OUT,
                        {
                            "reason": "TeardownTimeout",
                            "component": "StageController",
                            "detail": "the worker did not reset its role within 10 s",
                        },
                    ),
                    *stopped(unproven=("the worker did not reset its role within 10 s",)),
                ),
            ),
            (CRASH, (reported(),)),
        ],
        S.STOPPED,
    ),
}


def make() -> StageController:
    return StageController(teardown_bound=10.0)


# What each state expects and ignores, stated here and not read from the table.
ROLE_IS_THERE = (RoleProgress, RoleConfigured, RoleReset, DeviceObjectReleased)
# After a fault, and while it stops: all that edges, the worker and the model's adapter had still to say.
ANY_WORD = (
    EdgeReady,
    EdgeFailed,
    ObjectLoaded,
    ObjectProduced,
    ModelFetch,
    ModelOpened,
    ModelRefused,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    StepCompleted,
    StepFailed,
    DeviceObjectReleased,
    ReleaseFailed,
)
LATE: dict[StrEnum, tuple[type[Any], ...]] = {
    S.PREPARING: (RoleReset, DeviceObjectReleased, ReleaseFailed),  # of the run before this one
    S.READY: ROLE_IS_THERE,
    S.EXECUTING: ROLE_IS_THERE,
    S.FAULTED: (*ANY_WORD, RoleReset),
    S.STOPPING: (*(word for word in ANY_WORD if word not in (ObjectProduced, StepCompleted)), StopRun),
    S.STOPPED: (*ANY_WORD, StopRun),
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


def test_the_last_stage_answers_a_prefill_of_many_rows_with_one_token() -> None:
    machine = make()
    machine.step(provision(EdgeKind.TOKEN_OUT), 0.0)
    for event, _ in READY[1:]:
        machine.step(event, 0.0)
    *_, execute_step = machine.step(loaded(0, rows=3), 0.0)
    assert isinstance(execute_step, Send)
    assert isinstance(execute_step.message, ExecuteStep)
    assert execute_step.message.outputs[0].extent == 4


def test_broken_host_fires_the_teardown_timer_late_and_twice() -> None:
    machine = SCRIPT.play("the whole life without a step")
    for _ in range(2):
        assert machine.step(TimerFired("teardown", 1), 0.0) == ()
    assert machine.late_timers == 2


def test_broken_host_repeats_every_event_of_a_life_and_nothing_is_reported_twice() -> None:
    machine = make()
    reports: list[type] = []
    for event, _ in ENDED:
        for _ in range(2):
            actions = machine.step(event, 0.0) if machine.accepts(type(event)) else ()
            reports += [type(a.message) for a in actions if isinstance(a, Send) and a.to == RUN]
    assert reports == [StageReady, StageStopped]


EVENTS = event_strategies(
    StageController,
    {
        ProvisionStage: st.sampled_from((PROVISION, provision(EdgeKind.TOKEN_OUT))),
        EdgeId: st.sampled_from((IN, OUT)),
        RoleId: st.sampled_from((ROLE, ROLE, ROLE, OTHER_ROLE)),
        ObjectLoaded: st.builds(loaded, st.integers(0, 2), st.integers(1, 3)),
    },
)


@settings(max_examples=100)
@given(st.data())
def test_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject) -> None:
    walk(data, SCRIPT.somewhere(data), EVENTS)


@settings(max_examples=100)
@given(st.data())
def test_steps_are_one_at_a_time_in_sequence_and_only_between_ready_and_the_end(data: st.DataObject) -> None:
    sent: list[object] = []

    def check(event: object, actions: tuple[Action, ...]) -> None:
        sent.extend(a.message for a in actions if isinstance(a, Send) and a.to in (RUN, WORKER))

    machine = SCRIPT.somewhere(data, check)
    walk(data, machine, EVENTS, steps=25, check=check)
    steps = [m for m in sent if isinstance(m, ExecuteStep)]
    assert [s.inputs[0].sequence for s in steps] == list(range(len(steps)))
    assert [s.step_id for s in steps] == list(range(1, len(steps) + 1))
    kinds = [type(m) for m in sent]
    assert kinds.count(StageReady) <= 1
    assert kinds.count(StageFault) <= 1
    assert (StageStopped in kinds) == (machine.state is S.STOPPED)
    left = [len(message.unproven) for message in sent if isinstance(message, StageStopped)]
    assert left == sorted(set(left), reverse=True), "it is said again only when a proof has come"
    if steps:
        assert kinds.index(StageReady) < kinds.index(ExecuteStep)
    for end in (StageFault, StageStopped, ResetRole):
        if end in kinds:
            assert ExecuteStep not in kinds[kinds.index(end) :]
