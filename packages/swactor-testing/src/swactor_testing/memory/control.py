"""Control channels of the memory transport: whole frames, in order, at most one window ahead of the reader.

Knows its link end, no peer table and no message.
"""

from __future__ import annotations

import asyncio
from collections import deque

from swactor_core.errors import EdgeBroken, EdgeClosed
from swactor_core.ids import NodeId
from swactor_core.spi.transport import MAX_CONTROL_FRAME

from swactor_testing.memory.link import LinkEnd
from swactor_testing.memory.waiting import Signal

CLOSE_BOUND = 2.0


class MemoryControlChannel:
    """One side of a channel; `twin` is the other, set by whoever opens it. A frame is sent while the bytes
    that the peer has not read are none, or fit `window` with it."""

    def __init__(self, end: LinkEnd, *, window: int) -> None:
        self.twin: MemoryControlChannel = self
        self._end = end
        self._window = window
        self._frames: deque[bytes] = deque()
        self._unread_by_peer = 0
        self._turn = asyncio.Lock()
        self._sending = False
        self._closing = self._closed = self._peer_closed = False
        self._said_goodbye = False
        self._broken = ""
        self._arrived = Signal()
        self._room_made = Signal()
        end.streams[self] = None

    @property
    def peer(self) -> NodeId:
        return self._end.peer

    @property
    def peer_key(self) -> bytes:
        return self._end.peer_key

    @property
    def settled(self) -> bool:
        return True

    async def send(self, frame: bytes) -> None:
        if not 1 <= len(frame) <= MAX_CONTROL_FRAME:
            raise ValueError(f"control frame of {len(frame)} bytes, allowed 1..{MAX_CONTROL_FRAME}")
        if self._closing:
            self._check()
        async with self._turn:
            self._sending = True
            try:
                self._check()
                while self._unread_by_peer and self._unread_by_peer + len(frame) > self._window:
                    await self._room_made.wait()
                    self._check()
                self._unread_by_peer += len(frame)
                data, twin = bytes(frame), self.twin
                self._end.out.carry(lambda: twin.received(data))
            finally:
                self._sending = False
                self._room_made.fire()

    def _check(self) -> None:
        if self._closed or (self._closing and not self._sending):
            raise EdgeClosed(f"control channel to {self.peer:016x} was already closed")
        if self._broken or self._peer_closed:
            why = self._broken or "the peer closed it"
            raise EdgeBroken(f"control channel to {self.peer:016x}: {why}")

    async def receive(self) -> bytes | None:
        """None also after an own close."""
        while True:
            if self._closed:
                return None
            if self._frames:
                return self._take()
            if self._broken:
                raise EdgeBroken(f"control channel to {self.peer:016x}: {self._broken}")
            if self._peer_closed:
                return None
            await self._arrived.wait()

    def _take(self) -> bytes:
        frame, twin = self._frames.popleft(), self.twin
        self._end.out.carry(lambda: twin.read(len(frame)))
        return frame

    async def close(self) -> None:
        """Orderly: frames already given to send arrive before the end. Idempotent, bounded by 2 s."""
        if self._closing:
            return
        self._closing = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_BOUND
        while self._sending and not (self._broken or self._peer_closed):
            left = deadline - loop.time()
            if left <= 0 or not await self._room_made.wait(left):
                break
        self._closed = True
        self._end.streams.pop(self, None)
        if not self._broken:
            self._end.out.carry(self.twin.closed_by_peer)
        self._wake()

    def received(self, frame: bytes) -> None:
        if not (self._closed or self._broken):
            self._frames.append(frame)
            self._arrived.fire()

    def read(self, count: int) -> None:
        """The peer has read a frame of that size."""
        self._unread_by_peer -= count
        self._room_made.fire()

    def closed_by_peer(self) -> None:
        self._peer_closed = True
        self._end.streams.pop(self, None)
        self._wake()

    def broken(self, reason: str) -> None:
        if not (self._broken or self._peer_closed):
            self._broken = reason
        self._wake()

    def _wake(self) -> None:
        self._arrived.fire()
        self._room_made.fire()
