"""A restart (spec sections 6, 31, 39): a new generation, in which each handle, role, ring and step of the old
one is refused; roles and rings must be installed again. GpuWorkerCtl and the worker's machine, together."""

from __future__ import annotations

from typing import Any

import pytest
from swactor_core.faults import (
    Component,
    ReleaseFailure,
    StepFailure,
    UninstallReason,
)
from swactor_core.fsm import Action, Send
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
from swactor_core.machines.worker import WorkerMachine, WorkerState
from swactor_core.machines.worker_ctl import GpuWorkerCtl, WorkerCtlState
from swactor_core.machines.worker_effects import (
    ArenaAttached,
    ArenaSelected,
    AttachArena,
    BackendCreated,
    BuildRole,
    CreateBackend,
    OpenRing,
    RingOpened,
    RoleBuilt,
    SelectArena,
)
from swactor_core.machines.worker_process import (
    ContinueRestart,
    FromWorker,
    SpawnWorker,
    WorkerPolicy,
    WriteWorker,
)
from swactor_core.messages import (
    Address,
    ConfigureRole,
    DeviceObjectReleased,
    ExecuteStep,
    InputBinding,
    InstallRing,
    ObjectLoaded,
    ObjectProduced,
    OutputBinding,
    ProcessNotification,
    ProcessNotificationKind,
    ReleaseDeviceObject,
    ReleaseFailed,
    ResetRole,
    RingInstalled,
    RingQuiesced,
    RingReadable,
    RingWritable,
    RoleConfigured,
    RoleReset,
    StartWorker,
    StepCompleted,
    StepFailed,
    StepRuntime,
    UninstallRing,
    WorkerCrashed,
)
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingLayout

OLD, NEW = WorkerGeneration(1), WorkerGeneration(2)
ROLE = RoleId(5)
IN, OUT = RingId(8), RingId(9)
EDGE_IN, EDGE_OUT = EdgeId(6), EdgeId(7)
TOKENS = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
STAGE, ESTABLISHER = Address(Component.STAGE_CONTROLLER), Address(Component.EDGE_ESTABLISHER)
HANDLE = DeviceObjectHandle(OLD, 1)
LOADED = ObjectLoaded(IN, EDGE_IN, INPUT_PORT, ObjectId(40), Sequence(0), 8, HANDLE)
STEP = ExecuteStep(
    ROLE,
    StepId(1),
    (InputBinding(INPUT_PORT, ObjectId(40), Sequence(0), HANDLE),),
    (OutputBinding(OUTPUT_PORT, OUT, ObjectId(40), Sequence(0), 8),),
    StepRuntime(0),
    release_inputs_after=True,
)


def install(ring_id: RingId) -> InstallRing:
    offset = ring_id * 4096
    layout = RingLayout(ring_id, offset, 4096, offset, offset + 64, 4032, 64)
    if ring_id == IN:
        return InstallRing(IN, EDGE_IN, INPUT_PORT, RingDirection.INGRESS, layout, TOKENS)
    return InstallRing(ring_id, EDGE_OUT, OUTPUT_PORT, RingDirection.EGRESS, layout, TOKENS)


class Pair:
    """The node's side and the worker's of the moment, every line between them carried at once."""

    def __init__(self) -> None:
        self.ctl = GpuWorkerCtl(WorkerPolicy(), arena_ceiling=1 << 20, ring_helper_abi=1, backend={})
        self.worker = WorkerMachine(0)
        self.generation = WorkerGeneration(0)
        self.told: list[tuple[Address, object]] = []

    def tell(self, event: object) -> list[tuple[Address, object]]:
        """What others hear because the node's side took `event`."""
        already = len(self.told)
        for action in self.ctl.step(event, 0.0):
            self._of_node(action)
        return self.told[already:]

    def say(self, event: object, generation: WorkerGeneration) -> list[tuple[Address, object]]:
        return self.tell(FromWorker(generation, event))

    def _of_node(self, action: Action) -> None:
        match action:
            case Send(to, message) if to.component is Component.GPU_WORKER_CTL:
                self.tell(message)
            case Send(to, message):
                self.told.append((to, message))
            case SpawnWorker(generation):
                self.generation, self.worker = generation, WorkerMachine(70 + generation)
                self.tell(ProcessNotification(generation, ProcessNotificationKind.STARTED, 70, ""))
            case WriteWorker(generation, command):
                assert generation == self.generation, "a command for a process that is gone"
                self._take(command)

    def _take(self, event: object) -> None:
        for action in self.worker.step(event, 0.0):
            match action:
                case Send(_, message):
                    self.say(message, self.generation)
                case SelectArena():
                    self._take(ArenaSelected(1))
                case AttachArena():
                    self._take(ArenaAttached())
                case CreateBackend():
                    self._take(BackendCreated({}))
                case BuildRole(role_id):
                    self._take(RoleBuilt(role_id))
                case OpenRing(command):
                    self._take(RingOpened(command.ring_id))

    def equip(self, *rings: RingId) -> None:
        for ring_id in rings:
            command = install(ring_id)
            installed = RingInstalled(ring_id, command.edge_id, command.port_id)
            assert (ESTABLISHER, installed) in self.tell(command)
        assert self.tell(ConfigureRole(ROLE, {})) == [(STAGE, RoleConfigured(ROLE))]


@pytest.fixture
def restarted() -> Pair:
    """A worker with a role, two rings and a loaded object has crashed; its successor runs."""
    pair = Pair()
    pair.tell(StartWorker())
    pair.equip(IN, OUT)
    pair._take(LOADED)
    exited = ProcessNotification(OLD, ProcessNotificationKind.EXITED, 70, "killed by signal 9")
    heard = [message for _, message in pair.tell(exited)]
    assert WorkerCrashed(OLD, "killed by signal 9") in heard
    for ring_id in (IN, OUT):
        assert RingQuiesced(ring_id, process_reaped=True) in heard
    assert (pair.ctl.state, pair.ctl.generation) == (WorkerCtlState.RUNNING, NEW)
    assert pair.worker.state is WorkerState.RUNNING
    assert pair.ctl.rings == {}
    return pair


def test_no_role_and_no_step_of_the_old_generation(restarted: Pair) -> None:
    detail = "role 5 is not configured"
    assert restarted.tell(STEP) == [
        (STAGE, StepFailed(ROLE, StepId(1), StepFailure.ROLE_UNAVAILABLE, detail))
    ]
    assert restarted.tell(ResetRole(ROLE)) == [(STAGE, RoleReset(ROLE))]


def test_no_handle_of_the_old_generation(restarted: Pair) -> None:
    refused = ReleaseFailed(HANDLE, ReleaseFailure.STALE_GENERATION)
    assert restarted.tell(ReleaseDeviceObject(HANDLE)) == [(STAGE, refused)]
    restarted.equip(RingId(10))
    detail = "handle of generation 1, this is 2"
    failed = StepFailed(ROLE, StepId(1), StepFailure.INVALID_INPUT_HANDLE, detail)
    assert restarted.tell(STEP) == [(STAGE, failed)]


def test_no_ring_of_the_old_generation(restarted: Pair) -> None:
    for hint in (RingReadable(IN), RingWritable(OUT)):
        assert restarted.tell(hint) == []
    for ring_id in (IN, OUT):
        uninstalled = restarted.tell(UninstallRing(ring_id, UninstallReason.EDGE_STOPPED))
        assert uninstalled == [(ESTABLISHER, RingQuiesced(ring_id, process_reaped=True))]
    assert restarted.worker.stale_hints == 0, "nothing of it came to the new worker"


@pytest.mark.parametrize(
    "event",
    [
        LOADED,
        ObjectProduced(OUT, EDGE_OUT, OUTPUT_PORT, ObjectId(40), Sequence(0), 8),
        StepCompleted(ROLE, StepId(1)),
        RoleConfigured(ROLE),
        RingInstalled(IN, EDGE_IN, INPUT_PORT),
        RingQuiesced(IN),
        RingReadable(OUT),
        DeviceObjectReleased(HANDLE),
    ],
)
def test_no_late_word_of_the_old_generation(restarted: Pair, event: Any) -> None:
    stale = restarted.ctl.stale_events
    assert restarted.say(event, OLD) == []
    assert restarted.ctl.stale_events == stale + 1


def test_no_late_end_of_the_old_generation(restarted: Pair) -> None:
    for kind in ProcessNotificationKind:
        assert restarted.tell(ProcessNotification(OLD, kind, 70, "late")) == []
    assert restarted.ctl.state is WorkerCtlState.RUNNING


def test_everything_can_be_installed_again_and_a_step_runs(restarted: Pair) -> None:
    restarted.equip(IN, OUT)  # ring ids are never reused in a node's life; the machine does not need to know
    handle = DeviceObjectHandle(NEW, 1)
    loaded = ObjectLoaded(IN, EDGE_IN, INPUT_PORT, ObjectId(40), Sequence(0), 8, handle)
    restarted._take(loaded)
    bound = InputBinding(INPUT_PORT, ObjectId(40), Sequence(0), handle)
    assert restarted.tell(ExecuteStep(ROLE, StepId(1), (bound,), STEP.outputs, StepRuntime(0), True)) == []


def test_a_restart_that_was_told_before_it_began_is_refused_after(restarted: Pair) -> None:
    assert not restarted.ctl.accepts(ContinueRestart)
    assert not restarted.ctl.accepts(StartWorker)
