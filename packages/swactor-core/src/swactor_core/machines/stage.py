"""StageController (spec sections 14 to 16): one provisioned stage of one run, control path only.

Watches worker and edge events, issues one ExecuteStep at a time, reports to the orchestrator. Executes
sequence s only after loading inbound sequence s, and lets no output but that of s pass. Moves no payload and
opens no file: `OpenModel` asks its adapter for the worker's role configuration. Readiness and weight use are
its guarantees (spec section 39).
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason, RoleFailure
from swactor_core.fsm import Action, Emit, Machine, Outcome, Row, Send
from swactor_core.ids import RingId
from swactor_core.machines.bounds import teardown_timed_out
from swactor_core.machines.gates import ObjectConsumed, ProduceObject
from swactor_core.machines.provisioning import stage_edges
from swactor_core.machines.stage_effects import ModelFetch, ModelOpened, ModelRefused, OpenModel
from swactor_core.machines.stage_steps import STEP_FAULTS, StageSteps
from swactor_core.machines.stage_teardown import StageTeardown
from swactor_core.messages import (
    Address,
    ConfigureRole,
    DeviceObjectReleased,
    EdgeFailed,
    EdgeReady,
    EdgeStopped,
    LoadPhase,
    ObjectLoaded,
    ObjectProduced,
    ProvisionStage,
    ReleaseDeviceObject,
    ReleaseFailed,
    ResetRole,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    RoleReset,
    StageFault,
    StageProgress,
    StageReady,
    StageStats,
    StageStopped,
    StepCompleted,
    StepFailed,
    StopEdge,
    StopRun,
    TimerFired,
    WorkerCrashed,
)


class StageState(StrEnum):
    UNPROVISIONED = "Unprovisioned"
    PREPARING = "Preparing"
    READY = "Ready"
    EXECUTING = "Executing"
    FAULTED = "Faulted"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


S = StageState
ORCHESTRATOR = Address(Component.RUN)
ESTABLISHER = Address(Component.EDGE_ESTABLISHER)
WORKER = Address(Component.GPU_WORKER_CTL)
_LIVE = (S.PREPARING, S.READY, S.EXECUTING)
_LATE = (
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
_OF_LAST_STEP = (ObjectProduced, StepCompleted)
_ENDS = (EdgeStopped, RoleReset, WorkerCrashed)
_OfRole = RoleProgress | RoleConfigured | RoleFailed | RoleReset | StepCompleted | StepFailed


class StageController(Machine[StageState]):
    NAME = "StageController"
    INITIAL = S.UNPROVISIONED
    TABLE = (
        Row(S.UNPROVISIONED, ProvisionStage, "_provision", (S.PREPARING,)),
        Row(S.PREPARING, ModelFetch, "_fetching", (S.PREPARING,)),
        Row(S.PREPARING, ModelOpened, "_opened", (S.PREPARING,)),
        Row(S.PREPARING, ModelRefused, "_refused", (S.FAULTED,)),
        Row(S.PREPARING, RoleProgress, "_progress", (S.PREPARING,)),
        Row(S.PREPARING, RoleConfigured, "_configured", (S.PREPARING, S.READY)),
        Row(S.PREPARING, EdgeReady, "_edge_ready", (S.PREPARING, S.READY)),
        Row(S.PREPARING, ObjectLoaded, "_unexpected_object", (S.FAULTED,)),
        Row(S.READY, ObjectLoaded, "_loaded", (S.EXECUTING, S.FAULTED)),
        Row(S.READY, DeviceObjectReleased, None, (S.READY,)),
        Row(S.READY, ReleaseFailed, "_release_failed", (S.FAULTED,)),
        # StepCompleted comes straight from the worker, ObjectProduced through the Tx gate: in either order.
        Row(S.EXECUTING, ObjectProduced, "_produced", (S.EXECUTING, S.READY, S.FAULTED)),
        Row(S.EXECUTING, DeviceObjectReleased, None, (S.EXECUTING,)),
        Row(S.EXECUTING, ReleaseFailed, "_release_failed", (S.FAULTED,)),
        Row(S.EXECUTING, StepCompleted, "_completed", (S.EXECUTING, S.READY, S.FAULTED)),
        Row(S.EXECUTING, StepFailed, "_step_failed", (S.FAULTED, S.EXECUTING)),
        Row(S.EXECUTING, ObjectLoaded, "_unexpected_object", (S.FAULTED,)),
        # The worker outlives a run: words of an earlier run's role still come, and never concern this one.
        *(Row(state, RoleFailed, "_role_failed", (S.FAULTED, state)) for state in _LIVE),
        *(
            Row(state, message, "_unexpected_step", (S.FAULTED, state))
            for state in (S.PREPARING, S.READY)
            for message in (StepCompleted, StepFailed)
        ),
        *(Row(state, RoleReset, None, (state,)) for state in _LIVE),
        *(Row(state, late, None, (state,)) for state in _LIVE[1:] for late in (RoleProgress, RoleConfigured)),
        *(Row(S.PREPARING, late, None, (S.PREPARING,)) for late in (DeviceObjectReleased, ReleaseFailed)),
        *(Row(state, EdgeFailed, "_edge_failed", (S.FAULTED,)) for state in _LIVE),
        *(Row(state, EdgeStopped, "_edge_stopped_early", (S.FAULTED,)) for state in _LIVE),
        *(Row(state, WorkerCrashed, "_crashed", (S.FAULTED,)) for state in _LIVE),
        *(Row(state, StopRun, "_stop", (S.STOPPING,)) for state in (*_LIVE, S.FAULTED)),
        *(Row(S.FAULTED, late, None, (S.FAULTED,)) for late in _LATE),
        Row(S.FAULTED, WorkerCrashed, "_note", (S.FAULTED,)),
        Row(S.FAULTED, RoleReset, None, (S.FAULTED,)),
        Row(S.FAULTED, EdgeStopped, "_note", (S.FAULTED,)),
        # What the last step brought is on its way to the next stage before the worker says so.
        Row(S.STOPPING, ObjectProduced, "_produced_late", (S.STOPPING,)),
        Row(S.STOPPING, StepCompleted, "_completed_late", (S.STOPPING,)),
        *(Row(S.STOPPING, late, None, (S.STOPPING,)) for late in _LATE if late not in _OF_LAST_STEP),
        *(Row(S.STOPPING, end, "_ended", (S.STOPPING, S.STOPPED)) for end in _ENDS),
        Row(S.STOPPING, TimerFired, "_teardown_timeout", (S.STOPPED,)),
        Row(S.STOPPING, StopRun, None, (S.STOPPING,)),
        *(Row(S.STOPPED, late, None, (S.STOPPED,)) for late in (*_LATE, StopRun)),
        *(Row(S.STOPPED, end, "_proved_late", (S.STOPPED,)) for end in _ENDS),
    )

    def __init__(self, *, teardown_bound: float) -> None:
        super().__init__()
        self._teardown_bound = teardown_bound
        self._provision_: ProvisionStage | None = None
        self._output_ring: RingId | None = None
        self._ready_edges: set[int] = set()
        self._weights_ready = False
        self._steps = StageSteps()
        self._teardown = StageTeardown()
        self.foreign_messages = 0

    @property
    def stats(self) -> StageStats:
        return self._steps.stats

    @property
    def provisioned(self) -> ProvisionStage:
        assert self._provision_ is not None
        return self._provision_

    # --- preparing ---

    def _provision(self, event: ProvisionStage, now: float) -> Outcome[StageState]:
        self._provision_ = event
        self._teardown.ends.edges = frozenset({event.inbound.edge_id, event.outbound.edge_id})
        rx, tx = stage_edges(event)
        return S.PREPARING, (
            Emit(EventName.STAGE_PROVISION_STARTED, {}),
            Emit(EventName.WEIGHTS_DOWNLOAD_STARTED, {}),
            OpenModel(event),
            Send(ESTABLISHER, rx),
            Send(ESTABLISHER, tx),
        )

    def _fetching(self, event: ModelFetch, now: float) -> Outcome[StageState]:
        return S.PREPARING, (self._progress_report(LoadPhase.DOWNLOAD, event.done, event.total),)

    def _opened(self, event: ModelOpened, now: float) -> Outcome[StageState]:
        self._teardown.role_touched = True
        return S.PREPARING, (
            Emit(EventName.WEIGHTS_DOWNLOADED, {}),
            Send(WORKER, ConfigureRole(self.provisioned.runtime.role_id, event.config)),
        )

    def _refused(self, event: ModelRefused, now: float) -> Outcome[StageState]:
        return self._fault(FaultReason.WEIGHT_LOAD_FAILED, cause=str(event.cause), detail=event.detail)

    def _of_this_run(self, event: _OfRole) -> bool:
        ours = self._teardown.role_touched and event.role_id == self.provisioned.runtime.role_id
        if not ours:
            self.foreign_messages += 1
        return ours

    def _progress(self, event: RoleProgress, now: float) -> Outcome[StageState]:
        if not self._of_this_run(event):
            return S.PREPARING, ()
        return S.PREPARING, (self._progress_report(event.phase, event.done, event.total),)

    def _progress_report(self, phase: LoadPhase, done: int, total: int) -> Send:
        plan = self.provisioned
        return Send(ORCHESTRATOR, StageProgress(plan.run_id, plan.stage_index, phase, done, total))

    def _configured(self, event: RoleConfigured, now: float) -> Outcome[StageState]:
        if not self._of_this_run(event):
            return S.PREPARING, ()
        self._weights_ready = True
        self._steps.configured(event)
        target, actions = self._if_ready()
        return target, (Emit(EventName.WEIGHTS_LOADED, dict(event.facts)), *actions)

    def _edge_ready(self, event: EdgeReady, now: float) -> Outcome[StageState]:
        self._ready_edges.add(event.edge_id)
        if event.edge_id == self.provisioned.outbound.edge_id:
            self._output_ring = event.ring_id
        return self._if_ready()

    def _if_ready(self) -> Outcome[StageState]:
        plan = self.provisioned
        if not self._weights_ready or self._ready_edges != self._teardown.ends.edges:
            return S.PREPARING, ()
        ready = StageReady(plan.run_id, plan.stage_index)
        return S.READY, (Emit(EventName.STAGE_READY, {}), Send(ORCHESTRATOR, ready))

    def _role_failed(self, event: RoleFailed, now: float) -> Outcome[StageState]:
        if not self._of_this_run(event):
            return self.state, ()
        out_of_memory = event.reason is RoleFailure.DEVICE_OUT_OF_MEMORY
        reason = FaultReason.DEVICE_OUT_OF_MEMORY if out_of_memory else FaultReason.WEIGHT_LOAD_FAILED
        return self._fault(reason, cause=str(event.reason), detail=event.detail, component=Component.WORKER)

    # --- executing ---

    def _loaded(self, event: ObjectLoaded, now: float) -> Outcome[StageState]:
        if event.sequence != self._steps.expected:
            return self._unexpected_object(event, now)
        assert self._output_ring is not None
        outbound = self.provisioned.outbound.edge_id
        step = self._steps.begin(self.provisioned, event, self._output_ring)
        return S.EXECUTING, (
            *self._steps.begun(event),
            Send(WORKER, step),  # first: the worker wakes up while the gate hears of it
            Send(Address(Component.TX_EDGE, outbound), ProduceObject(outbound)),
        )

    def _produced(self, event: ObjectProduced, now: float) -> Outcome[StageState]:
        if not self._steps.is_output(event):
            detail = (
                f"object {event.object_id} of sequence {event.sequence} was produced, no step asked for it"
            )
            return self._fault(FaultReason.SEQUENCE_VIOLATION, detail=detail, component=Component.WORKER)
        produced, completion = self._steps.output(event), self._steps.completion
        if completion is None:
            return S.EXECUTING, (produced,)
        return S.READY, (produced, *self._step_done(completion))

    def _completed(self, event: StepCompleted, now: float) -> Outcome[StageState]:
        if not self._of_this_run(event):
            return S.EXECUTING, ()
        if event.step_id != self._steps.step_id:
            detail = f"step {event.step_id} completed, step {self._steps.step_id} was running"
            return self._fault(FaultReason.STEP_FAILED, detail=detail, component=Component.WORKER)
        if not self._steps.produced:
            self._steps.completion = event
            return S.EXECUTING, ()
        return S.READY, self._step_done(event)

    def _step_done(self, event: StepCompleted) -> tuple[Action, ...]:
        edge_id = self.provisioned.inbound.edge_id
        consumed = Send(Address(Component.RX_EDGE, edge_id), ObjectConsumed(edge_id))
        return self._steps.end(event), consumed

    def _unexpected_step(self, event: StepCompleted | StepFailed, now: float) -> Outcome[StageState]:
        if not self._of_this_run(event):
            return self.state, ()
        detail = f"{type(event).__name__} of step {event.step_id}, no step was running"
        return self._fault(FaultReason.STEP_FAILED, detail=detail, component=Component.WORKER)

    def _unexpected_object(self, event: ObjectLoaded, now: float) -> Outcome[StageState]:
        expected = self._steps.expected
        detail = f"object of sequence {event.sequence} while {self.state}, next expected is {expected}"
        return self._fault(FaultReason.SEQUENCE_VIOLATION, detail=detail)

    def _release_failed(self, event: ReleaseFailed, now: float) -> Outcome[StageState]:
        return self._fault(
            FaultReason.STEP_FAILED, cause=str(event.reason), detail="input handle not released"
        )

    def _step_failed(self, event: StepFailed, now: float) -> Outcome[StageState]:
        if not self._of_this_run(event):
            return S.EXECUTING, ()
        reason = STEP_FAULTS.get(event.reason, FaultReason.STEP_FAILED)
        return self._fault(reason, cause=str(event.reason), detail=event.detail, component=Component.WORKER)

    # --- faults ---

    def _edge_failed(self, event: EdgeFailed, now: float) -> Outcome[StageState]:
        return self._faulted(event.fault)

    def _edge_stopped_early(self, event: EdgeStopped, now: float) -> Outcome[StageState]:
        self._teardown.note(event)
        return self._fault(FaultReason.STREAM_FAULT, detail=f"edge {event.edge_id} stopped during the run")

    def _crashed(self, event: WorkerCrashed, now: float) -> Outcome[StageState]:
        self._teardown.note(event)
        if event.fatal is not None:
            fatal, component = FaultReason.WORKER_FATAL, Component.WORKER
            detail = event.detail.removeprefix(f"{event.fatal}: ")
            return self._fault(fatal, cause=str(event.fatal), detail=detail, component=component)
        crashed, component = FaultReason.WORKER_CRASHED, Component.GPU_WORKER_CTL
        return self._fault(crashed, cause=event.cause, detail=event.detail, component=component)

    def _note(self, event: EdgeStopped | RoleReset | WorkerCrashed, now: float) -> Outcome[StageState]:
        if not isinstance(event, RoleReset) or self._of_this_run(event):
            self._teardown.note(event)
        return self.state, ()

    def _fault(
        self,
        reason: FaultReason,
        *,
        cause: str = "",
        detail: str = "",
        component: Component = Component.STAGE_CONTROLLER,
    ) -> Outcome[StageState]:
        return self._faulted(Fault(reason, component, detail, cause))

    def _faulted(self, fault: Fault) -> Outcome[StageState]:
        plan = self.provisioned
        placed = replace(fault, stage_index=plan.stage_index)
        return S.FAULTED, (
            Emit(EventName.STAGE_FAULTED, placed.fields()),
            Send(ORCHESTRATOR, StageFault(plan.run_id, plan.stage_index, placed)),
        )

    # --- stopping (spec section 38) ---

    def _stop(self, event: StopRun, now: float) -> Outcome[StageState]:
        plan = self.provisioned
        inbound, outbound = plan.inbound.edge_id, plan.outbound.edge_id
        release: tuple[Action, ...] = ()
        if self._steps.input is not None and not self._teardown.role_gone and self.state is S.FAULTED:
            release = (Send(WORKER, ReleaseDeviceObject(self._steps.input.device_handle)),)
        reset = (Send(WORKER, ResetRole(plan.runtime.role_id)),) if self._teardown.waits_for_role else ()
        return S.STOPPING, (
            Send(Address(Component.RX_EDGE, inbound), StopEdge(inbound)),
            Send(Address(Component.TX_EDGE, outbound), StopEdge(outbound)),
            *release,
            *reset,
            self.set_timer("teardown", now + self._teardown_bound),
            *self._check_self(),
        )

    def _produced_late(self, event: ObjectProduced, now: float) -> Outcome[StageState]:
        return S.STOPPING, self._steps.late_output(event)

    def _completed_late(self, event: StepCompleted, now: float) -> Outcome[StageState]:
        ours = self._of_this_run(event) and event.step_id == self._steps.step_id
        return S.STOPPING, self._steps.late_end(event) if ours else ()

    def _ended(self, event: EdgeStopped | RoleReset | WorkerCrashed, now: float) -> Outcome[StageState]:
        self._note(event, now)
        return self._if_stopped()

    def _check_self(self) -> tuple[Action, ...]:
        """Everything may have stopped before StopRun came: then this EdgeStopped, told again, ends it."""
        said = self._teardown.ends.said(self.provisioned.inbound.edge_id)
        return () if said is None else (Send(Address(Component.STAGE_CONTROLLER), said),)

    def _if_stopped(self) -> Outcome[StageState]:
        if not self._teardown.complete:
            return S.STOPPING, ()
        return S.STOPPED, (*self.cancel_timer("teardown"), *self._stopped())

    def _teardown_timeout(self, event: TimerFired, now: float) -> Outcome[StageState]:
        missing = self._teardown.give_up(self._teardown_bound)
        timed_out = teardown_timed_out(Component.STAGE_CONTROLLER, missing)
        return S.STOPPED, (timed_out, *self._stopped())

    def _proved_late(self, event: EdgeStopped | RoleReset | WorkerCrashed, now: float) -> Outcome[StageState]:
        before = len(self._teardown.unproven)
        self._note(event, now)
        return S.STOPPED, (self._report(),) if len(self._teardown.unproven) < before else ()

    def _stopped(self) -> tuple[Action, ...]:
        return Emit(EventName.STAGE_STOPPED, {"unproven": list(self._teardown.unproven)}), self._report()

    def _report(self) -> Send:
        plan, unproven = self.provisioned, self._teardown.unproven
        return Send(ORCHESTRATOR, StageStopped(plan.run_id, plan.stage_index, self._steps.stats, unproven))
