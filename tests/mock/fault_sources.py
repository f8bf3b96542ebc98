"""What can go wrong in a run, as scripts for the mocks: one name for each source of spec section 36.

A source acts on a run at any of its moments, on one of its nodes, and says which reasons the run may then
record. Knows the mocks and the parts of a run that a script must reach; judges nothing.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mock_run import MockRun
from swactor_core.errors import ResourceError
from swactor_core.faults import Component
from swactor_core.ids import EdgeId, RingId, WorkerGeneration
from swactor_core.machines.worker_process import FromWorker
from swactor_core.messages import Address, InitializeWorker
from swactor_core.specs import OBJECT_HEADER_BYTES
from swactor_core.spi.membership import MemberState
from swactor_core.wire import ObjectHeader
from swactor_testing.memory.edges import Damage
from swactor_testing.memory.hub import HUB
from swactor_testing.synthetic import HIDDEN

TOKEN_RECORD = OBJECT_HEADER_BYTES + 4
ROW_RECORD = OBJECT_HEADER_BYTES + 4 * HIDDEN

# --- parts of a run ---


def hosted(run: MockRun, index: int) -> Any:
    """The worker in that node's process, or None."""
    worker: Any = run.pool[index]._worker
    return worker._hosted


def end_worker(run: MockRun, index: int) -> bool:
    """As a kill from outside."""
    worker = hosted(run, index)
    if worker is not None:
        worker.killed = True
        worker.woken.set()
    return worker is not None


def silence_worker(run: MockRun, index: int) -> bool:
    """It hears nothing from here on, and so says nothing; as a process that was stopped."""
    worker = hosted(run, index)
    if worker is not None:
        worker.commands = deque(maxlen=0)
    return worker is not None


def mislead_worker(run: MockRun, index: int) -> bool:
    """A second InitializeWorker is what no running worker may be given: it ends with WorkerFatal."""
    return command_worker(run, index, InitializeWorker(WorkerGeneration(1), 1, 1, {}))


def command_worker(run: MockRun, index: int, *commands: object) -> bool:
    """Commands that its node never gave it."""
    worker = hosted(run, index)
    if worker is not None:
        worker.commands.extend(commands)
        worker.woken.set()
    return worker is not None


def alter_commands(run: MockRun, index: int, alter: Callable[[Any], Any]) -> None:
    """What its node commands from here on reaches it as `alter` has it: another command, or a tuple."""

    class Altered(deque[Any]):
        def append(self, command: Any) -> None:
            altered = alter(command)
            self.extend(altered if isinstance(altered, tuple) else (altered,))

    worker = hosted(run, index)
    worker.commands = Altered(worker.commands)


def worker_says(run: MockRun, index: int, event: object, *, generation: int | None = None) -> None:
    """What its node reads of it without its having said so: what another worker plug-in might say, or the
    worker's life of that generation."""
    worker: Any = run.pool[index]._worker
    said_by = worker._generation if generation is None else WorkerGeneration(generation)
    run.pool[index].system.tell(Address(Component.GPU_WORKER_CTL), FromWorker(said_by, event))


def ring_of(run: MockRun, index: int, *, inbound: bool) -> tuple[EdgeId, RingId]:
    """Edge and ring of one end of the stage on that node."""
    plan = run.pool[index].stages._provision
    assert plan is not None
    edge_id = plan.inbound.edge_id if inbound else plan.outbound.edge_id
    ring_id = run.pool[index].data_plane.establisher.records[edge_id].ring_id
    assert ring_id is not None
    return edge_id, ring_id


def place(run: MockRun, edge: int, sequence: int) -> tuple[EdgeId, int, int]:
    """Edge id of the plan's edge of that number, where the record of that sequence begins in its stream, and
    the record's bytes."""
    edges = next(e["edges"] for e in run.events if e["event"] == "run_planned")
    prompt = len(run.prompt.encode()) + 1  # a token a byte, and the first
    if edge == len(edges) - 1:
        first = later = TOKEN_RECORD
    elif edge == 0:
        first, later = OBJECT_HEADER_BYTES + 4 * prompt, TOKEN_RECORD
    else:
        first, later = OBJECT_HEADER_BYTES + 4 * HIDDEN * prompt, ROW_RECORD
    begin = first + (sequence - 1) * later if sequence else 0
    return EdgeId(edges[edge]), begin, later if sequence else first


# --- damage to what an edge carries ---


def header_bytes(**changes: int) -> bytes:
    """An object header with some fields changed."""
    fields = {"magic": 0x424F5753, "version": 1, "header_len": 40, "object_id": 0, "sequence": 0, "extent": 4}
    fields |= {"flags": 0, "reserved": 0, **changes}
    return struct.pack("<IHHQQQII", *fields.values())


MALFORMED: dict[str, dict[str, int]] = {
    "HeaderMalformed": {"magic": 1},
    "UnsupportedObjectVersion": {"version": 2},
    "ExtentExceedsMax": {"extent": 1 << 40},
    "ExtentAlignmentInvalid": {"extent": 3},
    "SequenceViolation": {"sequence": 1 << 20},
}
"""By the failure that each must give: what of a sound header is changed."""


def malform(run: MockRun, *, edge: int, sequence: int, cause: str) -> None:
    """The record of `sequence` on that edge of the plan has a header that its consumer must refuse."""
    edge_id, begin, length = place(run, edge, sequence)
    sound = {"sequence": sequence, "extent": length - OBJECT_HEADER_BYTES}
    HUB.damage_edge(edge_id, damage=Damage(replaced=((begin, header_bytes(**sound | MALFORMED[cause])),)))


def cut_short(run: MockRun, *, edge: int, sequence: int, after: int) -> None:
    """The stream ends, as if in order, `after` bytes into the record; 0 is between two records."""
    edge_id, begin, length = place(run, edge, sequence)
    assert 0 <= after < length
    HUB.damage_edge(edge_id, damage=Damage(ends_after=begin + after))


# --- sources ---


@dataclass(frozen=True, slots=True)
class Source:
    """`act(run, node index, chance)` makes it happen, and says whether it could. `reasons` are what a run may
    record for it. `at` is an event's name for a source that has its own moment. `kills`: the node it hits
    owes nothing any more. `certain`: a run cannot complete that still has tokens to make. `unproven`: what it
    hits cannot prove its teardown in time."""

    act: Callable[[MockRun, int, random.Random], bool]
    reasons: frozenset[str]
    at: str = ""
    kills: bool = False
    certain: bool = True
    unproven: bool = False
    worker: Callable[[random.Random], dict[str, object]] = field(default=lambda chance: {})
    options: dict[str, Any] = field(default_factory=dict)


def _judged(state: MemberState, *, everybody: bool) -> Callable[[MockRun, int, random.Random], bool]:
    def act(run: MockRun, index: int, chance: random.Random) -> bool:
        members = {member.node_id for member in run.cluster.members}
        if run.ids[index] in members:
            run.cluster.judge(run.ids[index], state, observer=None if everybody else run.home)
        return run.ids[index] in members

    return act


def _vanishes(run: MockRun, index: int, chance: random.Random) -> bool:
    there = any(endpoint.node_id == run.ids[index] for endpoint in HUB.endpoints.values())
    if there:
        HUB.vanish(run.ids[index])
    return there


def _leaves(run: MockRun, index: int, chance: random.Random) -> bool:
    run.pool[index].stop()
    return True


def _lost_between(run: MockRun, left: int, right: int) -> bool:
    there = {endpoint.node_id: endpoint for endpoint in HUB.endpoints.values()}
    if left not in there or not any(link.up for link in there[left].links_to(right)):  # type: ignore[index]
        return False
    HUB.lose(left, right)  # type: ignore[arg-type]
    return True


def _loses_its_connection(run: MockRun, index: int, chance: random.Random) -> bool:
    """To the stage after it, if there is one and it has been dialled."""
    return index + 1 < run.nodes and _lost_between(run, run.ids[index], run.ids[index + 1])


def _loses_the_orchestrator(run: MockRun, index: int, chance: random.Random) -> bool:
    return _lost_between(run, run.home, run.ids[index])


def _is_silent(run: MockRun, index: int, chance: random.Random) -> bool:
    HUB.hold(sender=run.ids[index])
    return True


def _cannot_be_dialled(run: MockRun, index: int, chance: random.Random) -> bool:
    """By anyone but the orchestrator, whose link stands already: edges to it cannot be made."""
    HUB.refuse("no way", acceptor=run.ids[index])
    return True


def _malformed(causes: tuple[str, ...]) -> Callable[[MockRun, int, random.Random], bool]:
    def act(run: MockRun, index: int, chance: random.Random) -> bool:
        cause = chance.choice(causes)
        malform(run, edge=chance.randrange(run.nodes + 1), sequence=_sequence(run, chance), cause=cause)
        return True

    return act


def _sequence(run: MockRun, chance: random.Random) -> int:
    return chance.randrange(len(run.reference))


def _ends_inside(run: MockRun, index: int, chance: random.Random) -> bool:
    edge, sequence = chance.randrange(run.nodes + 1), _sequence(run, chance)
    length = place(run, edge, sequence)[2]
    cut_short(run, edge=edge, sequence=sequence, after=chance.randrange(1, length))
    return True


def _ends_between(run: MockRun, index: int, chance: random.Random) -> bool:
    cut_short(run, edge=chance.randrange(run.nodes + 1), sequence=_sequence(run, chance), after=0)
    return True


def _breaks(run: MockRun, index: int, chance: random.Random) -> bool:
    edge_id, begin, length = place(run, chance.randrange(run.nodes + 1), _sequence(run, chance))
    HUB.break_edge(edge_id, after=begin + chance.randrange(length))
    return True


def _no_memory_for_rings(run: MockRun, index: int, chance: random.Random) -> bool:
    arena: Any = run.pool[index].data_plane.arena.arena

    def refuse(layout: object) -> Any:
        raise ResourceError("no page is free, by script")

    arena.create_ring = refuse
    return True


def _scripted(**settings: object) -> Callable[[random.Random], dict[str, object]]:
    """Settings of the echo worker; a tuple stands for one of its values."""

    def draw(chance: random.Random) -> dict[str, object]:
        return {k: chance.choice(v) if isinstance(v, tuple) else v for k, v in settings.items()}

    return draw


def _nothing(run: MockRun, index: int, chance: random.Random) -> bool:
    return True


_LINKS = frozenset({"StreamFault", "EofMidObject", "EdgeEstablishmentFailed", "NodeUnavailable"})
_ANY_LAYER = tuple(range(12))
_EARLY = (0, 1, 2)

SOURCES: dict[str, Source] = {
    "membership says dead": Source(
        _judged(MemberState.DEAD, everybody=False), frozenset({"MembershipLost", "PoolTimeout"}), kills=True
    ),
    "membership says left, to all": Source(
        _judged(MemberState.LEFT, everybody=True), _LINKS | {"MembershipLost", "PoolTimeout"}, kills=True
    ),
    "node vanishes": Source(_vanishes, _LINKS | {"PoolTimeout"}, kills=True),
    "node leaves": Source(_leaves, _LINKS | {"PoolTimeout", "MembershipLost", "WorkerCrashed"}, kills=True),
    "connection lost": Source(_loses_its_connection, _LINKS, certain=False),
    "orchestrator's connection lost": Source(_loses_the_orchestrator, _LINKS, kills=True),
    "node is silent": Source(
        _is_silent,
        frozenset({"ExecutionTimeout", "ReadinessTimeout", "PoolTimeout", "EdgeEstablishmentFailed"}),
        kills=True,
        unproven=True,
    ),
    "node cannot be dialled": Source(
        _cannot_be_dialled, frozenset({"EdgeEstablishmentFailed", "PoolTimeout"}), certain=False
    ),
    "malformed header": Source(
        _malformed(tuple(cause for cause in MALFORMED if cause != "SequenceViolation")),
        frozenset({"MalformedObjectHeader"}),
        at="run_planned",
    ),
    "sequence violation": Source(
        _malformed(("SequenceViolation",)), frozenset({"SequenceViolation"}), at="run_planned"
    ),
    "EOF mid-object": Source(_ends_inside, frozenset({"EofMidObject"}), at="run_planned"),
    "EOF between objects": Source(_ends_between, frozenset({"ExecutionTimeout"}), at="run_planned"),
    "stream breaks": Source(_breaks, frozenset({"StreamFault", "EofMidObject"}), at="run_planned"),
    "lease refused": Source(_no_memory_for_rings, frozenset({"EdgeEstablishmentFailed"}), at="run_planned"),
    "ring too large": Source(
        _nothing,
        frozenset({"RingRequestTooLarge"}),
        at="run_planned",
        options={"ring_capacity": 1 << 20, "arena_ceiling": 1 << 20},
    ),
    "arena pressure": Source(  # each of a stage's two rings fits, but not both
        _nothing,
        frozenset({"ArenaPressureTimeout"}),
        at="run_planned",
        options={"ring_capacity": 640 << 10, "arena_ceiling": 1 << 20},
    ),
    "other weights": Source(
        _nothing, frozenset({"WeightLoadFailed"}), at="run_planned", options={"digest": "0" * 64}
    ),
    "worker ends": Source(
        lambda run, index, chance: end_worker(run, index),
        frozenset({"WorkerCrashed", "WorkerFatal"}),
        certain=False,
    ),
    "worker fatal": Source(
        lambda run, index, chance: mislead_worker(run, index),
        frozenset({"WorkerCrashed", "WorkerFatal"}),
        certain=False,
    ),
    "worker is silent": Source(
        lambda run, index, chance: silence_worker(run, index),
        frozenset({"ExecutionTimeout", "ReadinessTimeout", "EdgeEstablishmentFailed"}),
        certain=False,
    ),
    "worker exits in a step": Source(
        _nothing,
        frozenset({"WorkerCrashed"}),
        at="run_planned",
        worker=_scripted(exit_at=_EARLY, fault_layer=_ANY_LAYER),
    ),
    "step fails": Source(
        _nothing,
        frozenset({"StepFailed"}),
        at="run_planned",
        worker=_scripted(fail_at=_EARLY, fault_layer=_ANY_LAYER),
    ),
    "device copy fails": Source(
        _nothing,
        frozenset({"DeviceCopyFailed", "StepFailed"}),
        at="run_planned",
        worker=_scripted(fail_copy=(1, 2, 3, 4)),
    ),
    "device out of memory": Source(
        _nothing, frozenset({"DeviceOutOfMemory"}), at="run_planned", worker=_scripted(memory_bytes=3)
    ),
    "worker cannot start": Source(
        _nothing, frozenset({"WorkerFatal"}), at="-", worker=_scripted(colour="red")
    ),
    "arena cannot boot": Source(
        _nothing, frozenset({"ArenaBootFailed"}), at="-", options={"arena_ceiling": 1 << 60}
    ),
}

assert ObjectHeader(0, 0, 4).encode() == header_bytes()  # type: ignore[arg-type]
