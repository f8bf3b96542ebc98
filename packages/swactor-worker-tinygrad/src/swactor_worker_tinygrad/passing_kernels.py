"""Folders of compiled kernels that go with their process, for a machine that cannot keep any.

Each is in the temporary folder, has this user's lock while its process lives (flock(2), which the kernel
lets go with the process), and is removed by it; those that a killed process has left are removed by the next
that makes one. Must not import tinygrad.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swactor_core.errors import ResourceError
from swactor_core.open_files import files_below, open_elsewhere

PREFIX = "swactor-tinygrad-"
TRIES = 8
ROOM = 32 << 20  # bytes that the kernels of a model, the data base of them and its log may take
LITTLE_ROOM = 4 << 20  # where kernels are already: most of what a run needs is there
_held: list[int] = []


def passing_folder() -> Path:
    """A fresh private folder that is gone after this process. Raises ResourceError."""
    remove_left()
    try:
        place = tempfile.gettempdir()
        if not has_room(Path(place), used=False):
            raise ResourceError(
                f"no folder for compiled kernels has {ROOM >> 20} MiB free, nor has {place!r}",
                hint="make room, or set SWACTOR_CACHE_DIR or TMPDIR to a folder on another disk",
            )
        for _ in range(TRIES):
            folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = _lock(folder)
            if lock is not None and folder.is_dir():
                _held.append(lock)
                atexit.register(_remove_own, folder, os.getpid())
                return folder
            # Another process that looked for what was left has had it in between.
    except OSError as error:
        raise ResourceError(
            f"no folder for compiled kernels can be made: {error.strerror or error}",
            hint="set SWACTOR_CACHE_DIR or TMPDIR to a folder that can be written",
        ) from error
    raise ResourceError(
        f"temporary folders are taken away {TRIES} times in a row", hint="set SWACTOR_CACHE_DIR"
    )


def has_room(folder: Path, *, used: bool) -> bool:
    """Whether its disk, of which no quota is known, takes compiled kernels; `used` where some are kept
    there. Raises OSError."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize >= (LITTLE_ROOM if used else ROOM)


def passing_folders() -> list[Path]:
    """Those of this user, used or left."""
    found = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if not entry.name.startswith(PREFIX):
                continue
            with contextlib.suppress(OSError):
                state = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid():
                    found.append(Path(entry.path))
    return sorted(found)


@contextlib.contextmanager
def nobody_uses(folder: Path) -> Iterator[bool]:
    """Whether its process is gone; no other takes the folder meanwhile. Raises OSError."""
    lock = _lock(folder)
    try:
        # The files, too: of processes that took no lock.
        yield lock is not None and not any(open_elsewhere(path) for path in files_below(folder))
    finally:
        if lock is not None:
            os.close(lock)


def remove_left() -> None:
    """What cannot be removed stays: it is not this process's."""
    for folder in passing_folders():
        with contextlib.suppress(OSError), nobody_uses(folder) as free:
            if free:
                shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """A descriptor with the folder's lock, None when it is another's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not of a child that was forked
        shutil.rmtree(folder, ignore_errors=True)
