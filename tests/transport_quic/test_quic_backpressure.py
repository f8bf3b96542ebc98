"""From ring to ring over real sockets: what nobody reads stays where it is, to the byte, however long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from swactor_core.faults import Component
from swactor_core.ids import RingId, node_id_of
from swactor_core.messages import Address, EstablishRecv, EstablishSend, RingReadable, RingWritable
from swactor_core.node.pumps import RecvPumpTask, SendPumpTask
from swactor_core.specs import RING_HEADER_BYTES, RingLayout, align_up
from swactor_core.spi.transport import Peer, TransportContext
from swactor_testing.heap import HeapArena
from swactor_testing.virtual_time import VirtualTimeLoop
from swactor_transport_quic.transport import QuicPlugin, QuicTransport

KIB = 1024
HERE = Address(Component.DRIVER)


class Rings:
    """Rings of one process and the pumps on them; a hint for the ring's other end is a call."""

    def __init__(self, transport: QuicTransport) -> None:
        self.transport = transport
        self.arena = HeapArena(1 << 26)
        self.tasks: list[asyncio.Task[None]] = []
        self._offset = 0
        self._number = 0

    def _ring(self, capacity: int) -> tuple[RingLayout, Any, Any]:
        self._number += 1
        total = align_up(RING_HEADER_BYTES + capacity, 4096)
        offset, self._offset = self._offset, self._offset + total
        layout = RingLayout(
            RingId(self._number), offset, total, offset, offset + RING_HEADER_BYTES, capacity, 64
        )
        return layout, self.arena.create_ring(layout), self.arena.open_ring(layout)

    def _hooks(self, end: End) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        return {"now": loop.time, "tell": lambda action: None, "hint": end.hinted}

    def send(self, edge_id: int, peer: int, capacity: int) -> End:
        layout, ring, mine = self._ring(capacity)
        end = End(mine)
        spec = EstablishSend(edge_id, peer, layout.ring_id, layout, HERE)
        end.pump = SendPumpTask(spec, ring, self.transport, **self._hooks(end))
        self.tasks.append(asyncio.ensure_future(end.pump.run()))
        return end

    async def receive(self, capacity: int) -> tuple[int, End]:
        peer, edge_id, edge = await asyncio.wait_for(self.transport.accept_edge(), 20)
        layout, ring, mine = self._ring(capacity)
        end = End(mine)
        spec = EstablishRecv(edge_id, peer, layout.ring_id, layout, HERE)
        end.pump = RecvPumpTask(spec, ring, edge, **self._hooks(end))
        self.tasks.append(asyncio.ensure_future(end.pump.run()))
        return edge_id, end

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.transport.close()


class End:
    """The worker's end of a ring: puts or takes as much as can be, and waits for the hint."""

    def __init__(self, ring: Any) -> None:
        self.ring = ring
        self.pump: Any = None
        self.moved = 0
        self._hint = asyncio.Event()

    def hinted(self, message: RingReadable | RingWritable) -> None:
        self._hint.set()

    def put_what_fits(self, pattern: Callable[[int, int], bytes]) -> None:
        self.ring.acknowledge_writable()
        while len(span := self.ring.writable_span()):
            span[:] = pattern(self.moved, len(span))
            self.moved += len(span)
            if self.ring.advance_commit(len(span)):
                self.pump.wake()

    async def put(self, count: int, pattern: Callable[[int, int], bytes]) -> None:
        end = self.moved + count
        while self.moved < end:
            self._hint.clear()
            self.ring.acknowledge_writable()
            span = self.ring.writable_span()[: end - self.moved]
            if not len(span):
                await self._hint.wait()
                continue
            span[:] = pattern(self.moved, len(span))
            self.moved += len(span)
            if self.ring.advance_commit(len(span)):
                self.pump.wake()

    async def take(self, count: int, pattern: Callable[[int, int], bytes]) -> None:
        end = self.moved + count
        while self.moved < end:
            self._hint.clear()
            self.ring.acknowledge_readable()
            span = self.ring.readable_span()[: end - self.moved]
            if not len(span):
                await self._hint.wait()
                continue
            assert bytes(span) == pattern(self.moved, len(span)), f"wrong bytes at {self.moved}"
            self.moved += len(span)
            if self.ring.advance_consume(len(span)):
                self.pump.wake()


def numbered(at: int, count: int) -> bytes:
    """Bytes that differ from their neighbours' at every shift below 251."""
    start = at % 251
    return (bytes(range(251)) * (count // 251 + 2))[start : start + count]


def transport(name: str, settings: dict[str, Any]) -> tuple[QuicTransport, bytes, int]:
    plugin, seed = QuicPlugin(), name.encode().ljust(32, b".")
    key = plugin.public_key(seed)
    context = TransportContext(
        seed=seed,
        node_id=node_id_of(key),
        epoch=1,
        bind_host="127.0.0.1",
        bind_port=0,
        authorise=lambda candidate: True,
        on_peer_lost=lambda node_id, why: pytest.fail(why),
        settings=settings,
    )
    return plugin.create(context), key, node_id_of(key)


async def two(**settings: Any) -> tuple[Rings, Rings, int]:
    (left, _, _), (right, key, node_id) = transport("left", settings), transport("right", settings)
    await left.start()
    await right.start()
    left.set_peer(Peer(node_id, key, "127.0.0.1", right.port))
    return Rings(left), Rings(right), node_id


async def stalled_edge(capacity: int, far: int, **settings: Any) -> tuple[Rings, Rings, int, End, End]:
    """An edge whose reader takes nothing, and whose writer has put what it could."""
    left, right, peer = await two(**settings)
    egress = left.send(1, peer, capacity)
    egress.put_what_fits(numbered)
    edge_id, ingress = await right.receive(far)
    assert edge_id == 1
    deadline = asyncio.get_running_loop().time() + 10
    while egress.moved < capacity + far:
        assert asyncio.get_running_loop().time() < deadline, f"only {egress.moved} bytes"
        egress.put_what_fits(numbered)
        await asyncio.sleep(0.001)
    return left, right, peer, egress, ingress


@pytest.mark.parametrize(("near", "far"), [(4 * KIB, 64 * KIB), (64 * KIB, 4 * KIB), (256 * KIB, 256 * KIB)])
async def test_in_flight_is_what_both_rings_hold_and_nothing_else_waits(near, far):
    left, right, peer, egress, ingress = await stalled_edge(near, far)
    other = left.send(2, peer, 32 * KIB)
    other.put_what_fits(numbered)
    _, other_far = await right.receive(32 * KIB)
    mine = await left.transport.open_control(peer, deadline=5)
    theirs = await asyncio.wait_for(right.transport.accept_control(), 5)
    for round_ in range(5):
        # While a whole megabyte passes on the neighbour, and frames on control, not one byte more goes in.
        async with asyncio.timeout(20):
            await asyncio.gather(other.put(200 * KIB, numbered), other_far.take(200 * KIB, numbered))
        await mine.send(bytes([round_]) * 1000)
        assert await asyncio.wait_for(theirs.receive(), 5) == bytes([round_]) * 1000
        egress.put_what_fits(numbered)
        assert egress.moved == near + far
    async with asyncio.timeout(20):
        await asyncio.gather(egress.put(500 * KIB, numbered), ingress.take(near + far + 500 * KIB, numbered))
    await left.close()
    await right.close()


def test_hours_of_stall_end_neither_the_edge_nor_the_connection():
    """Virtual time over real sockets: pings keep the connection, and the edge goes on where it stopped."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        left, right, _, egress, ingress = await stalled_edge(16 * KIB, 16 * KIB, probe_interval=4.0)
        (link,) = left.transport._endpoint.links
        sent = link._sent
        began = loop.time()
        await asyncio.sleep(5 * 3600)
        assert loop.time() - began >= 5 * 3600
        assert left.transport._endpoint.links == (link,)
        assert link._sent - sent < 5 * 3600 * 8, "a stalled edge costs a few small datagrams a second"
        egress.put_what_fits(numbered)
        assert egress.moved == 32 * KIB
        async with asyncio.timeout(30):
            await asyncio.gather(egress.put(100 * KIB, numbered), ingress.take(132 * KIB, numbered))
        await left.close()
        await right.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())
