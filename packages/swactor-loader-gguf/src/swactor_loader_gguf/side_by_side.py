"""Several things that wait for a network, at the same time.

Must not know what they are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


def side_by_side(tasks: Sequence[Callable[[], T]], *, most: int, give_back: Callable[[T], None]) -> list[T]:
    """What the tasks return, in their order; `most` of them run at a time, each in a thread.

    Raises what one of them raised; no other is begun then, and what the others return is given back. A task
    that is under way is not waited for: its thread ends with it and holds up no process. Each must have a
    bound of its own.
    """
    work = _Work(tasks, give_back)
    try:
        for _ in range(min(most, len(tasks))):
            threading.Thread(target=work.run, name="swactor-open", daemon=True).start()
        return work.results()
    except BaseException:
        work.abandon()
        raise


class _Work(Generic[T]):
    def __init__(self, tasks: Sequence[Callable[[], T]], give_back: Callable[[T], None]) -> None:
        self._count = len(tasks)
        self._left = deque(enumerate(tasks))
        self._give_back = give_back
        self._done: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._over = threading.Event()
        self._changed = threading.Condition()

    def results(self) -> list[T]:
        with self._changed:
            self._changed.wait_for(lambda: self._errors or len(self._done) == self._count)
            if self._errors:
                raise self._errors[0]
            return [self._done[number] for number in range(self._count)]

    def run(self) -> None:
        while True:
            with self._changed:
                if self._over.is_set() or self._errors or not self._left:
                    return
                number, task = self._left.popleft()
            try:
                result = task()
            except BaseException as error:  # told to who waits
                with self._changed:
                    self._errors.append(error)
                    self._changed.notify()
                return
            with self._changed:
                late = self._over.is_set()
                if not late:
                    self._done[number] = result
                    self._changed.notify()
            if late:
                self._give_back(result)

    def abandon(self) -> None:
        with self._changed:
            self._over.set()
            done = list(self._done.values())
        for result in done:
            self._give_back(result)
