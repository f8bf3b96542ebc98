"""ArenaManager FSM, layouts (spec sections 18, 19): first fit, serial queue, reuse after proof, tiling."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.events import EventName
from swactor_core.faults import Component, LeaseRejection
from swactor_core.fsm import Action, Emit, InvalidTransition, Send
from swactor_core.ids import EdgeId, LeaseRequestId, RingId
from swactor_core.machines.arena import (
    PAGE,
    ArenaManager,
    ArenaState,
    DiscardRange,
    MapArena,
    PrepareRing,
    RingPreparationFailed,
    RingPrepared,
)
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    ArenaConstructionFailed,
    CancelLease,
    ConstructArena,
    LeaseRing,
    PumpProof,
    QuiescenceProof,
    ReleaseRing,
    RingLeased,
    RingLeaseRejected,
    RingProof,
    RingReleased,
    Shutdown,
)
from swactor_core.specs import HostPinning, RingDirection, RingLayout, RingSpec, WakeCoalescing
from swactor_testing.scripts import Script, Steps, event_strategies, step_or_refuse, walk

S = ArenaState
OWNER = Address(Component.NODE)
PROOF = QuiescenceProof(PumpProof.STOPPED, RingProof.QUIESCED)
CEILING = 4 * PAGE
ENDING = "the arena takes no more leases: its node is ending"


def requester(request: int) -> Address:
    return Address(Component.EDGE_ESTABLISHER, request)


def lease(request: int, capacity: int = PAGE - 64, alignment: int = 64) -> LeaseRing:
    """A lease of `capacity` data bytes for edge `request`; 64 bytes of header come on top."""
    spec = RingSpec(capacity, RingDirection.INGRESS, alignment)
    return LeaseRing(LeaseRequestId(request), requester(request), EdgeId(request), spec.direction, spec)


def layout(ring: int, page: int, pages: int = 1) -> RingLayout:
    offset = page * PAGE
    return RingLayout(RingId(ring), offset, pages * PAGE, offset, offset + 64, pages * PAGE - 64, 64)


def leased(request: int, where: RingLayout) -> tuple[Action, ...]:
    return (
        Emit(EventName.RING_LEASED, {"ring_id": where.ring_id, "edge_id": request}),
        Send(requester(request), RingLeased(LeaseRequestId(request), EdgeId(request), where)),
    )


def released(request: int, where: RingLayout) -> tuple[Action, ...]:
    fields = {"ring_id": where.ring_id, "edge_id": request, "proof": {"pump": "Stopped", "ring": "Quiesced"}}
    return (
        DiscardRange(where),
        Emit(EventName.RING_RELEASED, fields),
        Send(requester(request), RingReleased(where.ring_id)),
    )


def rejected(request: int, reason: LeaseRejection, detail: str = "") -> Send:
    return Send(
        requester(request), RingLeaseRejected(LeaseRequestId(request), EdgeId(request), reason, detail)
    )


def prepared(ring: int) -> RingPrepared:
    return RingPrepared(RingId(ring))


def give_back(ring: int) -> ReleaseRing:
    return ReleaseRing(RingId(ring), PROOF)


BOOTED: Steps = [
    (ConstructArena(CEILING + 100), (MapArena(CEILING),)),
    (ArenaConstructed(), (Send(OWNER, ArenaConstructed()),)),
]
FULL = lease(1, 4 * PAGE - 64)
TOO_LARGE = lease(2, 4 * PAGE)
TAKEN: Steps = [
    *BOOTED,
    (FULL, (PrepareRing(layout(1, 0, 4)),)),
    (prepared(1), leased(1, layout(1, 0, 4))),
]

SCENARIOS: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], S.BOOTING),
    "a lease and its release": ([*TAKEN, (give_back(1), released(1, layout(1, 0, 4)))], S.READY),
    "construction fails": (
        [
            (ConstructArena(CEILING), (MapArena(CEILING),)),
            (ArenaConstructionFailed("no memfd"), (Send(OWNER, ArenaConstructionFailed("no memfd")),)),
            (lease(1), (rejected(1, LeaseRejection.SHUTTING_DOWN, ENDING),)),
        ],
        S.FAILED,
    ),
    "stopped after it failed": (
        [
            (ConstructArena(CEILING), (MapArena(CEILING),)),
            (ArenaConstructionFailed("no"), (Send(OWNER, ArenaConstructionFailed("no")),)),
            (Shutdown(), ()),
        ],
        S.SHUTTING_DOWN,
    ),
    "stopped while it maps: the answer comes late": (
        [
            (ConstructArena(CEILING), (MapArena(CEILING),)),
            (Shutdown(), ()),
            (ArenaConstructed(), ()),
            (ArenaConstructionFailed("no"), ()),
            (lease(1), (rejected(1, LeaseRejection.SHUTTING_DOWN, ENDING),)),
        ],
        S.SHUTTING_DOWN,
    ),
    "first fit: the first hole that is large enough, split": (
        [
            *BOOTED,
            (lease(1), (PrepareRing(layout(1, 0)),)),
            (lease(2), (PrepareRing(layout(2, 1)),)),
            (prepared(2), leased(2, layout(2, 1))),
            (prepared(1), leased(1, layout(1, 0))),
            (give_back(1), released(1, layout(1, 0))),
            (lease(3, 2 * PAGE - 64), (PrepareRing(layout(3, 2, 2)),)),
            (lease(4), (PrepareRing(layout(4, 0)),)),
        ],
        S.READY,
    ),
    "pressure: queued in order, nobody overtakes, served on release": (
        [
            *TAKEN,
            (lease(2, 3 * PAGE - 64), ()),
            (lease(3), ()),
            (
                give_back(1),
                (
                    *released(1, layout(1, 0, 4)),
                    PrepareRing(layout(2, 0, 3)),
                    PrepareRing(layout(3, 3)),
                ),
            ),
        ],
        S.READY,
    ),
    "the head of the queue is cancelled: the next is served": (
        [
            *BOOTED,
            (lease(1, 2 * PAGE - 64), (PrepareRing(layout(1, 0, 2)),)),
            (lease(2, 3 * PAGE - 64), ()),
            (lease(3), ()),
            (CancelLease(LeaseRequestId(2)), (PrepareRing(layout(2, 2)),)),
        ],
        S.READY,
    ),
    "cancelled when the range is already being prepared: it is leased and the requester gives it back": (
        [
            *BOOTED,
            (lease(1), (PrepareRing(layout(1, 0)),)),
            (CancelLease(LeaseRequestId(1)), ()),
            (prepared(1), leased(1, layout(1, 0))),
            (give_back(1), released(1, layout(1, 0))),
        ],
        S.READY,
    ),
    "the end comes while a range is being prepared: its requester is refused, the range is free": (
        [
            *BOOTED,
            (lease(1), (PrepareRing(layout(1, 0)),)),
            (lease(2), (PrepareRing(layout(2, 1)),)),
            (Shutdown(), ()),
            (prepared(1), (DiscardRange(layout(1, 0)), rejected(1, LeaseRejection.SHUTTING_DOWN, ENDING))),
            (
                RingPreparationFailed(RingId(2), "no memory"),
                (DiscardRange(layout(2, 1)), rejected(2, LeaseRejection.SHUTTING_DOWN, ENDING)),
            ),
        ],
        S.SHUTTING_DOWN,
    ),
    "what can never fit is refused at once": (
        [
            *BOOTED,
            (
                TOO_LARGE,
                (rejected(2, LeaseRejection.EXCEEDS_CEILING, "ring of 20480 bytes in an arena of 16384"),),
            ),
        ],
        S.READY,
    ),
    "no memory for the ring: the range is free again, the next is tried": (
        [
            *BOOTED,
            (FULL, (PrepareRing(layout(1, 0, 4)),)),
            (lease(2), ()),
            (
                RingPreparationFailed(RingId(1), "ENOMEM"),
                (
                    DiscardRange(layout(1, 0, 4)),
                    rejected(1, LeaseRejection.NO_MEMORY, "ENOMEM"),
                    PrepareRing(layout(2, 0)),
                ),
            ),
        ],
        S.READY,
    ),
    "released twice: the second is stale": (
        [*TAKEN, (give_back(1), released(1, layout(1, 0, 4))), (give_back(1), ())],
        S.READY,
    ),
    "shutdown answers the queue and still takes releases": (
        [
            *TAKEN,
            (lease(2), ()),
            (Shutdown(), (rejected(2, LeaseRejection.SHUTTING_DOWN, ENDING),)),
            (lease(3), (rejected(3, LeaseRejection.SHUTTING_DOWN, ENDING),)),
            (give_back(1), released(1, layout(1, 0, 4))),
        ],
        S.SHUTTING_DOWN,
    ),
}
# What each state expects and ignores, stated here and not read from the table.
LATE = {
    # The memory that was asked for before the end, and whoever gives up waiting.
    S.SHUTTING_DOWN: (ArenaConstructed, ArenaConstructionFailed, CancelLease, Shutdown),
    S.FAILED: (CancelLease,),
}
SCRIPT = Script(lambda: ArenaManager(OWNER), SCENARIOS, LATE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


@pytest.mark.parametrize(("state", "event"), SCRIPT.ignored())
def test_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT.play_ignored(state, event)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


@pytest.mark.parametrize(
    "spec",
    [
        RingSpec(0, RingDirection.INGRESS),
        RingSpec(-1, RingDirection.INGRESS),
        RingSpec(64, RingDirection.INGRESS, alignment=0),
        RingSpec(64, RingDirection.INGRESS, alignment=3),
        RingSpec(64, RingDirection.INGRESS, alignment=2 * PAGE),
        RingSpec(64, RingDirection.INGRESS, host_pinning=HostPinning.PINNED_REQUIRED),
        RingSpec(64, RingDirection.INGRESS, wake_coalescing=WakeCoalescing.READY_SET),
    ],
)
def test_a_spec_that_no_ring_can_have_is_refused(spec: RingSpec) -> None:
    machine = booted()
    request = LeaseRing(LeaseRequestId(1), requester(1), EdgeId(1), spec.direction, spec)
    assert machine.step(request, 0.0) == (rejected(1, LeaseRejection.INVALID_SPEC, f"{spec}"),)
    assert_tiled(machine)


@pytest.mark.parametrize("alignment", [1, 64, 256, PAGE])
def test_a_layout_keeps_its_alignment_and_stays_in_its_range(alignment: int) -> None:
    machine = booted(16 * PAGE)
    machine.step(lease(1, 5), 0.0)
    (prepare,) = machine.step(lease(2, 1000, alignment), 0.0)
    assert isinstance(prepare, PrepareRing)
    ring = prepare.layout
    assert ring.data_offset % alignment == 0
    assert ring.data_offset % 64 == 0
    assert ring.header_offset == ring.arena_offset
    assert ring.data_offset - ring.header_offset >= 64
    assert ring.data_offset + ring.data_capacity <= ring.arena_offset + ring.total_len


def test_broken_host_constructs_twice() -> None:
    machine = ArenaManager(OWNER)
    machine.step(ConstructArena(CEILING), 0.0)
    assert step_or_refuse(machine, ConstructArena(PAGE)) is None
    machine.step(ArenaConstructed(), 0.0)
    assert machine.free == [(0, CEILING)]
    assert step_or_refuse(machine, ArenaConstructed()) is None


def test_broken_host_releases_a_ring_that_is_still_being_prepared() -> None:
    machine = booted()
    machine.step(lease(1), 0.0)
    assert machine.step(give_back(1), 0.0) == ()
    assert machine.stale_releases == 1
    assert machine.step(prepared(1), 0.0) == leased(1, layout(1, 0))


def test_broken_host_prepares_a_ring_twice() -> None:
    machine = booted()
    machine.step(lease(1), 0.0)
    machine.step(prepared(1), 0.0)
    for again in (prepared(1), RingPreparationFailed(RingId(1), ""), prepared(7)):
        with pytest.raises(InvalidTransition):
            machine.step(again, 0.0)
    assert list(machine.live) == [RingId(1)]


def test_an_arena_below_a_page_holds_nothing() -> None:
    machine = ArenaManager(OWNER)
    assert machine.step(ConstructArena(PAGE - 1), 0.0) == (MapArena(0),)
    machine.step(ArenaConstructed(), 0.0)
    assert machine.free == []
    (answer,) = machine.step(lease(1), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, RingLeaseRejected)


def test_ring_ids_are_never_used_again() -> None:
    machine = booted()
    seen = []
    for request in range(1, 6):
        (prepare,) = machine.step(lease(request), 0.0)
        assert isinstance(prepare, PrepareRing)
        seen.append(prepare.layout.ring_id)
        machine.step(prepared(request), 0.0)
        machine.step(give_back(request), 0.0)
    assert seen == [1, 2, 3, 4, 5]


def booted(ceiling: int = CEILING) -> ArenaManager:
    machine = ArenaManager(OWNER)
    machine.step(ConstructArena(ceiling), 0.0)
    machine.step(ArenaConstructed(), 0.0)
    return machine


def assert_tiled(machine: ArenaManager) -> None:
    """Free list and live leases cover the arena exactly; no two touch wrongly; free ranges are merged."""
    ranges = [(offset, length, True) for offset, length in machine.free]
    ranges += [(ring.arena_offset, ring.total_len, False) for ring, _ in machine.live.values()]
    end, was_free = 0, False
    for offset, length, free in sorted(ranges):
        assert offset == end, f"hole or overlap at {end}: {sorted(ranges)}"
        assert length > 0
        assert not (free and was_free), f"two free ranges touch at {offset}: {machine.free}"
        end, was_free = offset + length, free
    assert end == machine.ceiling


def specs() -> st.SearchStrategy[RingSpec]:
    return st.builds(
        RingSpec,
        st.sampled_from([0, 1, PAGE - 64, PAGE, 2 * PAGE, 9 * PAGE]),
        st.sampled_from(RingDirection),
        st.sampled_from([1, 3, 64, PAGE]),
    )


EVENTS = event_strategies(ArenaManager, {RingSpec: specs()})
EVENTS[ConstructArena] = st.builds(ConstructArena, st.sampled_from([-1, 0, PAGE, 8 * PAGE]))
BUSY = event_strategies(ArenaManager, {RingSpec: specs(), int: st.integers(1, 9)})
for ends in (Shutdown, ConstructArena, ArenaConstructed, ArenaConstructionFailed):
    del BUSY[ends]


@settings(max_examples=80)
@given(st.data())
def test_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject) -> None:
    walk(data, SCRIPT.somewhere(data), EVENTS)


@settings(max_examples=80)
@given(st.data())
def test_leases_and_holes_always_tile_the_arena(data: st.DataObject) -> None:
    machine = booted(8 * PAGE)
    walk(data, machine, BUSY, steps=40, check=lambda event, actions: assert_tiled(machine))
