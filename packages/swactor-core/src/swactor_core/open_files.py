"""What the kernel says of files on the disk: whether anybody has one open, and what a folder takes.

Knows files and leases (Linux fcntl(2)). Must not know what the files are for. Imported where a plug-in
removes what it keeps, and nowhere on a run's way.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from pathlib import Path

_BLOCK = 512  # what st_blocks counts, whatever the file system's own blocks are


def open_elsewhere(path: Path) -> bool:
    """Whether any process, this one too, has the file open or mapped: a write lease is given only for a file
    that nobody else has open. False where the system cannot say: for a file of another user, one that has
    gone, and on file systems without leases."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # were the lease broken before it is given back: a signal that does nothing, not SIGIO
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(descriptor)
    return False


def disk_bytes(state: os.stat_result) -> int:
    """What a file takes on the disk; less than its size where it has holes."""
    return state.st_blocks * _BLOCK


def files_below(folder: Path) -> list[Path]:
    """The files of a folder and of all folders in it; those that go meanwhile may be missing."""
    return [Path(where) / name for where, _, names in os.walk(folder) for name in names]


def taken_by(path: Path) -> tuple[int, float]:
    """What a file, or the files of a folder, take on the disk, in bytes, and when one was last read or
    written, in seconds since 1970."""
    nbytes, used = 0, 0.0
    for each in (path, *files_below(path)):
        try:
            state = each.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(state.st_mode):  # it is read by whoever looks into it: no use of what it holds
            used = max(used, state.st_mtime)
            continue
        nbytes += disk_bytes(state)
        used = max(used, state.st_mtime, state.st_atime)
    return nbytes, used
