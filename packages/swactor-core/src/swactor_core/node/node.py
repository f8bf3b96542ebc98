"""Assembly of one node (spec sections 5 and 8): all of `NodeAvailable`, in the order of `machines/node.py`.

The adapter of NodeLife: starts transport and membership, connects membership to the transport's peers, hands
commands from the orchestrator to the stage host. Ends with ExitProcess, always within its bounds. Must not
know how a run is decided, nor what a plug-in does inside.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from swactor_core import free_memory
from swactor_core.actors import ActorSystem, MachineActor
from swactor_core.broken_actors import fault_of
from swactor_core.config import NodeSettings, split_host_port
from swactor_core.errors import SwactorError
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Effect
from swactor_core.hosting import worker_in_process
from swactor_core.ids import NodeId, node_id_of
from swactor_core.machines.node import (
    AnnounceAvailable,
    AnnounceFault,
    CloseParts,
    ExitProcess,
    MembershipStarted,
    NodeLife,
    NodeState,
    PartFailed,
    PartsClosed,
    ProcessStarted,
    StartMembership,
    StartTransport,
    TransportStarted,
    WithdrawAvailable,
)
from swactor_core.machines.worker_ctl import GpuWorkerCtl
from swactor_core.machines.worker_process import WorkerPolicy
from swactor_core.messages import (
    Address,
    EventReport,
    NodeAvailable,
    NodeFaulted,
    ProvisionStage,
    Shutdown,
    ShutdownNode,
    StopRun,
    Watch,
)
from swactor_core.node.control import BootHistory, ControlService
from swactor_core.node.data_plane import DataPlane
from swactor_core.node.identity import fresh_epoch
from swactor_core.node.peers import PeerBook, replacement, take_leave
from swactor_core.node.stage_host import StageHost
from swactor_core.node.worker_inline import InProcessWorker
from swactor_core.node.worker_process import WorkerProcess
from swactor_core.observe.bus import EventBus
from swactor_core.plugins import Plugins
from swactor_core.spi.arena import ArenaPlugin
from swactor_core.spi.membership import Member, Membership, MembershipContext
from swactor_core.spi.provider import Kind
from swactor_core.spi.transport import Transport, TransportContext

log = logging.getLogger(__name__)

NODE = Address(Component.NODE)
WORKER = Address(Component.GPU_WORKER_CTL)
BOOT_BOUND = 30.0
STOP_BOUND = 12.0
TOLD_TO_STOP = "the node was told to stop"


class Node:
    """One node. Raises PluginError or UsageError on construction; afterwards faults are reported."""

    def __init__(self, settings: NodeSettings, plugins: Plugins, *, epoch: int | None = None) -> None:
        """`epoch` of this life, if it has to be a certain one."""
        choice = settings.plugins
        self.settings = settings
        self.epoch = fresh_epoch() if epoch is None else epoch
        self.replaced_by: Member | None = None
        """Whom the others hold in this life's place."""
        self._seed = bytes.fromhex(settings.key)
        transports = plugins.select(Kind.TRANSPORT, choice.transport)
        self._transports, self._crosses = transports.make(), transports.crosses_processes
        self._memberships = plugins.select(Kind.MEMBERSHIP, choice.membership).make()
        arena: ArenaPlugin = plugins.select(Kind.ARENA, choice.arena).make()
        loader = plugins.select(Kind.LOADER, choice.loader).make()
        self.public_key: bytes = self._transports.public_key(self._seed)
        self.node_id: NodeId = node_id_of(self.public_key)
        self._plugins = plugins
        self._orchestrators = {bytes.fromhex(key) for key in settings.cluster.orchestrators}
        self._peers = PeerBook(settings.cluster, self._orchestrators)
        self.transport: Transport | None = None
        self.membership: Membership | None = None
        self.ended: asyncio.Future[Fault | None] = asyncio.get_running_loop().create_future()
        self._available: NodeAvailable | None = None
        self._faulted: NodeFaulted | None = None

        self.system = ActorSystem(self._actor_failed)
        self.bus = EventBus(self.node_id)
        self._history = BootHistory()
        self.bus.add_sink(self._history)
        self.control: ControlService | None = None
        self.data_plane = DataPlane(
            self.system,
            self.bus,
            arena=arena,
            ring_host=WORKER,
            gate_owner=Address(Component.STAGE_CONTROLLER),
            arena_owner=NODE,
            identities=lambda: self.stages.identities(),
        )
        self.stages = StageHost(
            self.system,
            self.bus,
            node_id=self.node_id,
            data_plane=self.data_plane,
            loader=loader,
            to_orchestrator=self._report,
            on_stopped=self._announce,
        )
        self._worker = self._make_worker(arena)
        ceiling = settings.arena_ceiling
        ctl = GpuWorkerCtl(
            WorkerPolicy(), arena_ceiling=ceiling, ring_helper_abi=arena.abi, backend=settings.worker
        )
        self._host(WORKER, ctl, self._worker.perform)
        self.life = NodeLife(
            self.node_id, arena_ceiling=ceiling, boot_bound=BOOT_BOUND, stop_bound=STOP_BOUND
        )
        self._host(NODE, self.life, self._perform)

    def _make_worker(self, arena: ArenaPlugin) -> InProcessWorker | WorkerProcess:
        """The adapter of the worker's machine; the worker itself is not started."""
        plugins, choice = self._plugins, self.settings.plugins
        if worker_in_process(plugins, choice):
            backend = plugins.select(Kind.WORKER, choice.worker).make
            return InProcessWorker(self.system, arena=arena, descriptor=self._arena_fd, backend=backend)
        parts = (Kind.ARENA, choice.arena), (Kind.WORKER, choice.worker)
        return WorkerProcess(
            self.system,
            worker=choice.worker,
            arena_name=choice.arena,
            blocked=choice.blocked,
            modules=tuple(plugins.module_of(kind, name) for kind, name in parts),
            arena=self._arena_fd,
            lost_page=self.stages.lost_page,
        )

    def _host(self, address: Address, machine: Any, perform: Any) -> None:
        actor = MachineActor(self.system, address, machine=machine, bus=self.bus, perform=perform)
        self.system.spawn(address, actor)

    def start(self) -> None:
        self.system.tell(NODE, ProcessStarted())

    def stop(self) -> None:
        """A run that is on here is told first: that its stage then fails for want of a worker is no cause."""
        if self.stages.active and self._faulted is None:
            fault = Fault(FaultReason.NODE_UNAVAILABLE, Component.NODE, TOLD_TO_STOP, node_id=self.node_id)
            self._report(NodeFaulted(self.node_id, fault))
        self.system.tell(NODE, Shutdown())

    async def run(self) -> Fault | None:
        """Boots, serves and ends; returns why it ended, None for an ordered stop."""
        self.start()
        try:
            fault = await self.ended
            return None if fault is None else fault.named({self.node_id: self.settings.name})
        finally:
            await self.close()

    async def close(self) -> None:
        try:
            await self._close_parts()
        finally:
            await self.system.shutdown()
            self.data_plane.arena.close()

    def last_words(self, fault: Fault) -> tuple[object, ...]:
        """What a parent should know of a node that ended with `fault`: the events that no orchestrator was
        there to hear, and the fault."""
        unheard = () if self.control is not None and self.control.watched else tuple(self._history.events)
        faulted = NodeFaulted(self.node_id, fault)
        return (EventReport(unheard), faulted) if unheard else (faulted,)

    def _actor_failed(self, address: Address, error: Exception) -> None:
        log.error("%s:%d failed", address.component, address.key, exc_info=error)
        fault = fault_of(address.component, error, node_id=self.node_id)
        self._report(NodeFaulted(self.node_id, fault))
        if address == NODE:  # the one that would end the node in order is broken: end it without
            if not self.ended.done():
                self.ended.set_result(fault)
        elif self.life.state is not NodeState.STOPPED:
            self.life.fault = self.life.fault or fault
            self.system.tell(NODE, Shutdown())

    def _arena_fd(self) -> tuple[int, int]:
        arena = self.data_plane.arena.arena
        assert arena is not None
        return arena.fd, arena.ceiling

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartTransport():
                self.system.start_task(self._start_transport(), owner=NODE)
            case StartMembership():
                self.system.start_task(self._start_membership(), owner=NODE)
            case AnnounceAvailable(facts):
                here = {"worker": self.settings.plugins.worker, "machine": free_memory.machine()}
                worker = {**facts, **here}
                self._available = NodeAvailable(
                    self.node_id, self.epoch, self.settings.name, self.settings.memory_bytes, worker
                )
                self._announce()
                self._plugins.call_lifecycle("swactor_node_started", node_id=self.node_id)
            case WithdrawAvailable():
                self._available = None
            case AnnounceFault(message):
                self._faulted = message
                self._available = None
                self._report(message)
                self.stop()  # a node that cannot serve ends, and says why with its exit
            case CloseParts():
                self._plugins.call_lifecycle("swactor_node_stopping", node_id=self.node_id)
                self.system.start_task(self._close_then_tell(), owner=NODE)
            case ExitProcess(fault):
                if not self.ended.done():
                    self.ended.set_result(fault)

    async def _start_transport(self) -> None:
        settings = self.settings
        context = TransportContext(
            seed=self._seed,
            node_id=self.node_id,
            epoch=self.epoch,
            bind_host=settings.bind_host,
            bind_port=settings.bind_port,
            authorise=self._peers.knows,
            on_peer_lost=self._peer_lost,
            settings=settings.transport,
        )
        try:
            self.transport = transport = self._transports.create(context)
            await transport.start()
        except SwactorError as error:
            self.system.tell(NODE, PartFailed(Component.DRIVER, error.line))
            return
        self._peers.attach(transport)
        self.data_plane.attach_transport(transport, crosses_processes=self._crosses, met=self._peers.met)
        self.control = ControlService(
            self.system,
            self.bus,
            transport,
            node_id=self.node_id,
            history=self._history,
            authorised=self._orchestrators.__contains__,
            handle=self._command,
            on_lost=self.stages.abandon,
        )
        self.control.start()
        self.system.tell(NODE, TransportStarted(transport.host, transport.port))

    async def _start_membership(self) -> None:
        settings = self.settings
        assert self.transport is not None
        context = MembershipContext(
            cluster_id=settings.cluster.id,
            gossip_key=bytes.fromhex(settings.cluster.gossip_key),
            name=settings.name,
            node_id=self.node_id,
            epoch=self.epoch,
            public_key=self.public_key,
            role="node",
            host=settings.advertise_host or self.transport.host,
            port=self.transport.port,
            bind_host=settings.bind_host,
            bind_port=settings.membership_port,
            seeds=tuple(split_host_port(seed) for seed in settings.cluster.seeds),
            on_change=self._peers.member_changed,
            settings=settings.membership,
            on_over=self._replaced,
        )
        try:
            self.membership = self._memberships.create(context)
            await self.membership.start()
        except SwactorError as error:
            self.system.tell(NODE, PartFailed(Component.MEMBERSHIP, error.line))
            return
        self.system.tell(NODE, MembershipStarted())

    def _replaced(self, by: Member) -> None:
        self.replaced_by = by
        detail = f"the others hold {replacement(by, self.node_id, self.epoch)}"
        self.system.tell(NODE, PartFailed(Component.MEMBERSHIP, detail))

    def _peer_lost(self, node_id: NodeId, why: str) -> None:
        if self.membership is not None:
            self.membership.suspect(node_id, why)

    def _report(self, message: object) -> None:
        if self.control is not None:
            self.control.report(message)

    def _announce(self) -> None:
        """Says NodeAvailable, unless a run of an earlier orchestrator is still being torn down: then its end
        says so."""
        if self._available is not None and not self.stages.active:
            self._report(_with_memory(self._available))

    def _command(self, message: object) -> None:
        match message:
            case Watch(objects):
                self.bus.objects = objects
                if self._available is not None:
                    self._announce()
                elif self._faulted is not None:
                    self._report(self._faulted)
            case ProvisionStage():
                if self.life.state is NodeState.NODE_AVAILABLE:
                    self.stages.provision(message)
                else:
                    fault = self.life.fault or Fault(
                        FaultReason.NODE_UNAVAILABLE, Component.NODE, f"node is {self.life.state}"
                    )
                    self._report(NodeFaulted(self.node_id, fault))
            case StopRun():
                self.stages.stop_run(message)
            case ShutdownNode():
                self.stop()
            case _:
                log.warning("a node takes no %s", type(message).__name__)

    async def _close_then_tell(self) -> None:
        await self._close_parts()
        self.system.tell(NODE, PartsClosed())

    async def _close_parts(self) -> None:
        membership, self.membership = self.membership, None
        transport, self.transport = self.transport, None
        await take_leave(membership, transport)


def _with_memory(available: NodeAvailable) -> NodeAvailable:
    """With what is free now, where its worker said what was free when it started: a node lives long."""
    facts = available.worker
    if "free_bytes" not in facts or (free := free_memory.available_memory()) is None:
        return available
    return replace(available, worker={**facts, "free_bytes": free_memory.within_limits(free)})
