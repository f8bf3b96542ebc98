"""Calls that block, in threads that hold up no end of a process: a resolver without a network, a disk that is
gone, a server that says nothing. Python waits for the threads of its own executors, whatever they are in.

Knows threads and futures; must not know what is called. What is called must bear that the process ends in the
middle of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MOST_THREADS = 16


class UnwaitedThreads:
    """At most `most` threads, each as long as there is work for it."""

    def __init__(self, most: int = MOST_THREADS) -> None:
        self._most = most
        self._running = 0
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], None]]] = deque()

    def submit(self, function: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> Future[T]:
        """Its result, or what it raised; a future that is cancelled before its turn is never called. Where
        no thread runs and none may be started, the RuntimeError that says so."""
        outcome: Future[T] = Future()

        def call() -> None:
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments)
            except BaseException as error:  # told to who waits
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        with self._lock:
            self._waiting.append((outcome, call))
            begin = self._running < self._most
            self._running += begin
        if begin:
            try:
                threading.Thread(target=self._work, name="swactor-call", daemon=True).start()
            except RuntimeError as error:  # this user has as many threads as are allowed
                self._not_begun(error)
        return outcome

    def _not_begun(self, error: RuntimeError) -> None:
        """What waits is left to the threads that run, or told that there are none."""
        with self._lock:
            self._running -= 1
            stranded = [] if self._running else list(self._waiting)
            for _ in stranded:
                self._waiting.popleft()
        for outcome, _ in stranded:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(error)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                _, call = self._waiting.popleft()
            call()


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's own, whose `to_thread` and `getaddrinfo` are such calls. For asyncio.Runner."""

    def __init__(self) -> None:
        super().__init__()
        self._unwaited = UnwaitedThreads()

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> Any:
        """See `asyncio.loop.run_in_executor`; without an executor in a thread that is not waited for."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        return asyncio.wrap_future(self._unwaited.submit(func, *args), loop=self)
