"""unwaited.py: blocking calls are made in turn, told to who waits, and hold up no end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest
from swactor_core.node import addresses
from swactor_core.unwaited import EventLoop, UnwaitedThreads

STUCK = """
import asyncio, threading
from swactor_core.unwaited import EventLoop

async def main():
    task = asyncio.ensure_future(asyncio.to_thread(threading.Event().wait))
    await asyncio.sleep(0)
    print(await asyncio.to_thread(lambda: "answered"), flush=True)
    task.cancel()

with asyncio.Runner(loop_factory=EventLoop) as runner:
    runner.run(main())
print("ended", flush=True)
"""


def test_a_call_that_never_returns_holds_up_no_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["answered", "ended"], "")


def test_results_and_errors_are_told_to_who_waits() -> None:
    threads = UnwaitedThreads()
    assert threads.submit(divmod, 7, 2).result(60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(60)


def test_no_more_at_once_than_told_and_a_cancelled_call_is_never_made() -> None:
    threads, go_on, made = UnwaitedThreads(most=2), threading.Event(), []
    begun = threading.Barrier(3)

    def call() -> None:
        begun.wait(60)
        assert go_on.wait(60)

    running = [threads.submit(call) for _ in range(2)]
    begun.wait(60)
    waiting = [threads.submit(made.append, number) for number in range(3)]
    assert waiting[1].cancel()
    assert made == []
    go_on.set()
    for one in (*running, waiting[0], waiting[2]):
        one.result(60)
    assert sorted(made) == [0, 2]


def test_a_call_for_which_there_is_no_thread_is_told_so_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it waits for ever, and each such call takes a place from those that come later."""
    threads, begin = UnwaitedThreads(most=1), threading.Thread.start
    made: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for number in range(2):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(made.append, number).result(60)
    monkeypatch.setattr(threading.Thread, "start", begin)
    threads.submit(made.append, 2).result(60)
    assert made == [2]


def test_a_call_waits_for_the_threads_that_run_where_no_more_may_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, go_on = UnwaitedThreads(most=2), threading.Event()
    running = threads.submit(go_on.wait, 60)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        waiting = threads.submit(divmod, 7, 2)
    assert not waiting.done()
    go_on.set()
    assert (running.result(60), waiting.result(60)) == (True, (3, 1))


def test_an_executor_that_is_named_is_used() -> None:
    async def main() -> str:
        return await asyncio.get_running_loop().run_in_executor(
            executor, lambda: threading.current_thread().name
        )

    from concurrent.futures import ThreadPoolExecutor

    with (
        ThreadPoolExecutor(thread_name_prefix="named") as executor,
        asyncio.Runner(loop_factory=EventLoop) as runner,
    ):
        assert runner.run(main()).startswith("named")


def test_a_resolver_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()

    def getaddrinfo(*_: Any, **__: Any) -> Any:
        silent.wait(60)
        raise OSError

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses, "RESOLVE_SECONDS", 0.01)
    with pytest.raises(addresses.ConfigError, match="no seed of a:1 can be resolved"):
        addresses.advertised_host("0.0.0.0", "", ("a:1",))
    silent.set()
