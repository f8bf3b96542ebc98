"""Edges of the memory transport: what is not granted is not taken, to the byte.

A sender knows the credit that has reached it and what of its bytes is not acknowledged; a reader holds at
most what it granted and has not read. Knows its link end, no peer table.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from swactor_core.errors import EdgeBroken, EdgeClosed
from swactor_core.ids import EdgeId
from swactor_core.values import frozen

from swactor_testing.memory.link import LinkEnd
from swactor_testing.memory.waiting import Signal

_TURN_BYTES = 256 * 1024
"""A writer that never has to wait lets the loop turn after this much."""


@frozen
class Damage:
    """What becomes of an edge's bytes on their way, by script, which no transport does by itself: a peer that
    writes nonsense. `replaced` are bytes by the position in the stream at which they stand instead. After
    `ends_after` bytes the stream ends as if its writer had finished it; the rest goes nowhere."""

    replaced: tuple[tuple[int, bytes], ...] = ()
    ends_after: int | None = None

    def of(self, data: bytes, position: int) -> bytes:
        """What arrives of `data`, written at `position`."""
        arriving = bytearray(data)
        for at, instead in self.replaced:
            for offset, byte in enumerate(instead, at - position):
                if 0 <= offset < len(arriving):
                    arriving[offset] = byte
        left = len(data) if self.ends_after is None else max(0, self.ends_after - position)
        return bytes(arriving[:left])

    def ends_within(self, count: int, position: int) -> bool:
        """Whether the stream's end falls into the `count` bytes written at `position`."""
        return self.ends_after is not None and position <= self.ends_after < position + count


class MemorySendEdge:
    """The producer's end. One writer at a time. `break_after` bytes of payload it breaks, and what it carries
    is damaged, by script."""

    def __init__(
        self,
        end: LinkEnd,
        edge_id: EdgeId,
        *,
        send_bound: int,
        break_after: int | None = None,
        damage: Damage | None = None,
    ) -> None:
        self.edge_id = edge_id
        self.reader: MemoryRecvEdge | None = None
        self._end = end
        self._bound = send_bound
        self._break_after = break_after
        self._damage = damage or Damage()
        self._credit = self._accepted = self._acknowledged = 0
        self._turn = 0
        self._finished = self._aborted = self._over = False
        self._broken = ""
        self._room_made = Signal()
        end.streams[self] = None

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def settled(self) -> bool:
        return not self._finished or self._over or bool(self._broken)

    def room(self) -> int:
        unacknowledged = self._accepted - self._acknowledged
        return max(0, min(self._credit - self._accepted, self._bound - unacknowledged))

    async def write(self, view: memoryview) -> int:
        if not view.nbytes:
            raise ValueError("write needs at least one byte")
        if self._turn >= _TURN_BYTES:
            self._turn = 0
            await asyncio.sleep(0)
        while not (count := self.offer(view)):
            await self._room_made.wait()
            self._turn = 0
        return count

    def offer(self, view: memoryview) -> int:
        self._check()
        data = bytes(view.cast("B")[: self.room()])
        if not data:
            return 0
        if self._break_after is not None:
            data = data[: max(0, self._break_after - self._accepted)]
            if not data:
                self.reset_by_script()
                self._check()
        reader, position = self._reader(), self._accepted
        self._accepted += len(data)
        self._turn += len(data)
        arriving = self._damage.of(data, position)
        if arriving:
            self._end.out.carry(lambda: reader.received(arriving))
        if self._damage.ends_within(len(data), position):
            self._end.out.carry(reader.ended)
        return len(data)

    def watch(self, wake: Callable[[], None]) -> None:
        self._room_made.watcher = wake

    def _reader(self) -> MemoryRecvEdge:
        assert self.reader is not None, "an edge is written only after it was opened"
        return self.reader

    def _check(self) -> None:
        if self._aborted or self._finished:
            raise EdgeClosed(f"edge {self.edge_id} was already {'aborted' if self._aborted else 'finished'}")
        if self._broken:
            raise EdgeBroken(f"edge {self.edge_id}: {self._broken}")

    async def finish(self) -> None:
        if self._finished or self._aborted or self._broken:
            return
        self._finished = True
        self._end.out.carry(self._reader().ended)
        self._room_made.fire()

    async def abort(self) -> None:
        if self._aborted:
            return
        self._aborted = True
        if not (self._broken or self._over):
            self._leave()
            reader = self._reader()
            self._end.out.carry(lambda: reader.reset("the writer aborted it"))
        self._room_made.fire()

    def reset_by_script(self) -> None:
        """The stream breaks for both ends, the connection stays."""
        reader, why = self._reader(), "its stream was reset, by script"
        self.broken(why)
        self._leave()
        self._end.out.carry(lambda: reader.reset(why))

    def granted(self, total: int) -> None:
        """The reader's credit has arrived."""
        self._credit = max(self._credit, total)
        self._room_made.fire()

    def acknowledged(self, total: int) -> None:
        self._acknowledged = max(self._acknowledged, total)
        self._room_made.fire()

    def over(self) -> None:
        """The reader has everything, its end of stream too."""
        self._over = True
        self._leave()

    def broken(self, reason: str) -> None:
        if not (self._broken or self._over):
            self._broken = reason
        self._room_made.fire()

    def stopped(self) -> None:
        self.broken("the reader stopped it")
        self._leave()

    def _leave(self) -> None:
        self._end.streams.pop(self, None)


class MemoryRecvEdge:
    """The consumer's end."""

    def __init__(self, end: LinkEnd, edge_id: EdgeId, writer: MemorySendEdge) -> None:
        self.edge_id = edge_id
        self._end = end
        self._writer = writer
        self._chunks: deque[memoryview] = deque()
        self._received = self._granted = 0
        self._ended = self._stopped = self._reset = False
        self._broken = ""
        self._arrived = Signal()
        end.streams[self] = None

    @property
    def settled(self) -> bool:
        return True

    def grant(self, total: int) -> None:
        if total <= self._granted or self._ended or self._stopped or self._broken:
            return
        self._granted = total
        self._end.out.carry(lambda: self._writer.granted(total))

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
            return self._take(view.cast("B"))
        if self._ended:
            return 0
        if self._broken:
            raise EdgeBroken(f"edge {self.edge_id}: {self._broken}")
        return None

    def watch(self, wake: Callable[[], None]) -> None:
        self._arrived.watcher = wake

    def _take(self, view: memoryview) -> int:
        taken = 0
        while self._chunks and taken < len(view):
            chunk = self._chunks[0]
            count = min(len(chunk), len(view) - taken)
            view[taken : taken + count] = chunk[:count]
            taken += count
            if count == len(chunk):
                self._chunks.popleft()
            else:
                self._chunks[0] = chunk[count:]
        return taken

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._chunks.clear()
        if not (self._ended or self._broken):
            self._leave()
            self._end.out.carry(self._writer.stopped)
        self._arrived.fire()

    def received(self, data: bytes) -> None:
        """Bytes have arrived."""
        if self._stopped or self._broken:
            return
        self._received += len(data)
        assert self._received <= self._granted, "the sender was never granted these bytes"
        self._chunks.append(memoryview(data))
        total = self._received
        self._end.out.carry(lambda: self._writer.acknowledged(total))
        self._arrived.fire()

    def ended(self) -> None:
        if self._stopped or self._broken:
            return
        self._ended = True
        self._leave()
        self._end.out.carry(self._writer.over)
        self._arrived.fire()

    def reset(self, reason: str) -> None:
        if self._ended or self._stopped:
            return
        self._reset = True
        self._chunks.clear()
        self._leave()
        self.broken(reason)

    def broken(self, reason: str) -> None:
        if not (self._ended or self._broken):
            self._broken = reason
        self._arrived.fire()

    def _leave(self) -> None:
        self._end.streams.pop(self, None)
