"""The compiled kernels that this machine keeps: of each tinygrad, processor and compiler a folder.

Knows the folders that `environment` makes and that a worker has its data base open while it lives. Must not
import tinygrad.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from swactor_core.errors import ResourceError
from swactor_core.open_files import files_below, open_elsewhere, taken_by
from swactor_core.spi.storage import Stored, StoredKind

from swactor_worker_tinygrad.environment import cache_root


class KeptKernels:
    """Implements `swactor_core.spi.storage.Storage`."""

    def stored(self) -> list[Stored]:
        """See `Storage.stored`."""
        try:
            return [_described(path) for path in self._folders()]
        except OSError as error:
            raise _unusable(cache_root(), error) from error

    def remove(self, stored: Stored) -> bool:
        """See `Storage.remove`."""
        path = Path(stored.path)
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
        return sorted(path for path in cache_root().glob("tinygrad-*/*") if path.is_dir())


def _in_use(folder: Path) -> bool:
    return any(open_elsewhere(path) for path in files_below(folder))


def _described(folder: Path) -> Stored:
    nbytes, used = taken_by(folder)
    user = "a process has them open" if _in_use(folder) else ""
    return Stored(StoredKind.KERNELS, str(folder), nbytes, used, user)


def _unusable(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"compiled kernels cannot be removed or read at {str(path)!r}: {error.strerror or error}",
        hint="look at who owns that folder",
    )
