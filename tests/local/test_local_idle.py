"""A run that waits costs nothing (spec section 21): nobody polls, though its nodes probe each other."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from local_command import Command, Run
from swactor_testing.echo import reference_tokens

WINDOW_SECONDS = 4.0
BOUND = 0.01  # of one core, all processes together
ECHO = reference_tokens((5, 6, 7), 40, num_layers=4, vocab_size=160)


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """What each process has run so far, in all its threads."""
    spent = {}
    for pid in pids:
        spent[pid] = 0.0
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that ended in between
                spent[pid] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


def share_of_a_core(pids: list[int]) -> dict[int, float]:
    """Each process's share over the window, in which none of them may end."""
    ends = select.poll()
    fds = [os.pidfd_open(pid) for pid in pids]
    for fd in fds:
        ends.register(fd, select.POLLIN)
    begin, before = time.monotonic(), cpu_seconds(pids)
    ended = ends.poll(WINDOW_SECONDS * 1000)
    after, seconds = cpu_seconds(pids), time.monotonic() - begin
    for fd in fds:
        os.close(fd)
    assert not ended, "a process ended while the run should wait"
    return {pid: (after[pid] - before[pid]) / seconds for pid in pids}


def waiting(command: Command, stopped: int, shares: list[dict[str, float]]) -> float:
    """The least share of the command's processes over a few windows: other work on the machine, and what was
    still going on when the run came to rest, only ever add."""
    for _ in range(3):
        processes = {pid: line for pid, line in command.left().items() if pid != stopped}
        assert len(processes) >= 4, f"orchestrator, two nodes and a worker: {processes}"
        measured = share_of_a_core(list(processes))
        shares.append({f"{pid} {processes[pid]}": share for pid, share in measured.items()})
        if sum(measured.values()) < BOUND:
            break
    return min(sum(share.values()) for share in shares)


def test_a_run_that_waits_for_its_worker_uses_no_processor(echo: Callable[..., Run]) -> None:
    """Orchestrator, two nodes with their probes, the other stage's worker, while one worker is stopped."""
    run = echo("--prompt-ids", "5,6,7", "--max-tokens", "40", "--nodes", "2")
    run.wait_event("token_received", sequence=3)
    worker = run.worker_pid(1)
    os.kill(worker, signal.SIGSTOP)
    shares: list[dict[str, float]] = []
    least = waiting(run, worker, shares)
    os.kill(worker, signal.SIGCONT)
    assert run.finish(0)["token_ids"] == ECHO
    assert least < BOUND, shares


@pytest.mark.parametrize("pause", [0.001, 0.005])
def test_a_program_that_polls_is_found(pause: float) -> None:
    program = f"import time\nprint(flush=True)\nwhile True: time.sleep({pause})"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as polling:
        assert polling.stdout is not None
        polling.stdout.readline()
        share = share_of_a_core([polling.pid])[polling.pid]
        polling.kill()
    assert share > BOUND / 4, "one of the four processes of a run would stay within its part"
