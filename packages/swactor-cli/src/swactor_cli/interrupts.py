"""Ctrl-C and its kin of one command: the first asks for an orderly end, the second for one at once.

Caught from before the event loop is there, where an exception at any line could leave half a loop behind. A
signal that the caller had ignored, as nohup does, stays ignored. A loop that something blocks hears no
signal: the second one is heard all the same. Knows no run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held() -> Iterator[None]:
    """A stop signal that comes meanwhile is heard when this ends. For what is short and would be half begun:
    an event loop, a process that nobody holds yet."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    heard = [number for number in STOP_SIGNALS if callable(before[number])]  # others are ignored, or deadly
    for number in heard:
        signal.signal(number, lambda came_as, _: came.append(came_as))
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
        if came:
            signal.raise_signal(came[0])


def over(loop: asyncio.AbstractEventLoop, waits: Callable[[], bool]) -> None:
    """What the loop ran for has its outcome, and no signal changes that any more: one ends the process while
    `waits()` says that somebody has not taken what was written, and is nothing else. Ignored ones stay so."""

    def came(*_: object) -> None:
        if waits():
            os._exit(INTERRUPTED)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # taken from the loop they are deadly
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.remove_signal_handler(number)
            signal.signal(number, came)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupts:
    """`count` signals have come. Use: `catch()`, then `attach(...)` on the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._begun = False
        self._numbers: list[signal.Signals] = []
        self._first: Callable[[], None] = lambda: None
        self._second: Callable[[], None] = lambda: None

    def catch(self) -> None:
        """From here on a signal is only counted."""
        self._numbers = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        for number in self._numbers:
            signal.signal(number, self._came)

    def attach(
        self, loop: asyncio.AbstractEventLoop, first: Callable[[], None], second: Callable[[], None]
    ) -> None:
        """From here on the first signal calls `first` on the loop, each later one `second` at once, also
        where the loop is held up. One that came before counts as it would have."""
        self._first, self._second = first, second
        for number in self._numbers:
            loop.add_signal_handler(number, self._begin)  # which makes each of them wake the loop
            signal.signal(number, self._came)
        if self.count:
            (self._begin if self.count == 1 else second)()

    def _came(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            self._second()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._first()
