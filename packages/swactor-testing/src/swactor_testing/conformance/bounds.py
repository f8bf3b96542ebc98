"""Bounded waits that say what they waited for, comparisons that say where, and what a process holds open.

Knows asyncio and /proc; no plug-in and no contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from swactor_core.values import frozen

T = TypeVar("T")

_THREAD_ENDS = 1.0
"""Seconds that a thread may take to notice that it is not wanted any more."""


def seeded(seed: int) -> Random:
    """Repeatable chance: a test that draws from it says its seed when it fails."""
    return Random(seed)  # noqa: S311 - draws patterns and orders, keeps no secret


async def within(seconds: float, work: Awaitable[T], what: str) -> T:
    """The result of `work`. Raises AssertionError, naming `what`, when it takes longer."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"waited {seconds:g} s in vain for {what}") from None


async def until(seconds: float, condition: Callable[[], bool], what: str) -> None:
    """Returns as soon as `condition()` holds, looked at every 5 ms. Raises AssertionError naming `what`."""

    async def look() -> None:
        while not condition():  # noqa: ASYNC110 - a foreign plug-in has no event to wait for
            await asyncio.sleep(0.005)

    await within(seconds, look(), what)


@contextlib.asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """`work` as a task that is over, cancelled if need be, when the block ends. Where both fail the work's
    failure is told: the block has waited in vain for it."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    except AssertionError as failure:
        if task.done() and not task.cancelled() and (cause := task.exception()) is not None:
            raise cause from failure
        raise
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # seen: the block's own failure is the one to report


def same_bytes(received: bytes | bytearray, sent: bytes | bytearray, where: str) -> None:
    """Raises AssertionError that says where they first differ, instead of printing both."""
    if received == sent:
        return
    pairs = zip(received, sent, strict=False)
    first = next((index for index, (got, gave) in enumerate(pairs) if got != gave), None)
    if first is None:
        raise AssertionError(f"{where}: {len(received)} bytes arrived of {len(sent)} sent")
    raise AssertionError(
        f"{where}: byte {first} is {received[first]:#04x}, sent was {sent[first]:#04x} "
        f"({len(received)} bytes arrived of {len(sent)})"
    )


@frozen
class Footprint:
    """What this process holds: unfinished tasks of the running loop, open descriptors by what they are, and
    threads but those of the loop's own pool."""

    tasks: frozenset[asyncio.Task[Any]]
    descriptors: frozenset[str]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the directory's own descriptor is gone by now
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        threads = (one for one in threading.enumerate() if not one.name.startswith("asyncio_"))
        return cls(frozenset(asyncio.all_tasks()), frozenset(found), frozenset(threads))

    async def assert_nothing_left(self) -> None:
        """Raises AssertionError for tasks, descriptors and threads that are here now and were not then. What
        was cancelled or is just ending has a few turns of the loop to be over, a thread somewhat longer."""
        for _ in range(20):
            await asyncio.sleep(0)
        tasks, descriptors, _ = self._since()
        assert not tasks, f"left over: {tasks}"
        assert not descriptors, f"left open: {sorted(descriptors)}"
        with contextlib.suppress(AssertionError):
            await until(_THREAD_ENDS, lambda: not self._since()[2], "threads to end")
        threads = self._since()[2]
        assert not threads, f"left running: {sorted(map(repr, threads))}"

    async def settles(self, seconds: float) -> None:
        """As `assert_nothing_left`, where what ends may say its goodbyes for so long."""
        mine = asyncio.current_task()

        def settled() -> bool:
            tasks, descriptors, threads = self._since()
            return not tasks - {mine} and not descriptors and not threads

        try:
            await until(seconds, settled, "what has ended to leave nothing")
        except AssertionError:
            await self.assert_nothing_left()

    def _since(self) -> tuple[frozenset[asyncio.Task[Any]], frozenset[str], frozenset[threading.Thread]]:
        now = Footprint.now()
        return now.tasks - self.tasks, now.descriptors - self.descriptors, now.threads - self.threads
