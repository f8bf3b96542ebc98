"""The heap arena keeps the ring contract: step by step what the native ring does, and its own errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from swactor_core.errors import ResourceError, RingError, UsageError
from swactor_core.faults import RingFaultReason
from swactor_core.ids import RingId
from swactor_core.plugins import load_plugins
from swactor_core.specs import RingLayout
from swactor_core.spi.arena import Ring, RingState
from swactor_core.spi.provider import Kind
from swactor_testing.heap import COMMIT_OFFSET, HeapArenas
from swactor_testing.worker_kit import ring_layout

CAPACITY = 13
LAYOUT = RingLayout(RingId(9), 64, 64 + CAPACITY, 64, 128, CAPACITY, 64)


class SameAsShared(RuleBasedStateMachine):
    """Every call on a heap ring and on a native one: same result, or a RingError of the same reason."""

    def __init__(self) -> None:
        super().__init__()
        shared = load_plugins().select(Kind.ARENA, "memfd").factory()
        self.arenas = [HeapArenas().create(4096), shared.create(4096)]
        self.producers = [arena.create_ring(LAYOUT) for arena in self.arenas]
        self.consumers = [arena.open_ring(LAYOUT) for arena in self.arenas]
        self.value = 0

    def teardown(self) -> None:
        for ring in (*self.producers, *self.consumers):
            ring.close()
        for arena in self.arenas:
            arena.close()

    def same(self, rings: list[Ring], call: str, *arguments: Any) -> Any:
        results = []
        for ring in rings:
            try:
                results.append(getattr(ring, call)(*arguments))
            except RingError as error:
                results.append(error.reason)
        heap, native = results
        if isinstance(heap, memoryview) and isinstance(native, memoryview):
            assert len(heap) == len(native)
            return results
        assert heap == native, call
        return heap

    @rule(count=st.integers(-1, CAPACITY + 1))
    def produce(self, count: int) -> None:
        spans = self.same(self.producers, "writable_span")
        for i in range(max(0, min(count, len(spans[0]))) if isinstance(spans, list) else 0):
            self.value = (self.value + 1) % 256
            for span in spans:
                span[i] = self.value
        self.same(self.producers, "advance_commit", count)

    @rule(count=st.integers(-1, CAPACITY + 1))
    def consume(self, count: int) -> None:
        spans = self.same(self.consumers, "readable_span")
        if isinstance(spans, list):
            assert bytes(spans[0]) == bytes(spans[1])
        self.same(self.consumers, "advance_consume", count)

    @rule(count=st.integers(0, 3))
    def advance_again_without_a_new_span(self, count: int) -> None:
        self.same(self.producers, "advance_commit", count)
        self.same(self.consumers, "advance_consume", count)

    @rule()
    def acknowledge(self) -> None:
        self.same(self.consumers, "acknowledge_readable")
        self.same(self.producers, "acknowledge_writable")

    @rule(state=st.sampled_from(RingState), rings=st.sampled_from(["producers", "consumers"]))
    def set_state(self, state: RingState, rings: str) -> None:
        self.same(getattr(self, rings), "set_state", state)

    @rule()
    def reopen(self) -> None:
        for ring in self.consumers:
            ring.close()
        self.same(self.consumers, "readable_span")
        self.same(self.consumers, "acknowledge_readable")
        self.same(self.consumers, "set_state", RingState.FAULTED)
        self.consumers = [arena.open_ring(LAYOUT) for arena in self.arenas]

    @invariant()
    def cursors_and_state_agree(self) -> None:
        for ends in (self.producers, self.consumers):
            for name in ("commit", "consume", "state"):
                heap, native = (getattr(ring, name) for ring in ends)
                assert heap == native, name


SameAsShared.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSameAsShared = SameAsShared.TestCase


def test_the_header_is_the_one_of_a_shared_arena() -> None:
    shared = load_plugins().select(Kind.ARENA, "memfd").factory()
    arena, heap = shared.create(4096), HeapArenas().create(4096)
    arena.create_ring(LAYOUT)
    heap.create_ring(LAYOUT)
    with open(f"/proc/self/fd/{arena.fd}", "rb") as memory:
        memory.seek(LAYOUT.header_offset)
        native = memory.read(64)
    arena.close()
    assert native == bytes(heap.memory[LAYOUT.header_offset : LAYOUT.header_offset + 64])


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0, RingFaultReason.RING_LAYOUT_INVALID),
        (5, RingFaultReason.UNSUPPORTED_RING_VERSION),
        (6, RingFaultReason.UNSUPPORTED_RING_VERSION),
        (9, RingFaultReason.RING_LAYOUT_INVALID),
        (17, RingFaultReason.RING_LAYOUT_INVALID),
        (COMMIT_OFFSET + 5, RingFaultReason.RING_STATE_INVALID),
        (41, RingFaultReason.RING_STATE_INVALID),
    ],
)
def test_damage_is_noticed_before_a_payload_byte_is_touched(offset: int, reason: RingFaultReason) -> None:
    arena = HeapArenas().create(4096)
    ring = arena.create_ring(LAYOUT)
    arena.memory[LAYOUT.header_offset + offset] ^= 0x40
    with pytest.raises(RingError) as caught:
        _ = ring.state, ring.writable_span()
    assert caught.value.reason is reason


def test_a_cursor_moved_by_somebody_else_is_noticed() -> None:
    arena = HeapArenas().create(4096)
    ring = arena.create_ring(LAYOUT)
    ring.writable_span()
    arena.memory[LAYOUT.header_offset + COMMIT_OFFSET] = 3
    with pytest.raises(RingError, match="moved by somebody else"):
        ring.advance_commit(1)


@pytest.mark.parametrize(
    "layout",
    [
        RingLayout(RingId(1), 0, 8192, 0, 64, 100, 64),
        RingLayout(RingId(1), 0, 128, 0, 64, 100, 64),
        RingLayout(RingId(1), 0, 4096, 0, 32, 100, 32),
        RingLayout(RingId(1), 0, 4096, 8, 128, 100, 64),
        RingLayout(RingId(1), 0, 4096, 0, 100, 100, 64),
        RingLayout(RingId(1), 0, 4096, 0, 64, 0, 64),
        RingLayout(RingId(1), 0, 4096, 0, 64, 100, 48),
        RingLayout(RingId(1), -64, 4096, 0, 64, 100, 64),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_both_arenas(layout: RingLayout) -> None:
    shared = load_plugins().select(Kind.ARENA, "memfd").factory().create(4096)
    for arena in (HeapArenas().create(4096), shared):
        with pytest.raises(RingError) as caught:
            arena.create_ring(layout)
        assert caught.value.reason is RingFaultReason.RING_LAYOUT_INVALID
    shared.close()


def test_attach_gives_the_arena_of_the_same_plugin_object_only() -> None:
    plugin = HeapArenas()
    with pytest.raises(ResourceError, match="no heap arena of 4096 bytes"):
        plugin.attach(-1, 4096)
    arena = plugin.create(4096)
    assert plugin.attach(-1, 4096) is arena
    for fd, ceiling in ((3, 4096), (-1, 8192)):
        with pytest.raises(ResourceError, match="no heap arena"):
            plugin.attach(fd, ceiling)
    with pytest.raises(ResourceError, match="0 bytes"):
        plugin.create(0)


def test_discarded_bytes_do_not_look_like_data() -> None:
    arena = HeapArenas().create(8192)
    ring = arena.create_ring(ring_layout(RingId(1), 100, offset=0))
    arena.discard(0, 4096)
    with pytest.raises(RingError, match="no ring header"):
        ring.writable_span()
    with pytest.raises(UsageError, match="no range"):
        arena.discard(4096, 8192)


def test_a_write_after_the_release_is_found_when_the_range_is_used_again() -> None:
    arena = HeapArenas().create(1 << 16)
    arena.create_ring(ring_layout(RingId(1), 16384 - 64, offset=0)).close()
    arena.discard(0, 16384)
    arena.create_ring(ring_layout(RingId(2), 4096 - 64, offset=0))  # what follows stays poisoned
    arena.memory[9000] = 1
    arena.create_ring(ring_layout(RingId(3), 4096 - 64, offset=4096))
    with pytest.raises(AssertionError, match="wrote between 8192 and 12288"):
        arena.create_ring(ring_layout(RingId(4), 4096 - 64, offset=8192))
