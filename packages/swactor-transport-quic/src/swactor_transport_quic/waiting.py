"""A wake-up for coroutines of one event loop that wait for a condition to change.

Knows nothing of QUIC. A waiter checks its condition, waits, and checks again; between check and wait there is
no await, so no wake-up is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes everyone who waits now; firing with nobody waiting is not remembered. `watcher` is called with
    every firing."""

    __slots__ = ("_waiters", "watcher")

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[bool]] = set()
        self.watcher: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def fire(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)
        self._waiters.clear()
        if self.watcher is not None:
            self.watcher()

    async def wait(self, timeout: float | None = None) -> bool:
        """True when fired, False after `timeout` seconds. Cancelling one waiter leaves the others."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = None if timeout is None else loop.call_later(max(timeout, 0.0), _expire, waiter)
        self._waiters.add(waiter)
        try:
            return await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
