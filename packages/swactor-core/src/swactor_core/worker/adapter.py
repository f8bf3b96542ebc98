"""Command lines in, event lines out (spec section 28, adapter rules): the worker's control stream.

Knows bytes, lines and the codec. It blocks only in `fill` without a bound and in `flush`, both of which end
when the node is gone. Must not know what a command means, but for the two facts that `should_abort` needs.
"""

from __future__ import annotations

import os
import select
from collections import deque

from swactor_core.codec import MAX_LINE, CodecError, MessageCodec
from swactor_core.machines.worker_effects import ControlClosed, MalformedCommand
from swactor_core.messages import WORKER_COMMANDS, WORKER_EVENTS, ResetRole, ShutdownMode, ShutdownWorker

_READ_BYTES = 64 * 1024
"""What a pipe holds. Memory for more is asked of the system, and given back to it, with each read."""


class CommandReader:
    """Commands in order of arrival, then at most one of MalformedCommand and ControlClosed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._codec = MessageCodec(WORKER_COMMANDS)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._partial = bytearray()
        self._queue: deque[object] = deque()
        self._shutdown_seen = False
        self._ended = False
        self._abort = False

    def fill(self, timeout_ms: int | None) -> None:
        """Waits until bytes are there, at most `timeout_ms` (None: until the node writes or is gone), and
        queues the commands they complete. Returns at once when commands are queued or the stream ended."""
        if self._ended or (self._queue and timeout_ms != 0):
            return None
        # poll before each read instead of O_NONBLOCK, which would also change the writer's end of a tty.
        while self._poll.poll(timeout_ms):
            try:
                data = os.read(self._fd, _READ_BYTES)
            except OSError:  # a socket whose other end died may say so instead of ending
                data = b""
            if not data:
                return self._end(ControlClosed())
            self._split(data)
            if self._ended or len(data) < _READ_BYTES:
                return None
            timeout_ms = 0
        return None

    def take(self) -> object | None:
        """The next command, or None."""
        return self._queue.popleft() if self._queue else None

    def should_abort(self) -> bool:
        """Looks for what ends a long call: ShutdownWorker(AbortInFlight), ResetRole (its run is over), a
        broken stream, the node's end. Commands read on the way stay queued. Costs one poll."""
        if not self._abort:
            self.fill(0)
        return self._abort or any(isinstance(command, ResetRole) for command in self._queue)

    def _split(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            if self._partial:
                line = bytes(self._partial) + line
                self._partial.clear()
            try:
                command = self._codec.decode(line)
            except CodecError as error:
                return self._end(MalformedCommand(str(error)))
            if isinstance(command, ShutdownWorker):
                self._shutdown_seen = True
                self._abort |= command.mode is ShutdownMode.ABORT_IN_FLIGHT
            self._queue.append(command)
        self._partial += rest
        if len(self._partial) > MAX_LINE:
            return self._end(MalformedCommand(f"command line above {MAX_LINE} bytes"))
        return None

    def _end(self, last: ControlClosed | MalformedCommand) -> None:
        if isinstance(last, ControlClosed) and not self._shutdown_seen:
            self._queue.clear()  # nobody is left who could use the answers
        self._queue.append(last)
        self._ended = self._abort = True


class EventWriter:
    """Collects event lines; `flush` writes them all. Once the node is gone (`lost`) they are dropped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._codec = MessageCodec(WORKER_EVENTS)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lines = bytearray()
        self.lost = False

    def emit(self, event: object) -> None:
        self._lines += self._codec.encode(event)
        self._lines += b"\n"

    def flush(self) -> None:
        """Blocks while the node does not read; a node that is gone sets `lost` instead of raising."""
        if not self._lines or self.lost:
            return
        data = memoryview(bytes(self._lines))
        self._lines.clear()
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whoever made the descriptor left it non-blocking
                self._poll.poll()
            except OSError:
                self.lost = True
                return
