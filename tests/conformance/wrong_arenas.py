"""The heap arena with one thing broken at a time."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from swactor_core.errors import RingError
from swactor_core.specs import RingLayout
from swactor_core.spi.arena import RingState
from swactor_testing.conformance import ArenaCapabilities, ArenaContract
from swactor_testing.heap import (
    COMMIT_OFFSET,
    CONSUME_OFFSET,
    READABLE_PENDING,
    WRITABLE_PENDING,
    HeapArena,
    HeapArenas,
    HeapRing,
)
from wrong_kit import caught_by

FIFO = "test_bytes_come_out_as_they_went_in_through_every_wrap[0]"
COMMIT_WAKE = "test_a_commit_asks_for_one_hint_until_it_is_acknowledged"
RELEASE_WAKE = "test_a_release_of_a_full_ring_asks_for_one_hint_until_it_is_acknowledged"
LIVENESS = "test_ends_that_move_only_on_hints_never_stall[0]"
LEASES = "test_rings_of_live_leases_never_touch_each_other[0]"


class Arenas(HeapArenas):
    def __init__(self, parts: Any) -> None:
        super().__init__()
        self._parts = parts

    def create(self, ceiling: int) -> HeapArena:
        super().create(ceiling)
        self._arena = self._parts.memory(ceiling)
        self._arena.ring = self._parts.ring
        return self._arena


class Memory(HeapArena):
    ring: type = HeapRing

    def create_ring(self, layout: RingLayout) -> Any:
        super().create_ring(layout)
        return self.ring(self._view, layout)

    def open_ring(self, layout: RingLayout) -> Any:
        self._check_range(layout)
        return self.ring(self._view, layout)


class Wrong(ArenaContract):
    capabilities = ArenaCapabilities(provider="heap", crosses_processes=False)
    memory: ClassVar[type] = Memory
    ring: ClassVar[type] = HeapRing

    @pytest.fixture
    def plugin(self) -> Any:
        return Arenas(type(self))


class TestUnbroken(Wrong):
    pass


# --- bytes ---


@caught_by("test_what_is_read_is_not_free_before_its_release", "assert 1000 == 0")
class TestReleasesEarly(Wrong):
    """A range is the producer's again as soon as the consumer looks at it."""

    class ring(HeapRing):
        def readable_span(self) -> memoryview:
            span = super().readable_span()
            kept = bytes(span)
            self._header[CONSUME_OFFSET : CONSUME_OFFSET + 8] = self.commit.to_bytes(8, "little")
            self._own_consume = None
            return memoryview(kept)

        def advance_consume(self, count: int) -> bool:
            return True


@caught_by(FIFO, "seed 0")
class TestForgetsTheWrap(Wrong):
    class ring(HeapRing):
        def readable_span(self) -> memoryview:
            span = super().readable_span()
            start = self.consume % (len(self._data) - 1)
            return self._data[start : start + len(span)]


@caught_by(FIFO, "seed 0")
class TestGivesTooMuchRoom(Wrong):
    class ring(HeapRing):
        def writable_span(self) -> memoryview:
            span = super().writable_span()
            return span if len(span) else self._data[:8]


@caught_by("test_what_is_written_is_not_readable_before_its_commit", "assert 1000 == 0")
class TestCommitsByTheSpan(Wrong):
    class ring(HeapRing):
        def writable_span(self) -> memoryview:
            span = super().writable_span()
            super().advance_commit(len(span))
            return span

        def advance_commit(self, count: int) -> bool:
            return True


@caught_by("test_a_count_beyond_the_span_is_refused", "DID NOT RAISE")
class TestTakesAnyCount(Wrong):
    class ring(HeapRing):
        def advance_consume(self, count: int) -> bool:
            return super().advance_consume(max(0, min(count, self._read_granted)))


@caught_by("test_spans_are_contiguous_and_end_at_the_wrap", "assert 99 == 100")
class TestSwapsTheWrap(Wrong):
    class ring(HeapRing):
        def writable_span(self) -> memoryview:
            span = super().writable_span()
            return span[: len(span) - 1] if 1 < len(span) < len(self._data) else span


# --- wakes ---


@caught_by(COMMIT_WAKE, "a wake is lost")
class TestHintsOnlyFromEmpty(Wrong):
    """The defect of many a ring: a commit just before the consumer's acknowledgement is never told."""

    class ring(HeapRing):
        def advance_commit(self, count: int) -> bool:
            empty = self.commit == self.consume
            return super().advance_commit(count) and empty


@caught_by(COMMIT_WAKE, "assert True is False")
class TestHintsForEveryCommit(Wrong):
    class ring(HeapRing):
        def advance_commit(self, count: int) -> bool:
            super().advance_commit(count)
            return True


@caught_by(RELEASE_WAKE, "a wake is lost")
class TestHintsOnlyAtEighths(Wrong):
    class ring(HeapRing):
        def advance_consume(self, count: int) -> bool:
            before = self.consume
            eighth = len(self._data) // 8
            wanted = super().advance_consume(count)
            if wanted and self.consume // eighth == before // eighth:
                self._clear_pending(WRITABLE_PENDING)
                return False
            return wanted


@caught_by("test_releases_ask_for_a_hint_at_every_eighth", "1000 hints")
class TestHintsForEveryRelease(Wrong):
    class ring(HeapRing):
        def advance_consume(self, count: int) -> bool:
            super().advance_consume(count)
            return True


@caught_by(LIVENESS, "no hint is under way")
class TestForgetsToClearThePendingBit(Wrong):
    class ring(HeapRing):
        def acknowledge_readable(self) -> None:
            pass


@caught_by(LIVENESS, "no hint is under way")
class TestLosesEveryTenthWake(Wrong):
    class ring(HeapRing):
        count = 0

        def _set_pending(self, bit: int) -> bool:
            first = super()._set_pending(bit)
            self.count += 1
            return first and not (bit == READABLE_PENDING and self.count % 10 == 0)


# --- states, headers, ends ---


@caught_by("test_a_closed_ring_gives_what_was_committed_and_takes_no_more", "DID NOT RAISE")
class TestWritesAfterItsClose(Wrong):
    class ring(HeapRing):
        closed = False

        def set_state(self, state: RingState) -> None:
            self.closed = True

        @property
        def state(self) -> RingState:
            return RingState.OPEN

    @pytest.fixture
    def ends(self, arena: Any) -> Any:
        from swactor_testing.conformance.rings import CAPACITY, Ends, layout_of

        class Told(self.ring):
            @property
            def state(self) -> RingState:
                return RingState.CLOSED

        layout = layout_of(1, CAPACITY)
        producer = arena.create_ring(layout)
        return Ends(producer, Told(arena._view, layout))


@caught_by("test_either_end_faults_a_ring_for_good[consumer]", "CLOSED: 2> is <RingState.FAULTED")
class TestTakesAFaultBack(Wrong):
    class ring(HeapRing):
        def set_state(self, state: RingState) -> None:
            self._header[40:44] = int(state).to_bytes(4, "little")


@caught_by("test_a_damaged_header_is_an_error_at_every_call[magic]", "DID NOT RAISE")
class TestChecksItsHeaderOnce(Wrong):
    class ring(HeapRing):
        def _check_header(self) -> None:
            if not self.__dict__.get("checked"):
                super()._check_header()
                self.checked = True


@caught_by("test_a_damaged_header_is_an_error_at_every_call[commit]", "DID NOT RAISE")
class TestBelievesItsCursors(Wrong):
    class ring(HeapRing):
        def _cursors(self) -> tuple[int, int]:
            read = [
                int.from_bytes(self._header[at : at + 8], "little") for at in (COMMIT_OFFSET, CONSUME_OFFSET)
            ]
            self._require(self._open, "the ring is closed")
            return read[0], read[1]


@caught_by("test_after_close_every_call_is_an_error", "DID NOT RAISE")
class TestAClosedRingGoesOn(Wrong):
    class ring(HeapRing):
        def close(self) -> None:
            pass


# --- memory ---


@caught_by("test_a_layout_outside_the_arena_or_itself_is_refused", "DID NOT RAISE")
class TestTrustsLayouts(Wrong):
    class memory(Memory):
        def _check_range(self, layout: RingLayout) -> None:
            pass


@caught_by("test_a_discard_ends_a_ring_and_touches_no_neighbour", "the neighbour at|ring 3: no ring header")
class TestDiscardsAPageTooMany(Wrong):
    class memory(Memory):
        def discard(self, offset: int, length: int) -> None:
            super().discard(offset, min(length + 4096, self.ceiling - offset))


@caught_by("test_a_discard_ends_a_ring_and_touches_no_neighbour", "DID NOT RAISE")
class TestDiscardsNothing(Wrong):
    class memory(Memory):
        def discard(self, offset: int, length: int) -> None:
            pass


@caught_by(LEASES, "seed 0")
class TestAFreshRingKeepsItsFormerCursors(Wrong):
    class memory(Memory):
        def create_ring(self, layout: RingLayout) -> Any:
            ring = super().create_ring(layout)
            if self.__dict__.setdefault("seen", set()) & {layout.arena_offset}:
                ring._header[COMMIT_OFFSET : COMMIT_OFFSET + 8] = (8).to_bytes(8, "little")
            self.seen.add(layout.arena_offset)
            return self.ring(self._view, layout)


@caught_by(LEASES, "seed 0|somebody wrote")
class TestRingsOverlap(Wrong):
    """A range is used again while its lease lives: a later ring's data lie in an earlier one's."""

    class memory(Memory):
        first: RingLayout | None = None

        def create_ring(self, layout: RingLayout) -> Any:
            ring = super().create_ring(layout)
            if self.first is None:
                self.first = layout
            elif layout.data_capacity <= self.first.data_capacity:
                start = self.first.data_offset
                ring._data = self._view[start : start + layout.data_capacity]
            return ring


@caught_by("test_an_impossible_ceiling_is_a_resource_error", "ValueError|OSError|DID NOT RAISE")
class TestRaisesWhateverTheSystemDoes(Wrong):
    @pytest.fixture
    def plugin(self) -> Any:
        class Loose(Arenas):
            def create(self, ceiling: int) -> Any:
                if ceiling <= 0:
                    raise ValueError(ceiling)
                return super().create(ceiling)

        return Loose(type(self))


@caught_by("test_an_attached_view_sees_the_same_bytes", "RingError")
class TestAttachesACopy(Wrong):
    @pytest.fixture
    def plugin(self) -> Any:
        class Copies(Arenas):
            def attach(self, fd: int, ceiling: int) -> Any:
                super().attach(fd, ceiling)
                return HeapArena(ceiling)

        return Copies(type(self))


@caught_by("test_what_is_no_arena_is_not_attached", "DID NOT RAISE")
class TestAttachesAnything(Wrong):
    @pytest.fixture
    def plugin(self) -> Any:
        class Trusting(Arenas):
            def attach(self, fd: int, ceiling: int) -> Any:
                return self._arena

        return Trusting(type(self))


@caught_by("test_after_close_no_ring_and_no_descriptor_is_left", "a descriptor is left open")
class TestKeepsADescriptor(Wrong):
    class memory(Memory):
        def __init__(self, ceiling: int) -> None:
            super().__init__(ceiling)
            os.open(os.devnull, os.O_RDONLY)


@caught_by("test_a_ring_that_was_never_created_is_not_opened", "DID NOT RAISE")
class TestOpensAnyRing(Wrong):
    class memory(Memory):
        def open_ring(self, layout: RingLayout) -> Any:
            try:
                return super().open_ring(layout)
            except RingError:
                return super().create_ring(layout)
