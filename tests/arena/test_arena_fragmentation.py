"""Hundreds of thousands of leases and releases leave the arena as good as new (spec section 19)."""

from __future__ import annotations

import random

import pytest
from swactor_core.faults import Component
from swactor_core.fsm import Send
from swactor_core.ids import EdgeId, LeaseRequestId, RingId
from swactor_core.machines.arena import PAGE, ArenaManager, PrepareRing, RingPrepared
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    ConstructArena,
    LeaseRing,
    PumpProof,
    QuiescenceProof,
    ReleaseRing,
    RingLeaseRejected,
    RingProof,
)
from swactor_core.specs import RingDirection, RingLayout, RingSpec

PAGES = 1024
OWNER = Address(Component.NODE)
PROOF = QuiescenceProof(PumpProof.STOPPED, RingProof.QUIESCED)
CYCLES = 200_000


class Leases:
    """Requests in, layouts out; knows which are live."""

    def __init__(self, manager: type[ArenaManager]) -> None:
        self.machine = manager(OWNER)
        self.machine.step(ConstructArena(PAGES * PAGE), 0.0)
        self.machine.step(ArenaConstructed(), 0.0)
        self.live: dict[RingId, RingLayout] = {}
        self.requests = self.waited = 0

    def lease(self, pages: int) -> None:
        self.requests += 1
        number = self.requests
        spec = RingSpec(pages * PAGE - 64, RingDirection.EGRESS)
        request = LeaseRing(LeaseRequestId(number), OWNER, EdgeId(number), spec.direction, spec)
        self.waited += not self._take(self.machine.step(request, 0.0))

    def release(self, ring_id: RingId) -> None:
        del self.live[ring_id]
        self._take(self.machine.step(ReleaseRing(ring_id, PROOF), 0.0))

    def _take(self, actions) -> int:
        made = 0
        for action in actions:
            if isinstance(action, PrepareRing):
                made += 1
                self.live[action.layout.ring_id] = action.layout
                self.machine.step(RingPrepared(action.layout.ring_id), 0.0)
            assert not (isinstance(action, Send) and isinstance(action.message, RingLeaseRejected))
        return made

    def check(self) -> None:
        """Free ranges are exactly the gaps between live rings, and no request waits that would fit one."""
        gaps, end = [], 0
        for layout in sorted(self.live.values(), key=lambda layout: layout.arena_offset):
            assert layout.arena_offset >= end, "two rings overlap"
            if layout.arena_offset > end:
                gaps.append((end, layout.arena_offset - end))
            end = layout.arena_offset + layout.total_len
        if end < PAGES * PAGE:
            gaps.append((end, PAGES * PAGE - end))
        assert self.machine.free == gaps, "a free range is lost, or two that touch are not one"
        if self.machine.pending:
            wanted = self.machine.pending[0].ring_spec.data_capacity + 64
            assert all(length < wanted for _, length in gaps), "a request waits although it would fit"

    def churn(self, draw: random.Random, cycles: int, *, fullest: int) -> None:
        """`cycles` leases of runs' usual sizes, released in any order; at most `fullest` pages at once."""
        used = 0
        for cycle in range(cycles):
            pages = draw.choice((1, 1, 2, 3, 5, 8, 16, 17))
            while used + pages > fullest:
                ring_id = draw.choice(list(self.live))
                used -= self.live[ring_id].total_len // PAGE
                self.release(ring_id)
            self.lease(pages)
            used += pages
            if cycle % 500 == 0:
                self.check()

    def press(self, draw: random.Random, steps: int) -> None:
        """More is asked for than there is room; looks after every step."""
        for _ in range(steps):
            if draw.random() < 0.55 and len(self.machine.pending) < 20:
                self.lease(draw.choice((1, 3, 40, 200)))
            elif self.live:
                self.release(draw.choice(list(self.live)))
            self.check()

    def empty_and_lease_everything(self) -> None:
        for ring_id in list(self.live):
            self.release(ring_id)
        while self.live:  # what had waited came in between
            self.release(next(iter(self.live)))
        self.check()
        waited = self.waited
        self.lease(PAGES)
        assert self.waited == waited, "a ring as large as the arena does not fit the empty arena"


def test_half_full_no_lease_ever_waits_and_in_the_end_the_whole_arena_is_one_range() -> None:
    seed = 20260611
    leases = Leases(ArenaManager)
    leases.churn(random.Random(seed), CYCLES, fullest=PAGES // 2)
    assert leases.waited == 0, f"seed {seed}"
    leases.empty_and_lease_everything()


def test_under_pressure_who_waits_is_served_as_soon_as_a_range_fits() -> None:
    """Requests wait here; none of them for longer than its range does not exist."""
    leases = Leases(ArenaManager)
    leases.press(random.Random(7), 15_000)
    assert leases.waited > 1000
    leases.empty_and_lease_everything()


class NeverMerges(ArenaManager):
    def _give_back(self, layout: RingLayout) -> None:
        self.free = sorted([*self.free, (layout.arena_offset, layout.total_len)])


class LosesARange(ArenaManager):
    def _give_back(self, layout: RingLayout) -> None:
        if layout.ring_id % 97:
            super()._give_back(layout)


class ServesNobody(ArenaManager):
    def _retry(self):
        return ()


@pytest.mark.parametrize("broken", [NeverMerges, LosesARange, ServesNobody])
def test_a_manager_that_wears_out_is_found(broken) -> None:
    leases = Leases(broken)
    with pytest.raises(AssertionError, match=r"free range is lost|although it would fit"):
        leases.press(random.Random(1), 5000)
