"""The memory transport with a defect of connections, losses and numbers, one at a time.

The wrapping is that of `wrong_transports.py`, whose `TestUnbroken` it shares.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any, ClassVar

from around_transport import AroundTransport, later
from around_transport import WrongTransport as Wrong
from swactor_core.errors import EdgeBroken, EdgeClosed, TransportError
from swactor_core.spi.transport import Peer, TransportContext
from wrong_kit import Around, caught_by

CLOSE = "test_a_close_is_bounded_and_ends_both_sides_of_everything"
BITS = "test_ids_epochs_and_grants_have_all_their_bits"
CANCELLED = "test_a_cancelled_opening_disturbs_no_other"
LOW = 0xFFFF_FFFF

_kept: list[Any] = []


# --- losses ---


@caught_by("test_a_killed_peer_breaks_the_edge_to_it_and_is_told_once", "in vain for the waiting write")
class TestALossIsNotToldToWaitingWriters(Wrong):
    class send_edge(Around):
        async def write(self, view: memoryview) -> int:
            try:
                return await self._inner.write(view)
            except EdgeBroken:
                return await asyncio.get_running_loop().create_future()


@caught_by("test_a_killed_peer_breaks_the_channel_to_it_and_is_told_once", "in vain for the waiting receiver")
class TestALossIsNotToldToWaitingReceivers(Wrong):
    class channel(Around):
        async def receive(self) -> bytes | None:
            try:
                return await self._inner.receive()
            except EdgeBroken:
                return await asyncio.get_running_loop().create_future()


@caught_by("test_a_killed_peer_breaks_the_edge_to_it_and_is_told_once", "in vain for on_peer_lost")
class TestALossIsToldToAcceptorsOnly(Wrong):
    dialled: ClassVar[set[Any]] = set()

    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        def lost(node_id: Any, why: str) -> None:
            if node_id not in cls.dialled:
                context.on_peer_lost(node_id, why)

        return replace(context, on_peer_lost=lost)

    class around(AroundTransport):
        async def open_edge(self, peer: Any, edge_id: Any, *, deadline: float) -> Any:
            self.parts.dialled.add(peer)
            return await super().open_edge(peer, edge_id, deadline=deadline)


@caught_by(
    "test_a_peer_that_answers_nothing_fails_within_the_deadline", "in vain for the dial to end|did not match"
)
class TestADialOutlivesItsTransport(Wrong):
    class around(AroundTransport):
        async def connect(self, peer: Any, *, deadline: float) -> None:
            try:
                await self._inner.connect(peer, deadline=deadline)
            except EdgeClosed:
                await asyncio.get_running_loop().create_future()


@caught_by("test_a_peer_that_answers_nothing_fails_within_the_deadline", "in vain for a failure 0.25 s later")
class TestADeadlineCountsFromTheAnswer(Wrong):
    class around(AroundTransport):
        async def open_control(self, peer: Any, *, deadline: float) -> Any:
            return await super().open_control(peer, deadline=deadline + 10)


@caught_by(CLOSE, "ended an accept")
class TestAnAcceptEndsWithoutSayingWhy(Wrong):
    class around(AroundTransport):
        async def accept_edge(self) -> Any:
            try:
                return await super().accept_edge()
            except EdgeClosed as error:
                raise TransportError(error.message) from None


@caught_by("test_a_close_delivers_what_had_ended_before", "EdgeBroken|ended|bytes arrived of")
class TestACloseDropsWhatWasFinished(Wrong):
    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        return replace(context, settings={**context.settings, "drain_timeout": 0, "latency": 0.01})


@caught_by("test_a_close_is_told_after_the_longest_frame", "the close has overtaken the longest frame")
class TestACloseOvertakesLongFrames(Wrong):
    class channel(Around):
        closed = False

        async def send(self, frame: bytes) -> None:
            if len(frame) < 100_000:
                await self._inner.send(frame)
                return

            async def sends() -> None:
                await asyncio.sleep(0.01)
                if not self.closed:
                    await self._inner.send(frame)

            later(sends())

        async def close(self) -> None:
            self.closed = True
            await self._inner.close()


@caught_by("test_a_removed_peer_needs_authorisation_again", "DID NOT RAISE")
class TestWhoWasKnownIsKnownForEver(Wrong):
    known: ClassVar[set[bytes]] = set()

    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        return replace(context, authorise=lambda key: key in cls.known or context.authorise(key))

    class around(AroundTransport):
        def set_peer(self, peer: Peer) -> None:
            self.parts.known.add(peer.public_key)
            self._inner.set_peer(peer)


# --- many callers ---


@caught_by(CANCELLED, "CancelledError|in vain for the openings|TransportError")
class TestWhoGivesUpEndsTheDialOfAll(Wrong):
    class around(AroundTransport):
        async def open_edge(self, peer: Any, edge_id: Any, *, deadline: float) -> Any:
            dials = self.__dict__.setdefault("dials", {})
            if peer not in dials:

                async def dial() -> None:
                    await asyncio.sleep(0.01)
                    await self._inner.connect(peer, deadline=deadline)

                dials[peer] = asyncio.ensure_future(dial())
            await dials[peer]
            return await super().open_edge(peer, edge_id, deadline=deadline)


@caught_by("test_both_sides_may_open_at_the_same_moment", "EdgeBroken|in vain for|ended")
class TestTwoDialsEndEachOther(Wrong):
    class around(AroundTransport):
        async def accept_edge(self) -> Any:
            who, edge_id, edge = await super().accept_edge()
            if who in self.__dict__.setdefault("opened", set()):
                for end in self._inner._ends_of(who):
                    end.link.end("the other connection is kept")
            return who, edge_id, edge

        async def open_edge(self, peer: Any, edge_id: Any, *, deadline: float) -> Any:
            edge = await super().open_edge(peer, edge_id, deadline=deadline)
            self.__dict__.setdefault("opened", set()).add(peer)
            return edge


@caught_by("test_a_peer_that_is_set_again_keeps_its_connections", "EdgeBroken|in vain for|was lost")
class TestSettingAPeerEndsItsConnections(Wrong):
    class around(AroundTransport):
        def set_peer(self, peer: Peer) -> None:
            self._inner.remove_peer(peer.node_id)
            self._inner.set_peer(peer)


@caught_by("test_what_the_peer_has_not_got_is_opened_anew", "EdgeBroken|in vain for")
class TestConnectionsThatThePeerHasEndedAreUsed(Wrong):
    removed: ClassVar[set[Any]] = set()

    class around(AroundTransport):
        def remove_peer(self, node_id: Any) -> None:
            TestConnectionsThatThePeerHasEndedAreUsed.removed.add(node_id)
            self._inner.remove_peer(node_id)

        async def open_edge(self, peer: Any, edge_id: Any, *, deadline: float) -> Any:
            edge = await super().open_edge(peer, edge_id, deadline=deadline)
            if self._inner.node_id in TestConnectionsThatThePeerHasEndedAreUsed.removed:
                for end in self._inner._ends_of(peer):
                    end.link.end("the peer closed the connection")
            return edge


# --- numbers ---


@caught_by(BITS, "another edge arrived")
class TestEdgeIdsHave32Bits(Wrong):
    class around(AroundTransport):
        async def open_edge(self, peer: Any, edge_id: Any, *, deadline: float) -> Any:
            return await super().open_edge(peer, edge_id & LOW, deadline=deadline)


@caught_by(BITS, "in vain for room")
class TestGrantsHave32Bits(Wrong):
    class recv_edge(Around):
        def grant(self, total: int) -> None:
            self._inner.grant(total & LOW)


@caught_by(BITS, "DID NOT RAISE")
class TestEpochsHave32Bits(Wrong):
    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        return replace(context, epoch=context.epoch & LOW)

    class around(AroundTransport):
        def set_peer(self, peer: Peer) -> None:
            self._inner.set_peer(replace(peer, epoch=peer.epoch & LOW))


# --- what is left ---


@caught_by("test_streams_that_ended_are_forgotten[edge]", "in vain for the objects")
class TestKeepsEdgesThatEnded(Wrong):
    class recv_edge(Around):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            _kept.append(self)


@caught_by("test_streams_that_ended_are_forgotten[channel]", "in vain for the objects")
class TestKeepsChannelsThatEnded(Wrong):
    class channel(Around):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            _kept.append(self)


@caught_by("test_connections_that_ended_leave_nothing", "left open")
class TestKeepsASocketOfEachPeer(Wrong):
    class around(AroundTransport):
        async def accept_edge(self) -> Any:
            _kept.append(socket.socket())
            return await super().accept_edge()


@caught_by("test_connections_that_ended_leave_nothing", "left over")
class TestKeepsATaskOfEachPeer(Wrong):
    class around(AroundTransport):
        async def accept_edge(self) -> Any:
            _kept.append(asyncio.ensure_future(asyncio.sleep(1000)))
            return await super().accept_edge()
