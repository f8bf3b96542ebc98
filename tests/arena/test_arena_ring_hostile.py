"""Damaged and hostile headers (spec section 22): each operation refuses with RingError, touches no byte."""

from __future__ import annotations

import random

import pytest
from swactor_core.errors import RingError
from swactor_core.faults import RingFaultReason
from swactor_core.ids import RingId
from swactor_core.specs import RingLayout
from swactor_core.spi.arena import RingState

OPERATIONS = {
    "commit": lambda ring: ring.commit,
    "consume": lambda ring: ring.consume,
    "readable_span": lambda ring: ring.readable_span(),
    "writable_span": lambda ring: ring.writable_span(),
    "advance_consume": lambda ring: ring.advance_consume(1),
    "advance_commit": lambda ring: ring.advance_commit(1),
    "acknowledge_readable": lambda ring: ring.acknowledge_readable(),
    "acknowledge_writable": lambda ring: ring.acknowledge_writable(),
    "state": lambda ring: ring.state,
    "set_state": lambda ring: ring.set_state(RingState.CLOSED),
}

DAMAGE = {
    "magic": ("magic", 0x47525754, RingFaultReason.RING_LAYOUT_INVALID),
    "erased": ("magic", 0, RingFaultReason.RING_LAYOUT_INVALID),
    "version": ("version", 2, RingFaultReason.UNSUPPORTED_RING_VERSION),
    "header length": ("header_len", 128, RingFaultReason.UNSUPPORTED_RING_VERSION),
    "identity": ("ring_id", 8, RingFaultReason.RING_LAYOUT_INVALID),
    "capacity grows": ("capacity", 1 << 40, RingFaultReason.RING_LAYOUT_INVALID),
    "capacity zero": ("capacity", 0, RingFaultReason.RING_LAYOUT_INVALID),
    "state zero": ("state", 0, RingFaultReason.RING_STATE_INVALID),
    "state four": ("state", 4, RingFaultReason.RING_STATE_INVALID),
    "state huge": ("state", 2**32 - 1, RingFaultReason.RING_STATE_INVALID),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_sees_every_damage(arena, raw, layout_of, damage, operation) -> None:
    field, value, reason = DAMAGE[damage]
    ring = arena.create_ring(layout_of(64, ring_id=7))
    ring.writable_span()[:8] = b"12345678"
    ring.advance_commit(8)
    assert len(ring.readable_span()) == 8
    assert len(ring.writable_span()) == 56
    header = raw(0)
    header[field] = value
    before = header.content()
    with pytest.raises(RingError, match="ring 7") as caught:
        OPERATIONS[operation](ring)
    assert caught.value.reason is reason
    assert header.content() == before


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_ring_cannot_be_opened(arena, raw, layout_of, damage) -> None:
    field, value, reason = DAMAGE[damage]
    arena.create_ring(layout_of(64, ring_id=7))
    raw(0)[field] = value
    with pytest.raises(RingError) as caught:
        arena.open_ring(layout_of(64, ring_id=7))
    assert caught.value.reason is reason


def test_a_range_that_was_never_a_ring_cannot_be_opened(arena, layout_of) -> None:
    with pytest.raises(RingError, match="no ring header"):
        arena.open_ring(layout_of(64))


@pytest.mark.parametrize(
    ("commit", "consume"),
    [(0, 1), (65, 0), (2**63, 0), (0, 2**63), (2**64 - 1, 2**64 - 1), (2**64 - 1, 0), (10, 2**64 - 10)],
)
def test_cursors_that_contradict_each_other_are_refused_by_both_roles(arena, raw, layout_of, commit, consume):
    ring = arena.create_ring(layout_of(64))
    raw(0)["commit"], raw(0)["consume"] = commit, consume
    for operation in ("commit", "readable_span", "writable_span"):
        with pytest.raises(RingError, match="contradict"):
            OPERATIONS[operation](ring)
    with pytest.raises(RingError, match="contradict"):
        arena.open_ring(layout_of(64))


def test_the_other_end_cannot_move_backwards_or_past_the_ring(arena, raw, layout_of) -> None:
    producer, consumer = arena.create_ring(layout_of(64)), arena.open_ring(layout_of(64))
    producer.writable_span()
    producer.advance_commit(40)
    assert len(consumer.readable_span()) == 40
    consumer.advance_consume(20)
    assert len(producer.writable_span()) == 24
    header = raw(0)
    for consume in (19, 41, 2**64 - 1):
        header["consume"] = consume
        with pytest.raises(RingError):
            producer.writable_span()
    header["consume"] = 20
    for commit in (39, 85, 0, 2**64 - 1):
        header["commit"] = commit
        with pytest.raises(RingError):
            consumer.readable_span()
    header["commit"] = 40
    assert len(consumer.readable_span()) == 20
    assert len(producer.writable_span()) == 24


def test_a_second_producer_or_consumer_is_noticed(arena, layout_of) -> None:
    first, second = arena.create_ring(layout_of(64)), arena.open_ring(layout_of(64))
    first.writable_span()
    first.advance_commit(8)
    second.writable_span()
    second.advance_commit(8)
    with pytest.raises(RingError, match="moved by somebody else"):
        first.writable_span()
    second.readable_span()
    second.advance_consume(4)
    third = arena.open_ring(layout_of(64))
    third.readable_span()
    third.advance_consume(4)
    with pytest.raises(RingError, match="moved by somebody else"):
        second.advance_consume(1)


def test_random_headers_never_give_a_span_outside_the_ring(arena, raw, layout_of) -> None:
    """Spans end inside the data region whatever the header says; the neighbours' bytes stay as they were."""
    seed = 20240611
    draw = random.Random(seed)
    header = raw(128)
    interesting = [0, 1, 63, 64, 65, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 65, 2**64 - 1]
    refused = 0
    for attempt in range(4000):
        ring = arena.create_ring(layout_of(64, offset=128))
        if attempt % 2:
            ring.writable_span()
            ring.readable_span()
        for field in draw.sample(
            ["commit", "consume", "state", "wake", "ring_id", "capacity"], draw.randint(1, 2)
        ):
            narrow = field in ("state", "wake")
            value = draw.choice(interesting) if draw.random() < 0.7 else draw.getrandbits(64)
            header[field] = value % 2**32 if narrow else value
        for span_of in (ring.writable_span, ring.readable_span):
            try:
                span = span_of()
            except RingError:
                refused += 1
                continue
            assert len(span) <= 64, f"seed {seed}, attempt {attempt}"
        ring.close()
    assert 1000 < refused < 8000


BAD_LAYOUTS = {
    "header outside": {"header_offset": 1 << 20},
    "header past the lease": {"header_offset": 128 + 64 + 64},
    "header before the lease": {"header_offset": 64},
    "header misaligned": {"header_offset": 136},
    "data before the lease": {"data_offset": 64},
    "data over the header": {"data_offset": 160},
    "data beyond the lease": {"data_capacity": 65},
    "data wraps around": {"data_offset": 2**64 - 64},
    "no data": {"data_capacity": 0},
    "huge data": {"data_capacity": 2**64 - 1},
    "lease beyond the arena": {"total_len": 1 << 20},
    "lease wraps around": {"total_len": 2**64 - 1},
    "lease offset huge": {"arena_offset": 2**64 - 1},
    "negative": {"arena_offset": -1},
    "too large a number": {"data_offset": 2**64},
    "alignment zero": {"alignment": 0},
    "alignment three": {"alignment": 3},
    "alignment not met": {"alignment": 128},
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_a_layout_that_does_not_fit_is_refused(arena, name) -> None:
    good = {
        "arena_offset": 128,
        "total_len": 128,
        "header_offset": 128,
        "data_offset": 192,
        "data_capacity": 64,
        "alignment": 64,
    }
    ring = arena.create_ring(RingLayout(ring_id=RingId(1), **good))
    ring.close()
    bad = RingLayout(ring_id=RingId(1), **(good | BAD_LAYOUTS[name]))
    for attempt in (arena.create_ring, arena.open_ring):
        with pytest.raises(RingError) as caught:
            attempt(bad)
        assert caught.value.reason is RingFaultReason.RING_LAYOUT_INVALID
