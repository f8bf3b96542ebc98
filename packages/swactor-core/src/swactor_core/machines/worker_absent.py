"""What a command hears when there is no worker to take it: the word that the worker's end makes true.

Pure. A run that is being torn down goes on sending; each command has one answer, of the kind that a worker
would have given, so that nobody waits for a process that is not there (spec sections 28, 31 and 37).
"""

from __future__ import annotations

from collections.abc import Iterable

from swactor_core.faults import ReleaseFailure, RingFaultReason, StepFailure
from swactor_core.fsm import Send
from swactor_core.ids import WorkerGeneration
from swactor_core.machines.worker_routes import ESTABLISHER, STAGE
from swactor_core.messages import (
    ConfigureRole,
    ExecuteStep,
    InstallRing,
    ReleaseDeviceObject,
    ReleaseFailed,
    ResetRole,
    RingFault,
    RoleReset,
    StepFailed,
    WorkerCrashed,
)

Answered = InstallRing | ConfigureRole | ResetRole | ExecuteStep | ReleaseDeviceObject
ANSWERED = (InstallRing, ConfigureRole, ResetRole, ExecuteStep, ReleaseDeviceObject)


def crash_words(crashed: WorkerCrashed, rings: Iterable[InstallRing], *, exited: bool) -> tuple[Send, ...]:
    """What the stage and the edges hear of a crash; `exited` when the process is gone, otherwise it is still
    on its way out. The reason of the stage's fault comes before those of its edges."""
    reason = RingFaultReason.WORKER_PROCESS_EXITED if exited else RingFaultReason.WORKER_INTERNAL
    faults = (RingFault(ring.ring_id, ring.edge_id, ring.port_id, reason, crashed.detail) for ring in rings)
    return (Send(STAGE, crashed), *(Send(ESTABLISHER, fault) for fault in faults))


def answer(command: Answered, *, generation: WorkerGeneration, stopping: bool, state: str, why: str) -> Send:
    """`generation` is the last that was started, `why` the reason of the latest end; both for people."""
    detail = f"worker is {state}: {why}" if why else f"worker is {state}"
    match command:
        case InstallRing():
            fault = (
                RingFaultReason.WORKER_SHUTTING_DOWN if stopping else RingFaultReason.WORKER_PROCESS_EXITED
            )
            ring = RingFault(command.ring_id, command.edge_id, command.port_id, fault, detail)
            return Send(ESTABLISHER, ring)
        case ConfigureRole():
            return Send(STAGE, WorkerCrashed(generation, detail))
        case ResetRole():
            return Send(STAGE, RoleReset(command.role_id))
        case ExecuteStep():
            reason = StepFailure.WORKER_SHUTTING_DOWN if stopping else StepFailure.WORKER_PROCESS_EXITED
            return Send(STAGE, StepFailed(command.role_id, command.step_id, reason, detail))
        case ReleaseDeviceObject():  # the object went with the process that had it
            return Send(STAGE, ReleaseFailed(command.device_handle, ReleaseFailure.STALE_GENERATION))
