"""Control channels: whole frames over one bidirectional stream, with backpressure both ways.

A channel opens with eight bytes, so that the acceptor hears of it before the first frame. The reader lets its
peer be at most one window of unread frames ahead, plus the one frame that is still arriving. Knows no peer
table and no message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from swactor_core.errors import EdgeBroken, EdgeClosed
from swactor_core.ids import NodeId
from swactor_core.spi.transport import MAX_CONTROL_FRAME
from swactor_core.wire import FRAME_HEADER_BYTES, FrameDecoder, FrameError, encode_frame

from swactor_transport_quic.compat import ReceiveHalf, SendHalf
from swactor_transport_quic.link import Link, StreamCode
from swactor_transport_quic.waiting import Signal

CHANNEL_HELLO = b"SWCTRL\x00\x01"

_CLOSE_TIMEOUT = 2.0
"""How long close waits for a frame that is already on its way to a peer that does not read."""


class QuicControlChannel:
    """One channel; `opener` says which side opened it. Frames of concurrent senders never mix."""

    def __init__(self, link: Link, send: SendHalf, receive: ReceiveHalf, *, opener: bool) -> None:
        assert link.peer is not None
        self._peer = link.peer
        self._peer_key = link.peer_key
        self._link = link
        self._send = send
        self._receive = receive
        self._stream_id = send.stream_id
        self._window = link.settings.control_window
        self._bound = link.settings.send_bound
        self._received_total = 0 if opener else len(CHANNEL_HELLO)
        self._advertised = self._window
        self._decoder = FrameDecoder(MAX_CONTROL_FRAME)
        self._frames: deque[bytes] = deque()
        self._unread = 0
        self._tail = memoryview(b"")
        self._turn = asyncio.Lock()
        self._closing = False
        self._closed = False
        self._finished = False
        self._peer_closed = False
        self._peer_stopped = False
        self._broken = ""
        self._left = False
        self._arrived = Signal()
        self._room_made = Signal()
        link.handlers[self._stream_id] = self

    @property
    def peer(self) -> NodeId:
        return self._peer

    @property
    def peer_key(self) -> bytes:
        return self._peer_key

    @property
    def settled(self) -> bool:
        """Whether nothing that was sent still waits for its acknowledgement."""
        if self._broken or self._peer_stopped:
            return True
        return self._send.delivered if self._finished else not self._send.unacknowledged

    @property
    def reached(self) -> bool:
        """Whether the peer has it: it has acknowledged all that was sent so far, or has said something."""
        heard = self._received_total or self._peer_closed or self._peer_stopped
        return bool(heard) or not self._send.unacknowledged

    # Sending

    async def send(self, frame: bytes) -> None:
        data = encode_frame(frame, MAX_CONTROL_FRAME)
        async with self._turn:
            await self._tail_gone()
            # From here on the frame goes out whole, also when the caller is cancelled: half a frame would
            # make the rest of the channel unreadable.
            self._tail = memoryview(data)
            self._push()
            await self._tail_gone()

    async def _tail_gone(self) -> None:
        self._check()
        while self._tail:
            await self._room_made.wait()
            self._check()

    def _check(self) -> None:
        if self._closed or (self._closing and not self._tail):
            raise EdgeClosed(f"control channel to {self._peer:016x} was already closed")
        if self._broken or self._peer_closed or self._peer_stopped:
            why = self._broken or "the peer closed it"
            raise EdgeBroken(f"control channel to {self._peer:016x}: {why}")

    def _push(self) -> None:
        """Hands over as much of the frame on its way as the peer and the bound allow."""
        if self._broken or self._peer_stopped:
            return
        room = min(self._send.credit, self._bound - self._send.unacknowledged, len(self._tail))
        if room > 0:
            self._link.send(self._stream_id, self._tail[:room])
            self._tail = self._tail[room:]
        if self._tail:
            self._link.blocked.add(self)
        elif not self._finished:
            self._link.blocked.discard(self)
            self._room_made.fire()

    # Receiving

    async def receive(self) -> bytes | None:
        """None also after an own close."""
        while True:
            if self._closed:
                return None
            if self._frames:
                frame = self._frames.popleft()
                self._unread -= FRAME_HEADER_BYTES + len(frame)
                self._advertise()
                return frame
            if self._broken:
                raise EdgeBroken(f"control channel to {self._peer:016x}: {self._broken}")
            if self._peer_closed:
                return None
            await self._arrived.wait()

    def _advertise(self) -> None:
        """Credit covers what was read, the frame that is still arriving, and one window of unread frames."""
        limit = self._received_total - self._unread + self._window
        growth = limit - self._advertised
        if growth >= self._window // 4 or (
            growth > 0 and self._advertised - self._received_total < self._window // 4
        ):
            self._advertised = limit
            self._receive.advertise(limit)
            self._link.flush_soon()

    # The end

    async def close(self) -> None:
        """Orderly: frames already given to send arrive before the end. Idempotent, bounded by 2 s."""
        if self._closing:
            return
        self._closing = True
        if self._tail and not self._broken:
            deadline = asyncio.get_running_loop().time() + _CLOSE_TIMEOUT
            while self._tail and not (self._broken or self._peer_stopped or self._closed):
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or not await self._room_made.wait(left):
                    break
        self._shut()

    def withdraw(self) -> None:
        """Nobody wants it, and nothing was sent on it."""
        self._closing = True
        self._shut()

    def _shut(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._broken:
            if self._tail:
                self._link.quic.abort_sending(self._stream_id, StreamCode.CHANNEL_CLOSED)
                self._left = True
                self._link.drop(self._stream_id)
            else:
                self._finish()
            if not self._peer_closed:
                self._link.quic.stop_receiving(self._stream_id, StreamCode.CHANNEL_CLOSED)
            self._leave_when_done()
            self._link.flush()
        self._wake()

    def _finish(self) -> None:
        if not (self._finished or self._send.reset):
            self._finished = True
            self._link.quic.send_stream_data(self._stream_id, b"", end_stream=True)
            self._link.blocked.add(self)

    def _leave_when_done(self) -> None:
        if self._closed and self.settled and not self._left:
            self._left = True
            self._link.drop(self._stream_id)

    def _wake(self) -> None:
        self._arrived.fire()
        self._room_made.fire()

    # What the link tells

    def received(self, data: bytes, end: bool) -> None:
        if self._closed:
            return
        self._received_total += len(data)
        try:
            frames = self._decoder.feed(data)
        except FrameError as error:
            self._fail(str(error))
            return
        self._frames.extend(frames)
        self._unread += sum(FRAME_HEADER_BYTES + len(frame) for frame in frames)
        if end:
            if self._decoder.mid_frame:
                self._fail("the peer ended it inside a frame")
                return
            self._peer_closed = True
            self._room_made.fire()
        else:
            self._advertise()
        self._arrived.fire()

    def _fail(self, reason: str) -> None:
        """The peer broke the framing: nothing after it can be read, so the channel ends both ways."""
        self._frames.clear()
        self._link.quic.stop_receiving(self._stream_id, StreamCode.CHANNEL_CLOSED)
        self._link.quic.abort_sending(self._stream_id, StreamCode.CHANNEL_CLOSED)
        self._link.drop(self._stream_id)
        self.broken(reason)
        self._link.flush_soon()

    def reset(self) -> None:
        if not self._peer_closed:
            self._frames.clear()
            self.broken("the peer reset it")

    def stopped(self) -> None:
        self._peer_stopped = True
        self._link.blocked.discard(self)
        self._leave_when_done()
        self._room_made.fire()

    def broken(self, reason: str) -> None:
        if not self._broken:
            self._broken = reason
        self._wake()

    def poke(self) -> None:
        if self._tail:
            self._push()
        if self._finished:
            self._leave_when_done()


class ChannelArrival:
    """A bidirectional stream whose hello is not yet whole. Frames may follow the hello in the same bytes."""

    def __init__(self, link: Link, stream_id: int, accept: Callable[[Link, int], QuicControlChannel]) -> None:
        self._link = link
        self._stream_id = stream_id
        self._accept = accept
        self._hello = b""

    def received(self, data: bytes, end: bool) -> None:
        self._hello += data
        if len(self._hello) < len(CHANNEL_HELLO) and not end:
            return
        hello, rest = self._hello[: len(CHANNEL_HELLO)], self._hello[len(CHANNEL_HELLO) :]
        if hello != CHANNEL_HELLO:
            self._refuse("not a control channel")
            return
        self._link.preamble_done(self._stream_id)
        channel = self._accept(self._link, self._stream_id)
        if rest or end:
            channel.received(rest, end)

    def _refuse(self, why: str) -> None:
        self._link.quic.abort_sending(self._stream_id, StreamCode.PREAMBLE_INVALID)
        self._link.violation(self._stream_id, StreamCode.PREAMBLE_INVALID, why)

    def reset(self) -> None:
        self._refuse("reset before its hello")

    def stopped(self) -> None:
        pass

    def broken(self, reason: str) -> None:
        pass

    def poke(self) -> None:
        pass
