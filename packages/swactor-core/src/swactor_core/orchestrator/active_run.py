"""One run in its orchestrator's process: hosts pool gate, run and token endpoint, and performs their effects.

The adapter of `machines/pool.py` and `machines/run.py`: plans when the pool is ready, tells people through
the listener, gives the one outcome. Knows no link, no transport and no membership: what nodes and members say
is told to the machines by the orchestrator, and what they are told leaves through `Home.send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from swactor_core.actors import ActorSystem, MachineActor
from swactor_core.errors import SwactorError
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault
from swactor_core.fsm import Effect, Machine, Send
from swactor_core.ids import NodeId, RunId
from swactor_core.machines.endpoint import OpenTokenEdges
from swactor_core.machines.pool import BeginPool, PoolGate, ReportPool
from swactor_core.machines.run import Run
from swactor_core.machines.run_effects import (
    BuildPlan,
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
from swactor_core.messages import Address, NodeAvailable, Shutdown
from swactor_core.observe.bus import EventBus
from swactor_core.orchestrator.endpoint import ENDPOINT, EndpointAdapter, LogitsSink, RingHost
from swactor_core.orchestrator.links import POOL
from swactor_core.orchestrator.requests import PoolBounds, RunListener, RunRequest, RunResult
from swactor_core.plan import TokenOutputPolicy
from swactor_core.planner import EdgeIdAllocator, NodeCapacity, plan_run
from swactor_core.values import frozen

RUN = Address(Component.RUN)


@frozen
class Home:
    """What a run needs of its orchestrator. `names` of nodes are for people and may become more while the run
    lasts; `send` takes a message for a node; `on_planning` is called when the run has its nodes, and
    `on_finished` with its last event."""

    system: ActorSystem
    bus: EventBus
    rings: RingHost
    node_id: NodeId
    names: dict[NodeId, str]
    edge_ids: EdgeIdAllocator
    send: Callable[[NodeId, object], None]
    on_planning: Callable[[], None]
    on_finished: Callable[[], None]


class ActiveRun:
    """From its construction, which starts the clock of its pool, to `close`. `finished` is its outcome."""

    def __init__(
        self,
        home: Home,
        run_id: RunId,
        *,
        request: RunRequest,
        candidates: tuple[NodeId, ...],
        pool: PoolBounds,
        listener: RunListener,
        on_logits: LogitsSink | None,
    ) -> None:
        self.run_id = run_id
        self.candidates = candidates
        self.finished: asyncio.Future[FinishRun] = asyncio.get_running_loop().create_future()
        self._home = home
        self._request = request
        self._listener = listener
        self._token_times: list[float] = []
        self._injected = 0.0
        self._run = Run(run_id, bounds=request.bounds, prefill_chunk=request.prefill_chunk, names=home.names)
        gate = PoolGate(
            candidates,
            convergence_window=pool.convergence_window,
            deadline=pool.deadline,
            wait_for_lost=pool.wait_for_lost,
            names=home.names,
        )
        sampler = None
        if request.token_output_policy is TokenOutputPolicy.LOGITS:
            from swactor_core.sampling import Sampler  # numpy takes long to import, and logits seldom travel

            sampler = Sampler(request.sampling.after(request.prompt), request.token_count)
        EndpointAdapter(
            home.system, home.bus, home.rings, sampler=sampler, on_logits=on_logits, enough=listener.enough
        )
        self._host(POOL, gate, {})
        self._host(RUN, self._run, {"run_id": run_id})
        home.system.tell(POOL, BeginPool())

    def _host(self, address: Address, machine: Machine[Any], defaults: dict[str, Any]) -> None:
        home = self._home
        home.system.stop(address)  # an earlier run's, which hears what comes late
        actor = MachineActor(
            home.system,
            address,
            machine=machine,
            bus=home.bus,
            perform=self._perform,
            route=self._route,
            defaults=defaults,
        )
        home.system.spawn(address, actor)

    def close(self) -> None:
        """Nothing is run or waited for any more; the pool gate stays, deaf, for what comes late."""
        system = self._home.system
        system.tell(POOL, Shutdown())
        for address in (ENDPOINT, RUN):
            system.stop(address)
        if self._run.plan is not None:
            self._home.rings.data_plane.forget(tuple(edge.edge_id for edge in self._run.plan.edges))

    def result(self, finish: FinishRun) -> RunResult:
        """The outcome with what is known of the way there."""
        run = self._run
        return RunResult(
            outcome=finish.outcome,
            fault=finish.fault,
            token_ids=tuple(run.tokens),
            plan=run.plan,
            stages=finish.stats,
            unproven=finish.unproven,
            injected=self._injected,
            token_times=tuple(self._token_times),
            finish_reason=self._finish_reason(),
            waited_for=finish.waited_for,
        )

    def _finish_reason(self) -> FinishReason | None:
        """The run's, except that a plan of fewer tokens than were asked for ends with the context."""
        run, reason = self._run, self._run.finish_reason
        if reason is not FinishReason.LENGTH or run.plan is None:
            return reason
        return FinishReason.CONTEXT if run.plan.max_tokens < self._request.max_tokens else reason

    def finish_without_run(self, fault: Fault) -> None:
        """What decides and tears down is broken itself: the one outcome is recorded all the same, as it was
        decided, or else as this fault. Nodes stop the run when their link ends."""
        if self.finished.done():
            return
        run, bus, identity = self._run, self._home.bus, {"run_id": self.run_id}
        outcome, first = RunOutcome.FAULTED, fault
        if run.outcome is not None:
            outcome, first = run.outcome, run.fault or fault
        else:
            bus.emit(EventName.RUN_FAULTED, {**identity, **fault.fields()})
        unproven = (f"teardown was not run: {fault.detail}",)
        torn_down = {"outcome": str(outcome), "unproven": list(unproven)}
        bus.emit(EventName.RUN_TORN_DOWN, {**identity, **torn_down})
        self._home.on_finished()
        recorded = first if outcome is RunOutcome.FAULTED else None
        self.finished.set_result(FinishRun(outcome, recorded, (), unproven))

    # --- what the machines ask ---

    def _route(self, action: Send) -> bool:
        if action.to.component is not Component.NODE or not action.to.key:
            return False
        self._home.send(NodeId(action.to.key), action.message)
        return True

    def _perform(self, effect: Effect) -> None:
        system = self._home.system
        match effect:
            case ReportPool():
                self._listener.pool(effect)
            case ReportProgress(progress):
                self._listener.progress(progress)
            case RunMoved(state):
                if state is RunState.RUNNING:
                    self._injected = system.now()
                self._listener.state(state)
            case DeliverToken(sequence, token_id):
                self._token_times.append(system.now())
                self._listener.token(sequence, token_id)
            case BuildPlan(nodes):
                self._home.on_planning()
                system.tell(RUN, self._plan(nodes))
            case OpenEndpoints(token_in, token_out):
                system.tell(ENDPOINT, OpenTokenEdges(token_in, token_out))
            case FinishRun():
                self._home.on_finished()
                if not self.finished.done():
                    self.finished.set_result(effect)

    def _plan(self, nodes: tuple[NodeAvailable, ...]) -> PlanBuilt | PlanFailed:
        request, home = self._request, self._home
        try:
            plan = plan_run(
                tuple(map(self._capacity, nodes)),
                request.facts,
                source=request.source,
                choices=request.choices(),
                run_id=self.run_id,
                orchestrator=home.node_id,
                edge_ids=home.edge_ids,
            )
        except SwactorError as error:
            return PlanFailed(error.line)
        return PlanBuilt(plan)

    def _capacity(self, node: NodeAvailable) -> NodeCapacity:
        """What the node said of itself in the planner's words."""
        say, said, free = self._request.worker_memory, node.worker, node.worker.get("free_bytes")
        return NodeCapacity(
            node.node_id,
            node.memory_bytes,
            None if say is None else say(said),
            self._home.names.get(node.node_id, node.name),
            str(said.get("worker", "")),
            free if isinstance(free, int) else None,
            str(said.get("machine", "")),
        )
