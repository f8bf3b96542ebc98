"""State word, wake bits and closing of a ring (spec sections 20 and 21)."""

from __future__ import annotations

import ctypes
import gc

import pytest
from swactor_core.errors import RingError
from swactor_core.spi.arena import RingState


def test_a_fresh_ring_is_empty_open_and_has_the_header_of_the_specification(arena, raw, layout_of) -> None:
    layout = layout_of(100, ring_id=77)
    ring = arena.create_ring(layout)
    assert ring.layout is layout
    assert (ring.commit, ring.consume, ring.state) == (0, 0, RingState.OPEN)
    assert len(ring.readable_span()) == 0
    assert len(ring.writable_span()) == 100
    expected = (
        b"SWRG" + (1).to_bytes(2, "little") + (64).to_bytes(2, "little")
        + (77).to_bytes(8, "little") + (100).to_bytes(8, "little") + bytes(16)
        + (1).to_bytes(4, "little") + bytes(4) + bytes(16)
    )  # fmt: skip
    assert raw(0).content() == expected


def test_creating_again_starts_over(arena, layout_of) -> None:
    ring = arena.create_ring(layout_of(64))
    ring.writable_span()
    ring.advance_commit(5)
    ring.set_state(RingState.FAULTED)
    ring.close()
    again = arena.create_ring(layout_of(64, ring_id=2))
    assert (again.commit, again.consume, again.state) == (0, 0, RingState.OPEN)
    with pytest.raises(RingError, match="another ring"):
        arena.open_ring(layout_of(64, ring_id=1))


def test_both_hints_are_sent_once_until_acknowledged(arena, layout_of) -> None:
    ring = arena.create_ring(layout_of(64))
    ring.writable_span()
    assert ring.advance_commit(8)
    assert not ring.advance_commit(8)
    ring.acknowledge_readable()
    assert ring.advance_commit(48)
    ring.readable_span()
    assert ring.advance_consume(1), "the ring was full"
    assert not ring.advance_consume(8)
    ring.acknowledge_writable()
    assert not ring.advance_consume(6), "byte 15 lies in the eighth of byte 9"
    assert ring.advance_consume(1), "byte 16 begins an eighth"


def test_nothing_moved_asks_for_no_hint(arena, layout_of) -> None:
    ring = arena.create_ring(layout_of(64))
    assert not ring.advance_commit(0)
    assert not ring.advance_consume(0)


def test_a_count_without_a_span_is_refused(arena, layout_of) -> None:
    ring = arena.create_ring(layout_of(64))
    for advance in (ring.advance_commit, ring.advance_consume):
        for count in (1, -1, 2**62):
            with pytest.raises(RingError, match="count"):
                advance(count)


def test_closed_keeps_what_was_committed_and_admits_no_more(arena, layout_of) -> None:
    producer, consumer = arena.create_ring(layout_of(64)), arena.open_ring(layout_of(64))
    producer.writable_span()[:3] = b"end"
    producer.advance_commit(3)
    producer.set_state(RingState.CLOSED)
    producer.set_state(RingState.CLOSED)
    assert consumer.state is RingState.CLOSED
    assert bytes(consumer.readable_span()) == b"end"
    consumer.advance_consume(3)
    with pytest.raises(RingError, match="state"):
        producer.writable_span()
    with pytest.raises(RingError, match="state"):
        producer.advance_commit(1)


def test_faulted_is_final_for_both_ends(arena, layout_of) -> None:
    producer, consumer = arena.create_ring(layout_of(64)), arena.open_ring(layout_of(64))
    consumer.set_state(RingState.FAULTED)
    assert producer.state is RingState.FAULTED
    producer.set_state(RingState.CLOSED)
    assert producer.state is RingState.FAULTED
    with pytest.raises(RingError, match=r"set_state\(OPEN\)"):
        producer.set_state(RingState.OPEN)


def test_after_close_everything_raises_and_spans_are_dead(arena, layout_of) -> None:
    ring = arena.create_ring(layout_of(64))
    spans = [ring.writable_span() for _ in range(200)]
    ring.close()
    ring.close()
    for call in (
        lambda: ring.commit,
        lambda: ring.consume,
        lambda: ring.state,
        ring.readable_span,
        ring.writable_span,
        ring.acknowledge_readable,
        ring.acknowledge_writable,
        lambda: ring.advance_commit(0),
        lambda: ring.advance_consume(0),
        lambda: ring.set_state(RingState.FAULTED),
    ):
        with pytest.raises(RingError, match="the ring is closed"):
            call()
    for span in spans:
        with pytest.raises(ValueError, match="released"):
            span[0] = 1


def test_closing_one_end_leaves_the_other(arena, layout_of) -> None:
    producer, consumer = arena.create_ring(layout_of(64)), arena.open_ring(layout_of(64))
    producer.writable_span()[:2] = b"ok"
    producer.advance_commit(2)
    producer.close()
    assert bytes(consumer.readable_span()) == b"ok"


def test_a_span_exported_further_survives_the_arena(layout_of) -> None:
    """A device library's pointer into a span must never meet unmapped memory."""
    from swactor_arena.arena import MemfdArenas

    arena = MemfdArenas().create(1 << 16)
    ring = arena.create_ring(layout_of(64))
    ring.writable_span()[:4] = b"keep"
    ring.advance_commit(4)
    pointer = (ctypes.c_char * 4).from_buffer(ring.readable_span())
    ring.close()
    arena.close()
    gc.collect()
    assert pointer.raw == b"keep"
    pointer.raw = b"mine"
    assert pointer.raw == b"mine"
