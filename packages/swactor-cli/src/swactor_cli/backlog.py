"""Output that waits for no reader: what a pipe or a terminal does not take at once, a thread writes.

An event loop that waits in a write answers nobody meanwhile, no peer and no Ctrl-C: behind a pager that
shows its first page, on a terminal that is held by Ctrl-S. Knows descriptors, no command.
"""

from __future__ import annotations

import os
import select
import stat
import threading
from collections import deque
from typing import Any, TextIO


class Backlog:
    """In front of one descriptor, for one thread that writes. Bytes keep their order; an error of a write is
    raised by the next one, and by `drain`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._running = False
        self._error: OSError | None = None

    @property
    def pending(self) -> bool:
        """Whether something has been written that nobody has taken yet."""
        return self._running

    def write(self, data: bytes) -> None:
        """Raises OSError."""
        with self._changed:
            self._raise()
            if (self._running or not self._takes(len(data))) and self._hand_over():
                self._waiting.append(data)
                return
        self._write(data)

    def drain(self, seconds: float | None = None) -> None:
        """Waits until everything is taken, so long at most. Raises OSError."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, seconds)
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _takes(self, count: int) -> bool:
        """Without waiting: a file always, what else can be written up to this many bytes (pipe(7))."""
        return self._file or (count <= select.PIPE_BUF and bool(self._poll.poll(0)))

    def _hand_over(self) -> bool:
        """Whether there is a thread to write, which there is not where this user may have no more of them."""
        if not self._running:
            try:
                threading.Thread(target=self._work, name="swactor-output", daemon=True).start()
            except RuntimeError:
                return False
        self._running = True
        return True

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._running = False
                    self._changed.notify_all()
                    return
                data = self._waiting.popleft()
            try:
                self._write(data)
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._waiting.clear()


class Unhurried:
    """A text stream whose text goes through a Backlog."""

    def __init__(self, stream: TextIO) -> None:
        """Raises OSError for a stream without a descriptor."""
        stream.flush()
        self._stream = stream
        self._backlog = Backlog(stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def pending(self) -> bool:
        return self._backlog.pending

    def write(self, text: str) -> int:
        self._backlog.write(text.encode(self._stream.encoding, self._stream.errors or "strict"))
        return len(text)

    def flush(self) -> None:
        """What is written is on its way; `drain` waits for its end."""

    def drain(self, seconds: float | None = None) -> None:
        self._backlog.drain(seconds)
