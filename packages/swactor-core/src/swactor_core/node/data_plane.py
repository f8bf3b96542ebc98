"""The data plane of one process: ArenaManager, EdgeEstablisher, Driver as actors on arena and transport.

Used alike by nodes (rings installed in the worker) and by the orchestrator (rings installed in its token
endpoint): `ring_host` says where InstallRing goes. Knows no worker, no model and no run. Edge identity (spec
sections 24 and 39): an edge is found by its id, a peer by its node id, an actor of a peer never.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from swactor_core.actors import ActorSystem, MachineActor
from swactor_core.errors import EdgeClosed, ResourceError, RingError
from swactor_core.events import EventName
from swactor_core.faults import Component, StreamFaultReason
from swactor_core.fsm import Effect, Machine, Send
from swactor_core.ids import EDGE_IDS, EdgeId, LeaseRequestId, NodeId, RingId, node_hex
from swactor_core.machines.arena import (
    ArenaManager,
    DiscardRange,
    MapArena,
    PrepareRing,
    RingPreparationFailed,
    RingPrepared,
)
from swactor_core.machines.edge import EdgeBounds, EdgeRecord
from swactor_core.machines.gates import RxEdge, TxEdge
from swactor_core.machines.rendezvous import (
    RefuseStream,
    Rendezvous,
    RendezvousState,
    StartRecvPump,
    StopRecvPump,
)
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    ArenaConstructionFailed,
    DriverEdgeReady,
    EstablishRecv,
    EstablishSend,
    ProvisionRx,
    ProvisionTx,
    PumpStopped,
    RingFault,
    RingInstalled,
    RingQuiesced,
    RingReadable,
    RingWritable,
    StopEdge,
    StreamArrived,
    StreamClosed,
    StreamFault,
)
from swactor_core.node.pumps import Met, PumpTask, RecvPumpTask, SendPumpTask
from swactor_core.observe.bus import EventBus
from swactor_core.spi.arena import Arena, ArenaPlugin, Ring
from swactor_core.spi.transport import RecvEdge, Transport
from swactor_core.values import frozen

ARENA = Address(Component.ARENA_MANAGER)
ESTABLISHER = Address(Component.EDGE_ESTABLISHER)
DRIVER = Address(Component.DRIVER)
PENDING_STREAM_BOUND = 30.0
UNASKED_KEPT = 256
_WITH_STREAM = (RendezvousState.EMPTY, RendezvousState.PENDING_STREAM)


class ArenaAdapter:
    """Performs ArenaManager's effects on the arena plug-in and keeps this process's ring ends."""

    def __init__(self, system: ActorSystem, bus: EventBus, plugin: ArenaPlugin, *, owner: Address) -> None:
        self.plugin = plugin
        self.arena: Arena | None = None
        self.rings: dict[RingId, Ring] = {}
        self.machine = ArenaManager(owner)
        self._system = system
        system.spawn(ARENA, MachineActor(system, ARENA, machine=self.machine, bus=bus, perform=self._perform))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case MapArena(ceiling):
                try:
                    self.arena = self.plugin.create(ceiling)
                except ResourceError as error:
                    self._system.tell(ARENA, ArenaConstructionFailed(error.line))
                else:
                    self._system.tell(ARENA, ArenaConstructed())
            case PrepareRing(layout):
                assert self.arena is not None
                try:
                    self.rings[layout.ring_id] = self.arena.create_ring(layout)
                except (ResourceError, RingError) as error:
                    self._system.tell(ARENA, RingPreparationFailed(layout.ring_id, error.message))
                else:
                    self._system.tell(ARENA, RingPrepared(layout.ring_id))
            case DiscardRange(layout):
                ring = self.rings.pop(layout.ring_id, None)
                if ring is not None:
                    ring.close()
                if self.arena is not None:
                    self.arena.discard(layout.arena_offset, layout.total_len)

    def close(self) -> None:
        for ring in self.rings.values():
            ring.close()
        self.rings.clear()
        if self.arena is not None:
            self.arena.close()
            self.arena = None


@frozen
class _Follow:
    """To the establisher: pass this on, behind the provisioning that it follows."""

    to: Address
    message: object


class EdgeEstablisher:
    """One actor; spawns a record and a gate per edge and hands them what concerns their edge."""

    def __init__(
        self,
        system: ActorSystem,
        bus: EventBus,
        *,
        ring_host: Address,
        gate_owner: Address,
        bounds: EdgeBounds,
        identities: Callable[[], dict[str, Any]],
    ) -> None:
        self.records: dict[EdgeId, EdgeRecord] = {}
        self._forgotten: set[EdgeId] = set()
        self._system = system
        self._bus = bus
        self._ring_host = ring_host
        self._gate_owner = gate_owner
        self._bounds = bounds
        self._identities = identities
        self._requests = itertools.count(1)
        system.spawn(ESTABLISHER, self)

    def receive(self, message: object) -> None:
        match message:
            case ProvisionTx() | ProvisionRx():
                self._provision(message)
                self._system.tell(self._record(message.edge_id), message)
            case (
                RingInstalled()
                | RingFault()
                | DriverEdgeReady()
                | StreamClosed()
                | StreamFault()
                | PumpStopped()
                | StopEdge()
            ):
                self._system.tell(self._record(message.edge_id), message)
            case _Follow(to, followed):
                self._system.tell(to, followed)
            case RingQuiesced(ring_id):
                for edge_id, record in self.records.items():
                    if record.ring_id == ring_id:
                        self._system.tell(self._record(edge_id), message)
            case _:
                raise AssertionError(f"EdgeEstablisher does not take {type(message).__name__}")

    def to_gate(self, action: Send) -> bool:
        """A route for the owners of gates. A StopEdge right behind its ProvisionTx or ProvisionRx finds no
        gate yet: it takes the same way as they do. True when it was sent so."""
        gate = action.to.component in (Component.TX_EDGE, Component.RX_EDGE)
        if not gate or self._system.lives(action.to):
            return False
        self._system.tell(ESTABLISHER, _Follow(action.to, action.message))
        return True

    def _record(self, edge_id: EdgeId) -> Address:
        return Address(Component.EDGE_ESTABLISHER, edge_id)

    def _provision(self, message: ProvisionTx | ProvisionRx) -> None:
        edge_id = message.edge_id
        if edge_id in self.records:
            raise AssertionError(f"edge {edge_id} is provisioned twice")
        address = self._record(edge_id)
        record = EdgeRecord(
            edge_id,
            address=address,
            ring_host=self._ring_host,
            lease_request_id=LeaseRequestId(next(self._requests)),
            bounds=self._bounds,
        )
        self.records[edge_id] = record
        sending = isinstance(message, ProvisionTx)
        gate: Machine[Any] = (
            TxEdge(edge_id, self._gate_owner) if sending else RxEdge(edge_id, self._gate_owner)
        )
        gate_address = Address(Component.TX_EDGE if sending else Component.RX_EDGE, edge_id)
        self._host(address, record)
        self._host(gate_address, gate)

    def _host(self, address: Address, machine: Machine[Any]) -> None:
        actor = MachineActor(
            self._system, address, machine=machine, bus=self._bus, defaults=self._identities()
        )
        self._system.spawn(address, actor)

    def forget(self, edge_ids: tuple[EdgeId, ...]) -> None:
        """Drops edges after their run; late messages for them become dead letters. The record of one that has
        not ended stays until a later call finds that it has: without it nobody would give its range back."""
        for edge_id in edge_ids:
            for component in (Component.TX_EDGE, Component.RX_EDGE):
                self._system.stop(Address(component, edge_id))
        self._forgotten.update(edge_ids)
        for edge_id in [edge_id for edge_id in self._forgotten if self._is_over(edge_id)]:
            self._forgotten.discard(edge_id)
            self.records.pop(edge_id, None)
            self._system.stop(self._record(edge_id))

    def _is_over(self, edge_id: EdgeId) -> bool:
        record = self.records.get(edge_id)
        return record is None or record.ended


class Driver:
    """The boundary to the transport (spec section 24): demux, rendezvous, connections, pump tasks."""

    def __init__(
        self,
        system: ActorSystem,
        bus: EventBus,
        transport: Transport,
        *,
        rings: dict[RingId, Ring],
        ring_host: Address,
        crosses_processes: bool = False,
        met: Met | None = None,
    ) -> None:
        self._system = system
        self._crosses = crosses_processes
        self._met = met
        self._bus = bus
        self._transport = transport
        self._rings = rings
        self._ring_host = ring_host
        self._rendezvous: dict[EdgeId, Rendezvous] = {}
        self._unasked: deque[EdgeId] = deque()
        self._streams: dict[int, tuple[EdgeId, RecvEdge]] = {}
        self._stream_numbers = itertools.count(1)
        self._pumps: dict[RingId, PumpTask] = {}
        self._pump_of_edge: dict[EdgeId, PumpTask] = {}
        self._tasks: dict[EdgeId, asyncio.Task[None]] = {}
        self._sending: set[EdgeId] = set()
        system.spawn(DRIVER, self)

    def start(self) -> None:
        """Begins to accept edge streams."""
        self._system.start_task(self._accept(), owner=DRIVER)

    async def _accept(self) -> None:
        while True:
            try:
                peer, edge_id, edge = await self._transport.accept_edge()
            except EdgeClosed:  # the transport was closed: the process ends
                return
            if edge_id not in EDGE_IDS:
                self._refuse_impossible(peer, edge_id, edge)
                continue
            number = next(self._stream_numbers)
            self._streams[number] = edge_id, edge
            self.receive(StreamArrived(edge_id, peer, number))

    def _refuse_impossible(self, peer: NodeId, edge_id: EdgeId, edge: RecvEdge) -> None:
        """No plan has that edge; and an actor of key 0 would be this one."""
        self._system.start_task(edge.stop(), owner=DRIVER)
        reason = str(StreamFaultReason.UNKNOWN_EDGE)
        fields = {"edge_id": edge_id, "peer": node_hex(peer), "reason": reason}
        self._bus.emit(EventName.EDGE_REFUSED, fields)

    def receive(self, message: object) -> None:
        match message:
            case RingReadable() | RingWritable():
                pump = self._pumps.get(message.ring_id)
                if pump is not None:
                    pump.wake()
            case EstablishSend():
                self._sending.add(message.edge_id)
                self._start(
                    message.edge_id,
                    SendPumpTask(
                        message,
                        self._rings[message.ring_id],
                        self._transport,
                        met=self._met,
                        **self._hooks(),
                    ),
                )
            case EstablishRecv() | StreamArrived():
                self._system.tell(self._meeting(message.edge_id), message)
            case StopEdge(edge_id):
                # Sending or receiving, never both; yet a peer may have opened a stream for an edge that this
                # process sends on, and its rendezvous must not keep the stop from the send-pump.
                if edge_id in self._sending:
                    self._sending.discard(edge_id)
                    self._stop(edge_id)
                if edge_id in self._rendezvous:
                    self._system.tell(self._meeting(edge_id), message)
            case _:
                raise AssertionError(f"Driver does not take {type(message).__name__}")

    def _meeting(self, edge_id: EdgeId) -> Address:
        address = Address(Component.DRIVER, edge_id)
        if edge_id not in self._rendezvous:
            machine = Rendezvous(edge_id, pending_bound=PENDING_STREAM_BOUND)
            self._rendezvous[edge_id] = machine
            self._system.spawn(
                address,
                MachineActor(self._system, address, machine=machine, bus=self._bus, perform=self._perform),
            )
        return address

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartRecvPump(spec, stream):
                _, edge = self._streams.pop(stream)
                self._start(
                    spec.edge_id, RecvPumpTask(spec, self._rings[spec.ring_id], edge, **self._hooks())
                )
            case StopRecvPump(edge_id):
                self._stop(edge_id)
            case RefuseStream(stream):
                edge_id, refused = self._streams.pop(stream)
                self._system.start_task(refused.stop(), owner=DRIVER)
                if self._rendezvous[edge_id].unasked:
                    self._note_unasked(edge_id)

    def _note_unasked(self, edge_id: EdgeId) -> None:
        """A peer may name any number of edges. Not at once: more of it may be on its way in the mailbox."""
        if edge_id not in self._unasked:
            self._unasked.append(edge_id)
        if len(self._unasked) > UNASKED_KEPT:
            oldest = self._unasked.popleft()
            machine = self._rendezvous.get(oldest)
            if machine is not None and machine.unasked:
                self.forget((oldest,))

    def _hooks(self) -> dict[str, Any]:
        def tell(action: Send) -> None:
            self._system.tell(action.to, action.message)

        # Peers in this process call into each other's pumps: their actors take turns, as processes do.
        put = self._system.deliver if self._crosses else self._system.tell

        def hint(message: RingReadable | RingWritable) -> None:
            put(self._ring_host, message)

        return {"now": self._system.now, "tell": tell, "hint": hint}

    def _start(self, edge_id: EdgeId, pump: PumpTask) -> None:
        self._pumps[pump.ring_id] = pump
        self._pump_of_edge[edge_id] = pump
        self._tasks[edge_id] = self._system.start_task(self._guarded(edge_id, pump), owner=DRIVER)

    async def _guarded(self, edge_id: EdgeId, pump: PumpTask) -> None:
        try:
            await pump.run()
        except Exception as error:  # a pump's defect is a fault of its edge, not of the node
            detail = f"{type(error).__name__}: {error}"
            fault = StreamFault(edge_id, StreamFaultReason.PUMP_FAILED, detail)
            self._system.tell(ESTABLISHER, fault)

    def _stop(self, edge_id: EdgeId) -> None:
        pump = self._pump_of_edge.pop(edge_id, None)
        task = self._tasks.pop(edge_id, None)
        if pump is None or task is None:
            return

        def ended(_: asyncio.Task[None]) -> None:
            self._pumps.pop(pump.ring_id, None)
            self._system.tell(ESTABLISHER, PumpStopped(edge_id, pump.ring_id))

        pump.stop()
        task.add_done_callback(ended)

    def forget(self, edge_ids: tuple[EdgeId, ...]) -> None:
        """Drops the rendezvous of ended edges after their run. One that holds a stream, or is about to,
        stays: nobody else would refuse that in its time."""
        for edge_id in edge_ids:
            machine = self._rendezvous.get(edge_id)
            if machine is not None and machine.state not in _WITH_STREAM:
                del self._rendezvous[edge_id]
                self._system.stop(Address(Component.DRIVER, edge_id))


class DataPlane:
    """The three together, in the order in which they depend on each other."""

    def __init__(
        self,
        system: ActorSystem,
        bus: EventBus,
        *,
        arena: ArenaPlugin,
        ring_host: Address,
        gate_owner: Address,
        arena_owner: Address,
        bounds: EdgeBounds | None = None,
        identities: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._system = system
        self._bus = bus
        self._ring_host = ring_host
        self.arena = ArenaAdapter(system, bus, arena, owner=arena_owner)
        self.establisher = EdgeEstablisher(
            system,
            bus,
            ring_host=ring_host,
            gate_owner=gate_owner,
            bounds=bounds or EdgeBounds(),
            identities=identities,
        )
        self.driver: Driver | None = None

    def attach_transport(
        self, transport: Transport, *, crosses_processes: bool = False, met: Met | None = None
    ) -> None:
        """The transport is up: edges can be driven from now on. `crosses_processes` as its provider says,
        `met` as a send-pump takes it."""
        self.driver = Driver(
            self._system,
            self._bus,
            transport,
            rings=self.arena.rings,
            ring_host=self._ring_host,
            crosses_processes=crosses_processes,
            met=met,
        )
        self.driver.start()

    def forget(self, edge_ids: tuple[EdgeId, ...]) -> None:
        self.establisher.forget(edge_ids)
        if self.driver is not None:
            self.driver.forget(edge_ids)

    @property
    def leased(self) -> int:
        """Rings that are still leased: 0 after every run that could prove its teardown."""
        return len(self.arena.machine.live)
