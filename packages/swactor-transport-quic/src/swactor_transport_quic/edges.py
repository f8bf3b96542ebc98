"""Edges on a link: a sender that accepts what the peer has room for, a reader that grants it, and arrivals.

Stream offsets are preamble plus payload; every count in this file's interfaces is payload. Knows no socket
and no peer table.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from swactor_core.errors import EdgeBroken, EdgeClosed
from swactor_core.ids import EdgeId
from swactor_core.wire import PREAMBLE_BYTES, decode_preamble

from swactor_transport_quic.compat import ReceiveHalf, SendHalf
from swactor_transport_quic.link import Link, StreamCode
from swactor_transport_quic.waiting import Signal

_TURN_BYTES = 256 * 1024
"""A writer that never has to wait lets the loop turn after this much, so that acknowledgements are read."""

_CREDIT_STEPS = 8
"""Credit is advertised in steps of this fraction of the window: a frame per step, not per read."""


class QuicSendEdge:
    """The producer's end. One writer at a time."""

    def __init__(self, link: Link, half: SendHalf, edge_id: EdgeId) -> None:
        self.edge_id = edge_id
        self._link = link
        self._half = half
        self._bound = link.settings.send_bound
        self._full = False
        self._turn = 0
        self._finished = False
        self._broken = ""
        self._closed = False
        self._stopped = False
        self._room_made = Signal()
        link.handlers[half.stream_id] = self

    @property
    def ended(self) -> bool:
        """Whether this side has ended it; its end may be under way."""
        return self._finished or self._closed

    @property
    def settled(self) -> bool:
        """Whether nothing of a finished stream still waits for its acknowledgement."""
        return not self._finished or bool(self._broken) or self._half.delivered

    @property
    def reached(self) -> bool:
        """Whether the peer has it: it has acknowledged all that was written so far, or wants no more."""
        return self._stopped or not self._half.unacknowledged

    def room(self) -> int:
        unacknowledged = self._half.unacknowledged
        if self._full and unacknowledged > self._bound // 2:
            return 0
        self._full = unacknowledged >= self._bound
        return min(self._bound - unacknowledged, self._half.credit)

    def _check(self) -> None:
        if self._closed or self._finished:
            raise EdgeClosed(f"edge {self.edge_id} was already {'aborted' if self._closed else 'finished'}")
        if self._broken:
            raise EdgeBroken(f"edge {self.edge_id}: {self._broken}")

    async def write(self, view: memoryview) -> int:
        if not view.nbytes:
            raise ValueError("write needs at least one byte")
        if self._turn >= _TURN_BYTES:
            self._turn = 0
            await asyncio.sleep(0)
        self._check()
        while (room := self.room()) <= 0:
            self._link.blocked.add(self)
            await self._room_made.wait()
            self._turn = 0
            self._check()
        return self._accept(view, room)

    def offer(self, view: memoryview) -> int:
        self._check()
        room = self.room()
        if room <= 0:
            self._link.blocked.add(self)
            return 0
        return self._accept(view, room)

    def _accept(self, view: memoryview, room: int) -> int:
        data = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        count = min(room, len(data))
        self._link.send(self._half.stream_id, data[:count])
        self._turn += count
        return count

    def watch(self, wake: Callable[[], None]) -> None:
        self._room_made.watcher = wake

    async def finish(self) -> None:
        if self._finished or self._closed or self._broken:
            return
        self._finished = True
        self._link.quic.send_stream_data(self._half.stream_id, b"", end_stream=True)
        self._link.blocked.add(self)  # poked until everything is acknowledged
        self._room_made.fire()
        self._link.flush()

    async def abort(self) -> None:
        self.withdraw()

    def withdraw(self) -> None:
        if self._closed or self._broken or (self._finished and self._half.delivered):
            self._closed = True
            return
        self._closed = True
        self._link.quic.abort_sending(self._half.stream_id, StreamCode.ABORTED)
        self._link.blocked.add(self)  # poked until the reset is acknowledged
        self._room_made.fire()
        self._link.flush()

    def received(self, data: bytes, end: bool) -> None:
        raise AssertionError("a sending uni-stream receives nothing")

    def reset(self) -> None:
        raise AssertionError("a sending uni-stream is not reset by its reader")

    def stopped(self) -> None:
        self._stopped = True
        self._link.drop(self._half.stream_id)
        self.broken("the reader stopped it")

    def broken(self, reason: str) -> None:
        if not self._broken:
            self._broken = reason
        self._room_made.fire()

    def poke(self) -> None:
        if self.ended:
            if self._half.delivered:
                self._link.drop(self._half.stream_id)
        elif self.room() > 0:
            self._link.blocked.discard(self)
            self._room_made.fire()


class QuicRecvEdge:
    """The consumer's end. What arrived and was not read is at most what was granted and not read."""

    def __init__(self, link: Link, half: ReceiveHalf, edge_id: EdgeId, ended: Callable[[], None]) -> None:
        self.edge_id = edge_id
        self._link = link
        self._half = half
        self._ended = ended
        self._chunks: deque[memoryview] = deque()
        self._received = 0
        self._read = 0
        self._granted = 0
        self._advertised = 0
        self._window = 0
        self._end = False
        self._stopped = False
        self._reset = False
        self._broken = ""
        self._arrived = Signal()

    def grant(self, total: int) -> None:
        if total <= self._granted or self._end or self._stopped or self._broken:
            return
        self._granted = total
        self._window = max(self._window, total - self._read)
        self._advertise()

    def _advertise(self) -> None:
        growth = self._granted - self._advertised
        step = self._window // _CREDIT_STEPS
        # A sender that is nearly out of credit hears of every byte; one with plenty hears in steps.
        if growth > 0 and (growth >= step or self._advertised - self._received <= step):
            self._advertised = self._granted
            self._half.advertise(PREAMBLE_BYTES + self._granted)
            self._link.flush_soon()

    async def read_into(self, view: memoryview) -> int:
        if not view.nbytes:
            raise ValueError("read_into needs room for at least one byte")
        while (count := self.take(view)) is None:
            await self._arrived.wait()
        return count

    def take(self, view: memoryview) -> int | None:
        if self._stopped:
            raise EdgeClosed(f"edge {self.edge_id} was already stopped")
        if self._reset:
            raise EdgeBroken(f"edge {self.edge_id}: {self._broken}")
        if self._chunks:
            return self._take(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
        if self._end:
            return 0
        if self._broken:
            raise EdgeBroken(f"edge {self.edge_id}: {self._broken}")
        return None

    def watch(self, wake: Callable[[], None]) -> None:
        self._arrived.watcher = wake

    def _take(self, view: memoryview) -> int:
        taken, room = 0, len(view)
        while self._chunks and taken < room:
            chunk = self._chunks[0]
            count = min(len(chunk), room - taken)
            view[taken : taken + count] = chunk[:count]
            taken += count
            if count == len(chunk):
                self._chunks.popleft()
            else:
                self._chunks[0] = chunk[count:]
        self._read += taken
        return taken

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._chunks.clear()
        if not (self._end or self._broken):
            self._link.quic.stop_receiving(self._half.stream_id, StreamCode.STOPPED)
            self._leave()
            self._link.flush()
        self._arrived.fire()

    def _leave(self) -> None:
        self._link.drop(self._half.stream_id)
        self._ended()

    def received(self, data: bytes, end: bool) -> None:
        if data:
            self._received += len(data)
            self._chunks.append(memoryview(data))
        if end:
            self._end = True
            self._leave()
        else:
            self._advertise()
        self._link.arrived[self] = None  # whoever reads hears of it once for the whole batch

    def reset(self) -> None:
        self._reset = True
        self._chunks.clear()
        self._leave()
        self.broken("the writer aborted it")

    def stopped(self) -> None:
        raise AssertionError("a receiving uni-stream is not stopped by its writer")

    def broken(self, reason: str) -> None:
        if not (self._end or self._broken):
            self._broken = reason
            self._ended()
        self._arrived.fire()

    def poke(self) -> None:
        self._arrived.fire()


EdgeAccept = Callable[[Link, int, EdgeId], QuicRecvEdge | None]
"""Takes link, stream and edge id; None when that edge is already open there."""


class EdgeArrival:
    """A uni-stream whose preamble is not yet whole. `accept` makes the edge of a whole one."""

    def __init__(self, link: Link, stream_id: int, accept: EdgeAccept) -> None:
        self._link = link
        self._stream_id = stream_id
        self._accept = accept
        self._preamble = b""

    def received(self, data: bytes, end: bool) -> None:
        self._preamble += data
        if len(self._preamble) < PREAMBLE_BYTES:
            if end:
                self._link.violation(self._stream_id, StreamCode.PREAMBLE_INVALID, "ended in its preamble")
            return
        assert len(self._preamble) == PREAMBLE_BYTES, "the stream's credit ends with its preamble"
        self._link.preamble_done(self._stream_id)
        edge = self._accept(self._link, self._stream_id, decode_preamble(self._preamble))
        if edge is None:
            self._link.violation(self._stream_id, StreamCode.DUPLICATE_EDGE, "its edge is already open")
        elif end:
            edge.received(b"", True)

    def reset(self) -> None:
        self._link.violation(self._stream_id, StreamCode.PREAMBLE_INVALID, "reset in its preamble")

    def stopped(self) -> None:
        pass

    def broken(self, reason: str) -> None:
        pass

    def poke(self) -> None:
        pass
