"""The compiled kernels that this machine keeps: of each tinygrad, processor and compiler a folder; and what
processes that were killed have left of those that are not kept.

Knows the folders that `environment` and `passing_kernels` make and that a worker has its data base open while
it lives. Must not import tinygrad.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from swactor_core.errors import ResourceError
from swactor_core.open_files import files_below, open_elsewhere, taken_by
from swactor_core.spi.storage import Stored, StoredKind

from swactor_worker_tinygrad.environment import cache_root, cache_roots
from swactor_worker_tinygrad.passing_kernels import nobody_uses, passing_folders


class KeptKernels:
    """Implements `swactor_core.spi.storage.Storage`."""

    def stored(self) -> list[Stored]:
        """See `Storage.stored`."""
        try:
            return [_described(path) for path in self._folders()] + _left()
        except OSError as error:
            raise _unusable(cache_root() or Path(), error) from error

    def remove(self, stored: Stored) -> bool:
        """See `Storage.remove`."""
        path = Path(stored.path)
        if path in passing_folders():
            return _remove_left(path)
        if path not in self._folders():
            raise ResourceError(f"{stored.path!r} is no folder of compiled kernels", hint="list them again")
        if _in_use(path):
            return False
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise _unusable(path, error) from error
        with contextlib.suppress(OSError):  # others are in it
            os.rmdir(path.parent)
        return True

    def _folders(self) -> list[Path]:
        """This user's: beside models that many share others have theirs."""
        found = (path for root in cache_roots() for path in root.glob("tinygrad-*/*"))
        return sorted(path for path in found if _is_own(path))


def _is_own(path: Path) -> bool:
    with contextlib.suppress(OSError):
        state = path.stat()
        return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    return False


def _in_use(folder: Path) -> bool:
    return any(open_elsewhere(path) for path in files_below(folder))


def _described(folder: Path) -> Stored:
    nbytes, used = taken_by(folder)
    user = "a process has them open" if _in_use(folder) else ""
    return Stored(StoredKind.KERNELS, str(folder), nbytes, used, user)


def _left() -> list[Stored]:
    found = []
    for folder in passing_folders():
        with contextlib.suppress(FileNotFoundError), nobody_uses(folder) as free:
            nbytes, used = taken_by(folder)
            user = "" if free else "a process uses it"
            found.append(Stored(StoredKind.TEMPORARY, str(folder), nbytes, used, user))
    return found


def _remove_left(folder: Path) -> bool:
    try:
        with nobody_uses(folder) as free:
            if free:
                shutil.rmtree(folder)
            return free
    except FileNotFoundError:
        return True
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"compiled kernels cannot be removed or read at {str(path)!r}: {error.strerror or error}",
        hint="look at who owns that folder",
    )
