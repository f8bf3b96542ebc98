"""Edges without waiting: offer, take and watch, as a pump uses them."""

from __future__ import annotations

import asyncio

import pytest
from swactor_core.errors import EdgeBroken, EdgeClosed

KIB = 1024


class Watched:
    """Counts the wakes of an edge and waits for the next one."""

    def __init__(self, edge) -> None:
        self.wakes = 0
        self._event = asyncio.Event()
        edge.watch(self._woken)

    def _woken(self) -> None:
        self.wakes += 1
        self._event.set()

    async def again(self) -> None:
        self._event.clear()
        await asyncio.wait_for(self._event.wait(), 5)


async def test_an_offer_without_credit_takes_nothing_and_its_watcher_hears_of_credit(pair):
    left, right = pair
    sender, reader = await left.edge_to(right)
    writer = Watched(sender)
    assert sender.offer(memoryview(b"too early")) == 0
    reader.grant(4)
    await writer.again()
    assert sender.offer(memoryview(b"four bytes at most")) == 4
    assert sender.offer(memoryview(b" bytes at most")) == 0
    await sender.abort()
    with pytest.raises(EdgeClosed):
        sender.offer(memoryview(b"x"))


async def test_a_take_without_bytes_is_none_and_all_that_came_together_wakes_once(pair):
    left, right = pair
    sender, reader = await left.edge_to(right)
    watcher = Watched(reader)
    into = memoryview(bytearray(256 * KIB))
    assert reader.take(into) is None
    reader.grant(200 * KIB)
    writer = Watched(sender)
    while not (taken := sender.offer(memoryview(bytes(100 * KIB)))):
        await writer.again()
    await watcher.again()
    got = 0
    while got < taken:
        count = reader.take(into)
        if count is None:
            await watcher.again()
        else:
            got += count
    assert watcher.wakes <= 4, "one wake for a batch of datagrams, not one for each"
    assert reader.take(into) is None
    await sender.finish()
    await watcher.again()
    assert reader.take(into) == 0
    assert reader.take(into) == 0


async def test_the_watchers_hear_of_a_break(pair):
    left, right = pair
    sender, reader = await left.edge_to(right)
    writer, watcher = Watched(sender), Watched(reader)
    left.transport.remove_peer(right.node_id)
    assert writer.wakes == 1
    with pytest.raises(EdgeBroken, match="gave the other side up"):
        sender.offer(memoryview(b"x"))
    await watcher.again()
    with pytest.raises(EdgeBroken):
        reader.take(memoryview(bytearray(1)))


async def test_a_stopped_reader_wakes_the_writer(pair):
    left, right = pair
    sender, reader = await left.edge_to(right)
    writer = Watched(sender)
    await reader.stop()
    await writer.again()
    with pytest.raises(EdgeBroken, match="stopped"):
        sender.offer(memoryview(b"x"))
    with pytest.raises(EdgeClosed):
        reader.take(memoryview(bytearray(1)))
