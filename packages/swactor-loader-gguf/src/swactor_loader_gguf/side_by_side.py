"""Several things that wait for a network, at the same time.

Must not know what they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

from swactor_core.unwaited import UnwaitedThreads

T = TypeVar("T")


class _NotBegun(Exception):
    """Another task had failed before."""


def side_by_side(tasks: Sequence[Callable[[], T]], *, most: int, give_back: Callable[[T], None]) -> list[T]:
    """What the tasks return, in their order; `most` of them run at a time, each in a thread.

    Raises what the first of those that failed raised; no other is begun then, and what the others return is
    given back. A task that is under way is not waited for, and holds up no process. Each must have a bound of
    its own.
    """
    threads, over, failed = UnwaitedThreads(most), threading.Event(), list[BaseException]()

    def attempt(task: Callable[[], T]) -> T:
        if over.is_set():
            raise _NotBegun
        try:
            return task()
        except BaseException as error:
            failed.append(error)  # before others can know: one that is not begun may be told of first
            over.set()
            raise

    def unwanted(future: Future[T]) -> None:
        if future.exception() is None:
            give_back(future.result())

    futures = list[Future[T]]()
    try:
        futures += (threads.submit(attempt, task) for task in tasks)
        wait(futures, return_when=FIRST_EXCEPTION)
        if failed:
            raise failed[0]
        return [future.result() for future in futures]
    except BaseException:
        over.set()
        for future in futures:
            future.add_done_callback(unwanted)
        raise
