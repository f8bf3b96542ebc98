"""The life of the worker's machine in scenarios: what it hears, does at each word, and where it ends."""

from __future__ import annotations

import dataclasses

from swactor_core.faults import (
    ReleaseFailure,
    RingFaultReason,
    RoleFailure,
    StepFailure,
    WorkerFatalReason,
    WorkerStoppedReason,
)
from swactor_core.ids import (
    INPUT_PORT,
    DeviceObjectHandle,
    EdgeId,
    ObjectId,
    RingId,
    Sequence,
    WorkerGeneration,
)
from swactor_core.machines.worker import WorkerState
from swactor_core.machines.worker_effects import (
    ArenaSelected,
    BuildRole,
    CloseRole,
    ControlClosed,
    Crashed,
    Exit,
    ExitCode,
    FinishOutput,
    InitializeFailed,
    MalformedCommand,
    OpenRing,
    OutputBlocked,
    QuiesceRing,
    RingRefused,
    RoleRejected,
    StepComputed,
    StepRaised,
    WakeRing,
)
from swactor_core.messages import (
    ConfigureRole,
    ReleaseDeviceObject,
    ReleaseFailed,
    ResetRole,
    RingFault,
    RingQuiesced,
    RingReadable,
    RingWritable,
    RoleFailed,
    RoleReset,
    WorkerStopped,
)
from worker_machine_words import (
    ABORT,
    BEGIN,
    COMPLETED,
    COPY_FAULT,
    GENERATION,
    GRACEFUL,
    HANDLE,
    IN,
    INGRESS,
    KEEPING,
    LOADED,
    OBJECT_FAILED,
    OTHER_ROLE,
    OUT,
    PRODUCED,
    QUIESCE_BOTH,
    RELEASED,
    ROLE,
    RUN,
    SHUTTING_DOWN,
    STEP,
    TO_ATTACHING,
    TO_CONFIGURED,
    TO_INITIALIZING,
    TO_LOADED,
    TO_OUTPUT,
    TO_RINGS,
    TO_RUNNING,
    S,
    Steps,
    failed,
    fatal,
    say,
    stopped,
    uninstall,
)

SCENARIOS: dict[str, tuple[Steps, WorkerState]] = {
    # Booting and Initializing
    "ready": (TO_RUNNING, S.RUNNING),
    "another ABI": (
        [
            *TO_INITIALIZING,
            (
                ArenaSelected(2),
                fatal(
                    WorkerFatalReason.RING_HELPER_ABI_MISMATCH,
                    "the worker's ring helper has ABI 2, the node's 1; install one version",
                ),
            ),
        ],
        S.FATAL,
    ),
    "no arena": (
        [
            *TO_ATTACHING,
            (
                InitializeFailed(WorkerFatalReason.ARENA_MAP_FAILED, "no fd"),
                fatal(WorkerFatalReason.ARENA_MAP_FAILED, "no fd"),
            ),
        ],
        S.FATAL,
    ),
    "stopped before it began": (
        [(GRACEFUL, (say(WorkerStopped(WorkerStoppedReason.GRACEFUL)), Exit(ExitCode.STOPPED)))],
        S.DRAINING,
    ),
    # roles
    "role rejected": (
        [
            *TO_RUNNING,
            (ConfigureRole(ROLE, {}), (BuildRole(ROLE, {}),)),
            (
                RoleRejected(ROLE, RoleFailure.CONFIG_INVALID, "no"),
                (say(RoleFailed(ROLE, RoleFailure.CONFIG_INVALID, "no")),),
            ),
        ],
        S.RUNNING,
    ),
    "one role at a time": (
        [
            *TO_CONFIGURED,
            (
                ConfigureRole(OTHER_ROLE, {}),
                (
                    say(
                        RoleFailed(
                            OTHER_ROLE,
                            RoleFailure.CONFIG_INVALID,
                            "role 1 is configured; one role at a time, reset it first",
                        )
                    ),
                ),
            ),
        ],
        S.RUNNING,
    ),
    "reset frees what the run loaded, and a new role may come": (
        [
            *TO_LOADED,
            (ResetRole(OTHER_ROLE), (say(RoleReset(OTHER_ROLE)),)),
            (ResetRole(ROLE), (CloseRole(), *RELEASED, say(RoleReset(ROLE)))),
            (ResetRole(ROLE), (say(RoleReset(ROLE)),)),
            (STEP, (failed(StepFailure.ROLE_UNAVAILABLE, "role 1 is not configured"),)),
            (ConfigureRole(OTHER_ROLE, {}), (BuildRole(OTHER_ROLE, {}),)),
        ],
        S.RUNNING,
    ),
    "reset waits for the step in flight": (
        [
            *TO_OUTPUT,
            (ResetRole(ROLE), ()),
            (PRODUCED, (say(PRODUCED), COMPLETED, *RELEASED, CloseRole(), say(RoleReset(ROLE)))),
        ],
        S.RUNNING,
    ),
    # rings
    "ring refused, then uninstalled": (
        [
            *TO_RUNNING,
            (INGRESS, (OpenRing(INGRESS),)),
            (
                RingRefused(IN, RingFaultReason.RING_LAYOUT_INVALID, "magic"),
                (say(RingFault(IN, EdgeId(21), INPUT_PORT, RingFaultReason.RING_LAYOUT_INVALID, "magic")),),
            ),
            (uninstall(IN), (say(RingQuiesced(IN)),)),
        ],
        S.RUNNING,
    ),
    "ring installed twice": (
        [
            *TO_RINGS,
            (
                INGRESS,
                fatal(
                    WorkerFatalReason.MALFORMED_CONTROL_MESSAGE,
                    "InstallRing names ring 11, which is installed",
                ),
            ),
        ],
        S.FATAL,
    ),
    "ring with the layout of another": (
        [
            *TO_RUNNING,
            (
                dataclasses.replace(INGRESS, ring_id=OUT),
                fatal(WorkerFatalReason.MALFORMED_CONTROL_MESSAGE, "InstallRing 12 has the layout of 11"),
            ),
        ],
        S.FATAL,
    ),
    "uninstall": (
        [
            *TO_RINGS,
            (uninstall(IN), (QuiesceRing(uninstall(IN)),)),
            (RingQuiesced(IN), (say(RingQuiesced(IN)),)),
            (uninstall(IN), (say(RingQuiesced(IN)),)),
        ],
        S.RUNNING,
    ),
    "hints reach only rings that can use them": (
        [
            *TO_RINGS,
            (RingReadable(IN), (WakeRing(IN),)),
            (RingWritable(OUT), (WakeRing(OUT),)),
            (RingReadable(OUT), ()),
            (RingWritable(IN), ()),
            (RingReadable(RingId(99)), ()),
        ],
        S.RUNNING,
    ),
    "object failed": (
        [
            *TO_RINGS,
            (
                OBJECT_FAILED,
                (say(OBJECT_FAILED),),
            ),
        ],
        S.RUNNING,
    ),
    # steps
    "a step, its input released": (
        [*TO_OUTPUT, (PRODUCED, (say(PRODUCED), COMPLETED, *RELEASED))],
        S.RUNNING,
    ),
    "a step, its input kept and then released": (
        [
            *TO_LOADED,
            (KEEPING, (RUN,)),
            (StepComputed(4, 0.5), (BEGIN,)),
            (PRODUCED, (say(PRODUCED), COMPLETED)),
            (ReleaseDeviceObject(HANDLE), RELEASED),
            (
                ReleaseDeviceObject(HANDLE),
                (say(ReleaseFailed(HANDLE, ReleaseFailure.UNKNOWN_HANDLE)),),
            ),
        ],
        S.RUNNING,
    ),
    "an input in use is released after its step": (
        [
            *TO_LOADED,
            (KEEPING, (RUN,)),
            (StepComputed(4, 0.5), (BEGIN,)),
            (ReleaseDeviceObject(HANDLE), ()),
            (PRODUCED, (say(PRODUCED), COMPLETED, *RELEASED)),
        ],
        S.RUNNING,
    ),
    "a handle of another generation": (
        [
            *TO_RUNNING,
            (
                ReleaseDeviceObject(stale := DeviceObjectHandle(WorkerGeneration(3), 1)),
                (say(ReleaseFailed(stale, ReleaseFailure.STALE_GENERATION)),),
            ),
        ],
        S.RUNNING,
    ),
    "role code fails, its input stays": (
        [
            *TO_LOADED,
            (STEP, (RUN,)),
            (
                StepRaised(StepFailure.DEVICE_OUT_OF_MEMORY, "full"),
                (failed(StepFailure.DEVICE_OUT_OF_MEMORY, "full"),),
            ),
            (STEP, (RUN,)),
        ],
        S.RUNNING,
    ),
    "role code returns another extent": (
        [
            *TO_LOADED,
            (STEP, (RUN,)),
            (
                StepComputed(8, 0.5),
                (
                    failed(
                        StepFailure.OUTPUT_EXTENT_INVALID, "the role returned 8 bytes, the step declares 4"
                    ),
                ),
            ),
        ],
        S.RUNNING,
    ),
    "output copy fails": (
        [
            *TO_OUTPUT,
            (
                COPY_FAULT,
                (
                    say(COPY_FAULT),
                    failed(StepFailure.OUTPUT_COPY_FAILED, "ring 12: DeviceCopyFailed: dma"),
                ),
            ),
            (STEP, (failed(StepFailure.INVALID_OUTPUT_RING, "ring 12 is faulted"),)),
        ],
        S.RUNNING,
    ),
    "the fault of another ring leaves the step alone": (
        [
            *TO_OUTPUT,
            (
                other := RingFault(IN, EdgeId(21), INPUT_PORT, RingFaultReason.RING_STATE_INVALID, "bad"),
                (say(other),),
            ),
            (PRODUCED, (say(PRODUCED), COMPLETED, *RELEASED)),
        ],
        S.RUNNING,
    ),
    "uninstalling the output ring ends the step": (
        [
            *TO_OUTPUT,
            (ResetRole(ROLE), ()),
            (uninstall(OUT), (QuiesceRing(uninstall(OUT)),)),
            (
                RingQuiesced(OUT),
                (
                    failed(
                        StepFailure.INVALID_OUTPUT_RING, "ring 12 was uninstalled before the output was out"
                    ),
                    CloseRole(),
                    *RELEASED,
                    say(RoleReset(ROLE)),
                    say(RingQuiesced(OUT)),
                ),
            ),
        ],
        S.RUNNING,
    ),
    "a second step must wait": (
        [*TO_OUTPUT, (STEP, (failed(StepFailure.ROLE_UNAVAILABLE, "step 9 is in flight"),))],
        S.RUNNING,
    ),
    "object id out of range": (
        [
            *TO_LOADED,
            (
                dataclasses.replace(
                    STEP, outputs=(dataclasses.replace(STEP.outputs[0], object_id=ObjectId(1 << 64)),)
                ),
                fatal(
                    WorkerFatalReason.MALFORMED_CONTROL_MESSAGE,
                    "ExecuteStep 9: object id, extent or flags out of range",
                ),
            ),
        ],
        S.FATAL,
    ),
    # Draining
    "idle, graceful": (
        [
            *TO_LOADED,
            (GRACEFUL, QUIESCE_BOTH),
            (RingQuiesced(IN), (say(RingQuiesced(IN)),)),
            (
                RingQuiesced(OUT),
                (
                    say(RingQuiesced(OUT)),
                    CloseRole(),
                    *RELEASED,
                    *stopped(WorkerStoppedReason.GRACEFUL),
                ),
            ),
        ],
        S.DRAINING,
    ),
    "new work is refused while draining": (
        [
            *TO_LOADED,
            (GRACEFUL, QUIESCE_BOTH),
            (
                ConfigureRole(OTHER_ROLE, {}),
                (say(RoleFailed(OTHER_ROLE, RoleFailure.BACKEND_ERROR, SHUTTING_DOWN)),),
            ),
            (
                dataclasses.replace(INGRESS, ring_id=RingId(13)),
                (
                    say(
                        RingFault(
                            RingId(13),
                            EdgeId(21),
                            INPUT_PORT,
                            RingFaultReason.WORKER_SHUTTING_DOWN,
                            SHUTTING_DOWN,
                        )
                    ),
                ),
            ),
            (STEP, (failed(StepFailure.WORKER_SHUTTING_DOWN, SHUTTING_DOWN),)),
            (ResetRole(ROLE), ()),
            (RingReadable(IN), ()),
            (RingWritable(OUT), (WakeRing(OUT),)),
            (uninstall(IN), ()),
            (uninstall(RingId(99)), (say(RingQuiesced(RingId(99))),)),
            (ReleaseDeviceObject(HANDLE), RELEASED),
            (GRACEFUL, ()),
            (ABORT, ()),
        ],
        S.DRAINING,
    ),
    "graceful with a step whose output goes out": (
        [
            *TO_OUTPUT,
            (GRACEFUL, (FinishOutput(OUT),)),
            (PRODUCED, (say(PRODUCED), COMPLETED, *RELEASED, *QUIESCE_BOTH)),
        ],
        S.DRAINING,
    ),
    "graceful with a step that is blocked on egress space": (
        [
            *TO_OUTPUT,
            (GRACEFUL, (FinishOutput(OUT),)),
            (
                OutputBlocked(OUT),
                (
                    failed(
                        StepFailure.WORKER_SHUTTING_DOWN,
                        "ring 12 has no room and the worker is shutting down",
                    ),
                    *QUIESCE_BOTH,
                ),
            ),
        ],
        S.DRAINING,
    ),
    "graceful with a step whose output copy fails": (
        [
            *TO_OUTPUT,
            (GRACEFUL, (FinishOutput(OUT),)),
            (
                COPY_FAULT,
                (
                    say(COPY_FAULT),
                    failed(StepFailure.OUTPUT_COPY_FAILED, "ring 12: DeviceCopyFailed: dma"),
                    *QUIESCE_BOTH,
                ),
            ),
        ],
        S.DRAINING,
    ),
    "abort with a step in flight": (
        [
            *TO_OUTPUT,
            (
                ABORT,
                (failed(StepFailure.WORKER_SHUTTING_DOWN, "the worker was told to abort"), *QUIESCE_BOTH),
            ),
            (RingQuiesced(OUT), (say(RingQuiesced(OUT)),)),
            (
                RingQuiesced(IN),
                (
                    say(RingQuiesced(IN)),
                    CloseRole(),
                    *RELEASED,
                    *stopped(WorkerStoppedReason.ABORT_IN_FLIGHT),
                ),
            ),
        ],
        S.DRAINING,
    ),
    "graceful, then abort": (
        [
            *TO_OUTPUT,
            (GRACEFUL, (FinishOutput(OUT),)),
            (
                ABORT,
                (failed(StepFailure.WORKER_SHUTTING_DOWN, "the worker was told to abort"), *QUIESCE_BOTH),
            ),
            (ABORT, ()),
        ],
        S.DRAINING,
    ),
    "copies that end while draining still report": (
        [
            *TO_OUTPUT,
            (GRACEFUL, (FinishOutput(OUT),)),
            (
                second := dataclasses.replace(
                    LOADED, sequence=Sequence(1), device_handle=DeviceObjectHandle(GENERATION, 2)
                ),
                (say(second),),
            ),
            (OBJECT_FAILED, (say(OBJECT_FAILED),)),
        ],
        S.DRAINING,
    ),
    "the node is gone while draining": (
        [*TO_RINGS, (GRACEFUL, QUIESCE_BOTH), (ControlClosed(), (Exit(ExitCode.STOPPED),))],
        S.DRAINING,
    ),
    # Fatal
    **{
        f"{event} in {name}": (
            [*before, (event, fatal(reason, "why"))],
            S.FATAL,
        )
        for name, before in {
            "Booting": [],
            "Initializing": TO_INITIALIZING,
            "Running": TO_RUNNING,
            "Draining": [*TO_RINGS, (GRACEFUL, QUIESCE_BOTH)],
        }.items()
        for event, reason in (
            (MalformedCommand("why"), WorkerFatalReason.MALFORMED_CONTROL_MESSAGE),
            (Crashed("why"), WorkerFatalReason.UNHANDLED_EXCEPTION),
        )
    },
    **{
        f"the node is gone in {name}": (
            [*before, (ControlClosed(), (Exit(ExitCode.CONTROL_LOST),))],
            S.FATAL,
        )
        for name, before in {"Booting": [], "Initializing": TO_INITIALIZING, "Running": TO_OUTPUT}.items()
    },
}
