"""A damaged ring ends its pump with a fault (spec sections 25 and 36), whichever call meets it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import pytest
from swactor_core.faults import Component, StreamFaultReason
from swactor_core.fsm import Send
from swactor_core.ids import EdgeId, NodeId, RingId
from swactor_core.messages import Address, EstablishRecv, RingWritable, StreamFault
from swactor_core.node.pumps import RecvPumpTask
from swactor_core.specs import RingLayout
from swactor_testing.heap import CONSUME_OFFSET, HeapArenas

LAYOUT = RingLayout(RingId(9), 0, 4096, 0, 64, 4032, 64)
SPEC = EstablishRecv(EdgeId(6), NodeId(70), RingId(9), LAYOUT, Address(Component.RX_EDGE, 6))
BEYOND = 1 << 40


class Stream:
    """Gives what the peer has sent; nothing more comes by itself."""

    def __init__(self, sent: bytes) -> None:
        self.sent = sent
        self.stopped = False

    def grant(self, total: int) -> None:
        pass

    def watch(self, wake: Callable[[], None]) -> None:
        pass

    def take(self, view: memoryview) -> int | None:
        count = min(len(view), len(self.sent))
        view[:count], self.sent = self.sent[:count], self.sent[count:]
        return count or None

    async def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("sent", [0, 10, LAYOUT.data_capacity], ids=["empty", "waiting", "full"])
async def test_a_worker_that_scribbles_over_its_cursor_faults_the_edge(sent: int) -> None:
    arena = HeapArenas().create(LAYOUT.total_len)
    ring = arena.create_ring(LAYOUT)
    told: list[Any] = []
    hooks: dict[str, Any] = {"now": lambda: 0.0, "tell": lambda send: told.append(send), "hint": told.append}
    stream = Stream(bytes(sent))
    pump = RecvPumpTask(SPEC, ring, stream, **hooks)  # type: ignore[arg-type] # what the pump uses of an edge
    task = asyncio.ensure_future(pump.run())
    await asyncio.sleep(0)
    struct.pack_into("<Q", arena.memory, LAYOUT.header_offset + CONSUME_OFFSET, BEYOND)
    pump.wake()
    await asyncio.wait_for(task, 5)
    faults = [a.message for a in told if isinstance(a, Send) and isinstance(a.message, StreamFault)]
    assert [fault.reason for fault in faults] == [StreamFaultReason.RING_FAULT]
    assert stream.stopped
    assert not [hint for hint in told if isinstance(hint, RingWritable)]
    arena.close()


async def test_a_pump_with_a_defect_lets_its_peer_go() -> None:
    """The fault is its edge's (`Driver._guarded`); the peer must not wait for what nobody reads any more."""
    arena = HeapArenas().create(LAYOUT.total_len)
    hooks: dict[str, Any] = {"now": lambda: 0.0, "tell": lambda send: None, "hint": lambda message: None}
    stream = Stream(b"")
    pump = RecvPumpTask(SPEC, arena.create_ring(LAYOUT), stream, **hooks)  # type: ignore[arg-type] # as above
    task = asyncio.ensure_future(pump.run())
    await asyncio.sleep(0)
    stream.take = lambda view: 1 // 0  # type: ignore[method-assign]
    pump.wake()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(task, 5)
    assert stream.stopped
    arena.close()
