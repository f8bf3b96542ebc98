"""Assembly of the orchestrator: identity, data plane, membership, links, and one run at a time.

The run authority's process (spec sections 5 and 7): it plans, provisions, injects and consumes tokens, and
owns the outcome. It runs no model compute. People hear of progress through a `RunListener`, machines through
events.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swactor_core.actors import ActorSystem, MachineActor
from swactor_core.config import ClusterConfig, PluginChoice, split_host_port
from swactor_core.errors import ResourceError, SwactorError
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason, named_node
from swactor_core.fsm import Effect, Send
from swactor_core.hosting import WorkersSay
from swactor_core.ids import NodeId, RunId, StageIndex, node_id_of
from swactor_core.machines.endpoint import OpenTokenEdges
from swactor_core.machines.pool import BeginPool, MemberChanged, PoolGate, ReportPool
from swactor_core.machines.run import Run, RunBounds
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
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    ArenaConstructionFailed,
    ConstructArena,
    EndpointsFailed,
    EventReport,
    NodeAvailable,
    NodeFaulted,
    NodeLost,
    OperatorStop,
    Shutdown,
    ShutdownNode,
    StageFault,
    StageProgress,
    StageReady,
    StageStats,
    StageStopped,
    WatchRefused,
)
from swactor_core.node.data_plane import ARENA, DataPlane
from swactor_core.node.identity import fresh_epoch
from swactor_core.node.peers import PeerBook, replacement
from swactor_core.observe.bus import EventBus
from swactor_core.orchestrator.endpoint import ENDPOINT, RING_HOST, EndpointAdapter, LogitsSink, RingHost
from swactor_core.orchestrator.links import POOL, NodeLinks
from swactor_core.plan import GgufSource, RunPlan, SamplingPolicy, TokenOutputPolicy
from swactor_core.planner import EdgeIdAllocator, NodeCapacity, RuntimeChoices, plan_run
from swactor_core.plugins import Plugins
from swactor_core.specs import PREFILL_CHUNK
from swactor_core.spi.loader import ModelFacts
from swactor_core.spi.membership import Member, Membership, MembershipContext, MemberState
from swactor_core.spi.provider import Kind
from swactor_core.spi.transport import Transport, TransportContext

log = logging.getLogger(__name__)

RUN = Address(Component.RUN)
ARENA_CEILING = 256 << 20
CLOSE_BOUND = 4.0


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """Seconds that the view must be stable, and that the pool may take; `wait_for_lost` as in PoolGate."""

    convergence_window: float = 0.3
    deadline: float = 120.0
    wait_for_lost: bool = False


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One run: the model as every node can resolve it, the prompt as ids, and the operator's choices.
    `ring_capacity` in bytes, of every edge; None for a default by object size. `worker_memory` says what a
    node's worker takes beside what the model's facts tell; None: nothing of that is counted."""

    source: GgufSource
    facts: ModelFacts
    prompt: tuple[int, ...]
    max_tokens: int
    end_of_generation: tuple[int, ...] = ()
    sampling: SamplingPolicy = field(default_factory=SamplingPolicy)
    token_output_policy: TokenOutputPolicy = TokenOutputPolicy.TOKEN_IDS
    token_count: int = 0
    prefill_chunk: int = PREFILL_CHUNK
    bounds: RunBounds = field(default_factory=RunBounds)
    ring_capacity: int | None = None
    worker_memory: WorkersSay | None = None

    def choices(self) -> RuntimeChoices:
        """What the planner needs of it."""
        return RuntimeChoices(
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            end_of_generation=self.end_of_generation,
            sampling=self.sampling,
            token_output_policy=self.token_output_policy,
            ring_capacity=self.ring_capacity,
            prefill_chunk=self.prefill_chunk,
        )


@dataclass(frozen=True, slots=True)
class RunResult:
    """The one outcome. `unproven` lists what teardown could not prove; `token_times` are monotonic seconds of
    each token, `injected` of the prompt's injection; `finish_reason` is of a completed run, `waited_for` says
    for people which stage kept the token that did not come in time."""

    outcome: RunOutcome
    fault: Fault | None
    token_ids: tuple[int, ...]
    plan: RunPlan | None
    stages: tuple[tuple[StageIndex, StageStats], ...]
    unproven: tuple[str, ...]
    injected: float
    token_times: tuple[float, ...]
    finish_reason: FinishReason | None = None
    waited_for: str = ""


class RunListener:
    """What people are shown; every method is called on the event loop and must not block."""

    def pool(self, report: ReportPool) -> None:
        """Which candidates are still waited for."""

    def state(self, state: RunState) -> None:
        """The run has entered this state."""

    def progress(self, progress: StageProgress) -> None:
        """A stage's preparation has moved."""

    def enough(self, token_id: int) -> bool:
        """Whether the answer is whole with this token: a stop text. Asked once a token, before `token`."""
        return False

    def token(self, sequence: int, token_id: int) -> None:
        """One more token."""


class Orchestrator:
    """Use: construct, `await start()`, `await run(...)`, `await close()`. One run each."""

    def __init__(
        self,
        plugins: Plugins,
        choice: PluginChoice,
        *,
        cluster: ClusterConfig,
        seed: bytes,
        name: str,
        bind_host: str = "127.0.0.1",
        bind_port: int = 0,
        advertise_host: str = "",
        membership_port: int = 0,
        membership_settings: dict[str, Any] | None = None,
        transport_settings: dict[str, Any] | None = None,
        objects: bool = False,
    ) -> None:
        self._choice = choice
        self._plugins = plugins
        self._cluster = cluster
        self._seed = seed
        self._name = name
        self._bind = (bind_host, bind_port, advertise_host, membership_port)
        self._membership_settings = membership_settings or {}
        self._transport_settings = transport_settings or {}
        self.epoch = fresh_epoch()
        transports = plugins.select(Kind.TRANSPORT, choice.transport)
        self._transports, self._crosses = transports.factory(), transports.crosses_processes
        self._memberships = plugins.select(Kind.MEMBERSHIP, choice.membership).factory()
        arena = plugins.select(Kind.ARENA, choice.arena).factory()
        self.public_key: bytes = self._transports.public_key(seed)
        self.node_id: NodeId = node_id_of(self.public_key)
        self._peers = PeerBook(cluster, {bytes.fromhex(key) for key in cluster.orchestrators})
        self._peers.on_member = self._member_changed
        self.names = {node_id_of(bytes.fromhex(node.public_key)): node.name for node in cluster.nodes}
        self._before_run: list[NodeLost | NodeFaulted] = []
        self._edge_ids = EdgeIdAllocator(secrets.randbits(32) << 16 | 1)
        self._run_ids = secrets.randbits(48)
        self._transport: Transport | None = None
        self._membership: Membership | None = None
        self._arena_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broken: Fault | None = None
        self._request: RunRequest | None = None
        self._listener = RunListener()
        self._finished: asyncio.Future[FinishRun] | None = None
        self._pool_gate: PoolGate | None = None
        self._run: Run | None = None
        self._times: list[float] = []
        self._injected = 0.0
        self.on_finished: Callable[[], None] = lambda: None

        self.system = ActorSystem(self._actor_failed)
        self.bus = EventBus(self.node_id, objects=objects)
        self._links = NodeLinks(self.system, objects=objects, on_report=self._report_from)
        self.data_plane = DataPlane(
            self.system,
            self.bus,
            arena=arena,
            ring_host=RING_HOST,
            gate_owner=ENDPOINT,
            arena_owner=Address(Component.NODE),
            identities=self._identities,
        )
        self._rings = RingHost(self.system, self.data_plane)
        self.system.spawn(Address(Component.NODE), self)

    # --- life ---

    def receive(self, message: object) -> None:
        """As owner of the arena."""
        match message:
            case ArenaConstructed():
                self._arena_ready.set_result(None)
            case ArenaConstructionFailed(detail):
                self._arena_ready.set_exception(ResourceError(f"orchestrator arena: {detail}"))

    async def start(self) -> None:
        """Arena, transport, membership. Raises ResourceError."""
        host, port, advertise, membership_port = self._bind
        self.system.tell(ARENA, ConstructArena(ARENA_CEILING))
        await self._arena_ready
        context = TransportContext(
            seed=self._seed,
            node_id=self.node_id,
            epoch=self.epoch,
            bind_host=host,
            bind_port=port,
            authorise=self._peers.knows,
            on_peer_lost=self._peer_lost,
            settings=self._transport_settings,
        )
        self._transport = transport = self._transports.create(context)
        await transport.start()
        self._peers.attach(transport)
        self.data_plane.attach_transport(transport, crosses_processes=self._crosses)
        self._membership = self._memberships.create(
            MembershipContext(
                cluster_id=self._cluster.id,
                gossip_key=bytes.fromhex(self._cluster.gossip_key),
                name=self._name,
                node_id=self.node_id,
                epoch=self.epoch,
                public_key=self.public_key,
                role="orchestrator",
                host=advertise or transport.host,
                port=transport.port,
                bind_host=host,
                bind_port=membership_port,
                seeds=tuple(split_host_port(seed) for seed in self._cluster.seeds),
                on_change=self._peers.member_changed,
                settings=self._membership_settings,
                on_over=self._replaced,
            )
        )
        await self._membership.start()

    @property
    def membership_address(self) -> tuple[str, int]:
        assert self._membership is not None
        return self._membership.address

    async def close(self) -> None:
        """Ends links, membership and transport; bounded, idempotent."""
        await self._links.close()
        membership, self._membership = self._membership, None
        transport, self._transport = self._transport, None
        try:
            async with asyncio.timeout(CLOSE_BOUND):
                if membership is not None:
                    await membership.leave()
                if transport is not None:
                    await transport.close()
        except TimeoutError:
            log.warning("transport or membership did not close within %g s", CLOSE_BOUND)
        await self.system.shutdown()
        self.data_plane.arena.close()

    # --- one run ---

    async def run(
        self,
        request: RunRequest,
        candidates: tuple[NodeId, ...],
        *,
        pool: PoolBounds,
        listener: RunListener,
        on_logits: LogitsSink | None = None,
    ) -> RunResult:
        """Waits for the pool, then runs to the one outcome and through teardown."""
        assert self._transport is not None
        self._request, self._listener = request, listener
        self._times, self._injected = [], 0.0
        self._finished = asyncio.get_running_loop().create_future()
        self._run_ids += 1
        run_id = RunId(self._run_ids)
        run = Run(run_id, bounds=request.bounds, prefill_chunk=request.prefill_chunk, names=self.names)
        gate = PoolGate(
            candidates,
            convergence_window=pool.convergence_window,
            deadline=pool.deadline,
            wait_for_lost=pool.wait_for_lost,
            names=self.names,
        )
        self._pool_gate, self._run = gate, run
        sampler = None
        if request.token_output_policy is TokenOutputPolicy.LOGITS:
            from swactor_core.sampling import Sampler  # numpy takes long to import, and logits seldom travel

            sampler = Sampler(request.sampling.after(request.prompt), request.token_count)
        EndpointAdapter(
            self.system, self.bus, self._rings, sampler=sampler, on_logits=on_logits, enough=listener.enough
        )
        self._host(POOL, gate)
        self._host(RUN, run, defaults={"run_id": run_id})
        if self._broken is not None:
            self.system.tell(RUN, EndpointsFailed(self._broken))
        self._links.begin(self._transport, candidates)
        self.system.tell(POOL, BeginPool())
        for evidence in self._before_run:
            self.system.tell(POOL, evidence)
        self._before_run.clear()
        for member in self._membership.members() if self._membership is not None else ():
            self._member_changed(member)
        try:
            finish = await self._finished
        finally:
            self.system.tell(POOL, Shutdown())
            for address in (ENDPOINT, RUN):
                self.system.stop(address)
            if run.plan is not None:
                self.data_plane.forget(tuple(edge.edge_id for edge in run.plan.edges))
        return RunResult(
            outcome=finish.outcome,
            fault=finish.fault,
            token_ids=tuple(run.tokens),
            plan=run.plan,
            stages=finish.stats,
            unproven=finish.unproven,
            injected=self._injected,
            token_times=tuple(self._times),
            finish_reason=_finish_reason(run, request),
            waited_for=finish.waited_for,
        )

    def stop_run(self) -> None:
        """The operator's orderly stop; without an active run nothing happens."""
        if self.system.lives(RUN):
            self.system.tell(RUN, OperatorStop())

    def node_lost(self, node_id: NodeId, detail: str) -> None:
        """Evidence from outside, for example that a local node's process has ended."""
        self._to_pool(NodeLost(node_id, by_membership=False, detail=detail))

    def node_said(self, node_id: NodeId, message: object) -> None:
        """A node's report that came another way than over its control link."""
        self._report_from(node_id, message)

    def _to_pool(self, evidence: NodeLost | NodeFaulted) -> None:
        """Before `run` it is kept for the run's pool."""
        if self.system.lives(POOL):
            self.system.tell(POOL, evidence)
        else:
            self._before_run.append(evidence)

    def dead_nodes(self) -> frozenset[NodeId]:
        """Those that membership has given up."""
        members = self._membership.members() if self._membership is not None else ()
        return frozenset(member.node_id for member in members if member.state is MemberState.DEAD)

    def shutdown_nodes(self) -> None:
        """Asks every linked node to end; for pools that belong to this orchestrator."""
        self._links.send(ShutdownNode())

    # --- what the machines ask ---

    def _host(self, address: Address, machine: Any, defaults: dict[str, Any] | None = None) -> None:
        self.system.stop(address)
        actor = MachineActor(
            self.system,
            address,
            machine=machine,
            bus=self.bus,
            perform=self._perform,
            route=self._route,
            defaults=defaults,
        )
        self.system.spawn(address, actor)

    def _route(self, action: Send) -> bool:
        if action.to.component is not Component.NODE or not action.to.key:
            return False
        link = self._links.get(NodeId(action.to.key))
        if link is not None:
            link.send(action.message)
        return True

    def _identities(self) -> dict[str, Any]:
        return {"run_id": self._run_ids}

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ReportPool():
                self._listener.pool(effect)
            case ReportProgress(progress):
                self._listener.progress(progress)
            case RunMoved(state):
                if state is RunState.RUNNING:
                    self._injected = self.system.now()
                self._listener.state(state)
            case DeliverToken(sequence, token_id):
                self._times.append(self.system.now())
                self._listener.token(sequence, token_id)
            case BuildPlan(nodes):
                self._links.settle()
                self.system.tell(RUN, self._plan(nodes))
            case OpenEndpoints(token_in, token_out):
                self.system.tell(ENDPOINT, OpenTokenEdges(token_in, token_out))
            case FinishRun():
                self.on_finished()
                if self._finished is not None and not self._finished.done():
                    self._finished.set_result(effect)

    def _plan(self, nodes: tuple[NodeAvailable, ...]) -> PlanBuilt | PlanFailed:
        request = self._request
        assert request is not None
        say = request.worker_memory
        try:
            plan = plan_run(
                tuple(
                    NodeCapacity(
                        node.node_id,
                        node.memory_bytes,
                        None if say is None else say(node.worker),
                        self.names.get(node.node_id, node.name),
                    )
                    for node in nodes
                ),
                request.facts,
                source=request.source,
                choices=request.choices(),
                run_id=RunId(self._run_ids),
                orchestrator=self.node_id,
                edge_ids=self._edge_ids,
            )
        except SwactorError as error:
            return PlanFailed(error.line)
        return PlanBuilt(plan)

    # --- evidence and reports ---

    def _member_changed(self, member: Member) -> None:
        self.names.setdefault(member.node_id, member.name)
        link = self._links.get(member.node_id)
        if link is not None:
            link.seen(alive=member.state is MemberState.ALIVE)
        if self.system.lives(POOL):
            self.system.tell(POOL, MemberChanged(member))

    def _replaced(self, by: Member) -> None:
        """Nobody would tell it any more that a node is lost."""
        detail = f"the nodes hold {replacement(by, self.node_id, self.epoch)}"
        self._broken = fault = Fault(FaultReason.MEMBERSHIP_LOST, Component.MEMBERSHIP, detail)
        if self.system.lives(RUN):
            self.system.tell(RUN, EndpointsFailed(fault))

    def _peer_lost(self, node_id: NodeId, why: str) -> None:
        if self._membership is not None:
            self._membership.suspect(node_id, why)
        if self.system.lives(POOL):
            self.node_lost(node_id, f"connection lost: {why}")

    def _report_from(self, node_id: NodeId, message: object) -> None:
        match message:
            case EventReport(events, dropped):
                for event in events:
                    self.bus.forward(event)
                if dropped:
                    log.warning("node %s dropped %d events", named_node(node_id, self.names), dropped)
            case NodeFaulted():
                self._to_pool(message)
                # The run hears it before what the same node's stage says of its end, which is no cause.
                if self._pool_gate is not None and node_id in self._pool_gate.candidates:
                    self.system.tell(RUN, message)
            case NodeAvailable() | WatchRefused():
                self.system.tell(POOL, message)
            case StageReady() | StageFault() | StageProgress() | StageStopped():
                if message.run_id == self._run_ids and self.system.lives(RUN):
                    self.system.tell(RUN, message)
            case _:
                log.warning("an orchestrator takes no %s", type(message).__name__)

    def _actor_failed(self, address: Address, error: Exception) -> None:
        log.error("%s:%d failed", address.component, address.key, exc_info=error)
        detail = f"{address.component}: {type(error).__name__}: {error}"
        fault = Fault(FaultReason.INTERNAL, address.component, detail)
        self._broken = fault
        if not self._arena_ready.done():  # `start` waits for it, and nobody else would say
            self._arena_ready.set_exception(ResourceError(f"the orchestrator cannot start: {detail}"))
        if address == RUN or not self.system.lives(RUN):
            if self._finished is not None and not self._finished.done():
                self._finish_without_run(self._finished, fault)
        else:
            self.system.tell(RUN, EndpointsFailed(fault))

    def _finish_without_run(self, finished: asyncio.Future[FinishRun], fault: Fault) -> None:
        """What decides and tears down is broken itself: the one outcome is recorded all the same, as it was
        decided, or else as this fault. Nodes stop the run when their link ends."""
        run, identity = self._run, {"run_id": self._run_ids}
        outcome, first = RunOutcome.FAULTED, fault
        if run is not None and run.outcome is not None:
            outcome, first = run.outcome, run.fault or fault
        else:
            self.bus.emit(EventName.RUN_FAULTED, {**identity, **fault.fields()})
        unproven = (f"teardown was not run: {fault.detail}",)
        torn_down = {"outcome": str(outcome), "unproven": list(unproven)}
        self.bus.emit(EventName.RUN_TORN_DOWN, {**identity, **torn_down})
        self.on_finished()
        recorded = first if outcome is RunOutcome.FAULTED else None
        finished.set_result(FinishRun(outcome, recorded, (), unproven))


def _finish_reason(run: Run, request: RunRequest) -> FinishReason | None:
    """The run's, except that a plan of fewer tokens than were asked for ends with the context."""
    if run.finish_reason is FinishReason.LENGTH and run.plan is not None:
        return FinishReason.CONTEXT if run.plan.max_tokens < request.max_tokens else FinishReason.LENGTH
    return run.finish_reason
