"""The memory transport's calls without waiting, watchers and edge ids, with one thing broken at a time.

The wrapping is that of `wrong_transports.py`, whose `TestUnbroken` it shares.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from around_transport import AroundTransport, later
from around_transport import WrongTransport as Wrong
from swactor_core.errors import EdgeBroken, TransportError
from wrong_kit import Around, caught_by

MIXED = "test_offers_and_takes_move_every_byte[0]"
OFFERS = "test_offers_take_what_was_granted_and_not_a_byte_more[1000]"
TAKES = "test_a_take_has_nothing_before_something_comes_and_grants_nothing"
IDLE = "test_watchers_are_called_on_an_idle_connection"
TAKEN = "test_an_id_that_is_open_is_refused_and_its_edge_goes_on"


# --- without waiting ---


@caught_by(OFFERS, "1000 bytes were granted and none was read, offers took [0-9]+")
class TestOffersBeyondTheGrant(Wrong):
    class send_edge(Around):
        held = b""

        def offer(self, view: memoryview) -> int:
            if self.held:
                self.held = self.held[self._inner.offer(memoryview(self.held)) :]
            if self.held or not len(view) or not self._inner._credit:
                return 0
            taken = self._inner.offer(view)
            self.held = bytes(view[taken : taken + 10])
            return taken + len(self.held)


@caught_by(OFFERS, "an offer was taken before the first grant")
class TestOffersBeforeAGrant(Wrong):
    class send_edge(Around):
        def offer(self, view: memoryview) -> int:
            taken = self._inner.offer(view)
            if not taken:
                later(self._inner.write(bytes(view)))
            return taken or len(view)


@caught_by("test_offered_bytes_are_copied", "is 0x.., sent was")
class TestAnOfferKeepsTheWritersMemory(Wrong):
    class send_edge(Around):
        def offer(self, view: memoryview) -> int:
            count = min(len(view), self._inner.room())
            if count:
                later(self._inner.write(view[:count]))
            return count


@caught_by(MIXED, "offer took nothing with room for")
class TestOffersNothingWithRoom(Wrong):
    class send_edge(Around):
        def offer(self, view: memoryview) -> int:
            return self._inner.offer(view) if self._inner.room() >= 64 else 0


@caught_by(MIXED, "is 0x.., sent was|bytes arrived of")
class TestAnOfferSkipsBytes(Wrong):
    class send_edge(Around):
        def offer(self, view: memoryview) -> int:
            skipped = len(view) > 900 and self._inner.room() > len(view)
            return self._inner.offer(view[1:] if skipped else view) + skipped


@caught_by(MIXED, "is 0x.., sent was|bytes arrived of")
class TestTakesBytesTwice(Wrong):
    class recv_edge(Around):
        last = b""

        def take(self, view: memoryview) -> int | None:
            if 0 < len(self.last) <= len(view):
                view[: len(self.last)] = self.last
                count, self.last = len(self.last), b""
                return count
            count = self._inner.take(view)
            self.last = bytes(view[: count or 0])
            return count


@caught_by(TAKES, "assert b'' is None")
class TestNothingYetIsAnEnd(Wrong):
    class recv_edge(Around):
        def take(self, view: memoryview) -> int | None:
            return self._inner.take(view) or 0


@caught_by(TAKES, "a take made room that was never granted")
class TestATakeGrants(Wrong):
    class recv_edge(Around):
        read = 0

        def take(self, view: memoryview) -> int | None:
            count = self._inner.take(view)
            self.read += count or 0
            self._inner.grant(self.read + 64)
            return count


class WatchesWithCare(Around):
    """`hear` stands between an edge and its watcher."""

    wake: Any = None

    def hear(self) -> None:
        self.wake()

    def watch(self, wake: Any) -> None:
        self.wake = wake
        self._inner.watch(self.hear)


@caught_by(IDLE, "in vain for a watcher's call: there is room")
class TestRoomIsToldOnce(Wrong):
    class send_edge(WatchesWithCare):
        told = 0

        def hear(self) -> None:
            self.told += 1
            if self.told < 20:
                self.wake()


@caught_by(IDLE, "in vain for a watcher's call: something has arrived")
class TestArrivalsAreToldWithTheNext(Wrong):
    class recv_edge(WatchesWithCare):
        arrivals = 0

        def hear(self) -> None:
            self.arrivals += 1
            if self.arrivals > 1:
                self.wake()


@caught_by(IDLE, "another thread than the loop's")
class TestWakesInAnotherThread(Wrong):
    class send_edge(WatchesWithCare):
        def hear(self) -> None:
            thread = threading.Thread(target=self.wake)
            thread.start()
            thread.join()


@caught_by(
    "test_a_watcher_of_room_hears_of_every_end[stop]", "in vain for a watcher's call: the edge has ended"
)
class TestAStopIsToldToWritersOnly(Wrong):
    class send_edge(WatchesWithCare):
        def hear(self) -> None:
            if not self._inner._broken:
                self.wake()


@caught_by("test_a_watcher_of_room_hears_of_every_end[finish]", "in vain for a watcher's call|DID NOT RAISE")
class TestAnOwnEndIsNotTold(Wrong):
    class send_edge(WatchesWithCare):
        def hear(self) -> None:
            if not self._inner._finished:
                self.wake()


@caught_by("test_a_watcher_of_bytes_hears_of_every_end[finish]", "in vain for a watcher's call: the edge has")
class TestAnEndOfStreamIsToldToReadersOnly(Wrong):
    class recv_edge(WatchesWithCare):
        def hear(self) -> None:
            if not self._inner._ended:
                self.wake()


@caught_by(
    "test_a_watcher_of_bytes_hears_of_every_end[removal]", "in vain for a watcher's call: the edge has"
)
class TestALossIsToldToReadersOnly(Wrong):
    class recv_edge(WatchesWithCare):
        def hear(self) -> None:
            if not self._inner._broken:
                self.wake()


@caught_by("test_a_watcher_of_bytes_hears_of_every_end[abort]", "in vain for a watcher's call: the edge has")
class TestATakeAfterAnAbortIsAnEmptyOne(Wrong):
    class recv_edge(Around):
        def take(self, view: memoryview) -> int | None:
            try:
                return self._inner.take(view)
            except EdgeBroken:
                return None


@caught_by("test_the_last_watcher_is_the_one", "a watcher that was replaced was called")
class TestCollectsWatchers(Wrong):
    class send_edge(Around):
        def watch(self, wake: Any) -> None:
            every = self.__dict__.setdefault("every", [])
            every.append(wake)
            self._inner.watch(lambda: [one() for one in every])


@caught_by("test_a_quiet_edge_calls_nobody_over_and_over", "calls in 300 turns in which nothing happened")
class TestLooksInEveryTurn(Wrong):
    class recv_edge(Around):
        def watch(self, wake: Any) -> None:
            self._inner.watch(wake)

            def turn() -> None:
                if not (self._inner._ended or self._inner._broken):
                    wake()
                    asyncio.get_running_loop().call_soon(turn)

            turn()


# --- ids ---


@caught_by(TAKEN, "DID NOT RAISE")
class TestGivesTheOpenEdgeAgain(Wrong):
    class around(AroundTransport):
        async def open_edge(self, peer: Any, edge_id: Any, *, deadline: float) -> Any:
            opened = self.__dict__.setdefault("opened", {})
            if edge_id not in opened:
                opened[edge_id] = await super().open_edge(peer, edge_id, deadline=deadline)
            return opened[edge_id]


@caught_by(TAKEN, "DID NOT RAISE|EdgeClosed|EdgeBroken")
class TestASecondEdgeEndsTheFirst(Wrong):
    class around(AroundTransport):
        async def open_edge(self, peer: Any, edge_id: Any, *, deadline: float) -> Any:
            opened = self.__dict__.setdefault("opened", {})
            try:
                opened[edge_id] = await super().open_edge(peer, edge_id, deadline=deadline)
            except TransportError:
                await opened[edge_id].abort()
                raise
            return opened[edge_id]


@caught_by(TAKEN, "707.*did not match|Regex pattern did not match")
class TestARefusedIdIsNotNamed(Wrong):
    class around(AroundTransport):
        async def open_edge(self, peer: Any, edge_id: Any, *, deadline: float) -> Any:
            try:
                return await super().open_edge(peer, edge_id, deadline=deadline)
            except TransportError:
                raise TransportError("it is open") from None


@caught_by("test_an_id_is_free_in_other_directions_and_after_its_end", "edge 707 .*already open")
class TestAnIdIsTakenForEver(Wrong):
    class around(AroundTransport):
        async def open_edge(self, peer: Any, edge_id: Any, *, deadline: float) -> Any:
            seen = self.__dict__.setdefault("seen", set())
            if edge_id in seen:
                raise TransportError(f"edge {edge_id} to {peer} is already open")
            seen.add(edge_id)
            return await super().open_edge(peer, edge_id, deadline=deadline)
