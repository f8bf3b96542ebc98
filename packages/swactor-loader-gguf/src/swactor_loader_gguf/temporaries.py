"""What fetches that were killed have left: folders in the cache's `tmp`, each with its fetch's lock.

Knows the names that `packages` gives them. A folder whose lock somebody holds is being filled now.
Must not know what was to be fetched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swactor_core.errors import ResourceError
from swactor_core.open_files import taken_by
from swactor_core.spi.storage import Stored, StoredKind

from swactor_loader_gguf.cache import cache_directory
from swactor_loader_gguf.sparse import WRITABLE


class Temporaries:
    """Implements `swactor_core.spi.storage.Storage`."""

    def __init__(self) -> None:
        self._cache = cache_directory()

    def stored(self) -> list[Stored]:
        """See `Storage.stored`."""
        try:
            return [self._described(path) for path in sorted((self._cache / "tmp").glob("*"))]
        except OSError as error:
            raise _unusable(self._cache, error) from error

    def remove(self, stored: Stored) -> bool:
        """See `Storage.remove`."""
        path = Path(stored.path)
        if path.parent != self._cache / "tmp" or path.name in ("", ".", ".."):
            raise ResourceError(
                f"{stored.path!r} is no temporary of {str(self._cache)!r}", hint="list them again"
            )
        try:
            with self._locked(path) as free:
                if not free:
                    return False
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except FileNotFoundError:
            return True
        except OSError as error:
            raise _unusable(path, error) from error
        return True

    def _described(self, path: Path) -> Stored:
        nbytes, used = taken_by(path)
        with self._locked(path) as free:
            user = "" if free else "it is being fetched"
        return Stored(StoredKind.TEMPORARY, str(path), nbytes, used, user)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[bool]:
        """Whether the fetch of this folder is over; none of the same file begins meanwhile."""
        try:
            lock = os.open(self._cache / "locks" / path.name.rpartition(".")[0], os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, IsADirectoryError):  # no fetch has a lock of that name
            yield True
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(lock)


def _unusable(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"the cache cannot be changed or read at {str(path)!r}: {error.strerror or error}", hint=WRITABLE
    )
