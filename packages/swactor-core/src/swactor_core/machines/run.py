"""The run (spec section 13): the only component that decides the one terminal outcome.

Plans once, provisions in parallel, passes the readiness barrier, injects sequence k + 1 only after consuming
token k, and tears down after every end. Links, processes and membership give evidence; nothing else decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Action, Effect, Emit, Machine, Outcome, Row, Send
from swactor_core.ids import INPUT_PORT, OUTPUT_PORT, NodeId, RoleId, RunId, Sequence, StageIndex, node_hex
from swactor_core.machines.pool import PlanCommitted, PoolAborted, PoolReady
from swactor_core.messages import (
    Address,
    EndpointsFailed,
    EndpointsReady,
    EndpointsStopped,
    InboundEdgeProvision,
    InjectTokens,
    NodeAvailable,
    NodeFaulted,
    NodeLost,
    OperatorStop,
    OutboundEdgeProvision,
    ProvisionRx,
    ProvisionStage,
    ProvisionTx,
    StageFault,
    StageModelFacts,
    StageProgress,
    StageReady,
    StageRuntimeFacts,
    StageStats,
    StageStopped,
    StopEndpoints,
    StopRun,
    TimerFired,
    TokenReceived,
)
from swactor_core.plan import EdgeKind, EdgePlan, RunPlan, StagePlan
from swactor_core.specs import RingDirection


class RunState(StrEnum):
    PLANNING = "Planning"
    PROVISIONING = "Provisioning"
    WAITING_READY = "WaitingReady"
    RUNNING = "Running"
    COMPLETED = "Completed"
    FAULTED = "Faulted"
    OPERATOR_STOPPED = "OperatorStopped"
    TEARING_DOWN = "TearingDown"
    DONE = "Done"


class RunOutcome(StrEnum):
    COMPLETED = "completed"
    FAULTED = "faulted"
    OPERATOR_STOPPED = "operator-stopped"


@dataclass(frozen=True, slots=True)
class RunBounds:
    """Seconds: from provisioning to the barrier, for one token, for teardown."""

    readiness: float = 900.0
    execution: float = 300.0
    teardown: float = 15.0


@dataclass(frozen=True, slots=True)
class PlanBuilt:
    plan: RunPlan


@dataclass(frozen=True, slots=True)
class PlanFailed:
    detail: str


@dataclass(frozen=True, slots=True)
class Continue:
    """Self-sent: leaves a state that is only passed through."""


@dataclass(frozen=True, slots=True)
class BuildPlan(Effect):
    nodes: tuple[NodeAvailable, ...]


@dataclass(frozen=True, slots=True)
class OpenEndpoints(Effect):
    """Provision the orchestrator's two token edges."""

    token_in: ProvisionTx
    token_out: ProvisionRx


@dataclass(frozen=True, slots=True)
class DeliverToken(Effect):
    """A token for whoever asked for the run."""

    sequence: Sequence
    token_id: int


@dataclass(frozen=True, slots=True)
class ReportProgress(Effect):
    """For people: what a stage is doing before the barrier."""

    progress: StageProgress


@dataclass(frozen=True, slots=True)
class RunMoved(Effect):
    """For people: the run has entered this state."""

    state: RunState


@dataclass(frozen=True, slots=True)
class FinishRun(Effect):
    """The run is Done; this is its one outcome."""

    outcome: RunOutcome
    fault: Fault | None
    stats: tuple[tuple[StageIndex, StageStats], ...]
    unproven: tuple[str, ...]


S = RunState
ME = Address(Component.RUN)
POOL = Address(Component.POOL)
ENDPOINT = Address(Component.TOKEN_ENDPOINT)
_BEFORE = (S.PLANNING, S.PROVISIONING)
_ACTIVE = (S.PLANNING, S.PROVISIONING, S.WAITING_READY, S.RUNNING)
_PASSED = (S.COMPLETED, S.FAULTED, S.OPERATOR_STOPPED)
_EVIDENCE = (NodeLost, NodeFaulted, EndpointsFailed, PoolAborted)
_OF_STAGES = (StageReady, StageFault, StageProgress, StageStopped)


class Run(Machine[RunState]):
    NAME = "Run"
    INITIAL = S.PLANNING
    TABLE = (
        Row(S.PLANNING, PoolReady, "_pool_ready", (S.PLANNING,)),
        Row(S.PLANNING, PlanBuilt, "_planned", (S.PROVISIONING,)),
        Row(S.PLANNING, PlanFailed, "_plan_failed", (S.FAULTED,)),
        Row(S.PROVISIONING, Continue, "_provision", (S.WAITING_READY,)),
        Row(S.WAITING_READY, StageReady, "_stage_ready", (S.WAITING_READY, S.RUNNING)),
        Row(S.WAITING_READY, EndpointsReady, "_endpoints_ready", (S.WAITING_READY, S.RUNNING)),
        Row(S.WAITING_READY, StageProgress, "_progress", (S.WAITING_READY,)),
        Row(S.WAITING_READY, TimerFired, "_readiness_timeout", (S.FAULTED,)),
        Row(S.RUNNING, TokenReceived, "_token", (S.RUNNING, S.COMPLETED, S.FAULTED)),
        Row(S.RUNNING, TimerFired, "_execution_timeout", (S.FAULTED,)),
        *(Row(S.RUNNING, late, None, (S.RUNNING,)) for late in (StageProgress, StageReady, EndpointsReady)),
        *(Row(state, evidence, "_evidence", (S.FAULTED,)) for state in _ACTIVE for evidence in _EVIDENCE),
        # Before provisioning no stage is this run's: what speaks is left over from an earlier orchestrator.
        *(Row(state, message, "_foreign", (state,)) for state in _BEFORE for message in _OF_STAGES),
        *(
            Row(state, message, "_stage_ended", (state, S.FAULTED))
            for state in (S.WAITING_READY, S.RUNNING)
            for message in (StageFault, StageStopped)
        ),
        # A pool that was lost and found again while the plan was made: the first plan stands.
        *(
            Row(state, late, None, (state,))
            for state in (S.PROVISIONING, S.WAITING_READY, S.RUNNING)
            for late in (PoolReady, PlanBuilt, PlanFailed)
        ),
        *(Row(state, OperatorStop, "_operator_stop", (S.OPERATOR_STOPPED,)) for state in _ACTIVE),
        Row(S.COMPLETED, Continue, "_tear_down", (S.TEARING_DOWN,)),  # it has edges, at least
        *(
            Row(state, Continue, "_tear_down", (S.TEARING_DOWN, S.DONE))
            for state in (S.FAULTED, S.OPERATOR_STOPPED)
        ),
        *(
            Row(state, late, None, (state,))
            for state in (*_PASSED, S.TEARING_DOWN)
            for late in (
                NodeFaulted,
                EndpointsFailed,
                PoolAborted,
                PoolReady,
                PlanBuilt,
                PlanFailed,
                OperatorStop,
                StageReady,
                StageFault,
                StageProgress,
                EndpointsReady,
                TokenReceived,
            )
        ),
        *(Row(state, StageStopped, "_note_stopped", (state,)) for state in _PASSED),
        *(Row(state, NodeLost, "_note_lost", (state,)) for state in _PASSED),
        # A fault between PlanBuilt and its Continue leaves two of them in the queue.
        *(Row(state, Continue, None, (state,)) for state in (S.TEARING_DOWN, S.DONE)),
        Row(S.TEARING_DOWN, NodeLost, "_lost_tearing_down", (S.TEARING_DOWN, S.DONE)),
        Row(S.TEARING_DOWN, StageStopped, "_stage_stopped", (S.TEARING_DOWN, S.DONE)),
        Row(S.TEARING_DOWN, EndpointsStopped, "_endpoints_stopped", (S.TEARING_DOWN, S.DONE)),
        Row(S.TEARING_DOWN, TimerFired, "_teardown_timeout", (S.DONE,)),
        *(
            Row(S.DONE, late, None, (S.DONE,))
            for late in (
                *_EVIDENCE,
                OperatorStop,
                PoolReady,
                PlanBuilt,
                PlanFailed,
                *_OF_STAGES,
                EndpointsReady,
                EndpointsStopped,
                TokenReceived,
            )
        ),
    )

    def __init__(self, run_id: RunId, *, bounds: RunBounds, prefill_chunk: int) -> None:
        super().__init__()
        self.run_id = run_id
        self.outcome: RunOutcome | None = None
        self.fault: Fault | None = None
        self.tokens: list[int] = []
        self.plan: RunPlan | None = None
        self.foreign_messages = 0
        self._planning = False
        self._bounds = bounds
        self._prefill_chunk = prefill_chunk
        self._ready: set[StageIndex] = set()
        self._fetched: dict[StageIndex, int] = {}
        self._endpoints = False
        self._endpoints_opened = False
        self._endpoints_stopped_ = False
        self._provisioned: dict[StageIndex, NodeId] = {}
        self._gone: set[NodeId] = set()
        self._stopped: dict[StageIndex, StageStopped] = {}
        self._unproven: tuple[str, ...] = ()

    def _planned_run(self) -> RunPlan:
        assert self.plan is not None
        return self.plan

    # --- to the barrier ---

    def _pool_ready(self, event: PoolReady, now: float) -> Outcome[RunState]:
        if self._planning:
            return S.PLANNING, ()
        self._planning = True
        return S.PLANNING, (BuildPlan(event.nodes),)

    def _planned(self, event: PlanBuilt, now: float) -> Outcome[RunState]:
        self.plan = event.plan
        stages = [
            {
                "stage_index": s.stage_index,
                "node_id": node_hex(s.node_id),
                "layers": [s.layer_start, s.layer_end_exclusive],
            }
            for s in event.plan.stages
        ]
        return S.PROVISIONING, (
            Emit(EventName.RUN_PLANNED, {"stages": stages, "edges": [e.edge_id for e in event.plan.edges]}),
            Send(POOL, PlanCommitted()),
            RunMoved(S.PROVISIONING),
            Send(ME, Continue()),
        )

    def _plan_failed(self, event: PlanFailed, now: float) -> Outcome[RunState]:
        return self._fail(Fault(FaultReason.PLAN_INVALID, Component.PLANNER, event.detail))

    def _provision(self, event: Continue, now: float) -> Outcome[RunState]:
        plan = self._planned_run()
        edges = {edge.edge_id: edge for edge in plan.edges}
        token_in = next(e for e in plan.edges if e.kind is EdgeKind.TOKEN_IN)
        token_out = next(e for e in plan.edges if e.kind is EdgeKind.TOKEN_OUT)
        sends = []
        for stage in plan.stages:
            self._provisioned[stage.stage_index] = stage.node_id
            message = _provision_stage(
                plan, stage, edges[stage.inbound_edge], edges[stage.outbound_edge], self._prefill_chunk
            )
            sends.append(Send(Address(Component.NODE, stage.node_id), message))
        self._endpoints_opened = True
        opened = OpenEndpoints(
            ProvisionTx(
                token_in.edge_id,
                OUTPUT_PORT,
                token_in.consumer.node_id,
                token_in.object_spec,
                token_in.ring_spec(RingDirection.EGRESS),
            ),
            ProvisionRx(
                token_out.edge_id,
                INPUT_PORT,
                token_out.producer.node_id,
                token_out.object_spec,
                token_out.ring_spec(RingDirection.INGRESS),
            ),
        )
        bound = self.set_timer("bound", now + self._bounds.readiness)
        return S.WAITING_READY, (*sends, opened, bound, RunMoved(S.WAITING_READY))

    def _of_this_run(self, event: StageReady | StageFault | StageProgress | StageStopped) -> bool:
        ours = event.run_id == self.run_id and event.stage_index in self._provisioned
        if not ours:
            self.foreign_messages += 1
        return ours

    def _foreign(self, event: object, now: float) -> Outcome[RunState]:
        self.foreign_messages += 1
        return self.state, ()

    def _progress(self, event: StageProgress, now: float) -> Outcome[RunState]:
        if not self._of_this_run(event):
            return S.WAITING_READY, ()
        if event.phase != "download" or event.done <= self._fetched.get(event.stage_index, 0):
            return S.WAITING_READY, (ReportProgress(event),)
        # A large model may take longer to come than any bound for getting ready: the bound is for silence.
        self._fetched[event.stage_index] = event.done
        bound = self.set_timer("bound", now + self._bounds.readiness)
        return S.WAITING_READY, (ReportProgress(event), bound)

    def _stage_ready(self, event: StageReady, now: float) -> Outcome[RunState]:
        if not self._of_this_run(event):
            return S.WAITING_READY, ()
        self._ready.add(event.stage_index)
        ready = StageProgress(event.run_id, event.stage_index, "ready", 1, 1)
        target, actions = self._if_ready(now)
        return target, (ReportProgress(ready), *actions)

    def _endpoints_ready(self, event: EndpointsReady, now: float) -> Outcome[RunState]:
        self._endpoints = True
        return self._if_ready(now)

    def _if_ready(self, now: float) -> Outcome[RunState]:
        plan = self._planned_run()
        if not self._endpoints or self._ready != {s.stage_index for s in plan.stages}:
            return S.WAITING_READY, ()
        return S.RUNNING, (
            Emit(EventName.READINESS_BARRIER_PASSED, {}),
            Emit(EventName.PROMPT_INJECTED, {"sequence": 0, "tokens": len(plan.runtime.prompt)}),
            RunMoved(S.RUNNING),
            Send(ENDPOINT, InjectTokens(Sequence(0), plan.runtime.prompt)),
            self.set_timer("bound", now + self._bounds.execution),
        )

    def _readiness_timeout(self, event: TimerFired, now: float) -> Outcome[RunState]:
        missing = sorted({s.stage_index for s in self._planned_run().stages} - self._ready)
        what = f"stages {missing}" if missing else "the token edges"
        detail = f"{what} not ready within {self._bounds.readiness:g} s"
        return self._fail(Fault(FaultReason.READINESS_TIMEOUT, Component.RUN, detail))

    # --- running ---

    def _token(self, event: TokenReceived, now: float) -> Outcome[RunState]:
        plan = self._planned_run()
        if event.sequence != len(self.tokens):
            detail = f"token of sequence {event.sequence}, expected {len(self.tokens)}"
            return self._fail(Fault(FaultReason.SEQUENCE_VIOLATION, Component.RUN, detail))
        self.tokens.append(event.token_id)
        received: tuple[Action, ...] = (
            Emit(EventName.TOKEN_RECEIVED, {"sequence": event.sequence, "token_id": event.token_id}),
            DeliverToken(event.sequence, event.token_id),
        )
        if event.token_id in plan.model.end_of_generation or len(self.tokens) >= plan.max_tokens:
            self.outcome = RunOutcome.COMPLETED
            fields = {"tokens": len(self.tokens)}
            return S.COMPLETED, (
                *received,
                *self.cancel_timer("bound"),
                Emit(EventName.RUN_COMPLETED, fields),
                RunMoved(S.COMPLETED),
                Send(ME, Continue()),
            )
        return S.RUNNING, (
            *received,
            Send(ENDPOINT, InjectTokens(Sequence(event.sequence + 1), (event.token_id,))),
            self.set_timer("bound", now + self._bounds.execution),
        )

    def _execution_timeout(self, event: TimerFired, now: float) -> Outcome[RunState]:
        detail = f"no token of sequence {len(self.tokens)} within {self._bounds.execution:g} s"
        return self._fail(Fault(FaultReason.EXECUTION_TIMEOUT, Component.RUN, detail))

    # --- the other two outcomes ---

    def _evidence(self, event: object, now: float) -> Outcome[RunState]:
        match event:
            case EndpointsFailed() | PoolAborted() | NodeFaulted():
                return self._fail(event.fault)
            case NodeLost():
                self._gone.add(event.node_id)
                stage = next((i for i, n in self._provisioned.items() if n == event.node_id), None)
                reason = FaultReason.MEMBERSHIP_LOST if event.by_membership else FaultReason.NODE_UNAVAILABLE
                component = Component.MEMBERSHIP if event.by_membership else Component.NODE
                return self._fail(
                    Fault(reason, component, event.detail, node_id=event.node_id, stage_index=stage)
                )
        raise self.invalid(event)

    def _stage_ended(self, event: StageFault | StageStopped, now: float) -> Outcome[RunState]:
        if not self._of_this_run(event):
            return self.state, ()
        if isinstance(event, StageFault):
            return self._fail(event.fault)
        self._stopped[event.stage_index] = event
        detail = f"stage {event.stage_index} stopped before the run did"
        return self._fail(
            Fault(FaultReason.NODE_UNAVAILABLE, Component.RUN, detail, stage_index=event.stage_index)
        )

    def _fail(self, fault: Fault) -> Outcome[RunState]:
        self.outcome, self.fault = RunOutcome.FAULTED, fault
        fields = {
            "reason": str(fault.reason),
            "component": str(fault.component),
            "cause": fault.cause,
            "detail": fault.detail,
            "stage_index": fault.stage_index,
        }
        return S.FAULTED, (
            *self.cancel_timer("bound"),
            Emit(EventName.RUN_FAULTED, fields),
            RunMoved(S.FAULTED),
            Send(ME, Continue()),
        )

    def _operator_stop(self, event: OperatorStop, now: float) -> Outcome[RunState]:
        self.outcome = RunOutcome.OPERATOR_STOPPED
        return S.OPERATOR_STOPPED, (
            *self.cancel_timer("bound"),
            Emit(EventName.RUN_STOPPED, {"tokens": len(self.tokens)}),
            RunMoved(S.OPERATOR_STOPPED),
            Send(ME, Continue()),
        )

    # --- teardown (spec section 38) ---

    def _tear_down(self, event: Continue, now: float) -> Outcome[RunState]:
        actions: list[Action] = []
        for index, node_id in self._provisioned.items():
            if node_id not in self._gone and index not in self._stopped:
                actions.append(Send(Address(Component.NODE, node_id), StopRun(self.run_id)))
                actions.append(Emit(EventName.STOP_RUN_SENT, {"stage_index": index}))
        if self._endpoints_opened:
            actions.append(Send(ENDPOINT, StopEndpoints()))
        else:
            self._endpoints_stopped_ = True
        if not self._missing() and self._endpoints_stopped_:
            return S.DONE, (*actions, *self._finish())
        return S.TEARING_DOWN, (
            *actions,
            self.set_timer("bound", now + self._bounds.teardown),
            RunMoved(S.TEARING_DOWN),
        )

    def _missing(self) -> list[StageIndex]:
        return [i for i, n in self._provisioned.items() if i not in self._stopped and n not in self._gone]

    def _note_stopped(self, event: StageStopped, now: float) -> Outcome[RunState]:
        if self._of_this_run(event):
            self._stopped[event.stage_index] = event
        return self.state, ()

    def _note_lost(self, event: NodeLost, now: float) -> Outcome[RunState]:
        self._gone.add(event.node_id)
        return self.state, ()

    def _stage_stopped(self, event: StageStopped, now: float) -> Outcome[RunState]:
        self._note_stopped(event, now)
        return self._if_torn_down()

    def _lost_tearing_down(self, event: NodeLost, now: float) -> Outcome[RunState]:
        self._note_lost(event, now)
        return self._if_torn_down()

    def _endpoints_stopped(self, event: EndpointsStopped, now: float) -> Outcome[RunState]:
        self._endpoints_stopped_ = True
        self._unproven += event.unproven
        return self._if_torn_down()

    def _if_torn_down(self) -> Outcome[RunState]:
        if self._missing() or not self._endpoints_stopped_:
            return S.TEARING_DOWN, ()
        return S.DONE, self._finish()

    def _teardown_timeout(self, event: TimerFired, now: float) -> Outcome[RunState]:
        bound = f"within {self._bounds.teardown:g} s"
        self._unproven += tuple(f"stage {i} did not say StageStopped {bound}" for i in self._missing())
        if not self._endpoints_stopped_:
            self._unproven += (f"the token endpoints did not stop {bound}",)
        return S.DONE, self._finish()

    def _finish(self) -> tuple[Action, ...]:
        assert self.outcome is not None
        unproven = self._unproven + tuple(u for s in self._stopped.values() for u in s.unproven)
        unproven += tuple(
            f"stage {i} went with its node"
            for i, n in self._provisioned.items()
            if n in self._gone and i not in self._stopped
        )
        stats = tuple((i, s.stats) for i, s in sorted(self._stopped.items()))
        return (
            *self.cancel_timer("bound"),
            Emit(EventName.RUN_TORN_DOWN, {"outcome": str(self.outcome), "unproven": list(unproven)}),
            FinishRun(self.outcome, self.fault, stats, unproven),
        )


def _provision_stage(
    plan: RunPlan, stage: StagePlan, inbound: EdgePlan, outbound: EdgePlan, prefill_chunk: int
) -> ProvisionStage:
    model = plan.model
    last = stage.stage_index == stage.stage_count - 1
    return ProvisionStage(
        run_id=plan.run_id,
        stage_index=stage.stage_index,
        stage_count=stage.stage_count,
        gguf_source=stage.gguf_source,
        layer_start=stage.layer_start,
        layer_end_exclusive=stage.layer_end_exclusive,
        inbound=InboundEdgeProvision(
            inbound.edge_id,
            inbound.kind,
            inbound.producer.node_id,
            inbound.object_spec,
            inbound.ring_spec(RingDirection.INGRESS),
        ),
        outbound=OutboundEdgeProvision(
            outbound.edge_id,
            outbound.kind,
            outbound.consumer.node_id,
            outbound.object_spec,
            outbound.ring_spec(RingDirection.EGRESS),
        ),
        model=StageModelFacts(
            model.model_id,
            model.num_layers,
            model.hidden_dim,
            model.dtype_family,
            model.dtype_width_bytes,
            model.max_seq_len,
        ),
        runtime=StageRuntimeFacts(
            RoleId(plan.run_id),  # a late word of an earlier run's role is told apart by it
            INPUT_PORT,
            OUTPUT_PORT,
            plan.runtime.sampling if last else None,
            plan.runtime.token_output_policy,
            prefill_chunk,
        ),
    )
