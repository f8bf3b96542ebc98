"""What the worker's machine hears and answers: the words of its scenarios, and its life step by step."""

from __future__ import annotations

import dataclasses

from swactor_core.faults import (
    ObjectFailure,
    RingFaultReason,
    StepFailure,
    UninstallReason,
    WorkerFatalReason,
    WorkerStoppedReason,
)
from swactor_core.fsm import Send
from swactor_core.ids import (
    INPUT_PORT,
    OUTPUT_PORT,
    DeviceObjectHandle,
    EdgeId,
    ObjectId,
    RingId,
    RoleId,
    Sequence,
    StepId,
    WorkerGeneration,
)
from swactor_core.machines.worker import CTL, WorkerState
from swactor_core.machines.worker_effects import (
    ArenaAttached,
    ArenaSelected,
    AttachArena,
    BackendCreated,
    BeginOutput,
    BuildRole,
    CloseBackend,
    CreateBackend,
    Exit,
    ExitCode,
    FreeDeviceObject,
    OpenRing,
    QuiesceRing,
    RingOpened,
    RoleBuilt,
    RunStep,
    SelectArena,
    StepComputed,
    WakeRing,
)
from swactor_core.messages import (
    ConfigureRole,
    DeviceObjectReleased,
    ExecuteStep,
    InitializeWorker,
    InputBinding,
    InstallRing,
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
    OutputBinding,
    RingFault,
    RingInstalled,
    RoleConfigured,
    ShutdownMode,
    ShutdownWorker,
    StepCompleted,
    StepFailed,
    StepRuntime,
    UninstallRing,
    WorkerFatal,
    WorkerReady,
    WorkerStopped,
)
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingLayout
from swactor_core.wire import ObjectHeader

S = WorkerState
GENERATION = WorkerGeneration(4)
ROLE, OTHER_ROLE = RoleId(1), RoleId(2)
IN, OUT = RingId(11), RingId(12)
SPEC = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
HANDLE = DeviceObjectHandle(GENERATION, 1)
GRACEFUL = ShutdownWorker(ShutdownMode.GRACEFUL)
ABORT = ShutdownWorker(ShutdownMode.ABORT_IN_FLIGHT)
INITIALIZE = InitializeWorker(GENERATION, 1 << 20, 1, {"device": "x"})

Steps = list[tuple[object, tuple[object, ...]]]


def say(message: object) -> Send:
    return Send(CTL, message)


def ring(ring_id: RingId, direction: RingDirection) -> InstallRing:
    port = INPUT_PORT if direction is RingDirection.INGRESS else OUTPUT_PORT
    offset = ring_id * 4096
    layout = RingLayout(ring_id, offset, 4096, offset, offset + 64, 256, 64)
    return InstallRing(ring_id, EdgeId(ring_id + 10), port, direction, layout, SPEC)


INGRESS, EGRESS = ring(IN, RingDirection.INGRESS), ring(OUT, RingDirection.EGRESS)
LOADED = ObjectLoaded(IN, EdgeId(21), INPUT_PORT, ObjectId(70), Sequence(0), 16, HANDLE)
PRODUCED = ObjectProduced(OUT, EdgeId(22), OUTPUT_PORT, ObjectId(80), Sequence(0), 4)
STEP = ExecuteStep(
    ROLE,
    StepId(9),
    (InputBinding(INPUT_PORT, ObjectId(70), Sequence(0), HANDLE),),
    (OutputBinding(OUTPUT_PORT, OUT, ObjectId(80), Sequence(0), 4),),
    StepRuntime(0),
    release_inputs_after=True,
)
KEEPING = dataclasses.replace(STEP, release_inputs_after=False)
RUN = RunStep(HANDLE, 16, Sequence(0), 0)
BEGIN = BeginOutput(OUT, ObjectHeader(ObjectId(80), Sequence(0), 4))
COMPLETED = say(StepCompleted(ROLE, StepId(9), 0.5))
RELEASED = (FreeDeviceObject(HANDLE), say(DeviceObjectReleased(HANDLE)))
OBJECT_FAILED = ObjectFailed(IN, EdgeId(21), INPUT_PORT, None, None, ObjectFailure.HEADER_MALFORMED, "magic")
COPY_FAULT = RingFault(OUT, EdgeId(22), OUTPUT_PORT, RingFaultReason.DEVICE_COPY_FAILED, "dma")
QUIESCE_BOTH = tuple(QuiesceRing(UninstallRing(r, UninstallReason.WORKER_SHUTDOWN)) for r in (IN, OUT))


def failed(reason: StepFailure, detail: str, step: int = 9) -> Send:
    return say(StepFailed(ROLE, StepId(step), reason, detail))


def uninstall(ring_id: RingId) -> UninstallRing:
    return UninstallRing(ring_id, UninstallReason.EDGE_STOPPED)


def fatal(reason: WorkerFatalReason, detail: str) -> tuple[object, ...]:
    return say(WorkerFatal(reason, detail)), Exit(ExitCode.FATAL)


def stopped(reason: WorkerStoppedReason) -> tuple[object, ...]:
    return CloseBackend(), say(WorkerStopped(reason)), Exit(ExitCode.STOPPED)


TO_INITIALIZING: Steps = [(INITIALIZE, (SelectArena(),))]
TO_ATTACHING: Steps = [*TO_INITIALIZING, (ArenaSelected(1), (AttachArena(1 << 20),))]
TO_CREATING: Steps = [*TO_ATTACHING, (ArenaAttached(), (CreateBackend(GENERATION, {"device": "x"}),))]
TO_RUNNING: Steps = [
    *TO_CREATING,
    (BackendCreated({"device": "x"}), (say(WorkerReady(77, GENERATION, 1, {"device": "x"})),)),
]
TO_CONFIGURED: Steps = [
    *TO_RUNNING,
    (ConfigureRole(ROLE, {"a": 1}), (BuildRole(ROLE, {"a": 1}),)),
    (RoleBuilt(ROLE), (say(RoleConfigured(ROLE)),)),
]
TO_RINGS: Steps = [
    *TO_CONFIGURED,
    (INGRESS, (OpenRing(INGRESS),)),
    (RingOpened(IN), (say(RingInstalled(IN, EdgeId(21), INPUT_PORT)), WakeRing(IN))),
    (EGRESS, (OpenRing(EGRESS),)),
    (RingOpened(OUT), (say(RingInstalled(OUT, EdgeId(22), OUTPUT_PORT)), WakeRing(OUT))),
]
TO_LOADED: Steps = [*TO_RINGS, (LOADED, (say(LOADED),))]
TO_OUTPUT: Steps = [*TO_LOADED, (STEP, (RUN,)), (StepComputed(4, 0.5), (BEGIN,))]

SHUTTING_DOWN = "the worker is shutting down"
