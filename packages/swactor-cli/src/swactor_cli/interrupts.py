"""Ctrl-C and its kin of one command: the first asks for an orderly end, the second for one at once.

Caught from before the event loop is there, where an exception at any line could leave half a loop behind. A
signal that the caller had ignored, as nohup does, stays ignored. A loop that something blocks hears no
signal: the second one is heard all the same. Knows no run.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BLOCKED = 1.0
"""Seconds for which a loop has not taken a signal before the next one does not wait for it."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held() -> Iterator[None]:
    """A Ctrl-C that comes meanwhile is heard when this ends. For what is short and would be half begun: an
    event loop, a process that nobody holds yet."""
    before, came = signal.getsignal(signal.SIGINT), 0

    def count(*_: object) -> None:
        nonlocal came
        came += 1

    if not callable(before):  # it is ignored
        yield
        return
    signal.signal(signal.SIGINT, count)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


class Interrupts:
    """`count` signals have come. Use: `catch()`, then `attach(...)` on the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._numbers: list[signal.Signals] = []
        self._first: Callable[[], None] = lambda: None
        self._second: Callable[[], None] = lambda: None
        self._waiting_since = 0.0

    def catch(self) -> None:
        """From here on a signal is only counted."""
        self._numbers = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        for number in self._numbers:
            signal.signal(number, lambda *_: self._came())

    def attach(
        self, loop: asyncio.AbstractEventLoop, first: Callable[[], None], second: Callable[[], None]
    ) -> None:
        """From here on the first signal calls `first`, each later one `second`, on the loop. One that came
        before counts as it would have."""
        self._first, self._second = first, second
        for number in self._numbers:
            loop.add_signal_handler(number, self._came)
            # In the place of asyncio's, which does nothing and lets waits go on: the loop reads from a
            # descriptor which signals have come.
            signal.signal(number, lambda *_: self._heard())
        if self.count:
            (first if self.count == 1 else second)()

    def _heard(self) -> None:
        """What Python itself hears, whatever the loop does."""
        now = time.monotonic()
        if not self._waiting_since:
            self._waiting_since = now
        elif now - self._waiting_since >= BLOCKED:
            self._second()

    def _came(self) -> None:
        self._waiting_since = 0.0
        self.count += 1
        (self._first if self.count == 1 else self._second)()
