"""The memory transport with one thing broken at a time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from dataclasses import replace
from typing import Any

from around_transport import AroundTransport, later
from around_transport import WrongTransport as Wrong
from swactor_core.errors import EdgeBroken
from swactor_core.spi.transport import MAX_CONTROL_FRAME, Peer, TransportContext
from swactor_testing.memory.hub import HUB
from swactor_testing.memory.transport import MemoryTransport
from wrong_kit import Around, caught_by

BYTES = "test_bytes_arrive_in_order_once_and_whole[0]"
STALL = "test_a_reader_that_does_not_read_stops_its_writer_at_the_granted_byte[1000]"
FRAMES = "test_frames_arrive_whole_in_order_and_once[0]"
CLOSE = "test_a_close_is_bounded_and_ends_both_sides_of_everything"
LEFT = "test_after_close_nothing_is_left"
BOUND = "test_a_peer_that_acknowledges_nothing_stops_its_writer_at_the_bound"
KILLED = "test_a_killed_peer_breaks_its_edge_and_is_told_once"

_sockets: list[socket.socket] = []


class TestUnbroken(Wrong):
    capabilities = replace(Wrong.capabilities, patience=10.0)


@caught_by("test_an_unknown_setting_is_refused_by_name", "DID NOT RAISE")
class TestTakesAnySetting(Wrong):
    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        return replace(context, settings={})


# --- bytes ---


@caught_by(BYTES, r"bytes arrived of|is 0x.., sent was")
class TestDropsBytes(Wrong):
    class send_edge(Around):
        async def write(self, view: memoryview) -> int:
            taken = await self._inner.write(view[1:] if len(view) > 900 else view)
            return taken + 1 if len(view) > 900 else taken


@caught_by(BYTES, "is 0x.., sent was|bytes arrived of")
class TestDuplicatesBytes(Wrong):
    class recv_edge(Around):
        last = b""

        async def read_into(self, view: memoryview) -> int:
            if 0 < len(self.last) <= len(view):
                count, self.last = len(self.last), b""
                return count
            count = await self._inner.read_into(view)
            self.last = bytes(view[:count])
            return count


@caught_by(BYTES, "is 0x.., sent was")
class TestReordersBytes(Wrong):
    class recv_edge(Around):
        async def read_into(self, view: memoryview) -> int:
            count = await self._inner.read_into(view)
            half = count // 2
            view[:count] = bytes(view[half:count]) + bytes(view[:half])
            return count


@caught_by(BYTES, r"\d+ bytes arrived of \d+ sent")
class TestReportsItsEndEarly(Wrong):
    class recv_edge(Around):
        read = 0

        async def read_into(self, view: memoryview) -> int:
            count = 0 if self.read > 2000 else await self._inner.read_into(view)
            self.read += count
            return count


@caught_by("test_many_edges_carry_their_own_bytes", "is 0x.., sent was|bytes arrived of|in vain for bytes")
class TestMixesEdges(Wrong):
    class around(AroundTransport):
        async def accept_edge(self) -> Any:
            who, edge_id, edge = await super().accept_edge()
            kept = self.__dict__.setdefault("kept", [])
            kept.append(edge)
            if len(kept) == 3:
                kept[0]._inner, kept[1]._inner = kept[1]._inner, kept[0]._inner
            return who, edge_id, edge


@caught_by("test_written_bytes_are_copied", "is 0x.., sent was")
class TestKeepsTheWritersMemory(Wrong):
    class send_edge(Around):
        async def write(self, view: memoryview) -> int:
            while not self._inner.room():  # noqa: ASYNC110 - a defect, briefly
                await asyncio.sleep(0)
            count = min(len(view), self._inner.room())
            later(self._inner.write(view[:count]))
            await asyncio.sleep(0) if count > 4 else None
            return count


# --- credit ---


@caught_by(STALL, r"none was read, the writer took \d+")
class TestBuffersWithoutBound(Wrong):
    class send_edge(Around):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.held: deque[bytes] = deque()
            self.pump: asyncio.Task[None] | None = None

        async def write(self, view: memoryview) -> int:
            self.held.append(bytes(view))
            if self.pump is None or self.pump.done():
                self.pump = later(self.drain())
            return len(view)

        async def drain(self) -> None:
            with contextlib.suppress(EdgeBroken):
                while self.held:
                    view = memoryview(self.held.popleft())
                    while view:
                        view = view[await self._inner.write(view) :]


@caught_by(STALL, "none was read, the writer took")
class TestTakesAByteMoreThanWasGranted(Wrong):
    class recv_edge(Around):
        def grant(self, total: int) -> None:
            self._inner.grant(total + 1)


@caught_by(STALL, "in vain for (room for a write|bytes)")
class TestAStalledEdgeStopsTheOthers(Wrong):
    class send_edge(Around):
        async def write(self, view: memoryview) -> int:
            async with self.transport.lock:
                return await self._inner.write(view)


@caught_by(STALL, "in vain for a control frame to be taken")
class TestAStalledEdgeStopsControl(Wrong):
    class send_edge(Around):
        async def write(self, view: memoryview) -> int:
            self.transport.waiting.add(self)
            try:
                return await self._inner.write(view)
            finally:
                self.transport.waiting.discard(self)

    class channel(Around):
        async def send(self, frame: bytes) -> None:
            while self.transport.waiting:  # noqa: ASYNC110 - a defect, briefly
                await asyncio.sleep(0.01)
            await self._inner.send(frame)


@caught_by("test_reading_grants_nothing", "a read made room that was never granted")
class TestReadingGrants(Wrong):
    class recv_edge(Around):
        read = 0

        async def read_into(self, view: memoryview) -> int:
            count = await self._inner.read_into(view)
            self.read += count
            self._inner.grant(self.read + 64)
            return count


@caught_by("test_a_grant_reaches_a_waiting_writer_on_an_idle_connection", "in vain for the grant of byte")
class TestGrantsWaitForTraffic(Wrong):
    class recv_edge(Around):
        total = 0

        def grant(self, total: int) -> None:
            if total >= 2 * self.total:
                self.total = total
                self._inner.grant(total)


@caught_by("test_a_grant_is_never_lowered", "in vain for (room for a write|bytes)")
class TestGrantsAreLowered(Wrong):
    class recv_edge(Around):
        def grant(self, total: int) -> None:
            self.total = total
            asyncio.get_running_loop().call_soon(lambda: self._inner.grant(self.total))


@caught_by("test_room_is_what_write_takes_without_waiting", "room is .* with 5000 bytes granted")
class TestRoomIsAGuess(Wrong):
    class send_edge(Around):
        def room(self) -> int:
            return min(self._inner.room(), 4096)


@caught_by(BOUND, "bytes were taken of which none was acknowledged, 1048576 is said")
class TestHoldsWhateverWasGranted(Wrong):
    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        return replace(context, settings={**context.settings, "send_bound": 1 << 30})


# --- cancellation ---


@caught_by("test_a_cancelled_write_has_taken_nothing", "after a cancelled write")
class TestACancelledWriteWritesOn(Wrong):
    class send_edge(Around):
        async def write(self, view: memoryview) -> int:
            return await asyncio.shield(later(self._inner.write(view)))


@caught_by("test_a_cancelled_read_has_lost_nothing", "after a cancelled read")
class TestACancelledReadReadsOn(Wrong):
    class recv_edge(Around):
        async def read_into(self, view: memoryview) -> int:
            return await asyncio.shield(later(self._inner.read_into(view)))


@caught_by(
    "test_calls_cancelled_at_any_moment_neither_lose_nor_repeat", "seed .*(is 0x.., sent was|bytes arrived)"
)
class TestAWriteTakesBeforeItWaits(Wrong):
    class send_edge(Around):
        async def write(self, view: memoryview) -> int:
            taken = await self._inner.write(view)
            await asyncio.sleep(0)
            return taken


# --- ends ---


@caught_by("test_an_abort_breaks_the_reader_with_a_reason", "saw a clean end of stream")
class TestAnAbortLooksLikeAnEnd(Wrong):
    class send_edge(Around):
        async def abort(self) -> None:
            await self._inner.finish()


@caught_by("test_the_end_of_stream_comes_after_every_byte_and_stays", "bytes arrived of")
class TestFinishDropsWhatWasNotRead(Wrong):
    class recv_edge(Around):
        async def read_into(self, view: memoryview) -> int:
            return 0 if self._inner._ended else await self._inner.read_into(view)


@caught_by(
    "test_a_stopped_reader_breaks_its_waiting_writer", "in vain for (the writer to hear|room for a write)"
)
class TestAStopIsNotTold(Wrong):
    class recv_edge(Around):
        async def stop(self) -> None:
            self._inner._stopped = True


@caught_by("test_calls_after_an_own_end_say_so", "EdgeClosed|in vain for a refusal")
class TestWritesAfterItsEnd(Wrong):
    class send_edge(Around):
        async def finish(self) -> None:
            pass


@caught_by(CLOSE, "in vain for bytes or an end of stream")
class TestNeverReportsAClose(Wrong):
    class recv_edge(Around):
        async def read_into(self, view: memoryview) -> int:
            try:
                return await self._inner.read_into(view)
            except EdgeBroken:
                return await asyncio.get_running_loop().create_future()


# --- control ---


@caught_by(FRAMES, "frame|a control frame, or an end")
class TestMergesFrames(Wrong):
    class channel(Around):
        async def receive(self) -> bytes | None:
            frame = await self._inner.receive()
            while frame is not None and self._inner._frames:
                frame += await self._inner.receive()
            return frame


@caught_by(FRAMES, "frame|a control frame, or an end")
class TestLosesAFrame(Wrong):
    class channel(Around):
        count = 0

        async def send(self, frame: bytes) -> None:
            self.count += 1
            if self.count != 30:
                await self._inner.send(frame)


@caught_by("test_the_longest_frame_passes_and_longer_ones_and_empty_ones_are_refused", "DID NOT RAISE")
class TestCutsLongFrames(Wrong):
    class channel(Around):
        async def send(self, frame: bytes) -> None:
            await self._inner.send(frame[:MAX_CONTROL_FRAME] or b"\0")


@caught_by("test_a_peer_that_does_not_read_stops_the_sender", "were taken that nobody read")
class TestKeepsFramesWithoutBound(Wrong):
    class channel(Around):
        async def send(self, frame: bytes) -> None:
            if self._inner._unread_by_peer:
                later(self._inner.send(frame))
            else:
                await self._inner.send(frame)


@caught_by("test_a_cancelled_send_leaves_no_half_frame", "after a cancelled send")
class TestACancelledSendLeavesHalfAFrame(Wrong):
    class channel(Around):
        async def send(self, frame: bytes) -> None:
            half = len(frame) // 2
            try:
                await self._inner.send(frame)
            except asyncio.CancelledError:
                later(self._inner.send(frame[:half]))
                raise


@caught_by("test_a_close_is_told_after_every_frame", "assert None ==")
class TestACloseOvertakesFrames(Wrong):
    class channel(Around):
        async def receive(self) -> bytes | None:
            return None if self._inner._peer_closed else await self._inner.receive()


@caught_by("test_both_ends_name_their_authenticated_peer", "theirs.peer_key|mine.peer_key")
class TestNamesItselfAsThePeer(Wrong):
    class channel(Around):
        @property
        def peer_key(self) -> bytes:
            return self.transport.public_key


# --- peers, losses, the end ---


@caught_by("test_another_key_at_a_peers_address_is_refused", "DID NOT RAISE")
class TestTrustsWhoeverAnswers(Wrong):
    class around(AroundTransport):
        def set_peer(self, peer: Peer) -> None:
            listening = HUB.endpoints[peer.host, peer.port]
            assert isinstance(listening, MemoryTransport)
            self._inner.set_peer(replace(peer, public_key=listening.public_key))


@caught_by("test_a_dialler_that_is_not_authorised_is_refused", "DID NOT RAISE")
class TestAuthorisesEverybody(Wrong):
    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        return replace(context, authorise=lambda key: True)


@caught_by("test_a_newer_epoch_ends_connections_to_the_former_life", "in vain for bytes or an end of stream")
class TestKeepsFormerLives(Wrong):
    class around(AroundTransport):
        def set_peer(self, peer: Peer) -> None:
            self._inner.set_peer(replace(peer, epoch=0))


@caught_by("test_a_former_life_is_not_reached", "DID NOT RAISE")
class TestReachesFormerLives(Wrong):
    class around(AroundTransport):
        def set_peer(self, peer: Peer) -> None:
            self._inner.set_peer(replace(peer, epoch=0))


@caught_by("test_a_peer_that_does_not_listen_fails_within_the_deadline", "in vain for a refusal")
class TestDialsForEver(Wrong):
    class around(AroundTransport):
        async def connect(self, peer: Any, *, deadline: float) -> None:
            await self._inner.connect(peer, deadline=1000)


@caught_by(KILLED, "in vain for on_peer_lost")
class TestALossIsNotTold(Wrong):
    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        return replace(context, on_peer_lost=lambda node_id, why: None)


@caught_by(KILLED, "one connection was lost, told were")
class TestALossIsToldTwice(Wrong):
    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        def twice(node_id: Any, why: str) -> None:
            context.on_peer_lost(node_id, why)
            context.on_peer_lost(node_id, why)

        return replace(context, on_peer_lost=twice)


@caught_by(KILLED, "saw a clean end of stream")
class TestALossLooksLikeAnEnd(Wrong):
    class recv_edge(Around):
        async def read_into(self, view: memoryview) -> int:
            try:
                return await self._inner.read_into(view)
            except EdgeBroken:
                return 0


@caught_by(CLOSE, "an orderly close is no loss")
class TestAnOrderlyCloseIsALoss(Wrong):
    class around(AroundTransport):
        async def close(self) -> None:
            await self._inner.close()
            self.context.on_peer_lost(self._inner.node_id, "closed")


@caught_by(CLOSE, "in vain for close")
class TestCloseHangs(Wrong):
    class around(AroundTransport):
        async def close(self) -> None:
            await asyncio.sleep(4)
            await self._inner.close()


@caught_by(LEFT, "left over")
class TestLeavesATask(Wrong):
    class around(AroundTransport):
        async def start(self) -> None:
            await self._inner.start()
            later(asyncio.sleep(1000))


@caught_by(LEFT, "left open")
class TestLeavesASocket(Wrong):
    class around(AroundTransport):
        async def start(self) -> None:
            await self._inner.start()
            _sockets.append(socket.socket())


@caught_by(LEFT, "left running")
class TestLeavesAThread(Wrong):
    class around(AroundTransport):
        async def start(self) -> None:
            await self._inner.start()
            threading.Thread(target=threading.Event().wait, daemon=True).start()


@caught_by(LEFT, "cannot listen on")
class TestKeepsItsPort(Wrong):
    class around(AroundTransport):
        async def close(self) -> None:
            bound = HUB.endpoints.get((self._inner.host, self._inner.port))
            await self._inner.close()
            if bound is not None:
                HUB.endpoints[self._inner.host, self._inner.port] = bound
