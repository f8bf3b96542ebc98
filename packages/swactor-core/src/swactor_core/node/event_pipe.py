"""The node's end of a worker's event lines: messages are made in the callback that reads them.

Between a token's output and the datagram that carries it on, every task that must be woken first is time. So
this is no stream with a reader task: whoever hears a hint has sent the hinted bytes when the next line is
looked at. Knows bytes, lines and the codec, and no process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from swactor_core.codec import CodecError, MessageCodec
from swactor_core.messages import WORKER_EVENTS

MAX_EVENT_LINE = 256 * 1024
"""Of bytes. What a worker says goes on to the orchestrator, several words of it in one frame of the control
border: one that talks without end is faulted here, and not its node unheard there."""
LINE_BOUND = 5.0
"""Seconds without a byte in the middle of a line: it is written in one go, and who hangs there would only be
found by the bound of whatever the node waits for."""
_READ_BYTES = 16 * 1024
"""Of one turn of the loop, some hundred events: a worker that writes faster waits for its pipe."""
_TOO_LONG = f"an event line over the limit of {MAX_EVENT_LINE} bytes"
_EVENTS = MessageCodec(WORKER_EVENTS)


class EventPipe:
    """`writer` is the child's descriptor: close it here once the child has it. `ended` is done after the last
    event, or after `on_error`, which says why nothing more is read."""

    def __init__(self, on_event: Callable[[object], None], on_error: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._fd, self.writer = os.pipe()
        os.set_blocking(self._fd, False)
        self._partial = b""
        self._unfinished: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._fd, self._readable)

    def close_writer(self) -> None:
        """Idempotent."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Nothing is read any more. Idempotent."""
        self.close_writer()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._watch_line(begun=False)
        if not self.ended.done():
            self.ended.set_result(None)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._watch_line(begun=bool(self._partial))
        for line in lines:
            self._take(line)
            if self._fd < 0:
                return
        if len(self._partial) > MAX_EVENT_LINE:
            self._fail(_TOO_LONG)
        elif not data:
            if self._partial:
                self._fail("its last event line has no end")
            else:
                self.close()

    def _watch_line(self, *, begun: bool) -> None:
        """The bound of the line that has begun, or of none. What has come by then is read first, also after
        this process was stopped."""
        if self._unfinished is not None:
            self._unfinished.cancel()
            self._unfinished = None
        if begun:
            self._unfinished = self._loop.call_later(LINE_BOUND, self._line_hangs)

    def _line_hangs(self) -> None:
        self._unfinished = None
        self._fail(f"an event line stopped after {len(self._partial)} bytes, for {LINE_BOUND:g} s")

    def _take(self, line: bytes) -> None:
        if len(line) > MAX_EVENT_LINE:
            self._fail(_TOO_LONG)
            return
        try:
            event = _EVENTS.decode(line)
        except CodecError as error:
            self._fail(str(error))
        else:
            self._on_event(event)

    def _fail(self, why: str) -> None:
        self._on_error(why)
        self.close()
