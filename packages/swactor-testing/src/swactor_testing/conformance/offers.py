"""Edges without waiting (spec sections 23, 35): what is there now, and a call when there may be more.

The guarantees are those of `offer`, `take` and `watch` in `swactor_core.spi.transport`: a pump lives on them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
from swactor_core.errors import EdgeBroken, EdgeClosed
from swactor_core.spi.transport import RecvEdge, SendEdge

from swactor_testing.conformance.bounds import meanwhile, same_bytes, seeded, within
from swactor_testing.conformance.edges import EdgeContract
from swactor_testing.conformance.transport_rig import KIB, Neighbour, Pair

T = TypeVar("T")

QUIET_TURNS = 300
"""Turns of the loop in which nothing happens on the connection."""

QUIET_CALLS = 10
"""Calls of a watcher in them that are without cause, at most: acknowledgements and timers of before."""


class Watcher:
    """Hears an edge's calls, each in the thread of the loop, and tries again after one and only then."""

    def __init__(self, edge: SendEdge | RecvEdge, patience: float) -> None:
        self.calls = 0
        self._patience = patience
        self._loop, self._thread, self._foreign = asyncio.get_running_loop(), threading.get_ident(), False
        self._called = asyncio.Event()
        edge.watch(self._wake)

    def _wake(self) -> None:
        self.calls += 1
        self._foreign |= threading.get_ident() != self._thread
        self._loop.call_soon_threadsafe(self._called.set) if self._foreign else self._called.set()

    async def called(self, what: str) -> None:
        """Returns at once for a call since the last `forget`. Raises AssertionError when none comes."""
        await within(self._patience, self._called.wait(), f"a watcher's call: {what}")
        assert not self._foreign, "a watcher was called in another thread than the loop's"

    def forget(self) -> None:
        self._called.clear()

    async def raises(self, attempt: Callable[[], object], what: str) -> None:
        """Returns by what `attempt` raises, tried after each call."""
        while True:
            await self.called(what)
            self.forget()
            attempt()

    async def gets(self, attempt: Callable[[], T], what: str) -> T:
        """The first result of `attempt`, tried after each call, that is neither None nor 0."""
        while True:
            await self.called(what)
            self.forget()
            if (result := attempt()) not in (None, 0):
                return result

    async def offered(self, edge: SendEdge, view: memoryview) -> int:
        """Bytes of the first offer that took any, tried at once and after each call."""
        self.forget()
        return offer(edge, view) or await self.gets(lambda: offer(edge, view), "there is room")

    async def taken(self, edge: RecvEdge, count: int) -> bytes:
        """The bytes of the first take that gave any, tried at once and after each call; empty at the end of
        stream."""
        self.forget()
        part = take(edge, count)
        if part is None:
            part = await self.gets(lambda: take(edge, count), "something has arrived")
        assert part is not None
        return part


def offer(edge: SendEdge, view: memoryview) -> int:
    room = edge.room()
    taken = edge.offer(view)
    assert 0 <= taken <= min(len(view), room), f"offer took {taken} of {len(view)} bytes with room for {room}"
    assert taken or not room, f"offer took nothing with room for {room}"
    return taken


def take(edge: RecvEdge, count: int) -> bytes | None:
    buffer = bytearray(count)
    taken = edge.take(memoryview(buffer))
    assert taken is None or 0 <= taken <= count, f"take returned {taken} for room of {count}"
    return None if taken is None else bytes(buffer[:taken])


class OfferContract(EdgeContract):
    """What an edge's calls without waiting keep, and its watchers."""

    @pytest.mark.parametrize("seed", range(3))
    async def test_offers_and_takes_move_every_byte(self, pair: Pair, seed: int) -> None:
        """`offer` is `write` and `take` is `read_into` without waiting, in any mixture of them; who tries
        again when his watcher was called, and only then, misses nothing."""
        random = seeded(seed)
        data = random.randbytes(random.randint(100 * KIB, 300 * KIB))
        sender, reader = await pair.edge()
        room, bytes_came = Watcher(sender, pair.patience), Watcher(reader, pair.patience)

        async def write() -> None:
            start = 0
            while start < len(data):
                view = memoryview(data)[start : start + random.choice((1, 40, 1000, 70 * KIB))]
                if random.random() < 0.2:
                    start += await within(pair.patience, sender.write(view), "room for a write")
                else:
                    start += await room.offered(sender, view)
            await sender.finish()

        async with meanwhile(write()) as writing:
            received = bytearray()
            while True:
                reader.grant(len(received) + random.choice((1, 64, 5000, 100 * KIB)))
                wanted = random.choice((1, 40, 3000, 64 * KIB))
                if random.random() < 0.2:
                    part = await pair.read(reader, wanted)
                else:
                    part = await bytes_came.taken(reader, wanted)
                if not part:
                    break
                received += part
            same_bytes(received, data, f"seed {seed}")
            await within(pair.patience, writing, "the writer's end")
        assert take(reader, 10) == b"", "the end of stream did not stay"

    @pytest.mark.parametrize("granted", [0, 1, 1000, 200 * KIB])
    async def test_offers_take_what_was_granted_and_not_a_byte_more(self, pair: Pair, granted: int) -> None:
        """`offer`: 0 when there is no room. What nobody reads, nobody can send, without waiting either."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge()
        assert sender.offer(memoryview(b"early")) == 0, "an offer was taken before the first grant"
        if granted:
            reader.grant(granted)
        data = seeded(granted).randbytes(granted + 300 * KIB)
        taken, before = 0, -1
        while taken > before:
            before = taken
            await neighbour.exchange()
            while count := sender.offer(memoryview(data)[taken:]):
                taken += count
        assert taken == granted, f"{granted} bytes were granted and none was read, offers took {taken}"
        if granted:
            same_bytes(await pair.read_exactly(reader, granted), data[:granted], "what was offered")

    async def test_offered_bytes_are_copied(self, pair: Pair) -> None:
        """`offer`: the bytes are copied before return; the ring reuses them at once."""
        sender, reader = await pair.edge()
        room = Watcher(sender, pair.patience)
        reader.grant(4)
        data = bytearray(b"good")
        taken = await room.offered(sender, memoryview(data))
        data[:] = b"evil"
        await pair.write_all(sender, b"good"[taken:])
        same_bytes(await pair.read_exactly(reader, 4), b"good", "bytes overwritten after offer returned")

    async def test_a_take_has_nothing_before_something_comes_and_grants_nothing(self, pair: Pair) -> None:
        """`take`: None when there is nothing yet, which is no end of stream; reading grants nothing."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge()
        came = Watcher(reader, pair.patience)
        assert take(reader, 4) is None
        reader.grant(4)
        await pair.write_all(sender, b"1234")
        assert await came.taken(reader, 3) == b"123"
        assert await came.taken(reader, 3) == b"4"
        assert take(reader, 3) is None
        await neighbour.exchange()
        assert sender.offer(memoryview(b"5")) == 0, "a take made room that was never granted"

    async def test_watchers_are_called_on_an_idle_connection(self, pair: Pair) -> None:
        """`watch`: called when an offer that took nothing may fare better, and a take that gave None. A byte
        at a time, with nothing else on the connection that could wake anybody."""
        sender, reader = await pair.edge()
        room, came = Watcher(sender, pair.patience), Watcher(reader, pair.patience)
        for total in range(1, 30):
            assert sender.offer(memoryview(b"xyz")) == 0
            assert take(reader, 10) is None
            for watcher in (room, came):
                watcher.forget()
            reader.grant(total)
            assert await room.gets(lambda: offer(sender, memoryview(b"xyz")), "there is room") == 1
            assert await came.gets(lambda: take(reader, 10), "something has arrived") == b"x"

    @pytest.mark.parametrize("end", ["finish", "abort", "stop", "removal"])
    async def test_a_watcher_of_room_hears_of_every_end(self, pair: Pair, end: str) -> None:
        """`watch`: called when an offer would raise, whoever ended the edge; `offer` raises as `write` does:
        EdgeClosed after an own end, else EdgeBroken."""
        sender, reader = await pair.edge()
        room = Watcher(sender, pair.patience)
        assert sender.offer(memoryview(b"x")) == 0
        room.forget()
        if end == "removal":
            pair.right.transport.remove_peer(pair.left.node_id)
        else:
            await getattr(reader if end == "stop" else sender, end)()
        with pytest.raises(EdgeClosed if end in ("finish", "abort") else EdgeBroken, match=r"\S"):
            await room.raises(lambda: sender.offer(memoryview(b"x")), f"the edge has ended by {end}")

    @pytest.mark.parametrize("end", ["finish", "abort", "stop", "removal"])
    async def test_a_watcher_of_bytes_hears_of_every_end(self, pair: Pair, end: str) -> None:
        """`watch`: called when a take gives an end of stream or would raise, whoever ended the edge; `take`
        raises as `read_into` does: EdgeClosed after an own end, else EdgeBroken."""
        sender, reader = await pair.edge()
        came = Watcher(reader, pair.patience)
        assert take(reader, 1) is None
        came.forget()
        if end == "removal":
            pair.left.transport.remove_peer(pair.right.node_id)
        else:
            await getattr(reader if end == "stop" else sender, end)()
        if end == "finish":
            assert await came.gets(lambda: take(reader, 1), "the edge has ended by finish") == b""
            return
        with pytest.raises(EdgeClosed if end == "stop" else EdgeBroken, match=r"\S"):
            await came.raises(lambda: take(reader, 1), f"the edge has ended by {end}")

    async def test_what_arrived_is_taken_before_a_break_is_told(self, pair: Pair) -> None:
        """`take` as `read_into`: bytes that have arrived are not lost with the connection."""
        sender, reader = await pair.edge()
        came = Watcher(reader, pair.patience)
        reader.grant(6)
        await pair.write_all(sender, b"before")
        first = await came.taken(reader, 1)
        pair.right.transport.remove_peer(pair.left.node_id)
        received = bytearray(first)

        async def take_all() -> None:
            while True:
                received.extend(await came.taken(reader, 2))

        with pytest.raises(EdgeBroken):
            await take_all()
        assert b"before".startswith(received), f"{received} arrived of b'before'"

    async def test_the_last_watcher_is_the_one(self, pair: Pair) -> None:
        """`watch`: there is one watcher, the last."""
        sender, reader = await pair.edge()
        former = [Watcher(edge, pair.patience) for edge in (sender, reader)]
        room, came = Watcher(sender, pair.patience), Watcher(reader, pair.patience)
        before = [watcher.calls for watcher in former]
        reader.grant(1)
        assert await room.offered(sender, memoryview(b"x")) == 1
        assert await came.taken(reader, 1) == b"x"
        assert [watcher.calls for watcher in former] == before, "a watcher that was replaced was called"

    async def test_a_quiet_edge_calls_nobody_over_and_over(self, pair: Pair) -> None:
        """`watch`: without cause now and then, not over and over while nothing happens: idle nodes sleep."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge()
        watchers = Watcher(sender, pair.patience), Watcher(reader, pair.patience)
        assert sender.offer(memoryview(b"x")) == 0
        assert take(reader, 1) is None
        await neighbour.exchange()
        before = sum(watcher.calls for watcher in watchers)
        for _ in range(QUIET_TURNS):
            await asyncio.sleep(0)
        calls = sum(watcher.calls for watcher in watchers) - before
        assert calls <= QUIET_CALLS, f"{calls} calls in {QUIET_TURNS} turns in which nothing happened"
