"""What the worker's controller hears and answers: the words of its scenarios, and its life step by step."""

from __future__ import annotations

from swactor_core.events import EventName
from swactor_core.faults import (
    Component,
    RingFaultReason,
    UninstallReason,
    WorkerFatalReason,
)
from swactor_core.fsm import Action, CancelTimer, Emit, Send, SetTimer
from swactor_core.ids import (
    DeviceObjectHandle,
    EdgeId,
    PortId,
    RingId,
    RoleId,
    StepId,
    WorkerGeneration,
)
from swactor_core.machines.worker_ctl import WorkerCtlState
from swactor_core.machines.worker_process import (
    ContinueRestart,
    FromWorker,
    KillWorker,
    SpawnWorker,
    WorkerPolicy,
    WriteWorker,
)
from swactor_core.messages import (
    Address,
    ConfigureRole,
    ExecuteStep,
    InitializeWorker,
    InstallRing,
    ProcessNotification,
    ProcessNotificationKind,
    ReleaseDeviceObject,
    ResetRole,
    RingFault,
    RingQuiesced,
    ShutdownMode,
    ShutdownWorker,
    StartWorker,
    StepRuntime,
    TimerFired,
    UninstallRing,
    WorkerCrashed,
    WorkerFatal,
    WorkerGone,
    WorkerReady,
    WorkerRunning,
)
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingLayout
from swactor_testing.scripts import Steps

S = WorkerCtlState
POLICY = WorkerPolicy(start_timeout=60.0, stop_timeout=5.0, kill_timeout=3.0, max_restarts=1)
ME, NODE, STAGE = (
    Address(Component.GPU_WORKER_CTL),
    Address(Component.NODE),
    Address(Component.STAGE_CONTROLLER),
)
ESTABLISHER, DRIVER = Address(Component.EDGE_ESTABLISHER), Address(Component.DRIVER)
EDGE, PORT, RING, ROLE = EdgeId(6), PortId(1), RingId(9), RoleId(5)
OBJECT = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
LAYOUT = RingLayout(RING, 0, 4096, 0, 64, 4032, 64)
INSTALL = InstallRing(RING, EDGE, PORT, RingDirection.EGRESS, LAYOUT, OBJECT)
UNINSTALL = UninstallRing(RING, UninstallReason.EDGE_STOPPED)
SHUTDOWN = ShutdownWorker(ShutdownMode.GRACEFUL)
ABORT = ShutdownWorker(ShutdownMode.ABORT_IN_FLIGHT)
CONFIGURE, RESET = ConfigureRole(ROLE, {"manifest": 1}), ResetRole(ROLE)
HANDLE = DeviceObjectHandle(WorkerGeneration(1), 4)
EXECUTE = ExecuteStep(ROLE, StepId(1), (), (), StepRuntime(0), True)
RELEASE = ReleaseDeviceObject(HANDLE)
UNTIMED = CancelTimer("bound")
REAPED_RING = Send(ESTABLISHER, RingQuiesced(RING, process_reaped=True))


def process(
    kind: str, detail: str = "", generation: int = 1, *, pid: int = 70, cause: str = ""
) -> ProcessNotification:
    told = ProcessNotificationKind(kind)
    return ProcessNotification(WorkerGeneration(generation), told, pid, detail, cause)


def said(event: object, generation: int = 1) -> FromWorker:
    return FromWorker(WorkerGeneration(generation), event)


def write(command: object, generation: int = 1) -> WriteWorker:
    return WriteWorker(WorkerGeneration(generation), command)


def timer(generation: int, at: float) -> SetTimer:
    return SetTimer("bound", generation, at)


def fired(generation: int) -> TimerFired:
    return TimerFired("bound", generation)


def spawn(generation: int, timer_generation: int) -> tuple[Action, ...]:
    return SpawnWorker(WorkerGeneration(generation)), timer(timer_generation, 60.0)


def ready(generation: int) -> tuple[object, tuple[Action, ...]]:
    backend = {"device": "CPU"}
    return (
        said(WorkerReady(70, WorkerGeneration(generation), 1, backend), generation),
        (
            UNTIMED,
            Emit(EventName.WORKER_STARTED, {"worker_generation": generation, "pid": 70}),
            Send(NODE, WorkerRunning(WorkerGeneration(generation), backend)),
        ),
    )


def initialize(generation: int) -> WriteWorker:
    command = InitializeWorker(WorkerGeneration(generation), 1 << 20, 1, {"threads": 2})
    return write(command, generation)


def ended(reason: str, generation: int = 1) -> Emit:
    return Emit(EventName.WORKER_ENDED, {"worker_generation": generation, "reason": reason})


def gone(reason: str, fatal: WorkerFatalReason | None = None) -> Send:
    return Send(NODE, WorkerGone(reason, fatal))


def crash(
    detail: str,
    timer_generation: int,
    *,
    generation: int = 1,
    kill: bool = False,
    ring: bool = True,
    fatal: WorkerFatalReason | None = None,
    cause: str = "",
) -> tuple[Action, ...]:
    crashed = WorkerCrashed(WorkerGeneration(generation), detail, fatal, cause)
    reason = RingFaultReason.WORKER_INTERNAL if kill else RingFaultReason.WORKER_PROCESS_EXITED
    fault = RingFault(RING, EDGE, PORT, reason, detail)
    return (
        *((KillWorker(WorkerGeneration(generation)),) if kill else ()),
        timer(timer_generation, 3.0),
        ended(detail, generation),
        Send(NODE, crashed),
        Send(STAGE, crashed),
        *((Send(ESTABLISHER, fault),) if ring else ()),
    )


def kill(timer_generation: int) -> tuple[Action, ...]:
    return KillWorker(WorkerGeneration(1)), timer(timer_generation, 3.0)


SPAWNING: Steps = [(StartWorker(), spawn(1, 1))]
INITIALIZING: Steps = [*SPAWNING, (process("Started"), (initialize(1),))]
IDLE: Steps = [*INITIALIZING, ready(1)]
RUNNING: Steps = [*IDLE, (INSTALL, (write(INSTALL),))]
STOPPING: Steps = [*RUNNING, (SHUTDOWN, (write(SHUTDOWN), timer(2, 5.0)))]
EXITED = process("Exited", "exited with 1", cause="ModelContentChanged")
BROKEN = process("Error", "bad event")
CRASHED: Steps = [*RUNNING, (BROKEN, crash("bad event", 2, kill=True))]
RESTARTING: Steps = [*CRASHED, (EXITED, (UNTIMED, REAPED_RING, Send(ME, ContinueRestart())))]
DEAD: Steps = [
    *RESTARTING,
    (ContinueRestart(), spawn(2, 3)),
    (process("Started", generation=2), (initialize(2),)),
    ready(2),
    (
        process("Exited", "again", generation=2),
        (
            *crash("again", 4, generation=2, ring=False),
            Send(ME, process("Exited", "again", generation=2)),
        ),
    ),
    (process("Exited", "again", generation=2), (UNTIMED, gone("crashed 2 times, last: again"))),
]
KILLED_STARTING: Steps = [*SPAWNING, (SHUTDOWN, kill(2))]
FATAL = said(WorkerFatal(WorkerFatalReason.BACKEND_INIT_FAILED, "no device"))
FATAL_REASON = "BackendInitFailed: no device"
FATAL_CRASH = crash(FATAL_REASON, 2, kill=True, fatal=WorkerFatalReason.BACKEND_INIT_FAILED)
UNKILLABLE: Steps = [
    *CRASHED,
    (fired(2), (gone("the worker process could not be reaped (bad event)"),)),
]
