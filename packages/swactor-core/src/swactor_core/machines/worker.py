"""Worker process FSM (spec sections 29 to 31): which command is allowed when, and what it is answered.

Owns the tables of rings, device objects, the one role and the one step in flight. Must not know pipes,
memory, devices or model code: the harness (`swactor_core/worker`) performs the effects and reports results,
the ring machines report to this one, and everything the node hears is sent from here.
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.faults import (
    RingFaultReason,
    RoleFailure,
    StepFailure,
    UninstallReason,
    WorkerFatalReason,
    WorkerStoppedReason,
)
from swactor_core.fsm import Action, Machine, Outcome, Row, Send
from swactor_core.ids import Sequence
from swactor_core.machines.worker_effects import (
    ArenaAttached,
    ArenaSelected,
    AttachArena,
    BackendCreated,
    BeginOutput,
    BuildRole,
    ControlClosed,
    Crashed,
    CreateBackend,
    Exit,
    ExitCode,
    FinishOutput,
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
from swactor_core.machines.worker_holdings import CTL, HeldRing, Holdings, output_header
from swactor_core.machines.worker_refusals import (
    NewWork,
    misfit,
    out_of_range,
    release_refusal,
    step_refusal,
    while_draining,
)
from swactor_core.messages import (
    ConfigureRole,
    ExecuteStep,
    InitializeWorker,
    InstallRing,
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
    ReleaseDeviceObject,
    ResetRole,
    RingFault,
    RingQuiesced,
    RingReadable,
    RingWritable,
    RoleConfigured,
    RoleFailed,
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


class WorkerState(StrEnum):
    BOOTING = "Booting"
    INITIALIZING = "Initializing"
    RUNNING = "Running"
    DRAINING = "Draining"
    FATAL = "Fatal"


S = WorkerState
_LIVE = (S.BOOTING, S.INITIALIZING, S.RUNNING, S.DRAINING)


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
        Row(S.RUNNING, RingReadable, "_on_hint", (S.RUNNING,)),
        Row(S.RUNNING, RingWritable, "_on_hint", (S.RUNNING,)),
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
        Row(S.DRAINING, ConfigureRole, "_on_new_work", (S.DRAINING,)),
        Row(S.DRAINING, ResetRole, None, (S.DRAINING,)),
        Row(S.DRAINING, InstallRing, "_on_new_work", (S.DRAINING,)),
        Row(S.DRAINING, UninstallRing, "_on_uninstall", (S.DRAINING,)),
        Row(S.DRAINING, RingReadable, None, (S.DRAINING,)),
        Row(S.DRAINING, RingWritable, "_on_hint", (S.DRAINING,)),
        Row(S.DRAINING, ExecuteStep, "_on_new_work", (S.DRAINING,)),
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
        self._held = Holdings()
        self._abi = 0
        self._compute_seconds = 0.0
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
        return S.INITIALIZING, (CreateBackend(self._initialize.worker_generation, self._initialize.backend),)

    def _on_backend_created(self, event: BackendCreated, now: float) -> Outcome[WorkerState]:
        self._held.generation = generation = self._initialize.worker_generation
        return S.RUNNING, (Send(CTL, WorkerReady(self._pid, generation, self._abi, event.facts)),)

    def _on_initialize_failed(self, event: InitializeFailed, now: float) -> Outcome[WorkerState]:
        return self._fatal(event.reason, event.detail)

    # --- role ---

    def _on_configure(self, event: ConfigureRole, now: float) -> Outcome[WorkerState]:
        if self._held.role is not None:
            detail = f"role {self._held.role} is configured; one role at a time, reset it first"
            return S.RUNNING, (Send(CTL, RoleFailed(event.role_id, RoleFailure.CONFIG_INVALID, detail)),)
        return S.RUNNING, (BuildRole(event.role_id, event.config),)

    def _on_role_built(self, event: RoleBuilt, now: float) -> Outcome[WorkerState]:
        if self._held.role is not None:
            raise self.invalid(event)
        self._held.role = event.role_id
        return S.RUNNING, (Send(CTL, RoleConfigured(event.role_id, event.facts)),)

    def _on_role_rejected(self, event: RoleRejected, now: float) -> Outcome[WorkerState]:
        return S.RUNNING, (Send(CTL, RoleFailed(event.role_id, event.reason, event.detail)),)

    def _on_reset(self, event: ResetRole, now: float) -> Outcome[WorkerState]:
        if self._held.step is not None and event.role_id == self._held.role:
            # Its output allocation is still read; the node ends the step by uninstalling the egress ring.
            self._held.reset_later.append(event.role_id)
            return S.RUNNING, ()
        return S.RUNNING, self._held.reset(event.role_id)

    # --- rings ---

    def _on_install(self, event: InstallRing, now: float) -> Outcome[WorkerState]:
        complaint = misfit(self._held, event)
        if complaint:
            return self._malformed(complaint)
        self._held.rings[event.ring_id] = HeldRing(event)
        return S.RUNNING, (OpenRing(event),)

    def _on_ring_opened(self, event: RingOpened, now: float) -> Outcome[WorkerState]:
        if not self._held.is_opening(event.ring_id):
            raise self.invalid(event)
        ring = self._held.rings[event.ring_id]
        ring.open = True
        # A hint sent before this ring was known is gone, but its pending bit is still set: look once.
        return S.RUNNING, (Send(CTL, ring.installed()), WakeRing(event.ring_id))

    def _on_ring_refused(self, event: RingRefused, now: float) -> Outcome[WorkerState]:
        if not self._held.is_opening(event.ring_id):
            raise self.invalid(event)
        ring = self._held.rings.pop(event.ring_id)
        return S.RUNNING, (Send(CTL, ring.fault(event.reason, event.detail)),)

    def _on_uninstall(self, event: UninstallRing, now: float) -> Outcome[WorkerState]:
        if event.ring_id not in self._held.rings:
            return self.state, (Send(CTL, RingQuiesced(event.ring_id)),)
        # While draining, its RingQuiesced comes with the others.
        return self.state, () if self.state is S.DRAINING else (QuiesceRing(event),)

    def _on_hint(self, event: RingReadable | RingWritable, now: float) -> Outcome[WorkerState]:
        direction = RingDirection.INGRESS if isinstance(event, RingReadable) else RingDirection.EGRESS
        if not self._held.has_ring(event.ring_id, direction):
            self.stale_hints += 1
            return self.state, ()
        return self.state, (WakeRing(event.ring_id),)

    def _on_loaded(self, event: ObjectLoaded, now: float) -> Outcome[WorkerState]:
        self._held.objects[event.device_handle] = event
        return self.state, (Send(CTL, event),)

    def _on_object_failed(self, event: ObjectFailed, now: float) -> Outcome[WorkerState]:
        self._held.mark_faulted(event.ring_id)
        return self.state, (Send(CTL, event),)

    def _on_ring_fault(self, event: RingFault, now: float) -> Outcome[WorkerState]:
        self._held.mark_faulted(event.ring_id)
        actions: tuple[Action, ...] = (Send(CTL, event),)
        if self._held.writes_to(event.ring_id):
            copy = event.reason is RingFaultReason.DEVICE_COPY_FAILED
            reason = StepFailure.OUTPUT_COPY_FAILED if copy else StepFailure.INVALID_OUTPUT_RING
            actions += self._fail_step(reason, f"ring {event.ring_id}: {event.reason}: {event.detail}")
        return self.state, actions

    def _on_quiesced(self, event: RingQuiesced, now: float) -> Outcome[WorkerState]:
        if event.ring_id not in self._held.rings:
            raise self.invalid(event)
        del self._held.rings[event.ring_id]
        actions: tuple[Action, ...] = (Send(CTL, event),)
        if self._held.writes_to(event.ring_id):
            detail = f"ring {event.ring_id} was uninstalled before the output was out"
            actions = (*self._fail_step(StepFailure.INVALID_OUTPUT_RING, detail), *actions)
        if self._quiescing and not self._held.rings:
            actions += self._stopped()
        return self.state, actions

    # --- steps ---

    def _on_execute(self, event: ExecuteStep, now: float) -> Outcome[WorkerState]:
        if out_of_range(event):
            return self._malformed(f"ExecuteStep {event.step_id}: object id, extent or flags out of range")
        refusal = step_refusal(self._held, event)
        if refusal is not None:
            return S.RUNNING, (Send(CTL, StepFailed(event.role_id, event.step_id, *refusal)),)
        self._held.step = event
        bound = event.inputs[0]
        loaded = self._held.objects[bound.device_handle]
        run = RunStep(bound.device_handle, loaded.extent, bound.sequence, event.runtime.position)
        return S.RUNNING, (run,)

    def _on_computed(self, event: StepComputed, now: float) -> Outcome[WorkerState]:
        if self._held.step is None:
            raise self.invalid(event)
        out = self._held.step.outputs[0]
        if event.extent != out.extent:
            detail = f"the role returned {event.extent} bytes, the step declares {out.extent}"
            return S.RUNNING, self._fail_step(StepFailure.OUTPUT_EXTENT_INVALID, detail)
        self._compute_seconds = event.compute_seconds
        return S.RUNNING, (BeginOutput(out.ring_id, output_header(self._held.step)),)

    def _on_raised(self, event: StepRaised, now: float) -> Outcome[WorkerState]:
        if self._held.step is None:
            raise self.invalid(event)
        return S.RUNNING, self._fail_step(event.reason, event.detail)

    def _on_produced(self, event: ObjectProduced, now: float) -> Outcome[WorkerState]:
        step, ring = self._held.step, self._held.rings.get(event.ring_id)
        if step is None or ring is None or not self._held.writes_to(event.ring_id):
            raise self.invalid(event)
        ring.next_sequence = Sequence(event.sequence + 1)
        completed = StepCompleted(step.role_id, step.step_id, self._compute_seconds)
        if step.release_inputs_after:
            self._held.release_later.extend(bound.device_handle for bound in step.inputs)
        actions = (Send(CTL, event), Send(CTL, completed), *self._held.end_step())
        if self.state is S.DRAINING:
            actions += self._quiesce()
        return self.state, actions

    def _on_output_blocked(self, event: OutputBlocked, now: float) -> Outcome[WorkerState]:
        if not self._held.writes_to(event.ring_id):
            raise self.invalid(event)
        detail = f"ring {event.ring_id} has no room and the worker is shutting down"
        return S.DRAINING, self._fail_step(StepFailure.WORKER_SHUTTING_DOWN, detail)

    def _fail_step(self, reason: StepFailure, detail: str) -> tuple[Action, ...]:
        """The inputs of a failed step stay loaded: the node releases them, or ResetRole does."""
        actions = (self._held.step_failed(reason, detail), *self._held.end_step())
        return (*actions, *self._quiesce()) if self.state is S.DRAINING else actions

    # --- device objects ---

    def _on_release(self, event: ReleaseDeviceObject, now: float) -> Outcome[WorkerState]:
        handle = event.device_handle
        refused = release_refusal(self._held, handle)
        if refused is not None:
            return self.state, (Send(CTL, refused),)
        if self._held.reads(handle):
            self._held.release_later.append(handle)
            return self.state, ()
        return self.state, self._held.release(handle)

    # --- ends ---

    def _on_new_work(self, event: NewWork, now: float) -> Outcome[WorkerState]:
        return S.DRAINING, (Send(CTL, while_draining(event)),)

    def _on_shutdown(self, event: ShutdownWorker, now: float) -> Outcome[WorkerState]:
        self._stopping = event.mode
        if self._held.step is None:
            return S.DRAINING, self._quiesce()
        if event.mode is ShutdownMode.GRACEFUL:
            return S.DRAINING, (FinishOutput(self._held.step.outputs[0].ring_id),)
        return S.DRAINING, self._abort_step()

    def _on_shutdown_again(self, event: ShutdownWorker, now: float) -> Outcome[WorkerState]:
        if event.mode is ShutdownMode.GRACEFUL or self._stopping is ShutdownMode.ABORT_IN_FLIGHT:
            return S.DRAINING, ()
        self._stopping = event.mode
        return S.DRAINING, () if self._held.step is None else self._abort_step()

    def _abort_step(self) -> tuple[Action, ...]:
        failed = self._held.step_failed(StepFailure.WORKER_SHUTTING_DOWN, "the worker was told to abort")
        self._held.step = None
        # A copy may still read the step's output: the role is closed only after every ring is quiesced.
        return (failed, *self._quiesce())

    def _quiesce(self) -> tuple[Action, ...]:
        self._quiescing = True
        if not self._held.rings:
            return self._stopped()
        return tuple(QuiesceRing(UninstallRing(r, UninstallReason.WORKER_SHUTDOWN)) for r in self._held.rings)

    def _stopped(self) -> tuple[Action, ...]:
        assert self._stopping is not None
        reason = WorkerStoppedReason(self._stopping.value)
        return (*self._held.close(), Send(CTL, WorkerStopped(reason)), Exit(ExitCode.STOPPED))

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
