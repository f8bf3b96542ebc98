"""The life of a stage in scenarios: what it hears, what it does at each word, and where it ends."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from machine_stage_words import (
    BROKEN,
    BROKEN_EDGE,
    CRASH,
    CRASHED,
    DECODED,
    ENDED,
    FAULTED,
    IN,
    IN_RING,
    IS_READY,
    LOADED_WEIGHTS,
    ME,
    OPENED,
    OTHER_ROLE,
    OUT,
    OUT_RING,
    PREFILL,
    PREPARING,
    READY,
    RESET,
    ROLE,
    STOP,
    STOPPED_EARLY,
    STOPPING,
    UNTIMED,
    WORKER,
    S,
    completed,
    done,
    execute,
    faulted,
    handle,
    loaded,
    output,
    produced,
    progress,
    reported,
    step_fault,
    stopped,
    stopping,
)
from swactor_core.events import EventName
from swactor_core.faults import (
    Component,
    FaultReason,
    ReleaseFailure,
    RoleFailure,
    StepFailure,
    WorkerFatalReason,
)
from swactor_core.fsm import Emit, Send
from swactor_core.ids import (
    ObjectId,
    RoleId,
    StepId,
    WorkerGeneration,
)
from swactor_core.machines.stage_effects import ModelFetch, ModelRefused
from swactor_core.messages import (
    DeviceObjectReleased,
    EdgeReady,
    EdgeStopped,
    LoadPhase,
    ReleaseDeviceObject,
    ReleaseFailed,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    RoleReset,
    StageStats,
    StepFailed,
    TimerFired,
    WorkerCrashed,
)
from swactor_testing.scripts import Steps

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
            (RoleProgress(ROLE, LoadPhase.WEIGHTS, 2, 9), progress(LoadPhase.WEIGHTS, 2, 9)),
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
    "an object that the step was not to produce": (
        [
            *PREFILL,
            (
                produced(1),
                faulted(
                    FaultReason.SEQUENCE_VIOLATION,
                    "object 41 of sequence 1 was produced, no step asked for it",
                    component=Component.WORKER,
                ),
            ),
        ],
        S.FAULTED,
    ),
    "an object of that sequence under another id": (
        [
            *PREFILL,
            (
                replace(produced(0), object_id=ObjectId(41)),
                faulted(
                    FaultReason.SEQUENCE_VIOLATION,
                    "object 41 of sequence 0 was produced, no step asked for it",
                    component=Component.WORKER,
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
            (RoleProgress(OTHER_ROLE, LoadPhase.WEIGHTS, 1, 2), ()),
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
