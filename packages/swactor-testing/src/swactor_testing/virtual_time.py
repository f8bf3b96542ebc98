"""An event loop whose clock jumps to the next timer when nothing is ready: hours of waiting in no time.

For programs of one process whose waits are all timers, as a run on mocks is. No wait takes real time, the
order of everything depends on the program alone, and a wait that nothing can ever end is an error at once
instead of a test that hangs. What a program gives to a thread runs on the loop, in its next turn. Knows
asyncio's public surface only: a loop takes a selector, and asks it how long to sleep.
"""

from __future__ import annotations

import asyncio
import selectors
from asyncio import Future
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

START = 1000.0
"""Seconds at which every clock starts: not 0, which a program could take for "no time"."""
TURNS_WITHOUT_TIME = 500_000


class Stalled(AssertionError):
    """The program waits for what cannot come: nothing is ready, and no timer is set or ever reached."""


class _JumpingSelector(selectors.PollSelector):
    """Never sleeps: what the loop would have slept is added to `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START
        self.jumps = 0
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            self._turns += 1
            if self._turns > TURNS_WITHOUT_TIME:
                turns, self._turns = self._turns, 0  # what is left of the program is still to be cancelled
                raise Stalled(f"{turns} turns of the loop at {self.now - START:g} s: time stands still")
            return ready
        if timeout is None:
            raise Stalled(f"nothing is ready and no timer is set at {self.now - START:g} s")
        self.now += timeout
        self.jumps += 1
        self._turns = 0
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`asyncio.Runner(loop_factory=VirtualTimeLoop)`. `elapsed` in virtual seconds since its start."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    @property
    def elapsed(self) -> float:
        return self._jumping.now - START

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], T], *args: *Arguments
    ) -> Future[T]:
        """A thread would end at a moment that the clock does not know; `func` must not wait for the loop."""
        future: Future[T] = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_soon(work)
        return future


def run(work: Coroutine[Any, Any, T], *, bound: float) -> T:
    """The result of `work`, in virtual time. Raises TimeoutError after `bound` virtual seconds, also for a
    wait that nothing ends, Stalled when time does not pass, and AssertionError for tasks left behind."""

    async def bounded() -> T:
        async with asyncio.timeout(bound):
            result = await work
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks outlive what started them: {sorted(task.get_name() for task in left)}"
        return result

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(bounded())
