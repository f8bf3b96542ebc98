"""A wake-up for coroutines of one event loop that wait for a condition to change. Knows nothing else.

A waiter checks its condition, waits, and checks again; between check and wait there is no await, so no
wake-up is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes everyone who waits now; firing with nobody waiting is not remembered. `watcher` is called with
    every firing."""

    __slots__ = ("_waiters", "watcher")

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order: who waited first is woken first
        self.watcher: Callable[[], None] | None = None

    def fire(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        if self.watcher is not None:
            self.watcher()

    async def wait(self, timeout: float | None = None) -> bool:
        """True when fired, False after `timeout` seconds. Cancelling one waiter leaves the others."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self._waiters.pop(waiter, None)
