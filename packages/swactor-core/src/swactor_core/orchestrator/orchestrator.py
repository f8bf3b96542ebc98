"""Assembly of the orchestrator: identity, data plane, membership, links, and one run at a time.

The run authority's process (spec sections 5 and 7): it plans, provisions, injects and consumes tokens, and
owns the outcome. It runs no model compute. What one run is made of is `active_run.py`'s; here is what all of
them need, and who hears what nodes and members say.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

from swactor_core.actors import ActorSystem
from swactor_core.broken_actors import fault_of
from swactor_core.config import ClusterConfig, PluginChoice, split_host_port
from swactor_core.errors import ResourceError
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason, named_node
from swactor_core.ids import NodeId, RunId, node_id_of
from swactor_core.machines.pool import MemberChanged
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
    ShutdownNode,
    StageFault,
    StageProgress,
    StageReady,
    StageStopped,
    WatchRefused,
)
from swactor_core.node.data_plane import ARENA, DataPlane
from swactor_core.node.identity import fresh_epoch
from swactor_core.node.peers import PeerBook, replacement, take_leave
from swactor_core.observe.bus import EventBus
from swactor_core.orchestrator.active_run import RUN, ActiveRun, Home
from swactor_core.orchestrator.endpoint import ENDPOINT, RING_HOST, LogitsSink, RingHost
from swactor_core.orchestrator.links import POOL, NodeLinks
from swactor_core.orchestrator.requests import PoolBounds, RunListener, RunRequest, RunResult
from swactor_core.planner import EdgeIdAllocator
from swactor_core.plugins import Plugins
from swactor_core.spi.membership import Member, Membership, MembershipContext, MemberState
from swactor_core.spi.provider import Kind
from swactor_core.spi.transport import Transport, TransportContext

__all__ = ["Orchestrator", "PoolBounds", "RunListener", "RunRequest", "RunResult"]

log = logging.getLogger(__name__)

ARENA_CEILING = 256 << 20


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
        epoch: int | None = None,
    ) -> None:
        """`epoch` of this life, later than any before it; None takes the clock's word."""
        self._choice = choice
        self._plugins = plugins
        self._cluster = cluster
        self._seed = seed
        self._name = name
        self._bind = (bind_host, bind_port, advertise_host, membership_port)
        self._membership_settings = membership_settings or {}
        self._transport_settings = transport_settings or {}
        self.epoch = fresh_epoch() if epoch is None else epoch
        transports = plugins.select(Kind.TRANSPORT, choice.transport)
        self._transports, self._crosses = transports.make(), transports.crosses_processes
        self._memberships = plugins.select(Kind.MEMBERSHIP, choice.membership).make()
        arena = plugins.select(Kind.ARENA, choice.arena).make()
        self.public_key: bytes = self._transports.public_key(seed)
        self.node_id: NodeId = node_id_of(self.public_key)
        self._peers = PeerBook(cluster, {bytes.fromhex(key) for key in cluster.orchestrators})
        self._peers.on_member = self._member_changed
        self.names = {node_id_of(bytes.fromhex(node.public_key)): node.name for node in cluster.nodes}
        self._before_run: list[NodeLost | NodeFaulted] = []
        self._edge_ids = EdgeIdAllocator(secrets.randbits(32) << 16 | 1)
        self._first_run = self._run_ids = secrets.randbits(48)
        self._transport: Transport | None = None
        self._membership: Membership | None = None
        self._arena_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broken: Fault | None = None
        self._active: ActiveRun | None = None
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
            case _ if self._arena_ready.done():  # who waited for it was interrupted
                pass
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
        self.data_plane.attach_transport(transport, crosses_processes=self._crosses, met=self._peers.met)
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
            await take_leave(membership, transport)
        finally:
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
        self._run_ids += 1
        home = Home(
            self.system,
            self.bus,
            self._rings,
            node_id=self.node_id,
            names=self.names,
            edge_ids=self._edge_ids,
            send=self._links.send,
            on_planning=self._links.settle,
            on_finished=self.on_finished,
        )
        self._active = active = ActiveRun(
            home,
            RunId(self._run_ids),
            request=request,
            candidates=candidates,
            pool=pool,
            listener=listener,
            on_logits=on_logits,
        )
        try:
            self._tell_what_is_known(candidates, self._transport)
            finish = await active.finished
        finally:
            active.close()
        return active.result(finish)

    def _tell_what_is_known(self, candidates: tuple[NodeId, ...], transport: Transport) -> None:
        """The run's machines hear what came before them, and links to the candidates are there."""
        if self._broken is not None:
            self.system.tell(RUN, EndpointsFailed(self._broken))
        self._links.begin(transport, candidates)
        for evidence in self._before_run:
            self.system.tell(POOL, evidence)
        self._before_run.clear()
        for member in self._membership.members() if self._membership is not None else ():
            self._member_changed(member)

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
        self._links.send_all(ShutdownNode())

    def _identities(self) -> dict[str, Any]:
        return {"run_id": self._run_ids}

    # --- evidence and reports ---

    def _member_changed(self, member: Member) -> None:
        self.names.setdefault(member.node_id, member.name)
        self._links.seen(member.node_id, alive=member.state is MemberState.ALIVE)
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
                    if self._ours(event):
                        self.bus.forward(event)
                if dropped:
                    log.warning("node %s dropped %d events", named_node(node_id, self.names), dropped)
            case NodeFaulted():
                self._to_pool(message)
                # The run hears it before what the same node's stage says of its end, which is no cause.
                if self._active is not None and node_id in self._active.candidates:
                    self.system.tell(RUN, message)
            case NodeAvailable() | WatchRefused():
                self.system.tell(POOL, message)
            case StageReady() | StageFault() | StageProgress() | StageStopped():
                if message.run_id == self._run_ids and self.system.lives(RUN):
                    self.system.tell(RUN, message)
            case _:
                log.warning("an orchestrator takes no %s", type(message).__name__)

    def _ours(self, event: dict[str, Any]) -> bool:
        """Not so is what a node says of a run whose orchestrator has died, while this one waits for it; what
        the node refused of another run meanwhile concerns this one."""
        match event:
            case {"event": EventName.PROVISIONING_REFUSED}:
                return True
            case {"run_id": int(run_id)}:
                return self._first_run < run_id <= self._run_ids
        return True

    def _actor_failed(self, address: Address, error: Exception) -> None:
        log.error("%s:%d failed", address.component, address.key, exc_info=error)
        fault = fault_of(address.component, error)
        self._broken = fault
        if not self._arena_ready.done():  # `start` waits for it, and nobody else would say
            self._arena_ready.set_exception(ResourceError(f"the orchestrator cannot start: {fault.detail}"))
        if address != RUN and self.system.lives(RUN):
            self.system.tell(RUN, EndpointsFailed(fault))
        elif self._active is not None:
            self._active.finish_without_run(fault)
