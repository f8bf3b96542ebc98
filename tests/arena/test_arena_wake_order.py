"""The callers' half of the wake rule (spec section 21): the other end moves between two calls of a user.

The users are the worker's ring ends and the pumps, on native rings. After each of their calls in turn
the other end moves once, and from then on only hints wake anybody. A user that clears the pending bit after
it has loaded cursors misses one of these moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from itertools import combinations
from typing import Any

from swactor_core.faults import Component
from swactor_core.ids import EdgeId, NodeId, ObjectId, RingId, Sequence
from swactor_core.machines.pumps import AwaitReadable, AwaitWritable
from swactor_core.messages import (
    Address,
    EstablishRecv,
    EstablishSend,
    ObjectLoaded,
    ObjectProduced,
    RingReadable,
    RingWritable,
)
from swactor_core.node import pumps
from swactor_core.specs import RingDirection
from swactor_core.wire import ObjectHeader
from swactor_core.worker.rings import DeviceObjects, EgressEnd, IngressEnd
from swactor_testing.echo import EchoBridge
from swactor_testing.worker_kit import GENERATION, install, record, ring_layout, token_spec

SPEC = token_spec(64)
PAYLOAD = bytes(range(1, 5)) * 4


class Interrupted:
    """A ring on which `act` happens right after each of its calls whose numbers are in `at`."""

    def __init__(self, ring: Any, at: Collection[int], act: Callable[[], None]) -> None:
        self._ring, self._at, self._act = ring, at, act
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ring, name)
        if not callable(found):
            return found

        def called(*arguments: Any) -> Any:
            result = found(*arguments)
            self.calls += 1
            if self.calls in self._at:
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


class LateSendPump(pumps.SendPumpTask):
    def _do_now(self, effect: Any) -> object | None:
        if isinstance(effect, AwaitReadable):
            found = len(self.ring.readable_span())
            self.ring.acknowledge_readable()
            return RingReadable(self.ring_id) if found else None
        return super()._do_now(effect)


class LateRecvPump(pumps.RecvPumpTask):
    def wake(self) -> None:
        pumps._PumpTask.wake(self)

    def _do_now(self, effect: Any) -> object | None:
        if isinstance(effect, AwaitWritable):
            found = len(self.ring.writable_span())
            self.ring.acknowledge_writable()
            return RingWritable(self.ring_id) if found else None
        return super()._do_now(effect)


def ingress(arena: Any, kind: type[IngressEnd], at: int) -> tuple[int, int]:
    """(objects that came of two, calls made) when the second is committed after call `at`."""
    layout = ring_layout(RingId(1), 256, offset=0)
    producer, hints, reports = arena.create_ring(layout), [], []

    def write(number: int) -> None:
        data = record(number, number, PAYLOAD)
        producer.writable_span()[: len(data)] = data
        if producer.advance_commit(len(data)):
            hints.append("RingReadable")

    ring = Interrupted(arena.open_ring(layout), {at}, lambda: write(1))
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

    ring = Interrupted(arena.open_ring(layout), {at}, read)
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


class Wire:
    """Both ends of an edge in one: it takes what is offered, and hands out `stock` bytes in pieces."""

    def __init__(self, stock: int = 0) -> None:
        self.taken, self.stock = 0, stock

    async def connect(self, peer: NodeId, *, deadline: float) -> None:
        pass

    async def open_edge(self, peer: NodeId, edge_id: EdgeId, *, deadline: float) -> Wire:
        return self

    def watch(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def grant(self, position: int) -> None:
        pass

    def offer(self, view: memoryview) -> int:
        self.taken += len(view)
        return len(view)

    def take(self, view: memoryview) -> int | None:
        count = min(self.stock, len(view), 48)
        self.stock -= count
        return count or None

    async def finish(self) -> None:
        pass

    async def abort(self) -> None:
        pass

    async def stop(self) -> None:
        pass


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def hooks() -> dict[str, Any]:
    return {"now": lambda: 0.0, "tell": lambda message: None}


async def sent(arena: Any, kind: Any, at: Collection[int]) -> tuple[int, int]:
    """(bytes that came out, calls made) of one and one more after each of the calls `at`."""
    layout, edge_id = ring_layout(RingId(1), 64, offset=0), EdgeId(1)
    producer, wire, loop = arena.create_ring(layout), Wire(), asyncio.get_running_loop()

    def write() -> None:
        producer.writable_span()
        if producer.advance_commit(1):
            loop.call_soon(pump.wake)

    ring = Interrupted(arena.open_ring(layout), at, write)
    spec = EstablishSend(edge_id, NodeId(2), layout.ring_id, layout, Address(Component.TX_EDGE))
    pump = kind(spec, ring, wire, hint=lambda hint: None, **hooks())
    running = asyncio.ensure_future(pump.run())
    await settle()  # it waits for the first byte
    write()
    await settle()
    pump.stop()
    await running
    producer.close()
    return wire.taken, ring.calls


async def received(arena: Any, kind: Any, at: Collection[int]) -> tuple[int, int]:
    """(bytes that came out of 256, calls made): the ring has room for 64, the consumer empties it when it
    hears a hint, and once more after each of the calls `at`. The first bytes come alone: the hint that they
    were read finds a pump that waits for bytes."""
    layout, edge_id, loop = ring_layout(RingId(1), 64, offset=0), EdgeId(1), asyncio.get_running_loop()
    consumer, wire, came, hints = arena.create_ring(layout), Wire(48), [], []

    def read() -> None:
        consumer.acknowledge_readable()
        while length := len(consumer.readable_span()):
            came.append(length)
            if consumer.advance_consume(length):
                loop.call_soon(pump.wake)

    ring = Interrupted(arena.open_ring(layout), at, read)
    spec = EstablishRecv(edge_id, NodeId(2), layout.ring_id, layout, Address(Component.RX_EDGE))
    pump = kind(spec, ring, wire, hint=hints.append, **hooks())
    running = asyncio.ensure_future(pump.run())
    await settle()
    read()
    await settle()
    wire.stock = 256 - 48
    wire.wake()
    hints.append(None)
    while hints:
        hints.clear()
        read()
        await settle()
    pump.stop()
    await running
    consumer.close()
    return sum(came), ring.calls


async def test_a_pump_misses_nothing_that_comes_between_two_of_its_calls(arena) -> None:
    assert await unsent(arena, pumps.SendPumpTask) == []
    assert await unreceived(arena, pumps.RecvPumpTask) == []


async def test_a_pump_that_acknowledges_late_is_found(arena) -> None:
    assert await unsent(arena, LateSendPump)
    assert await unreceived(arena, LateRecvPump)


async def unsent(arena: Any, kind: Any) -> list[tuple[int, int]]:
    """The pairs of calls after which a byte was lost: one is committed while the pump writes, one when it
    is about to wait."""
    _, calls = await sent(arena, kind, ())
    assert calls >= 6
    pairs = combinations(range(1, calls + 4), 2)
    return [at for at in pairs if (await sent(arena, kind, at))[0] < 1 + sum(call <= calls for call in at)]


async def unreceived(arena: Any, kind: Any) -> list[int]:
    """The calls after which room that was made was lost."""
    _, calls = await received(arena, kind, ())
    assert calls >= 6
    return [at for at in range(1, calls + 1) if (await received(arena, kind, {at}))[0] < 256]
