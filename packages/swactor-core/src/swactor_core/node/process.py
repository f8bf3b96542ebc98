"""Life ties of a process to its parent: dies with it, and is deaf to the terminal's Ctrl-C when managed.

Knows prctl, signals and `/proc` of Linux. Must not know what the process does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
NODE_GOES = 300
WORKER_GOES = 600


def tied_to_parent(parent: int) -> bool:
    """SIGKILL for this process when its parent ends; False when that has ended already.

    `parent` is the pid that started this process (prctl(2): the setting is not inherited by children). The
    kernel watches the thread that started it, so parents start it from their main thread. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    return os.getppid() == parent


def die_with_parent(parent: int) -> None:
    """The same; exits at once when the parent is already gone."""
    if not tied_to_parent(parent):
        sys.exit(1)


def first_to_go(score: int) -> None:
    """When memory is short the kernel ends this process before its parent (proc(5), oom_score_adj: `score` in
    thousandths of the memory, children inherit it), which then lives to say what has happened."""
    own = Path("/proc/self/oom_score_adj")
    with suppress(OSError):
        if int(own.read_text()) < score:
            own.write_text(str(score))


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
