"""Life ties of a process to its parent: dies with it, and is deaf to the terminal's Ctrl-C when managed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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


def ignore_terminal_interrupt() -> None:
    """Ctrl-C reaches every process of the group; only the command decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
