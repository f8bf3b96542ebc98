"""Rings (spec sections 20 to 22): first in first out through every wrap, wake bits, hostile headers, ends.

The guarantees are those of `Ring` in `swactor_core.spi.arena`. Both ends of a ring are opened: the node's
by `create_ring`, the worker's by `open_ring`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from swactor_core.errors import RingError
from swactor_core.ids import RingId
from swactor_core.specs import CACHE_LINE, RING_HEADER_BYTES, RingLayout, align_up
from swactor_core.spi.arena import Arena, ArenaPlugin, Ring, RingState
from swactor_core.values import frozen

from swactor_testing.conformance.base import Contract
from swactor_testing.conformance.bounds import same_bytes, seeded
from swactor_testing.conformance.capabilities import ArenaCapabilities

CEILING = 1 << 20
CAPACITY = 1000
"""No power of two: physical positions are cursors modulo the capacity, whatever it is."""


def layout_of(ring_id: int, capacity: int, *, offset: int = 0) -> RingLayout:
    total = align_up(RING_HEADER_BYTES + capacity, 4096)
    data = offset + RING_HEADER_BYTES
    return RingLayout(RingId(ring_id), offset, total, offset, data, capacity, CACHE_LINE)


def take_all(ring: Ring) -> bytes:
    """Everything that is committed, released as it is read."""
    data = b""
    while len(span := ring.readable_span()):
        data += bytes(span)
        ring.advance_consume(len(span))
    return data


def put(ring: Ring, data: bytes) -> bool:
    """Commits all of `data`, which must have room; whether any advance asked for a hint."""
    wanted = False
    while data:
        span = ring.writable_span()
        count = min(len(span), len(data))
        assert count, f"no room for {len(data)} bytes"
        span[:count] = data[:count]
        data = data[count:]
        wanted |= ring.advance_commit(count)
    return wanted


@frozen
class Ends:
    producer: Ring
    consumer: Ring


class RingContract(Contract[ArenaPlugin, ArenaCapabilities]):
    """What the two ends of one ring keep."""

    @pytest.fixture
    def arena(self, plugin: ArenaPlugin) -> Iterator[Arena]:
        arena = plugin.create(CEILING)
        yield arena
        arena.close()

    @pytest.fixture
    def ends(self, arena: Arena) -> Ends:
        layout = layout_of(1, CAPACITY)
        return Ends(arena.create_ring(layout), arena.open_ring(layout))

    # --- bytes ---

    def test_a_new_ring_is_empty_and_open(self, ends: Ends) -> None:
        """`create_ring`: a fresh header, cursors 0, state OPEN. Section 20: empty when consume == commit."""
        for ring in (ends.producer, ends.consumer):
            assert (ring.commit, ring.consume, ring.state) == (0, 0, RingState.OPEN)
            assert ring.layout == layout_of(1, CAPACITY)
        assert len(ends.consumer.readable_span()) == 0
        assert len(ends.producer.writable_span()) == CAPACITY

    @pytest.mark.parametrize("seed", range(6))
    def test_bytes_come_out_as_they_went_in_through_every_wrap(self, ends: Ends, seed: int) -> None:
        """Section 21: monotonic cursors, wraparound aliases no byte; what is read is what was committed, in
        order, once; the producer can have at most the capacity unread, and all of it."""
        random = seeded(seed)
        committed, read = bytearray(), bytearray()
        for _ in range(400):
            if random.random() < 0.5:
                span = ends.producer.writable_span()
                unread = len(committed) - len(read)
                assert (len(span) == 0) == (unread == CAPACITY), f"seed {seed}: {unread} unread"
                data = random.randbytes(random.randint(0, len(span)))
                assert unread + len(data) <= CAPACITY, f"seed {seed}: room for more than the capacity"
                span[: len(data)] = data
                ends.producer.advance_commit(len(data))
                committed += data
            else:
                span = ends.consumer.readable_span()
                assert (len(span) == 0) == (len(committed) == len(read)), f"seed {seed}: nothing to read"
                count = random.randint(0, len(span))
                read += span[:count]
                ends.consumer.advance_consume(count)
            same_bytes(read, committed[: len(read)], f"seed {seed}")
            cursors = (len(committed), len(read))
            assert (ends.producer.commit, ends.producer.consume) == cursors, f"seed {seed}"
            assert (ends.consumer.commit, ends.consumer.consume) == cursors, f"seed {seed}"
        assert len(committed) > 5 * CAPACITY, "the walk went around too seldom"

    def test_what_is_written_is_not_readable_before_its_commit(self, ends: Ends) -> None:
        """Section 20: commit .. write is reserved but not readable."""
        ends.producer.writable_span()[:4] = b"soon"
        assert len(ends.consumer.readable_span()) == 0
        ends.producer.advance_commit(3)
        assert bytes(ends.consumer.readable_span()) == b"soo"

    def test_what_is_read_is_not_free_before_its_release(self, ends: Ends) -> None:
        """Section 21: the consumer advances `consume` only when the bytes are safe to release, as after a
        device copy; until then the producer has no room there."""
        put(ends.producer, bytes(CAPACITY))
        span = ends.consumer.readable_span()
        assert len(ends.producer.writable_span()) == 0
        ends.consumer.advance_consume(10)
        assert len(ends.producer.writable_span()) == 10
        assert len(span) == CAPACITY

    def test_spans_are_contiguous_and_end_at_the_wrap(self, ends: Ends) -> None:
        """`readable_span`, `writable_span`: contiguous bytes; at the end of the data region they stop, and
        the next call gives the rest."""
        put(ends.producer, bytes(CAPACITY - 100))
        assert len(take_all(ends.consumer)) == CAPACITY - 100
        pattern = bytes(range(200))
        first = ends.producer.writable_span()
        assert len(first) == 100
        first[:] = pattern[:100]
        ends.producer.advance_commit(100)
        second = ends.producer.writable_span()
        assert len(second) == CAPACITY - 100
        second[:100] = pattern[100:]
        ends.producer.advance_commit(100)
        assert bytes(ends.consumer.readable_span()) == pattern[:100]
        same_bytes(take_all(ends.consumer), pattern, "across the wrap")

    @pytest.mark.parametrize("count", [-1, CAPACITY + 1, 1 << 63, 1 << 64])
    def test_a_count_beyond_the_span_is_refused(self, ends: Ends, count: int) -> None:
        """A count is bounded by the span last given; beyond it RingError, and nothing has moved."""
        put(ends.producer, b"12345")
        ends.producer.writable_span()
        ends.consumer.readable_span()
        for advance in (ends.producer.advance_commit, ends.consumer.advance_consume):
            with pytest.raises((RingError, OverflowError)):
                advance(count)
        with pytest.raises(RingError):
            ends.consumer.advance_consume(6)
        assert (ends.producer.commit, ends.consumer.consume) == (5, 0)

    # --- wake bits ---

    def test_a_commit_asks_for_one_hint_until_it_is_acknowledged(self, ends: Ends) -> None:
        """The wake rule: True means exactly one RingReadable; further commits are covered by it while its
        pending bit is set. Losing the only transition from empty to readable is a liveness bug (section
        21), so the first commit after an acknowledgement asks again, also when the ring is not empty."""
        assert put(ends.producer, b"a") is True
        assert put(ends.producer, b"b") is False
        ends.consumer.acknowledge_readable()
        assert put(ends.producer, b"c") is True, "a wake is lost: acknowledged, then committed, no hint"
        ends.consumer.acknowledge_readable()
        assert take_all(ends.consumer) == b"abc"
        assert put(ends.producer, b"d") is True, "a wake is lost: the ring was empty, no hint"

    def test_a_release_of_a_full_ring_asks_for_one_hint_until_it_is_acknowledged(self, ends: Ends) -> None:
        """`advance_consume` asks when the ring was full as the producer can have seen it, with one byte as
        with all of them."""
        put(ends.producer, bytes(CAPACITY))
        ends.consumer.readable_span()
        assert ends.consumer.advance_consume(1) is True, "a wake is lost: the ring was full, no hint"
        ends.producer.acknowledge_writable()
        put(ends.producer, b"x")
        ends.consumer.readable_span()
        assert ends.consumer.advance_consume(1) is True, "a wake is lost: the ring was full again, no hint"
        assert ends.consumer.advance_consume(1) is False

    def test_releases_ask_for_a_hint_at_every_eighth(self, ends: Ends) -> None:
        """`advance_consume` asks when consumption crossed a multiple of one eighth of the capacity: enough
        for transport credit, without a hint for every byte."""
        hints = 0
        for _ in range(CAPACITY):
            put(ends.producer, b"x")
            ends.consumer.readable_span()
            if ends.consumer.advance_consume(1):
                hints += 1
                ends.producer.acknowledge_writable()
        assert 7 <= hints <= 9, f"{hints} hints for the consumption of one capacity, byte by byte"

    @pytest.mark.parametrize("seed", range(3))
    def test_ends_that_move_only_on_hints_never_stall(self, ends: Ends, seed: int) -> None:
        """Section 21, liveness: a producer that fills what it can and a consumer that drains what is there,
        each only when a hint arrives, in any order, bring everything through."""
        random = seeded(seed)
        total, sent, received = 20 * CAPACITY, 0, 0
        pending = ["writable"]
        while pending:
            hint = pending.pop(random.randrange(len(pending)))
            if hint == "writable":
                ends.producer.acknowledge_writable()
                while sent < total and len(span := ends.producer.writable_span()):
                    count = min(random.choice((1, 90, CAPACITY)), len(span), total - sent)
                    sent += count
                    if ends.producer.advance_commit(count):
                        pending.append("readable")
            else:
                ends.consumer.acknowledge_readable()
                while len(span := ends.consumer.readable_span()):
                    count = min(random.choice((1, 90, CAPACITY)), len(span))
                    received += count
                    if ends.consumer.advance_consume(count):
                        pending.append("writable")
        assert received == total, (
            f"seed {seed}: no hint is under way, {received} of {total} bytes are through"
        )

    # --- states and hostile headers ---

    def test_a_closed_ring_gives_what_was_committed_and_takes_no_more(self, ends: Ends) -> None:
        """CLOSED by the producer: what is committed is all there will be."""
        put(ends.producer, b"rest")
        ends.producer.set_state(RingState.CLOSED)
        assert ends.consumer.state is RingState.CLOSED
        assert take_all(ends.consumer) == b"rest"
        with pytest.raises(RingError):
            put(ends.producer, b"more")

    @pytest.mark.parametrize("who", ["producer", "consumer"])
    def test_either_end_faults_a_ring_for_good(self, ends: Ends, who: str) -> None:
        """FAULTED by either end; no later state takes it back."""
        getattr(ends, who).set_state(RingState.FAULTED)
        assert ends.producer.state is ends.consumer.state is RingState.FAULTED
        ends.producer.set_state(RingState.CLOSED)
        assert ends.consumer.state is RingState.FAULTED

    @pytest.mark.parametrize(
        ("at", "value"),
        [(0, b"\0\0\0\0"), (4, b"\xff\xff"), (8, b"\x77"), (16, b"\x01"), (24, b"\xff" * 8)],
        ids=["magic", "version", "ring_id", "capacity", "commit"],
    )
    def test_a_damaged_header_is_an_error_at_every_call(self, arena: Arena, at: int, value: bytes) -> None:
        """Every method raises RingError when the shared header is not consistent with the layout, and then
        has touched no payload byte. The header is damaged as a hostile process would: through another ring
        whose data region lies over it."""
        layout = layout_of(1, CAPACITY, offset=4096)
        ring = arena.create_ring(layout)
        put(ring, b"payload")
        weapon = arena.create_ring(layout_of(2, 4096, offset=0))
        span = weapon.writable_span()
        gap = layout.header_offset + at - RING_HEADER_BYTES
        assert gap + len(value) <= len(span), "the data region of the other ring reaches the header"
        span[gap : gap + len(value)] = value
        calls = (ring.readable_span, ring.writable_span, lambda: ring.commit, lambda: ring.consume)
        for call in calls:
            with pytest.raises(RingError):
                call()
        with pytest.raises(RingError):
            ring.advance_commit(1)
        with pytest.raises(RingError):
            arena.open_ring(layout)

    def test_after_close_every_call_is_an_error(self, ends: Ends) -> None:
        """`close` drops this end's views; idempotent; after it every method raises RingError. The other end
        goes on."""
        put(ends.producer, b"kept")
        ends.producer.close()
        ends.producer.close()
        ring = ends.producer
        for call in (
            ring.readable_span,
            ring.writable_span,
            ring.acknowledge_readable,
            ring.acknowledge_writable,
            lambda: ring.advance_commit(0),
            lambda: ring.advance_consume(0),
            lambda: ring.commit,
            lambda: ring.state,
            lambda: ring.set_state(RingState.FAULTED),
        ):
            with pytest.raises(RingError):
                call()
        assert take_all(ends.consumer) == b"kept"
