"""The callers' half of the wake rule (spec section 21): the other end moves between two calls of a user.

The users are the worker's ring ends and the pumps' wait, on native rings. After each of their calls in turn
the other end moves once, and from then on only hints wake anybody. A user that clears the pending bit after
it has loaded cursors misses one of these moves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from swactor_core.ids import ObjectId, RingId, Sequence
from swactor_core.messages import ObjectLoaded, ObjectProduced
from swactor_core.node import pumps
from swactor_core.specs import RingDirection
from swactor_core.wire import ObjectHeader
from swactor_core.worker.rings import DeviceObjects, EgressEnd, IngressEnd
from swactor_testing.echo import EchoBridge
from swactor_testing.worker_kit import GENERATION, install, record, ring_layout, token_spec

SPEC = token_spec(64)
PAYLOAD = bytes(range(1, 5)) * 4


class Interrupted:
    """A ring on which `act` happens right after its call number `at`."""

    def __init__(self, ring: Any, at: int, act: Callable[[], None]) -> None:
        self._ring, self._at, self._act = ring, at, act
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ring, name)
        if not callable(found):
            return found

        def called(*arguments: Any) -> Any:
            result = found(*arguments)
            self.calls += 1
            if self.calls == self._at:
                self._act()
            return result

        return called


class LateIngress(IngressEnd):
    def wake(self) -> None:
        self.pump()
        self.ring.acknowledge_readable()


class LateEgress(EgressEnd):
    def wake(self) -> None:
        self.pump()
        self.ring.acknowledge_writable()


async def late_wait(event: asyncio.Event, acknowledge: Callable[[], None], ready: Callable[[], int]) -> None:
    while not ready():
        acknowledge()
        await event.wait()
        event.clear()


def ingress(arena: Any, kind: type[IngressEnd], at: int) -> tuple[int, int]:
    """(objects that came of two, calls made) when the second is committed after call `at`."""
    layout = ring_layout(RingId(1), 256, offset=0)
    producer, hints, reports = arena.create_ring(layout), [], []

    def write(number: int) -> None:
        data = record(number, number, PAYLOAD)
        producer.writable_span()[: len(data)] = data
        if producer.advance_commit(len(data)):
            hints.append("RingReadable")

    ring = Interrupted(arena.open_ring(layout), at, lambda: write(1))
    objects = DeviceObjects(EchoBridge(1 << 16), GENERATION)
    command = install(layout, RingDirection.INGRESS, SPEC)
    end = kind(command, ring, objects, report=reports.append, hint=lambda hint: None)
    write(0)
    while hints:
        hints.pop()
        end.wake()
    producer.close()
    return sum(isinstance(report, ObjectLoaded) for report in reports), ring.calls


def egress(arena: Any, kind: type[EgressEnd], at: int) -> tuple[int, int]:
    """(objects that are out of one, calls made): it fills the ring several times, and the consumer empties
    the ring when it hears a hint, and once more after call `at`."""
    layout = ring_layout(RingId(1), 64, offset=0)
    consumer, to_node, to_worker, reports = arena.create_ring(layout), [], [], []

    def read() -> None:
        consumer.acknowledge_readable()
        while length := len(consumer.readable_span()):
            if consumer.advance_consume(length):
                to_worker.append("RingWritable")

    ring = Interrupted(arena.open_ring(layout), at, read)
    command = install(layout, RingDirection.EGRESS, SPEC)
    end = kind(command, ring, EchoBridge(1 << 16), report=reports.append, hint=to_node.append)
    end.begin(ObjectHeader(ObjectId(0), Sequence(0), 12 * len(PAYLOAD)), bytearray(12 * PAYLOAD))
    while to_node or to_worker:
        if to_worker:
            to_worker.pop()
            end.wake()
        else:
            to_node.pop()
            read()
    consumer.close()
    return sum(isinstance(report, ObjectProduced) for report in reports), ring.calls


def missed(walk: Callable[[Any, Any, int], tuple[int, int]], arena: Any, kind: Any, whole: int) -> list[int]:
    """The calls after which a move of the other end was lost."""
    _, calls = walk(arena, kind, 0)
    assert calls >= 6
    return [at for at in range(1, calls + 1) if walk(arena, kind, at)[0] < whole]


def test_the_worker_misses_nothing_that_comes_between_two_of_its_calls(arena) -> None:
    assert missed(ingress, arena, IngressEnd, 2) == []
    assert missed(egress, arena, EgressEnd, 1) == []


def test_a_worker_that_acknowledges_late_is_found(arena) -> None:
    assert missed(ingress, arena, LateIngress, 2)
    assert missed(egress, arena, LateEgress, 1)


async def waits_for_ever(arena: Any, wait: Any, at: int) -> bool:
    """A pump waits for a byte, which is committed after its call `at`."""
    layout = ring_layout(RingId(1), 64, offset=0)
    producer, event = arena.create_ring(layout), asyncio.Event()

    def write() -> None:
        producer.writable_span()
        if producer.advance_commit(1):
            event.set()

    write()
    reader = arena.open_ring(layout)
    reader.readable_span()
    reader.advance_consume(1)
    event.clear()  # the hint of the first byte was heard and has not been acknowledged
    ring = Interrupted(reader, at, write)
    waiting = asyncio.ensure_future(wait(event, ring.acknowledge_readable, lambda: len(ring.readable_span())))
    for _ in range(20):
        await asyncio.sleep(0)
    ended = waiting.done()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    producer.close()
    return not ended


@pytest.mark.parametrize("at", [1, 2])
async def test_a_pump_misses_nothing_that_comes_between_two_of_its_calls(arena, at) -> None:
    assert not await waits_for_ever(arena, pumps._hinted, at)


async def test_a_pump_that_acknowledges_late_is_found(arena) -> None:
    assert await waits_for_ever(arena, late_wait, 1)
