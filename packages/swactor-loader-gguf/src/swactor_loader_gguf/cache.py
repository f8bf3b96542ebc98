"""The cache's folders, and how those who wait hear of a fetch.

Layout: `gguf/SHA256/FILE` holds whole models out of packages, `names/` says which digest a package's file
had, `remote/KEY/` holds what has been fetched of one content (`sparse.py`), `addresses/` says which content
an address had (`known.py`), `locks/` and `tmp/` serve a fetch while it runs. A whole model is renamed into
place when it is complete and verified. Must not know what is in a file, nor how its bytes come.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from swactor_core.errors import ModelError, remedy_of_encoding
from swactor_core.faults import ModelFailure

from swactor_loader_gguf.sparse import WRITABLE

Progress = Callable[[int, int], None]  # bytes that are here, and of how many; 0 where that is not known


def silent(done: int, total: int) -> None:
    """The progress that nobody listens to."""


def is_text(path: str) -> bool:
    """Whether a path is valid UTF-8: it goes to other processes as text."""
    return not any("\ud800" <= character <= "\udfff" for character in path)


def cache_directory() -> Path:
    """SWACTOR_CACHE_DIR, or `swactor` in the user's cache folder. Raises ModelError for a name that is not
    UTF-8."""
    chosen = os.environ.get("SWACTOR_CACHE_DIR")
    # The XDG specification says to ignore a relative value.
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    folder = os.path.abspath(os.path.expanduser(chosen)) if chosen else os.path.join(base, "swactor")
    if not os.path.isabs(folder):
        raise ModelError(
            "this user has no home folder for a cache",
            hint="set SWACTOR_CACHE_DIR to a folder",
            cause=ModelFailure.CACHE_UNUSABLE,
        )
    if not is_text(folder):
        raise ModelError(
            f"the name of the cache, {folder!r}, is not valid UTF-8",
            hint=remedy_of_encoding(folder, "set SWACTOR_CACHE_DIR to a folder whose name is"),
            cause=ModelFailure.CACHE_UNUSABLE,
        )
    return Path(folder)


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
