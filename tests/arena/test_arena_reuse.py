"""A range is used again only with its proof, and whoever comes late is fenced (spec section 19).

Real memory under the real ArenaManager. A released range is poisoned, and the poison is looked at before its
next ring is made: a byte that somebody wrote in between is an error.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator

import pytest
from swactor_arena import memory
from swactor_arena.arena import AttachedArena, MemfdArenas, OwnedArena
from swactor_arena.ring import NativeRing
from swactor_core.errors import RingError
from swactor_core.faults import Component
from swactor_core.ids import EdgeId, LeaseRequestId, RingId
from swactor_core.machines.arena import PAGE, ArenaManager, DiscardRange, PrepareRing, RingPrepared
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    ConstructArena,
    LeaseRing,
    PumpProof,
    QuiescenceProof,
    ReleaseRing,
    RingProof,
)
from swactor_core.specs import RingDirection, RingLayout, RingSpec

CEILING = 64 * PAGE
POISON = 0xDB
OWNER = Address(Component.NODE)
PROOF = QuiescenceProof(PumpProof.STOPPED, RingProof.QUIESCED)


class PoisonedArena(OwnedArena):
    """Keeps the pages of a released range and fills them with poison, which must be whole at its next use."""

    def __init__(self) -> None:
        super().__init__(memory.create_memory(CEILING), CEILING)
        self._bytes = mmap.mmap(self.fd, CEILING)
        self._poisoned: set[int] = set()  # page numbers

    def discard(self, offset: int, length: int) -> None:
        self._bytes[offset : offset + length] = bytes([POISON]) * length
        self._poisoned.update(range(offset // PAGE, (offset + length) // PAGE))

    def create_ring(self, layout: RingLayout) -> NativeRing:
        begin, end = layout.arena_offset, layout.arena_offset + layout.total_len
        for page in self._poisoned.intersection(range(begin // PAGE, end // PAGE)):
            whole = self._bytes[page * PAGE : (page + 1) * PAGE] == bytes([POISON]) * PAGE
            assert whole, f"somebody wrote into page {page} after its release"
            self._poisoned.discard(page)
        return super().create_ring(layout)

    def close(self) -> None:
        super().close()
        self._bytes.close()


class Node:
    """The manager, its effects performed on the arena, and a worker's mapping of it."""

    def __init__(self, manager: type[ArenaManager] = ArenaManager) -> None:
        self.arena = PoisonedArena()
        self.worker: AttachedArena = MemfdArenas().attach(self.arena.fd, CEILING)
        self.machine = manager(OWNER)
        self.machine.step(ConstructArena(CEILING), 0.0)
        self.machine.step(ArenaConstructed(), 0.0)
        self.rings: dict[RingId, NativeRing] = {}
        self._requests = 0

    def lease(self, pages: int) -> RingLayout | None:
        """The new ring's layout; None while the request waits."""
        self._requests += 1
        spec = RingSpec(pages * PAGE - 64, RingDirection.INGRESS)
        number = self._requests
        request = LeaseRing(LeaseRequestId(number), OWNER, EdgeId(number), spec.direction, spec)
        made = self._perform(self.machine.step(request, 0.0))
        return made[0] if made else None

    def release(self, ring_id: RingId) -> list[RingLayout]:
        return self._perform(self.machine.step(ReleaseRing(ring_id, PROOF), 0.0))

    def _perform(self, actions) -> list[RingLayout]:
        made = []
        for action in actions:
            if isinstance(action, PrepareRing):
                self.rings[action.layout.ring_id] = self.arena.create_ring(action.layout)
                self.machine.step(RingPrepared(action.layout.ring_id), 0.0)
                made.append(action.layout)
            elif isinstance(action, DiscardRange):
                self.rings.pop(action.layout.ring_id).close()
                self.arena.discard(action.layout.arena_offset, action.layout.total_len)
        return made

    def close(self) -> None:
        self.worker.close()
        self.arena.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


def overlap(left: RingLayout, right: RingLayout) -> bool:
    first, second = sorted((left, right), key=lambda layout: layout.arena_offset)
    return first.arena_offset + first.total_len > second.arena_offset


def use(ring: NativeRing) -> None:
    span = ring.writable_span()
    span[:] = b"\x5a" * len(span)
    ring.advance_commit(len(span))
    ring.advance_consume(len(ring.readable_span()))


OPERATIONS = (
    lambda ring: ring.writable_span(),
    lambda ring: ring.readable_span(),
    lambda ring: ring.advance_commit(1),
    lambda ring: ring.advance_consume(1),
    lambda ring: ring.acknowledge_readable(),
    lambda ring: ring.acknowledge_writable(),
)


@pytest.mark.parametrize("seed", range(4))
def test_late_ends_of_old_generations_reach_no_later_ring(node, seed) -> None:
    """Ends of released rings go on calling; the poison stays whole and no living ring notices."""
    draw = random.Random(seed)
    late: list[NativeRing] = []
    live: dict[RingId, RingLayout] = {}
    refused = reused = 0
    released: list[RingLayout] = []
    for _ in range(600):
        if draw.random() < 0.6 and sum(ring.total_len for ring in live.values()) < CEILING // 2:
            layout = node.lease(draw.randint(1, 5))
            assert layout is not None
            assert not any(overlap(layout, other) for other in live.values())
            reused += any(overlap(layout, old) for old in released)
            live[layout.ring_id] = layout
            use(node.rings[layout.ring_id])
        elif live:
            ring_id = draw.choice(list(live))
            old = node.worker.open_ring(live[ring_id])
            old.writable_span()
            late.append(old)
            released.append(live.pop(ring_id))
            node.release(ring_id)
        for old in draw.sample(late, min(3, len(late))):
            with pytest.raises(RingError):
                draw.choice(OPERATIONS)(old)
            refused += 1
        for ring_id in live:
            assert node.rings[ring_id].commit == node.rings[ring_id].consume, f"seed {seed}"
    assert min(refused, reused) > 100, "nobody came late, or no range was used again"


def test_an_unproven_range_is_never_leased_again(node) -> None:
    kept = node.lease(32)
    other = node.lease(32)
    assert kept is not None
    assert other is not None
    assert node.lease(1) is None, "the arena is full and nobody has proven anything"
    (next_one,) = node.release(other.ring_id)
    assert overlap(next_one, other)
    assert not overlap(next_one, kept)


def test_the_poison_finds_a_manager_that_does_not_wait_for_the_proof() -> None:
    """It hands the range out while the worker still has a span of it and writes there."""

    class Hasty(ArenaManager):
        def _prepared(self, event: RingPrepared, now: float):
            outcome = super()._prepared(event, now)
            layout, _ = self.live[event.ring_id]
            self._give_back(layout)
            return outcome

    node = Node(Hasty)
    layout = node.lease(4)
    assert layout is not None
    span = node.worker.open_ring(layout).writable_span()
    node.arena.discard(layout.arena_offset, layout.total_len)
    span[100] = 1
    with pytest.raises(AssertionError, match="somebody wrote into page 0 after its release"):
        node.lease(4)
    node.close()
