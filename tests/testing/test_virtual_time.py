"""Virtual time: hours cost nothing, the order is the program's, and a wait without an end is an error."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from swactor_testing import virtual_time
from swactor_testing.virtual_time import Stalled, VirtualTimeLoop


def elapsed() -> float:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop.elapsed


def test_an_hour_takes_no_time() -> None:
    async def work() -> float:
        await asyncio.sleep(3600)
        return elapsed()

    began = time.process_time()
    assert virtual_time.run(work(), bound=4000) == pytest.approx(3600)
    assert time.process_time() - began < 1.0


def test_sleepers_wake_in_the_order_of_their_times() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, round(elapsed(), 6)))

    async def work() -> None:
        await asyncio.gather(sleeper("c", 3), sleeper("a", 1), sleeper("b", 2), sleeper("also b", 2))

    virtual_time.run(work(), bound=10)
    assert woken == [("a", 1), ("b", 2), ("also b", 2), ("c", 3)]


def test_computing_takes_no_virtual_time() -> None:
    async def work() -> float:
        began = time.monotonic()
        while time.monotonic() - began < 0.02:  # noqa: ASYNC110 - a busy loop is what is tested
            await asyncio.sleep(0)
        return elapsed()

    assert virtual_time.run(work(), bound=10) == 0


def test_a_bound_is_reached_at_its_moment() -> None:
    async def work() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(12.5):
                await asyncio.sleep(50)
        return elapsed()

    assert virtual_time.run(work(), bound=20) == pytest.approx(12.5)


def test_the_bound_of_the_whole_is_virtual_too() -> None:
    with pytest.raises(TimeoutError):
        virtual_time.run(asyncio.sleep(1e6), bound=1e5)


def test_a_wait_that_nothing_ends_is_an_error_at_once() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with (
        pytest.raises(Stalled, match="no timer is set at 0 s"),
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        runner.run(work())


def test_a_loop_in_which_time_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "TURNS_WITHOUT_TIME", 1000)

    async def work() -> None:
        while True:  # noqa: ASYNC110 - a busy loop is what is tested
            await asyncio.sleep(0)

    with pytest.raises(Stalled, match="time stands still"):
        virtual_time.run(work(), bound=10)


def test_what_goes_to_a_thread_runs_on_the_loop() -> None:
    def where(wrong: bool) -> threading.Thread:
        if wrong:
            raise ValueError("no")
        return threading.current_thread()

    async def work() -> None:
        assert await asyncio.to_thread(where, False) is threading.current_thread()
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(where, True)
        given_up = asyncio.ensure_future(asyncio.to_thread(where, True))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up

    virtual_time.run(work(), bound=1)


def test_a_word_of_another_thread_is_heard() -> None:
    async def work() -> str:
        loop, heard = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(heard.set_result, "hello"))
        thread.start()
        thread.join()
        return str(await heard)

    assert virtual_time.run(work(), bound=1) == "hello"


def test_tasks_that_outlive_their_program_are_named() -> None:
    async def work() -> None:
        asyncio.get_running_loop().create_task(asyncio.sleep(5), name="forgotten")

    with pytest.raises(AssertionError, match=r"outlive.*forgotten"):
        virtual_time.run(work(), bound=10)
