"""Life ties of a process to its parent: dies with it, and is deaf to the terminal's Ctrl-C when managed."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends; exits at once when the parent is already gone.

    `parent` is the pid that started this process (prctl(2): the setting is not inherited by children).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        sys.exit(1)


async def exited(process: asyncio.subprocess.Process) -> None:
    """Returns when the process itself has ended and its `returncode` is known. `Process.wait` waits for its
    pipes too, which a process that it started may hold open (CPython 3.11.4 and later)."""
    if process.returncode is None:
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:  # ended and reaped; the loop hears of it in one of its next turns
            descriptor = -1
        except OSError:  # no such call here
            await process.wait()
            return
        if descriptor >= 0:
            gone = asyncio.Event()
            loop.add_reader(descriptor, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
    while process.returncode is None:  # noqa: ASYNC110 - the loop's own watcher reaps it at this moment
        await asyncio.sleep(0.001)


def ignore_terminal_interrupt() -> None:
    """Ctrl-C reaches every process of the group; only the command decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def born_deaf() -> Iterator[None]:
    """Processes that are started meanwhile have SIGINT blocked from their first instruction on, which exec
    hands on, until they call `ignore_terminal_interrupt`; here it is only late. Uses may overlap."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if signal.SIGINT not in before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
