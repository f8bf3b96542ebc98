"""Quiescence (spec sections 38 and 39) with the real machines wired together and every order of events.

Arena release is safe only after its proof. ArenaManager, three EdgeRecords, GpuWorkerCtl and two Rendezvous
exchange messages over channels that keep order for each pair of parties and nothing else. Who else there is
(a worker process, pumps, the network, a stopping owner) is modelled by what it truly holds: whenever the
arena hands a range back, the truth is asked.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.faults import Component, RingFaultReason, StreamFaultReason
from swactor_core.fsm import InvalidTransition, Machine, Send
from swactor_core.ids import EdgeId, LeaseRequestId, NodeId, PortId, RingId, WorkerGeneration
from swactor_core.machines.arena import (
    PAGE,
    ArenaManager,
    DiscardRange,
    PrepareRing,
    RingPreparationFailed,
    RingPrepared,
)
from swactor_core.machines.edge import EdgeBounds, EdgeProvisionState, EdgeRecord
from swactor_core.machines.rendezvous import Rendezvous, StartRecvPump, StopRecvPump
from swactor_core.machines.worker_ctl import (
    FromWorker,
    GpuWorkerCtl,
    KillWorker,
    SpawnWorker,
    WorkerPolicy,
    WriteWorker,
)
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    CancelLease,
    ConstructArena,
    DriverEdgeReady,
    EdgeStopped,
    EstablishRecv,
    EstablishSend,
    InstallRing,
    ProcessNotification,
    ProcessNotificationKind,
    ProvisionRx,
    ProvisionTx,
    PumpStopped,
    RingFault,
    RingInstalled,
    RingQuiesced,
    ShutdownMode,
    ShutdownWorker,
    StartWorker,
    StopEdge,
    StreamArrived,
    StreamFault,
    TimerFired,
    UninstallRing,
    WorkerReady,
)
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingSpec

OBJECT = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
PEER, STRANGER = NodeId(77), NodeId(78)
INGRESS, EGRESS = (EdgeId(1), EdgeId(2)), EdgeId(3)
EDGES = (*INGRESS, EGRESS)
PAGES = {EdgeId(1): 2, EdgeId(2): 2, EdgeId(3): 3}  # in an arena of 5: one always waits for another
S = EdgeProvisionState


class World:
    """`broken_host` tells reports and answers twice now and then: machines may refuse, the arena may still
    not err."""

    def __init__(self, choose: Callable[[int], int], *, broken_host: bool) -> None:
        self.choose = choose
        self.broken_host = broken_host
        self.channels: dict[tuple[Any, Any], deque[object]] = defaultdict(deque)
        self.arena = ArenaManager(Address(Component.NODE))
        self.arena.step(ConstructArena(5 * PAGE), 0.0)
        self.arena.step(ArenaConstructed(), 0.0)
        self.ctl = GpuWorkerCtl(WorkerPolicy(max_restarts=1), arena_ceiling=0, ring_helper_abi=1, backend={})
        self.records = {edge: self.record(edge) for edge in EDGES}
        self.meetings = {edge: Rendezvous(edge, pending_bound=30.0) for edge in INGRESS}
        self.process: int = 0  # generation of the live process, 0 for none
        self.installed: set[RingId] = set()
        self.pumps: dict[EdgeId, RingId] = {}
        self.cancelled: set[EdgeId] = set()
        self.unproven: set[EdgeId] = set()
        self.stopped: set[EdgeId] = set()
        self.log: list[str] = []
        self.tell("node", "ctl", StartWorker())
        for edge in EDGES:
            self.tell("stage", edge, self.provision(edge))

    def record(self, edge: EdgeId) -> EdgeRecord:
        address = Address(Component.EDGE_ESTABLISHER, edge)
        host, request = Address(Component.GPU_WORKER_CTL), LeaseRequestId(edge)
        return EdgeRecord(
            edge, address=address, ring_host=host, lease_request_id=request, bounds=EdgeBounds()
        )

    def provision(self, edge: EdgeId) -> ProvisionRx | ProvisionTx:
        direction = RingDirection.INGRESS if edge in INGRESS else RingDirection.EGRESS
        kind = ProvisionRx if edge in INGRESS else ProvisionTx
        return kind(edge, PortId(0), PEER, OBJECT, RingSpec(PAGES[edge] * PAGE - 64, direction))

    def tell(self, sender: Any, receiver: Any, message: object) -> None:
        self.channels[sender, receiver].append(message)

    # --- one step of the world ---

    def step(self) -> None:
        """Mostly a message is delivered; now and then a stream comes, a timer fires, something goes wrong."""
        pairs = [pair for pair, queue in self.channels.items() if queue]
        timers = [
            (take, TimerFired(name, generation))
            for machine, take in self.machines()
            for name, generation in machine._timers.items()
        ]
        kind = self.choose(24)
        if kind < 20 and pairs:
            self.deliver(pairs[self.choose(len(pairs))])
        elif kind < 22:
            self.stream(INGRESS[self.choose(len(INGRESS))])
        elif kind < 23 and timers:
            take, timer = timers[self.choose(len(timers))]
            self.log.append(f"{timer}")
            take(timer)
        else:
            self.trouble(EDGES[self.choose(len(EDGES))])

    def machines(self) -> list[tuple[Machine[Any], Callable[[object], None]]]:
        records = [(r, lambda e, edge=edge: self.at_record(edge, e)) for edge, r in self.records.items()]
        meetings = [(m, lambda e, edge=edge: self.at_meeting(edge, e)) for edge, m in self.meetings.items()]
        return [*records, *meetings, (self.ctl, self.at_ctl)]

    def deliver(self, pair: tuple[Any, Any]) -> None:
        queue = self.channels[pair]
        command = pair == ("ctl", "worker") or (pair[0] in EDGES and pair[1] != "arena")
        twice = self.broken_host and not command and self.choose(4) == 0
        message = queue[0] if twice else queue.popleft()
        receiver = pair[1]
        self.log.append(f"{pair[0]} -> {receiver}: {message}{' (told twice)' if twice else ''}")
        match receiver:
            case "arena":
                self.at_arena(message)
            case "ctl":
                self.at_ctl(message)
            case "worker":
                self.at_worker(*message)
            case "establisher":
                self.at_establisher(message)
            case ("driver", edge):
                self.at_driver(edge, message)
            case edge:
                self.at_record(edge, message)

    def taken(self, machine: Machine[Any], event: object) -> tuple[Any, ...]:
        try:
            return machine.step(event, 0.0)
        except InvalidTransition:
            assert self.broken_host, f"a host that keeps order was refused: {event}"
            return ()

    # --- what may go wrong ---

    def stream(self, edge: EdgeId) -> None:
        peer = PEER if self.choose(4) else STRANGER
        self.tell("network", ("driver", edge), StreamArrived(edge, peer, 1))

    def trouble(self, edge: EdgeId) -> None:
        record = self.records[edge]
        match self.choose(6):
            case 0 | 1 if record.state is not S.NEW:
                self.tell("stage", edge, StopEdge(edge))
            case 2 if edge in self.pumps:
                fault = StreamFault(edge, StreamFaultReason.STREAM_BROKEN)
                self.tell(("driver", edge), "establisher", fault)
            case 3 if record.ring_id in self.installed:
                fault_reason = RingFaultReason.DEVICE_COPY_FAILED
                said = RingFault(record.ring_id, edge, PortId(0), fault_reason)
                self.tell("worker", "ctl", FromWorker(WorkerGeneration(self.process), said))
            case 4 if self.process and self.choose(2):
                self.die()
            case 4 if self.process:
                generation, error = WorkerGeneration(self.process), ProcessNotificationKind.ERROR
                self.tell("worker", "ctl", ProcessNotification(generation, error, 1, "bad event"))
            case 5 if self.process and self.choose(4) == 0:
                self.tell("node", "ctl", ShutdownWorker(ShutdownMode.GRACEFUL))

    def die(self) -> None:
        """The worker process ends; what it held ends with it, and its exit is known after its last event."""
        generation, self.process = WorkerGeneration(self.process), 0
        self.installed.clear()
        exited = ProcessNotification(generation, ProcessNotificationKind.EXITED, 1, "exited")
        self.tell("worker", "ctl", exited)

    # --- the parties ---

    def at_arena(self, event: object) -> None:
        for action in self.taken(self.arena, event):
            match action:
                case Send(Address(Component.EDGE_ESTABLISHER, edge), message):
                    self.tell("arena", edge, message)
                case PrepareRing(layout):
                    lucky = self.choose(8) > 0
                    failed = RingPreparationFailed(layout.ring_id, "ENOMEM")
                    self.tell("memory", "arena", RingPrepared(layout.ring_id) if lucky else failed)
                case DiscardRange(layout):
                    self.assert_quiet(layout.ring_id)
        self.assert_tiled()

    def at_record(self, edge: EdgeId, event: object) -> None:
        for action in self.taken(self.records[edge], event):
            match action:
                case Send(Address(Component.ARENA_MANAGER), message):
                    if isinstance(message, CancelLease):
                        self.cancelled.add(edge)
                    self.tell(edge, "arena", message)
                case Send(Address(Component.GPU_WORKER_CTL), message):
                    assert not (isinstance(message, InstallRing) and edge in self.cancelled)
                    self.tell(edge, "ctl", message)
                case Send(Address(Component.DRIVER), message):
                    self.tell(edge, ("driver", edge), message)
                case Send(_, EdgeStopped(_, unproven)):
                    self.stopped.add(edge)
                    (self.unproven.add if unproven else self.unproven.discard)(edge)

    def at_establisher(self, message: Any) -> None:
        if isinstance(message, RingQuiesced):
            for edge, record in self.records.items():
                if record.ring_id == message.ring_id:
                    self.at_record(edge, message)
        else:
            self.at_record(message.edge_id, message)

    def at_ctl(self, event: object) -> None:
        for action in self.taken(self.ctl, event):
            match action:
                case Send(Address(Component.EDGE_ESTABLISHER), message):
                    self.tell("ctl", "establisher", message)
                case Send(Address(Component.GPU_WORKER_CTL), message):
                    self.tell("ctl", "ctl", message)
                case WriteWorker(generation, command):
                    self.tell("ctl", "worker", (generation, command))
                case SpawnWorker(generation):
                    self.process = generation
                    started = ProcessNotification(generation, ProcessNotificationKind.STARTED, 1)
                    self.tell("worker", "ctl", started)
                    ready = WorkerReady(1, generation, 1, {})
                    self.tell("worker", "ctl", FromWorker(generation, ready))
                case KillWorker(generation):
                    self.tell("signal", "worker", (generation, action))

    def at_worker(self, generation: WorkerGeneration, command: object) -> None:
        if generation != self.process:
            return

        def say(event: object) -> None:
            self.tell("worker", "ctl", FromWorker(generation, event))

        match command:
            case InstallRing(ring, edge, port):
                if self.choose(8) or ring in self.installed:
                    self.installed.add(ring)
                    say(RingInstalled(ring, edge, port))
                else:
                    say(RingFault(ring, edge, port, RingFaultReason.RING_LAYOUT_INVALID))
            case UninstallRing(ring):
                self.installed.discard(ring)
                say(RingQuiesced(ring))
            case ShutdownWorker() | KillWorker():
                self.die()

    def at_driver(self, edge: EdgeId, message: Any) -> None:
        if edge in INGRESS:
            self.at_meeting(edge, message)
            return
        match message:
            case EstablishSend():
                self.pumps[edge] = message.ring_id
                fault = StreamFault(edge, StreamFaultReason.PEER_UNREACHABLE)
                self.tell(("driver", edge), "establisher", DriverEdgeReady(edge) if self.choose(4) else fault)
            case StopEdge():
                self.stop_pump(edge)

    def at_meeting(self, edge: EdgeId, event: object) -> None:
        for action in self.taken(self.meetings[edge], event):
            match action:
                case Send(_, message):
                    self.tell(("driver", edge), "establisher", message)
                case StartRecvPump(spec):
                    self.pumps[edge] = spec.ring_id
                case StopRecvPump():
                    self.stop_pump(edge)

    def stop_pump(self, edge: EdgeId) -> None:
        ring = self.pumps.pop(edge, None)
        if ring is not None:
            self.tell(("driver", edge), "establisher", PumpStopped(edge, ring))

    # --- the truth ---

    def assert_quiet(self, ring: RingId) -> None:
        """Nobody touches this ring, and nobody is on the way to."""
        assert ring not in self.installed, f"ring {ring} is in the worker"
        assert ring not in self.pumps.values(), f"ring {ring} has a pump"
        for (_, receiver), queue in self.channels.items():
            for message in queue:
                match message:
                    case (generation, InstallRing(there)) if generation == self.process:
                        assert there != ring, f"InstallRing {ring} is on its way to the worker"
                    case InstallRing(there):
                        assert there != ring, f"InstallRing {ring} is on its way to {receiver}"
                    case EstablishSend() | EstablishRecv():
                        assert message.ring_id != ring, f"ring {ring} is on its way to the driver"

    def assert_tiled(self) -> None:
        ranges = sorted(
            [*self.arena.free, *((ring.arena_offset, ring.total_len) for ring, _ in self.arena.live.values())]
        )
        end = 0
        for offset, length in ranges:
            assert offset == end, f"hole or overlap at {end}: {ranges}"
            end += length
        assert end == self.arena.ceiling

    def settle(self) -> None:
        """Every edge is stopped and every message delivered; no timer fires, nothing more goes wrong."""
        self.choose = lambda options: options - 1  # the good end of every choice
        for edge in EDGES:
            self.tell("stage", edge, StopEdge(edge))
        for _ in range(10_000):
            pair = next((pair for pair, queue in self.channels.items() if queue), None)
            if pair is None:
                return
            self.deliver(pair)
        raise AssertionError("the world does not come to rest")


def run(seed: int, *, broken_host: bool) -> World:
    chance = random.Random(seed)
    world = World(chance.randrange, broken_host=broken_host)
    try:
        for _ in range(chance.randrange(10, 150)):
            world.step()
    except AssertionError:
        print(f"seed {seed}", *world.log, sep="\n")
        raise
    return world


@settings(max_examples=400)
@given(st.integers(0, 2**64))
def test_no_range_is_reused_under_a_pump_a_ring_or_an_order_to_use_it(seed: int) -> None:
    world = run(seed, broken_host=False)
    world.settle()
    for edge, record in world.records.items():
        assert record.state is S.STOPPED, f"edge {edge} rests in {record.state}"
    assert world.stopped == set(EDGES)
    still_leased = {request.edge_id for _, request in world.arena.live.values()}
    assert not still_leased, f"edges {still_leased} are proved and their ranges not free"
    assert not world.unproven, f"edges {world.unproven} are proved, and nobody was told"
    assert not world.arena.pending


@settings(max_examples=400)
@given(st.integers(0, 2**64))
def test_a_host_that_tells_things_twice_cannot_make_the_arena_reuse_a_range(seed: int) -> None:
    run(seed, broken_host=True)
