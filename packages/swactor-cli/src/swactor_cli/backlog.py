"""Output that waits for no reader: what a pipe or a terminal does not take at once, a thread writes.

An event loop that waits in a write answers nobody meanwhile, no peer and no Ctrl-C: behind a pager that
shows its first page, on a terminal that is held by Ctrl-S. Knows descriptors, no command.
"""

from __future__ import annotations

import codecs
import errno
import os
import select
import stat
import threading
from collections import deque
from typing import Any, TextIO

from swactor_cli.terminal import unwaiting

MOST_UNREAD = 64 << 20
"""Bytes that are kept for a reader that pauses: of a run everything, of a node the events of thousands."""


class Backlog:
    """In front of one descriptor, for one thread that writes. Bytes keep their order; an error of a write is
    raised by the next one, and by `drain`. What comes when MOST_UNREAD bytes wait is an error and is lost."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._terminal = unwaiting(descriptor)
        self._waiting: deque[bytes] = deque()
        self._unread = 0
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
            if not self._running:
                data = self._at_once(data)
            if not data:
                return
            if self._unread and self._unread + len(data) > MOST_UNREAD:
                raise OSError(errno.ENOBUFS, f"nobody has read the last {MOST_UNREAD >> 20} MiB of it")
            if self._hand_over():
                self._waiting.append(data)
                self._unread += len(data)
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

    def _at_once(self, data: bytes) -> bytes:
        """What is left of it when as much is written as is taken without waiting: of a file nothing, nor of
        up to PIPE_BUF bytes for a pipe that can be written (pipe(7)), which tells nothing of a terminal."""
        if self._terminal is not None:
            try:
                return data[os.write(self._terminal, data) :]
            except BlockingIOError:
                return data
        if self._file or (len(data) <= select.PIPE_BUF and self._poll.poll(0)):
            self._write(data)
            return b""
        return data

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
            error = self._wait_and_write(data)
            with self._changed:
                self._unread -= len(data)
                if error is not None:
                    self._error, self._unread = error, 0
                    self._waiting.clear()

    def _wait_and_write(self, data: bytes) -> OSError | None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process that has it too has made it so
                self._poll.poll()
            except OSError as error:
                return error
        return None


class Unhurried:
    """A text stream whose text goes through a Backlog."""

    def __init__(self, stream: TextIO, beside: Unhurried | None = None) -> None:
        """`beside` is another, whose order is kept with where both go to one pipe or terminal. Raises OSError
        for a stream without a descriptor."""
        stream.flush()
        self._stream = stream
        # One for all of it: some encodings begin with a mark.
        self._encoder = codecs.getincrementalencoder(stream.encoding)(stream.errors or "strict")
        shared = beside is not None and _one_reader(beside.fileno(), stream.fileno())
        self._backlog: Backlog = beside._backlog if beside and shared else Backlog(stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def pending(self) -> bool:
        return self._backlog.pending

    def write(self, text: str) -> int:
        self._backlog.write(self._encoder.encode(text))
        return len(text)

    def flush(self) -> None:
        """What is written is on its way; `drain` waits for its end."""

    def drain(self, seconds: float | None = None) -> None:
        self._backlog.drain(seconds)


def _one_reader(first: int, second: int) -> bool:
    """Two descriptors of one file may have a place in it each."""
    return os.path.sameopenfile(first, second) and not stat.S_ISREG(os.fstat(first).st_mode)
