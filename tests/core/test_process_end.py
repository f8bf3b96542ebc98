"""The end of a child process is seen at once, whoever holds its pipes (spec section 31)."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from swactor_core.ids import WorkerGeneration
from swactor_core.machines.worker_process import SpawnWorker
from swactor_core.messages import ProcessNotification, ProcessNotificationKind
from swactor_core.node import worker_process
from swactor_core.node.process_end import exited
from swactor_core.node.worker_process import WorkerProcess, exit_text, last_words

LEAVES_A_CHILD = "import os, time; os.fork() or time.sleep(20); os._exit(3)"


async def start(code: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=pipe, stderr=pipe, start_new_session=True
    )


async def test_a_process_that_leaves_a_child_on_its_pipes_has_ended() -> None:
    process = await start(LEAVES_A_CHILD)
    began = time.monotonic()
    try:
        await asyncio.wait_for(exited(process), 15)
        assert process.returncode == 3
        assert time.monotonic() - began < 15
    finally:
        os.killpg(process.pid, 9)
        process._transport.close()


@pytest.mark.parametrize("later", [False, True], ids=["while it lives", "after its end"])
async def test_the_exit_code_is_known(later: bool) -> None:
    process = await start("import sys; sys.exit(5)")
    if later:
        await process.wait()
    await asyncio.wait_for(exited(process), 15)
    assert process.returncode == 5
    await asyncio.wait_for(process.wait(), 15)


GOES = """
import sys
from pathlib import Path
from swactor_core.node.process import first_to_go
score = Path("/proc/self/oom_score_adj")
before = int(score.read_text())
higher = min(before + 50, 1000)  # proc(5); containers may begin at the most
first_to_go(higher)
first_to_go(before)  # a process that is to go first already stays so
sys.exit(50 - higher + int(score.read_text()))
"""


async def test_a_child_goes_before_its_parent_when_memory_is_short() -> None:
    process = await start(GOES)
    await asyncio.wait_for(exited(process), 15)
    assert process.returncode == 50


def test_how_a_process_ended_is_said_with_what_it_often_means() -> None:
    assert exit_text(-9) == "was ended by SIGKILL, as the kernel does when memory is short"
    assert exit_text(-11) == "was ended by SIGSEGV"
    assert exit_text(3) == "exited with 3"


class Hearing:
    """What the adapter uses of the actor system."""

    def __init__(self) -> None:
        self.told: list[ProcessNotification] = []
        self.tasks: list[asyncio.Task[None]] = []

    def start_task(self, body: Coroutine[Any, Any, None], *, owner: object) -> None:
        self.tasks.append(asyncio.ensure_future(body))

    def tell(self, address: object, message: ProcessNotification) -> None:
        self.told.append(message)


def worker_for(hearing: Hearing) -> WorkerProcess:
    return WorkerProcess(
        hearing,  # type: ignore[arg-type]  # all that is asked of a system
        worker="nobody", arena_name="memfd", blocked=(), arena=lambda: (-1, 0),
    )  # fmt: skip


async def test_a_worker_whose_end_nobody_reaped_in_time_has_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end is certain (`exited`), and with it that its rings are free; only how it ended is not known."""

    async def unheard(process: asyncio.subprocess.Process) -> None:
        process.kill()
        await exited(process)
        process._transport._returncode = None  # type: ignore[attr-defined]  # as if the loop had not heard
        raise TimeoutError

    monkeypatch.setattr(worker_process, "exited", unheard)
    hearing = Hearing()
    worker = worker_for(hearing)
    worker.perform(SpawnWorker(WorkerGeneration(3)))
    await asyncio.wait_for(hearing.tasks[0], 30)
    assert [message.kind for message in hearing.told] == [
        ProcessNotificationKind.STARTED, ProcessNotificationKind.EXITED,
    ]  # fmt: skip
    assert "ended, and nobody was told how" in hearing.told[-1].detail


@pytest.mark.parametrize("lacking", ["EventPipe", "born_deaf"])
async def test_a_worker_that_lacks_files_to_start_with_is_told_with_the_remedy(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event pipe is the first to need some, its process the next."""

    def lacks(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(worker_process, lacking, lacks)
    hearing = Hearing()
    worker = worker_for(hearing)
    worker.perform(SpawnWorker(WorkerGeneration(1)))
    await hearing.tasks[0]
    (told,) = hearing.told
    assert told.kind is ProcessNotificationKind.ERROR
    remedy = "allow this user more open files: `ulimit -n 1024`"
    assert told.detail == f"cannot start the worker: [Errno 24] Too many open files ({remedy})"


def test_the_last_words_of_a_fatal_signal_are_what_and_where_not_the_modules_behind_the_stacks() -> None:
    stacks = [
        "noise",
        "Fatal Python error: Segmentation fault",
        "Thread 0x01 (most recent call first):",
        '  File "idle.py", line 3 in wait',
        "Current thread 0x02 (most recent call first):",
        '  File "step.py", line 5 in compute',
        '  File "harness.py", line 7 in serve',
    ]
    said = 'Fatal Python error: Segmentation fault, File "step.py", line 5 in compute'
    assert last_words([*stacks, "Extension modules: numpy (total: 1)"]) == said
    assert last_words(stacks[:2]) == "Fatal Python error: Segmentation fault"
    assert last_words(["one", "  two"]) == "two"
    assert last_words([]) == ""
