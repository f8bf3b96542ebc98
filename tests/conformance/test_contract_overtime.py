"""A plug-in that would not let a test of the kit end is told so, and the test ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading

import pytest
from swactor_testing.conformance import overtime
from swactor_testing.conformance.overtime import Overtime, ends_within


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overtime, "LOOK", 0.02)


def test_a_call_that_blocks_the_loop_is_ended_and_the_traceback_shows_it() -> None:
    async def blocks() -> None:
        await asyncio.sleep(0)
        threading.Event().wait()

    with pytest.raises(Overtime, match="made no turn") as caught, ends_within(60, blocked=3):
        asyncio.run(blocks())
    assert "blocks" in [entry.name for entry in caught.traceback]


def test_what_ignores_its_cancellation_is_named_and_ended_in_the_loops_own_end_too() -> None:
    async def ignores() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()

    async def waits_for_it() -> None:
        task = asyncio.ensure_future(ignores())
        async with asyncio.timeout(0.01):
            while True:
                await asyncio.wait((task,))

    said = r"not ended within 0\.1 s: its tasks are in .*ignores"
    with pytest.raises(Overtime, match=said), ends_within(0.1, blocked=1000):
        asyncio.run(waits_for_it())


def test_a_loop_that_turns_is_left_alone_and_so_is_a_foreign_alarm() -> None:
    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)  # a turn

    with ends_within(60, blocked=3):
        asyncio.run(turns())
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    mine = signal.getsignal(signal.SIGALRM)
    try:
        with ends_within(60, blocked=3):
            assert signal.getsignal(signal.SIGALRM) is mine
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)
