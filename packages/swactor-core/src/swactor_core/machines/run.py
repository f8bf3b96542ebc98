"""The run (spec section 13): the only component that decides the one terminal outcome.

Plans once, provisions in parallel, passes the readiness barrier, injects sequence k + 1 only after consuming
token k, and tears down after every end. Links, processes and membership give evidence; nothing else decides.
Readiness, sequence and terminal outcome are its guarantees (spec section 39).
"""

from __future__ import annotations

from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Action, Emit, Machine, Outcome, Row, Send
from swactor_core.ids import NodeId, RunId, Sequence, StageIndex, node_hex
from swactor_core.machines.pool import PlanCommitted, PoolAborted, PoolReady
from swactor_core.machines.provisioning import provision_stage, token_edges
from swactor_core.machines.run_effects import (
    BuildPlan,
    Continue,
    DeliverToken,
    FinishReason,
    FinishRun,
    OpenEndpoints,
    PlanBuilt,
    PlanFailed,
    ReportProgress,
    RunMoved,
    RunOutcome,
    RunState,
)
from swactor_core.machines.run_teardown import RunTeardown
from swactor_core.messages import (
    Address,
    EndpointsFailed,
    EndpointsReady,
    EndpointsStopped,
    InjectTokens,
    LoadPhase,
    NodeFaulted,
    NodeLost,
    OperatorStop,
    StageFault,
    StageProgress,
    StageReady,
    StageStopped,
    StopEndpoints,
    StopRun,
    TimerFired,
    TokenReceived,
)
from swactor_core.plan import RunPlan
from swactor_core.values import frozen


@frozen
class RunBounds:
    """Seconds: from provisioning to the barrier, for one token, for teardown."""

    readiness: float = 900.0
    execution: float = 300.0
    teardown: float = 15.0


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

    def __init__(
        self, run_id: RunId, *, bounds: RunBounds, prefill_chunk: int, names: dict[NodeId, str] | None = None
    ) -> None:
        """`names` are for people, of the nodes as far as anybody knows them yet."""
        super().__init__()
        self.run_id = run_id
        self.outcome: RunOutcome | None = None
        self.finish_reason: FinishReason | None = None
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
        self._teardown = RunTeardown(names={} if names is None else names)

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
        self._teardown.begin(plan)
        sends = []
        for stage in plan.stages:
            message = provision_stage(plan, stage, prefill_chunk=self._prefill_chunk)
            sends.append(Send(Address(Component.NODE, stage.node_id), message))
        opened = OpenEndpoints(*token_edges(plan))
        bound = self.set_timer("bound", now + self._bounds.readiness)
        return S.WAITING_READY, (*sends, opened, bound, RunMoved(S.WAITING_READY))

    def _of_this_run(self, event: StageReady | StageFault | StageProgress | StageStopped) -> bool:
        ours = event.run_id == self.run_id and event.stage_index in self._teardown.nodes
        if not ours:
            self.foreign_messages += 1
        return ours

    def _foreign(self, event: object, now: float) -> Outcome[RunState]:
        self.foreign_messages += 1
        return self.state, ()

    def _progress(self, event: StageProgress, now: float) -> Outcome[RunState]:
        if not self._of_this_run(event):
            return S.WAITING_READY, ()
        if event.phase is not LoadPhase.DOWNLOAD or event.done <= self._fetched.get(event.stage_index, 0):
            return S.WAITING_READY, (ReportProgress(event),)
        # A large model may take longer to come than any bound for getting ready: the bound is for silence.
        self._fetched[event.stage_index] = event.done
        bound = self.set_timer("bound", now + self._bounds.readiness)
        return S.WAITING_READY, (ReportProgress(event), bound)

    def _stage_ready(self, event: StageReady, now: float) -> Outcome[RunState]:
        if not self._of_this_run(event):
            return S.WAITING_READY, ()
        self._ready.add(event.stage_index)
        ready = StageProgress(event.run_id, event.stage_index, LoadPhase.READY, 1, 1)
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
        if event.token_id in plan.model.end_of_generation:
            self.finish_reason = FinishReason.END_OF_GENERATION
        elif event.enough:
            self.finish_reason = FinishReason.STOP_TEXT
        elif len(self.tokens) >= plan.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
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
                self._teardown.note_lost(event.node_id)
                reason = FaultReason.MEMBERSHIP_LOST if event.by_membership else FaultReason.NODE_UNAVAILABLE
                component = Component.MEMBERSHIP if event.by_membership else Component.NODE
                return self._fail(Fault(reason, component, event.detail, node_id=event.node_id))
        raise self.invalid(event)

    def _stage_ended(self, event: StageFault | StageStopped, now: float) -> Outcome[RunState]:
        if not self._of_this_run(event):
            return self.state, ()
        if isinstance(event, StageFault):
            return self._fail(event.fault)
        self._teardown.note_stopped(event)
        detail = f"stage {event.stage_index} stopped before the run did"
        return self._fail(
            Fault(FaultReason.NODE_UNAVAILABLE, Component.RUN, detail, stage_index=event.stage_index)
        )

    def _fail(self, fault: Fault) -> Outcome[RunState]:
        self.outcome, self.fault = RunOutcome.FAULTED, self._teardown.placed(fault)
        return S.FAULTED, (
            *self.cancel_timer("bound"),
            Emit(EventName.RUN_FAULTED, self.fault.fields()),
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
        for index, node_id in self._teardown.missing().items():
            actions.append(Send(Address(Component.NODE, node_id), StopRun(self.run_id)))
            actions.append(Emit(EventName.STOP_RUN_SENT, {"stage_index": index}))
        if self._teardown.endpoints_opened:
            actions.append(Send(ENDPOINT, StopEndpoints()))
        if self._teardown.complete:
            return S.DONE, (*actions, *self._finish())
        return S.TEARING_DOWN, (
            *actions,
            self.set_timer("bound", now + self._bounds.teardown),
            RunMoved(S.TEARING_DOWN),
        )

    def _note_stopped(self, event: StageStopped, now: float) -> Outcome[RunState]:
        if self._of_this_run(event):
            self._teardown.note_stopped(event)
        return self.state, ()

    def _note_lost(self, event: NodeLost, now: float) -> Outcome[RunState]:
        self._teardown.note_lost(event.node_id)
        return self.state, ()

    def _stage_stopped(self, event: StageStopped, now: float) -> Outcome[RunState]:
        self._note_stopped(event, now)
        return self._if_torn_down()

    def _lost_tearing_down(self, event: NodeLost, now: float) -> Outcome[RunState]:
        self._note_lost(event, now)
        return self._if_torn_down()

    def _endpoints_stopped(self, event: EndpointsStopped, now: float) -> Outcome[RunState]:
        self._teardown.note_endpoints(event.unproven)
        return self._if_torn_down()

    def _if_torn_down(self) -> Outcome[RunState]:
        return (S.DONE, self._finish()) if self._teardown.complete else (S.TEARING_DOWN, ())

    def _teardown_timeout(self, event: TimerFired, now: float) -> Outcome[RunState]:
        missing = "; ".join(self._teardown.give_up(self._bounds.teardown))
        return S.DONE, self._finish(Fault(FaultReason.TEARDOWN_TIMEOUT, Component.RUN, missing))

    def _finish(self, overdue: Fault | None = None) -> tuple[Action, ...]:
        """`overdue`: the teardown's own failure, beside the outcome, which stands."""
        assert self.outcome is not None
        unproven, late = self._teardown.unproven(), self._teardown.waited_for(self.fault, len(self.tokens))
        fields = {"outcome": str(self.outcome), "unproven": list(unproven)}
        fields |= {"waited_for": late} if late else {}
        return (
            *self.cancel_timer("bound"),
            Emit(EventName.RUN_TORN_DOWN, fields if overdue is None else {**fields, **overdue.fields()}),
            FinishRun(self.outcome, self.fault, self._teardown.stats(), unproven, late),
        )
