"""The native ring against a plain model: every boundary of small rings, random life, cursors near overflow.

Spec sections 20 to 22. The model is the specification in fifty lines of Python without any sharing.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from swactor_arena.arena import MemfdArenas
from swactor_core.errors import RingError
from swactor_core.ids import RingId
from swactor_core.specs import RingLayout


class Model:
    """What a ring of `capacity` bytes must do, one end after the other."""

    def __init__(self, capacity: int, cursor: int = 0) -> None:
        self.capacity = capacity
        self.commit = self.consume = cursor
        self.content = bytearray(capacity)
        self.readable_pending = self.writable_pending = False
        self.write_granted = self.read_granted = 0

    def writable(self) -> tuple[int, int]:
        """(physical position, length) of the free span."""
        position = self.commit % self.capacity
        self.write_granted = min(self.capacity - (self.commit - self.consume), self.capacity - position)
        return position, self.write_granted

    def readable(self) -> tuple[int, int]:
        position = self.consume % self.capacity
        self.read_granted = min(self.commit - self.consume, self.capacity - position)
        return position, self.read_granted

    def advance_commit(self, count: int) -> bool:
        assert 0 <= count <= self.write_granted
        self.write_granted -= count
        self.commit += count
        hint = count > 0 and not self.readable_pending
        self.readable_pending |= count > 0
        return hint

    def advance_consume(self, count: int) -> bool:
        assert 0 <= count <= self.read_granted
        self.read_granted -= count
        was_full = self.commit - self.consume == self.capacity
        eighth = max(1, self.capacity // 8)
        crossed = self.consume // eighth != (self.consume + count) // eighth
        self.consume += count
        wanted = count > 0 and (was_full or crossed)
        hint = wanted and not self.writable_pending
        self.writable_pending |= wanted
        return hint


@pytest.mark.parametrize("capacity", [*range(1, 10), 13])
def test_every_fill_position_and_count_of_a_small_ring(arena, raw, layout_of, capacity) -> None:
    """All (position, fill, count): spans, cursors and hints of one step are the model's."""
    layout = layout_of(capacity)
    header = raw(0)
    for consume in range(2 * capacity):
        for fill in range(capacity + 1):
            for count in range(capacity + 2):
                for pending in (0, 1):
                    ring = arena.create_ring(layout)
                    header["commit"], header["consume"] = consume + fill, consume
                    header["wake"] = 3 * pending
                    model = Model(capacity, consume)
                    model.commit = consume + fill
                    model.readable_pending = model.writable_pending = bool(pending)
                    assert len(ring.writable_span()) == model.writable()[1]
                    assert len(ring.readable_span()) == model.readable()[1]
                    if count <= model.read_granted:
                        assert ring.advance_consume(count) == model.advance_consume(count)
                    else:
                        with pytest.raises(RingError, match="count"):
                            ring.advance_consume(count)
                    if count <= model.write_granted:
                        assert ring.advance_commit(count) == model.advance_commit(count)
                    else:
                        with pytest.raises(RingError, match="count"):
                            ring.advance_commit(count)
                    assert (ring.commit, ring.consume) == (model.commit, model.consume)
                    assert len(ring.readable_span()) == model.readable()[1]
                    assert len(ring.writable_span()) == model.writable()[1]
                    assert header["wake"] == model.readable_pending + 2 * model.writable_pending
                    ring.close()


@pytest.mark.parametrize("boundary", [2**31, 2**32, 2**63, 2**53])
@pytest.mark.parametrize("capacity", [1, 7, 64, 4096])
def test_cursors_cross_the_places_where_narrow_arithmetic_breaks(arena, raw, layout_of, capacity, boundary):
    start = boundary - capacity - 3
    arena.create_ring(layout_of(capacity)).close()
    raw(0)["commit"], raw(0)["consume"] = start, start
    ring = arena.open_ring(layout_of(capacity))
    model = Model(capacity, start)
    value = 0
    while ring.consume < boundary + capacity:
        span = ring.writable_span()
        position, length = model.writable()
        assert len(span) == length
        if length:
            step = max(1, length // 2)
            written = bytes((value + i) % 251 for i in range(step))
            value += step
            span[:step] = written
            model.content[position : position + step] = written
            assert ring.advance_commit(step) == model.advance_commit(step)
            ring.acknowledge_readable()
            model.readable_pending = False
        position, length = model.readable()
        span = ring.readable_span()
        assert bytes(span) == bytes(model.content[position : position + length])
        step = (length + 1) // 2
        assert ring.advance_consume(step) == model.advance_consume(step)
        assert (ring.commit, ring.consume) == (model.commit, model.consume)


def test_a_cursor_that_could_overflow_is_refused(arena, raw, layout_of) -> None:
    arena.create_ring(layout_of(64)).close()
    raw(0)["commit"], raw(0)["consume"] = 2**64 - 64, 2**64 - 64
    with pytest.raises(RingError, match="contradict"):
        arena.open_ring(layout_of(64))
    raw(0)["commit"], raw(0)["consume"] = 2**64 - 65, 2**64 - 65
    ring = arena.open_ring(layout_of(64))
    assert len(ring.writable_span()) == 1
    with pytest.raises(RingError, match="contradict"):
        ring.advance_commit(1)


class RingLife(RuleBasedStateMachine):
    """Two handles, producer and consumer, in two mappings of one arena, against the model."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 13
        layout = RingLayout(RingId(9), 64, 64 + self.capacity, 64, 128, self.capacity, 64)
        arenas = MemfdArenas()
        self.owner = arenas.create(4096)
        self.producer = self.owner.create_ring(layout)
        self.view = arenas.attach(self.owner.fd, 4096)
        self.consumer = self.view.open_ring(layout)
        self.model = Model(self.capacity)
        self.next_value = 0

    def teardown(self) -> None:
        self.view.close()
        self.owner.close()

    @rule(count=st.integers(0, 13))
    def produce(self, count: int) -> None:
        span = self.producer.writable_span()
        position, length = self.model.writable()
        assert len(span) == length
        count = min(count, length)
        for i in range(count):
            span[i] = self.model.content[position + i] = self.next_value
            self.next_value = (self.next_value + 1) % 256
        assert self.producer.advance_commit(count) == self.model.advance_commit(count)

    @rule(count=st.integers(0, 13))
    def consume(self, count: int) -> None:
        span = self.consumer.readable_span()
        position, length = self.model.readable()
        assert bytes(span) == bytes(self.model.content[position : position + length])
        count = min(count, length)
        assert self.consumer.advance_consume(count) == self.model.advance_consume(count)

    @rule(count=st.integers(1, 20))
    def overrun(self, count: int) -> None:
        _, length = self.model.writable()
        assert len(self.producer.writable_span()) == length
        with pytest.raises(RingError, match="count"):
            self.producer.advance_commit(length + count)
        _, length = self.model.readable()
        assert len(self.consumer.readable_span()) == length
        with pytest.raises(RingError, match="count"):
            self.consumer.advance_consume(length + count)

    @precondition(lambda self: self.model.readable_pending)
    @rule()
    def hear_readable(self) -> None:
        self.consumer.acknowledge_readable()
        self.model.readable_pending = False

    @precondition(lambda self: self.model.writable_pending)
    @rule()
    def hear_writable(self) -> None:
        self.producer.acknowledge_writable()
        self.model.writable_pending = False

    @invariant()
    def both_ends_agree(self) -> None:
        expected = (self.model.commit, self.model.consume)
        assert (self.producer.commit, self.producer.consume) == expected
        assert (self.consumer.commit, self.consumer.consume) == expected


TestRingLife = RingLife.TestCase
TestRingLife.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
