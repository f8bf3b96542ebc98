"""Worker process FSM alone (spec sections 29 to 31): which command when, every answer, every transition."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.faults import (
    ObjectFailure,
    ReleaseFailure,
    RingFaultReason,
    RoleFailure,
    StepFailure,
    UninstallReason,
    WorkerFatalReason,
    WorkerStoppedReason,
)
from swactor_core.fsm import Action, InvalidTransition, Send
from swactor_core.ids import (
    INPUT_PORT,
    OUTPUT_PORT,
    DeviceObjectHandle,
    EdgeId,
    ObjectId,
    PortId,
    RingId,
    RoleId,
    Sequence,
    StepId,
    WorkerGeneration,
)
from swactor_core.machines.worker import CTL, WorkerMachine, WorkerState
from swactor_core.machines.worker_effects import (
    ArenaAttached,
    ArenaSelected,
    AttachArena,
    BackendCreated,
    BeginOutput,
    BuildRole,
    CloseBackend,
    CloseRole,
    ControlClosed,
    Crashed,
    CreateBackend,
    Exit,
    ExitCode,
    FinishOutput,
    FreeDeviceObject,
    InitializeFailed,
    MalformedCommand,
    OpenRing,
    OutputBlocked,
    QuiesceRing,
    RingOpened,
    RingRefused,
    RoleBuilt,
    RoleRejected,
    RunStep,
    SelectArena,
    StepComputed,
    StepRaised,
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
    ReleaseDeviceObject,
    ReleaseFailed,
    ResetRole,
    RingFault,
    RingInstalled,
    RingQuiesced,
    RingReadable,
    RingWritable,
    RoleConfigured,
    RoleFailed,
    RoleReset,
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
from swactor_testing.scripts import Script, step_or_refuse

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
                failure := ObjectFailed(
                    IN, EdgeId(21), INPUT_PORT, None, None, ObjectFailure.HEADER_MALFORMED, "magic"
                ),
                (say(failure),),
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
            (failure, (say(failure),)),
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


SCRIPT = Script(lambda: WorkerMachine(77), SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


def test_useless_hints_are_counted() -> None:
    machine = SCRIPT.play("hints reach only rings that can use them")
    assert isinstance(machine, WorkerMachine)
    assert machine.stale_hints == 3


def bound(**changes: Any) -> ExecuteStep:
    return dataclasses.replace(STEP, inputs=(dataclasses.replace(STEP.inputs[0], **changes),))


def out(**changes: Any) -> ExecuteStep:
    return dataclasses.replace(STEP, outputs=(dataclasses.replace(STEP.outputs[0], **changes),))


REFUSED: dict[str, tuple[ExecuteStep, StepFailure, str]] = {
    "another role": (
        dataclasses.replace(STEP, role_id=OTHER_ROLE),
        StepFailure.ROLE_UNAVAILABLE,
        "role 2 is not configured",
    ),
    "no input": (
        dataclasses.replace(STEP, inputs=()),
        StepFailure.INVALID_INPUT_HANDLE,
        "a step takes one input",
    ),
    "two inputs": (
        dataclasses.replace(STEP, inputs=STEP.inputs * 2),
        StepFailure.INVALID_INPUT_HANDLE,
        "a step takes one input",
    ),
    "negative position": (
        dataclasses.replace(STEP, runtime=StepRuntime(-1)),
        StepFailure.INVALID_INPUT_HANDLE,
        "position from 0 on",
    ),
    "handle of another generation": (
        bound(device_handle=DeviceObjectHandle(WorkerGeneration(3), 1)),
        StepFailure.INVALID_INPUT_HANDLE,
        "handle of generation 3, this is 4",
    ),
    "unknown handle": (
        bound(device_handle=DeviceObjectHandle(GENERATION, 5)),
        StepFailure.INVALID_INPUT_HANDLE,
        "no device object 5",
    ),
    "another object": (
        bound(object_id=ObjectId(71)),
        StepFailure.INVALID_INPUT_HANDLE,
        "device object 1 is object 70, sequence 0",
    ),
    "another sequence": (
        bound(sequence=Sequence(1)),
        StepFailure.INVALID_INPUT_HANDLE,
        "device object 1 is object 70, sequence 0",
    ),
    "another port": (bound(port_id=PortId(1)), StepFailure.INVALID_INPUT_HANDLE, "on port 0"),
    "no output": (
        dataclasses.replace(STEP, outputs=()),
        StepFailure.INVALID_OUTPUT_RING,
        "a step has one output",
    ),
    "output to an ingress ring": (
        out(ring_id=IN),
        StepFailure.INVALID_OUTPUT_RING,
        "ring 11 is not an installed egress ring",
    ),
    "output to no ring": (
        out(ring_id=RingId(99)),
        StepFailure.INVALID_OUTPUT_RING,
        "ring 99 is not an installed egress ring",
    ),
    "output port of another ring": (
        out(port_id=PortId(0)),
        StepFailure.INVALID_OUTPUT_RING,
        "ring 12 is of port 1",
    ),
    "output out of sequence": (
        out(sequence=Sequence(1)),
        StepFailure.INVALID_OUTPUT_RING,
        "sequence 1 on ring 12, expected 0",
    ),
    "output above the edge's extent": (
        out(extent=68),
        StepFailure.OUTPUT_EXTENT_INVALID,
        "extent 68 above 64",
    ),
    "unaligned output": (out(extent=6), StepFailure.OUTPUT_EXTENT_INVALID, "extent 6"),
    "empty output": (out(extent=0), StepFailure.OUTPUT_EXTENT_INVALID, "extent 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_with_a_wrong_binding_fails_and_the_right_one_still_runs(name: str) -> None:
    command, reason, detail = REFUSED[name]
    machine = WorkerMachine(77)
    for event, _ in TO_LOADED:
        machine.step(event, 0.0)
    (answer,) = machine.step(command, 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, StepFailed)
    assert answer.message.reason is reason
    assert detail in answer.message.detail
    assert machine.step(STEP, 0.0) == (RUN,)


def test_broken_host_answers_for_a_step_that_does_not_exist() -> None:
    machine = WorkerMachine(77)
    for event, _ in TO_LOADED:
        machine.step(event, 0.0)
    for event in (StepComputed(4, 0.1), StepRaised(StepFailure.TINYGRAD_ERROR, ""), PRODUCED):
        with pytest.raises(InvalidTransition, match=f"Running cannot take {type(event).__name__}"):
            machine.step(event, 0.0)
    assert machine.step(STEP, 0.0) == (RUN,)


EVENTS: list[Any] = [
    INITIALIZE,
    ArenaSelected(1),
    ArenaAttached(),
    BackendCreated({}),
    InitializeFailed(WorkerFatalReason.BACKEND_INIT_FAILED, "no"),
    ConfigureRole(ROLE, {}),
    ConfigureRole(OTHER_ROLE, {}),
    RoleBuilt(ROLE),
    RoleRejected(ROLE, RoleFailure.CONFIG_INVALID, "no"),
    ResetRole(ROLE),
    INGRESS,
    EGRESS,
    RingOpened(IN),
    RingOpened(OUT),
    RingRefused(OUT, RingFaultReason.RING_LAYOUT_INVALID, "no"),
    uninstall(IN),
    uninstall(OUT),
    RingQuiesced(IN),
    RingQuiesced(OUT),
    RingReadable(IN),
    RingWritable(OUT),
    LOADED,
    failure,
    COPY_FAULT,
    STEP,
    KEEPING,
    StepComputed(4, 0.5),
    StepComputed(8, 0.5),
    StepRaised(StepFailure.TINYGRAD_ERROR, "no"),
    PRODUCED,
    OutputBlocked(OUT),
    ReleaseDeviceObject(HANDLE),
    GRACEFUL,
    ABORT,
    MalformedCommand("no"),
    Crashed("no"),
    ControlClosed(),
    "not an event",
]
PREFIXES = st.sampled_from([[], TO_RUNNING, TO_RINGS, TO_LOADED, TO_OUTPUT])


@given(PREFIXES, st.lists(st.sampled_from(EVENTS), max_size=30))
def test_any_event_in_any_state_is_taken_or_refused_and_every_step_ends_once(
    prefix: Steps, events: list[Any]
) -> None:
    machine = WorkerMachine(77)
    for event, _ in prefix:
        machine.step(event, 0.0)
    in_flight = prefix is TO_OUTPUT
    for event in events:
        actions = step_or_refuse(machine, event)
        if actions is None:
            continue
        started = any(isinstance(action, RunStep) for action in actions)
        assert not (started and in_flight)
        ended = sum(_ends_a_step(action) for action in actions)
        if isinstance(event, ExecuteStep) and not started:
            ended -= _refusals(actions)
        assert ended <= (1 if in_flight else 0)
        in_flight = started or (in_flight and not ended)
        if any(isinstance(action, CloseRole) for action in actions):
            assert not in_flight


def _ends_a_step(action: Action) -> bool:
    return isinstance(action, Send) and isinstance(action.message, (StepCompleted, StepFailed))


def _refusals(actions: tuple[Action, ...]) -> int:
    return sum(_ends_a_step(action) for action in actions)
