"""The cache's folders, and how those who wait hear of a fetch.

Layout: `gguf/SHA256/FILE` holds whole models out of packages, `names/` says which digest a package's file
had, `remote/KEY/` holds what has been fetched of one content (`sparse.py`), `locks/` and `tmp/` serve a fetch
while it runs. A whole model is renamed into place when it is complete and verified.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure

from swactor_loader_gguf.sparse import WRITABLE

Progress = Callable[[int, int], None]  # bytes that are here, and of how many; 0 where that is not known


def silent(done: int, total: int) -> None:
    """The progress that nobody listens to."""


def cache_directory() -> Path:
    """SWACTOR_CACHE_DIR, or `swactor` in the user's cache folder."""
    chosen = os.environ.get("SWACTOR_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative value.
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "swactor"


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write where `folder` is or would be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def prepare_cache() -> Path:
    """Makes the cache's folders. Raises ModelError when they cannot be made or written."""
    cache = cache_directory()
    try:
        for part in ("gguf", "names", "remote", "locks", "tmp"):
            (cache / part).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache / "tmp"):
            pass
    except OSError as error:
        raise ModelError(
            f"the cache {str(cache)!r} cannot be written: {error.strerror}",
            hint=WRITABLE,
            cause=ModelFailure.CACHE_UNUSABLE,
        ) from error
    return cache
