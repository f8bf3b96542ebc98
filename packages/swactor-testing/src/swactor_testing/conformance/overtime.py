"""The end of a test that a plug-in would not let end: it blocks the event loop, or what it does cannot be
cancelled. Neither is reached by a bound that the loop itself would have to keep.

Knows signals and asyncio; no plug-in and no contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

LOOK = 1.0
"""Seconds between two looks at a test that goes on."""


class Overtime(AssertionError):
    """A test was ended from outside; the traceback says where it was then."""


class _Watch:
    """`longest` seconds for the test, `blocked` looks without a turn of the loop between them: a machine that
    is busy with others delays looks and turns alike. Told again at every look for as long as it lasts: what
    has ignored one end in the test may ignore another in what clears up behind it."""

    def __init__(self, longest: float, blocked: int) -> None:
        self._longest, self._blocked = longest, blocked
        self._begun = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looks = 0

    def look(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal. Raises Overtime in whatever the main thread does."""
        loop = asyncio._get_running_loop()  # None, where the public one raises
        if loop is not self._loop:
            self._loop, self._looks = loop, 0
        if loop is not None:
            self._looks += 1
            loop.call_soon_threadsafe(self._turned)
            if self._looks > self._blocked:
                raise Overtime(
                    f"the event loop made no turn for {self._looks * LOOK:g} s: what is called in it blocks"
                )
        if time.monotonic() - self._begun > self._longest:
            raise Overtime(
                f"the test has not ended within {self._longest:g} s: {_places(loop)}"
                "what does not end when it is cancelled is waited for without an end"
            )

    def _turned(self) -> None:
        self._looks = 0


def _places(loop: asyncio.AbstractEventLoop | None) -> str:
    """Where the tasks of the loop are, or nothing."""
    if loop is None:
        return ""
    places = []
    for task in asyncio.all_tasks(loop):
        stack = task.get_stack(limit=1)
        if stack:
            place = stack[-1]
            places.append(f"{place.f_code.co_qualname} ({place.f_code.co_filename}:{place.f_lineno})")
    return f"its tasks are in {', '.join(sorted(places))}; " if places else ""


@contextlib.contextmanager
def ends_within(longest: float, *, blocked: int) -> Iterator[None]:
    """Raises Overtime in the block when it takes longer than `longest` seconds, or when an event loop that
    runs in it makes no turn for `blocked` looks. Does nothing outside of the main thread, or where somebody
    else uses the alarm."""
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGALRM) in (
        signal.SIG_DFL,
        signal.SIG_IGN,
        None,
    )
    if not free:
        yield
        return
    before = signal.signal(signal.SIGALRM, _Watch(longest, blocked).look)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
