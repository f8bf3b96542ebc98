"""Worker process FSM (spec sections 29 to 31): which command is allowed when, and what it is answered.

Owns the tables of rings, device objects, the one role and the one step in flight. Must not know pipes,
memory, devices or model code: the harness (`swactor_core/worker`) performs the effects and reports results,
the ring machines report to this one, and everything the node hears is sent from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swactor_core.faults import (
    Component,
    ReleaseFailure,
    RingFaultReason,
    RoleFailure,
    StepFailure,
    UninstallReason,
    WorkerFatalReason,
    WorkerStoppedReason,
)
from swactor_core.fsm import Action, Machine, Outcome, Row, Send
from swactor_core.ids import DeviceObjectHandle, RingId, RoleId, Sequence, WorkerGeneration
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
    Address,
    ConfigureRole,
    DeviceObjectReleased,
    ExecuteStep,
    InitializeWorker,
    InstallRing,
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
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
    UninstallRing,
    WorkerFatal,
    WorkerReady,
    WorkerStopped,
)
from swactor_core.specs import RingDirection
from swactor_core.wire import HeaderRejected, ObjectHeader, check_object_header


class WorkerState(StrEnum):
    BOOTING = "Booting"
    INITIALIZING = "Initializing"
    RUNNING = "Running"
    DRAINING = "Draining"
    FATAL = "Fatal"


CTL = Address(Component.GPU_WORKER_CTL)
S = WorkerState
_LIVE = (S.BOOTING, S.INITIALIZING, S.RUNNING, S.DRAINING)


_FIRST = Sequence(0)


@dataclass(slots=True)
class _Ring:
    """`next_sequence` is that of the next output of an egress ring."""

    command: InstallRing
    open: bool = False
    faulted: bool = False
    next_sequence: Sequence = _FIRST


class WorkerMachine(Machine[WorkerState]):
    NAME = "Worker"
    INITIAL = S.BOOTING
    TABLE = (
        Row(S.BOOTING, InitializeWorker, "_on_initialize", (S.INITIALIZING,)),
        Row(S.BOOTING, ShutdownWorker, "_on_shutdown", (S.DRAINING,)),
        Row(S.INITIALIZING, ArenaSelected, "_on_arena_selected", (S.INITIALIZING, S.FATAL)),
        Row(S.INITIALIZING, ArenaAttached, "_on_arena_attached", (S.INITIALIZING,)),
        Row(S.INITIALIZING, BackendCreated, "_on_backend_created", (S.RUNNING,)),
        Row(S.INITIALIZING, InitializeFailed, "_on_initialize_failed", (S.FATAL,)),
        Row(S.RUNNING, ConfigureRole, "_on_configure", (S.RUNNING,)),
        Row(S.RUNNING, RoleBuilt, "_on_role_built", (S.RUNNING,)),
        Row(S.RUNNING, RoleRejected, "_on_role_rejected", (S.RUNNING,)),
        Row(S.RUNNING, ResetRole, "_on_reset", (S.RUNNING,)),
        Row(S.RUNNING, InstallRing, "_on_install", (S.RUNNING, S.FATAL)),
        Row(S.RUNNING, RingOpened, "_on_ring_opened", (S.RUNNING,)),
        Row(S.RUNNING, RingRefused, "_on_ring_refused", (S.RUNNING,)),
        Row(S.RUNNING, UninstallRing, "_on_uninstall", (S.RUNNING,)),
        Row(S.RUNNING, RingReadable, "_on_readable", (S.RUNNING,)),
        Row(S.RUNNING, RingWritable, "_on_writable", (S.RUNNING,)),
        Row(S.RUNNING, ExecuteStep, "_on_execute", (S.RUNNING, S.FATAL)),
        Row(S.RUNNING, StepComputed, "_on_computed", (S.RUNNING,)),
        Row(S.RUNNING, StepRaised, "_on_raised", (S.RUNNING,)),
        Row(S.RUNNING, ObjectLoaded, "_on_loaded", (S.RUNNING,)),
        Row(S.RUNNING, ObjectFailed, "_on_object_failed", (S.RUNNING,)),
        Row(S.RUNNING, ObjectProduced, "_on_produced", (S.RUNNING,)),
        Row(S.RUNNING, RingFault, "_on_ring_fault", (S.RUNNING,)),
        Row(S.RUNNING, RingQuiesced, "_on_quiesced", (S.RUNNING,)),
        Row(S.RUNNING, ReleaseDeviceObject, "_on_release", (S.RUNNING,)),
        Row(S.RUNNING, ShutdownWorker, "_on_shutdown", (S.DRAINING,)),
        # Draining: no new work, but what is in flight still reports.
        Row(S.DRAINING, ConfigureRole, "_on_configure_refused", (S.DRAINING,)),
        Row(S.DRAINING, ResetRole, None, (S.DRAINING,)),
        Row(S.DRAINING, InstallRing, "_on_install_refused", (S.DRAINING,)),
        Row(S.DRAINING, UninstallRing, "_on_uninstall_draining", (S.DRAINING,)),
        Row(S.DRAINING, RingReadable, None, (S.DRAINING,)),
        Row(S.DRAINING, RingWritable, "_on_writable", (S.DRAINING,)),
        Row(S.DRAINING, ExecuteStep, "_on_execute_refused", (S.DRAINING,)),
        Row(S.DRAINING, OutputBlocked, "_on_output_blocked", (S.DRAINING,)),
        Row(S.DRAINING, ObjectLoaded, "_on_loaded", (S.DRAINING,)),
        Row(S.DRAINING, ObjectFailed, "_on_object_failed", (S.DRAINING,)),
        Row(S.DRAINING, ObjectProduced, "_on_produced", (S.DRAINING,)),
        Row(S.DRAINING, RingFault, "_on_ring_fault", (S.DRAINING,)),
        Row(S.DRAINING, RingQuiesced, "_on_quiesced", (S.DRAINING,)),
        Row(S.DRAINING, ReleaseDeviceObject, "_on_release", (S.DRAINING,)),
        Row(S.DRAINING, ShutdownWorker, "_on_shutdown_again", (S.DRAINING,)),
        *(Row(state, MalformedCommand, "_on_malformed", (S.FATAL,)) for state in _LIVE),
        *(Row(state, Crashed, "_on_crashed", (S.FATAL,)) for state in _LIVE),
        *(Row(s, ControlClosed, "_on_control_lost", (S.FATAL,)) for s in _LIVE if s is not S.DRAINING),
        Row(S.DRAINING, ControlClosed, "_on_control_closed_draining", (S.DRAINING,)),
    )

    _initialize: InitializeWorker

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid
        self._worker_generation: WorkerGeneration | None = None
        self._abi = 0
        self._role: RoleId | None = None
        self._rings: dict[RingId, _Ring] = {}
        self._objects: dict[DeviceObjectHandle, ObjectLoaded] = {}
        self._step: ExecuteStep | None = None
        self._compute_seconds = 0.0
        self._release_later: list[DeviceObjectHandle] = []
        self._reset_later: list[RoleId] = []
        self._stopping: ShutdownMode | None = None
        self._quiescing = False
        self.stale_hints = 0

    # --- Booting and Initializing ---

    def _on_initialize(self, event: InitializeWorker, now: float) -> Outcome[WorkerState]:
        self._initialize = event
        return S.INITIALIZING, (SelectArena(),)

    def _on_arena_selected(self, event: ArenaSelected, now: float) -> Outcome[WorkerState]:
        required = self._initialize.required_ring_helper_abi
        if event.abi != required:
            detail = (
                f"the worker's ring helper has ABI {event.abi}, the node's {required}; install one version"
            )
            return self._fatal(WorkerFatalReason.RING_HELPER_ABI_MISMATCH, detail)
        self._abi = event.abi
        return S.INITIALIZING, (AttachArena(self._initialize.arena_ceiling),)

    def _on_arena_attached(self, event: ArenaAttached, now: float) -> Outcome[WorkerState]:
        command = self._initialize
        return S.INITIALIZING, (CreateBackend(command.worker_generation, command.backend),)

    def _on_backend_created(self, event: BackendCreated, now: float) -> Outcome[WorkerState]:
        self._worker_generation = generation = self._initialize.worker_generation
        return S.RUNNING, (Send(CTL, WorkerReady(self._pid, generation, self._abi, event.facts)),)

    def _on_initialize_failed(self, event: InitializeFailed, now: float) -> Outcome[WorkerState]:
        return self._fatal(event.reason, event.detail)

    # --- role ---

    def _on_configure(self, event: ConfigureRole, now: float) -> Outcome[WorkerState]:
        if self._role is not None:
            detail = f"role {self._role} is configured; one role at a time, reset it first"
            return S.RUNNING, (Send(CTL, RoleFailed(event.role_id, RoleFailure.CONFIG_INVALID, detail)),)
        return S.RUNNING, (BuildRole(event.role_id, event.config),)

    def _on_role_built(self, event: RoleBuilt, now: float) -> Outcome[WorkerState]:
        if self._role is not None:
            raise self.invalid(event)
        self._role = event.role_id
        return S.RUNNING, (Send(CTL, RoleConfigured(event.role_id)),)

    def _on_role_rejected(self, event: RoleRejected, now: float) -> Outcome[WorkerState]:
        return S.RUNNING, (Send(CTL, RoleFailed(event.role_id, event.reason, event.detail)),)

    def _on_configure_refused(self, event: ConfigureRole, now: float) -> Outcome[WorkerState]:
        failed = RoleFailed(event.role_id, RoleFailure.BACKEND_ERROR, "the worker is shutting down")
        return S.DRAINING, (Send(CTL, failed),)

    def _on_reset(self, event: ResetRole, now: float) -> Outcome[WorkerState]:
        if self._step is not None and event.role_id == self._role:
            # Its output allocation is still read; the node ends the step by uninstalling the egress ring.
            self._reset_later.append(event.role_id)
            return S.RUNNING, ()
        return S.RUNNING, self._reset(event.role_id)

    def _reset(self, role_id: RoleId) -> tuple[Action, ...]:
        if role_id != self._role:
            return (Send(CTL, RoleReset(role_id)),)
        self._role = None
        return (CloseRole(), *self._release_all(), Send(CTL, RoleReset(role_id)))

    # --- rings ---

    def _on_install(self, event: InstallRing, now: float) -> Outcome[WorkerState]:
        if event.ring_id in self._rings:
            return self._malformed(f"InstallRing names ring {event.ring_id}, which is installed")
        if event.layout.ring_id != event.ring_id:
            return self._malformed(f"InstallRing {event.ring_id} has the layout of {event.layout.ring_id}")
        self._rings[event.ring_id] = _Ring(event)
        return S.RUNNING, (OpenRing(event),)

    def _on_ring_opened(self, event: RingOpened, now: float) -> Outcome[WorkerState]:
        ring = self._rings.get(event.ring_id)
        if ring is None or ring.open:
            raise self.invalid(event)
        ring.open = True
        command = ring.command
        installed = RingInstalled(command.ring_id, command.edge_id, command.port_id)
        # A hint sent before this ring was known is gone, but its pending bit is still set: look once.
        return S.RUNNING, (Send(CTL, installed), WakeRing(event.ring_id))

    def _on_ring_refused(self, event: RingRefused, now: float) -> Outcome[WorkerState]:
        ring = self._rings.get(event.ring_id)
        if ring is None or ring.open:
            raise self.invalid(event)
        del self._rings[event.ring_id]
        command = ring.command
        fault = RingFault(command.ring_id, command.edge_id, command.port_id, event.reason, event.detail)
        return S.RUNNING, (Send(CTL, fault),)

    def _on_install_refused(self, event: InstallRing, now: float) -> Outcome[WorkerState]:
        reason, detail = RingFaultReason.WORKER_SHUTTING_DOWN, "the worker is shutting down"
        return S.DRAINING, (
            Send(CTL, RingFault(event.ring_id, event.edge_id, event.port_id, reason, detail)),
        )

    def _on_uninstall(self, event: UninstallRing, now: float) -> Outcome[WorkerState]:
        if event.ring_id not in self._rings:
            return S.RUNNING, (Send(CTL, RingQuiesced(event.ring_id)),)
        return S.RUNNING, (QuiesceRing(event),)

    def _on_uninstall_draining(self, event: UninstallRing, now: float) -> Outcome[WorkerState]:
        known = event.ring_id in self._rings  # its RingQuiesced comes with the others
        return S.DRAINING, () if known else (Send(CTL, RingQuiesced(event.ring_id)),)

    def _on_readable(self, event: RingReadable, now: float) -> Outcome[WorkerState]:
        return S.RUNNING, self._wake(event.ring_id, RingDirection.INGRESS)

    def _on_writable(self, event: RingWritable, now: float) -> Outcome[WorkerState]:
        return self.state, self._wake(event.ring_id, RingDirection.EGRESS)

    def _wake(self, ring_id: RingId, direction: RingDirection) -> tuple[Action, ...]:
        ring = self._rings.get(ring_id)
        if ring is None or ring.command.direction is not direction:
            self.stale_hints += 1
            return ()
        return (WakeRing(ring_id),)

    def _on_loaded(self, event: ObjectLoaded, now: float) -> Outcome[WorkerState]:
        self._objects[event.device_handle] = event
        return self.state, (Send(CTL, event),)

    def _on_object_failed(self, event: ObjectFailed, now: float) -> Outcome[WorkerState]:
        self._mark_faulted(event.ring_id)
        return self.state, (Send(CTL, event),)

    def _on_ring_fault(self, event: RingFault, now: float) -> Outcome[WorkerState]:
        self._mark_faulted(event.ring_id)
        actions: tuple[Action, ...] = (Send(CTL, event),)
        if self._step is not None and event.ring_id == self._step.outputs[0].ring_id:
            copy = event.reason is RingFaultReason.DEVICE_COPY_FAILED
            reason = StepFailure.OUTPUT_COPY_FAILED if copy else StepFailure.INVALID_OUTPUT_RING
            actions += self._fail_step(reason, f"ring {event.ring_id}: {event.reason}: {event.detail}")
        return self.state, actions

    def _mark_faulted(self, ring_id: RingId) -> None:
        ring = self._rings.get(ring_id)
        if ring is not None:
            ring.faulted = True

    def _on_quiesced(self, event: RingQuiesced, now: float) -> Outcome[WorkerState]:
        if event.ring_id not in self._rings:
            raise self.invalid(event)
        del self._rings[event.ring_id]
        actions: tuple[Action, ...] = (Send(CTL, event),)
        if self._step is not None and event.ring_id == self._step.outputs[0].ring_id:
            detail = f"ring {event.ring_id} was uninstalled before the output was out"
            actions = (*self._fail_step(StepFailure.INVALID_OUTPUT_RING, detail), *actions)
        if self._quiescing and not self._rings:
            actions += self._stopped()
        return self.state, actions

    # --- steps ---

    def _on_execute(self, event: ExecuteStep, now: float) -> Outcome[WorkerState]:
        for binding in event.outputs:
            if not (
                0 <= binding.object_id < 1 << 64 and 0 <= binding.flags < 1 << 32 and binding.extent >= 0
            ):
                return self._malformed(
                    f"ExecuteStep {event.step_id}: object id, extent or flags out of range"
                )
        refusal = self._refusal(event)
        if refusal is not None:
            return S.RUNNING, (Send(CTL, StepFailed(event.role_id, event.step_id, *refusal)),)
        self._step = event
        bound = event.inputs[0]
        loaded = self._objects[bound.device_handle]
        run = RunStep(bound.device_handle, loaded.extent, bound.sequence, event.runtime.position)
        return S.RUNNING, (run,)

    def _refusal(self, event: ExecuteStep) -> tuple[StepFailure, str] | None:
        if event.role_id != self._role:
            return StepFailure.ROLE_UNAVAILABLE, f"role {event.role_id} is not configured"
        if self._step is not None:
            return StepFailure.ROLE_UNAVAILABLE, f"step {self._step.step_id} is in flight"
        if len(event.inputs) != 1 or event.runtime.position < 0:
            return StepFailure.INVALID_INPUT_HANDLE, "a step takes one input at a position from 0 on"
        bound = event.inputs[0]
        handle = bound.device_handle
        if handle.worker_generation != self._worker_generation:
            detail = f"handle of generation {handle.worker_generation}, this is {self._worker_generation}"
            return StepFailure.INVALID_INPUT_HANDLE, detail
        loaded = self._objects.get(handle)
        if loaded is None:
            return StepFailure.INVALID_INPUT_HANDLE, f"no device object {handle.id}"
        said = (bound.port_id, bound.object_id, bound.sequence)
        if said != (loaded.port_id, loaded.object_id, loaded.sequence):
            detail = f"device object {handle.id} is object {loaded.object_id}, sequence {loaded.sequence}"
            return StepFailure.INVALID_INPUT_HANDLE, f"{detail}, on port {loaded.port_id}"
        if len(event.outputs) != 1:
            return StepFailure.INVALID_OUTPUT_RING, "a step has one output"
        out = event.outputs[0]
        ring = self._rings.get(out.ring_id)
        if ring is None or not ring.open or ring.command.direction is not RingDirection.EGRESS:
            return StepFailure.INVALID_OUTPUT_RING, f"ring {out.ring_id} is not an installed egress ring"
        if ring.faulted or ring.command.port_id != out.port_id:
            what = "faulted" if ring.faulted else f"of port {ring.command.port_id}"
            return StepFailure.INVALID_OUTPUT_RING, f"ring {out.ring_id} is {what}"
        if out.sequence != ring.next_sequence:
            detail = f"sequence {out.sequence} on ring {out.ring_id}, expected {ring.next_sequence}"
            return StepFailure.INVALID_OUTPUT_RING, detail
        try:
            check_object_header(_header(event), ring.command.object_spec, ring.next_sequence)
        except HeaderRejected as rejected:
            return StepFailure.OUTPUT_EXTENT_INVALID, str(rejected)
        return None

    def _on_computed(self, event: StepComputed, now: float) -> Outcome[WorkerState]:
        if self._step is None:
            raise self.invalid(event)
        out = self._step.outputs[0]
        if event.extent != out.extent:
            detail = f"the role returned {event.extent} bytes, the step declares {out.extent}"
            return S.RUNNING, self._fail_step(StepFailure.OUTPUT_EXTENT_INVALID, detail)
        self._compute_seconds = event.compute_seconds
        return S.RUNNING, (BeginOutput(out.ring_id, _header(self._step)),)

    def _on_raised(self, event: StepRaised, now: float) -> Outcome[WorkerState]:
        if self._step is None:
            raise self.invalid(event)
        return S.RUNNING, self._fail_step(event.reason, event.detail)

    def _on_execute_refused(self, event: ExecuteStep, now: float) -> Outcome[WorkerState]:
        reason, detail = StepFailure.WORKER_SHUTTING_DOWN, "the worker is shutting down"
        return S.DRAINING, (Send(CTL, StepFailed(event.role_id, event.step_id, reason, detail)),)

    def _on_produced(self, event: ObjectProduced, now: float) -> Outcome[WorkerState]:
        step, ring = self._step, self._rings.get(event.ring_id)
        if step is None or ring is None or event.ring_id != step.outputs[0].ring_id:
            raise self.invalid(event)
        ring.next_sequence = Sequence(event.sequence + 1)
        completed = StepCompleted(step.role_id, step.step_id, self._compute_seconds)
        if step.release_inputs_after:
            self._release_later.extend(bound.device_handle for bound in step.inputs)
        actions = (Send(CTL, event), Send(CTL, completed), *self._end_step())
        if self.state is S.DRAINING:
            actions += self._quiesce()
        return self.state, actions

    def _on_output_blocked(self, event: OutputBlocked, now: float) -> Outcome[WorkerState]:
        if self._step is None or event.ring_id != self._step.outputs[0].ring_id:
            raise self.invalid(event)
        detail = f"ring {event.ring_id} has no room and the worker is shutting down"
        return S.DRAINING, self._fail_step(StepFailure.WORKER_SHUTTING_DOWN, detail)

    def _fail_step(self, reason: StepFailure, detail: str) -> tuple[Action, ...]:
        """The inputs of a failed step stay loaded: the node releases them, or ResetRole does."""
        step = self._step
        assert step is not None
        actions = (Send(CTL, StepFailed(step.role_id, step.step_id, reason, detail)), *self._end_step())
        return (*actions, *self._quiesce()) if self.state is S.DRAINING else actions

    def _end_step(self) -> tuple[Action, ...]:
        self._step = None
        released, self._release_later = dict.fromkeys(self._release_later), []
        resets, self._reset_later = self._reset_later, []
        actions = tuple(a for handle in released for a in self._release(handle))
        return actions + tuple(a for role_id in resets for a in self._reset(role_id))

    # --- device objects ---

    def _on_release(self, event: ReleaseDeviceObject, now: float) -> Outcome[WorkerState]:
        handle = event.device_handle
        if handle not in self._objects:
            stale = handle.worker_generation != self._worker_generation
            reason = ReleaseFailure.STALE_GENERATION if stale else ReleaseFailure.UNKNOWN_HANDLE
            return self.state, (Send(CTL, ReleaseFailed(handle, reason)),)
        if self._step is not None and any(bound.device_handle == handle for bound in self._step.inputs):
            self._release_later.append(handle)
            return self.state, ()
        return self.state, self._release(handle)

    def _release(self, handle: DeviceObjectHandle) -> tuple[Action, ...]:
        del self._objects[handle]
        return FreeDeviceObject(handle), Send(CTL, DeviceObjectReleased(handle))

    def _release_all(self) -> tuple[Action, ...]:
        return tuple(a for handle in tuple(self._objects) for a in self._release(handle))

    # --- ends ---

    def _on_shutdown(self, event: ShutdownWorker, now: float) -> Outcome[WorkerState]:
        self._stopping = event.mode
        if self._step is None:
            return S.DRAINING, self._quiesce()
        if event.mode is ShutdownMode.GRACEFUL:
            return S.DRAINING, (FinishOutput(self._step.outputs[0].ring_id),)
        return S.DRAINING, self._abort_step()

    def _on_shutdown_again(self, event: ShutdownWorker, now: float) -> Outcome[WorkerState]:
        if event.mode is ShutdownMode.GRACEFUL or self._stopping is ShutdownMode.ABORT_IN_FLIGHT:
            return S.DRAINING, ()
        self._stopping = event.mode
        return S.DRAINING, () if self._step is None else self._abort_step()

    def _abort_step(self) -> tuple[Action, ...]:
        step = self._step
        assert step is not None
        self._step = None
        reason, detail = StepFailure.WORKER_SHUTTING_DOWN, "the worker was told to abort"
        # A copy may still read the step's output: the role is closed only after every ring is quiesced.
        return (Send(CTL, StepFailed(step.role_id, step.step_id, reason, detail)), *self._quiesce())

    def _quiesce(self) -> tuple[Action, ...]:
        self._quiescing = True
        if not self._rings:
            return self._stopped()
        return tuple(QuiesceRing(UninstallRing(r, UninstallReason.WORKER_SHUTDOWN)) for r in self._rings)

    def _stopped(self) -> tuple[Action, ...]:
        assert self._stopping is not None
        reason = WorkerStoppedReason(self._stopping.value)
        role = () if self._role is None else (CloseRole(),)
        backend = () if self._worker_generation is None else (*self._release_all(), CloseBackend())
        return (*role, *backend, Send(CTL, WorkerStopped(reason)), Exit(ExitCode.STOPPED))

    def _on_malformed(self, event: MalformedCommand, now: float) -> Outcome[WorkerState]:
        return self._malformed(event.detail)

    def _malformed(self, detail: str) -> Outcome[WorkerState]:
        return self._fatal(WorkerFatalReason.MALFORMED_CONTROL_MESSAGE, detail)

    def _on_crashed(self, event: Crashed, now: float) -> Outcome[WorkerState]:
        return self._fatal(WorkerFatalReason.UNHANDLED_EXCEPTION, event.detail)

    def _fatal(self, reason: WorkerFatalReason, detail: str) -> Outcome[WorkerState]:
        return S.FATAL, (Send(CTL, WorkerFatal(reason, detail)), Exit(ExitCode.FATAL))

    def _on_control_lost(self, event: ControlClosed, now: float) -> Outcome[WorkerState]:
        return S.FATAL, (Exit(ExitCode.CONTROL_LOST),)

    def _on_control_closed_draining(self, event: ControlClosed, now: float) -> Outcome[WorkerState]:
        return S.DRAINING, (Exit(ExitCode.STOPPED),)


def _header(step: ExecuteStep) -> ObjectHeader:
    out = step.outputs[0]
    return ObjectHeader(out.object_id, out.sequence, out.extent, out.flags)
