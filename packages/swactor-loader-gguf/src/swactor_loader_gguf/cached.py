"""What lies in the cache, and how it goes again: models are kept until somebody removes them.

Knows the cache's folders (`cache`) and the locks of those who fetch. A model that a process has open or
mapped stays: the kernel says so itself, whoever the process is. Must not know how models are fetched or read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_core.open_files import disk_bytes, open_elsewhere
from swactor_core.spi.loader import CachedModel, ModelSource

from swactor_loader_gguf.cache import cache_directory
from swactor_loader_gguf.known import addresses_by_key, forget_lost
from swactor_loader_gguf.packages import names_by_digest
from swactor_loader_gguf.sparse import WRITABLE, Claim

_SERVING = frozenset({"journal", "lock"})


class GgufCache:
    """Implements `swactor_core.spi.loader.ModelCache`."""

    def __init__(self) -> None:
        self._cache = cache_directory()

    @property
    def folder(self) -> str:
        return str(self._cache)

    def models(self) -> list[CachedModel]:
        """See `ModelCache.models`."""
        try:
            names = names_by_digest(self._cache)
            for key, known in addresses_by_key().items():
                # an address that was kept with each of its signatures is one
                latest = {each.address: each.asked for each in reversed(known)}
                names[key] = [ModelSource(*each) for each in sorted(latest.items(), key=lambda one: -one[1])]
            found = [_described(path, names.get(path.parent.name, [])) for path in self._files()]
        except OSError as error:
            raise _unusable(self._cache, error) from error
        return sorted((model for model in found if model is not None), key=lambda model: -model.used)

    def remove(self, model: CachedModel) -> bool:
        """See `ModelCache.remove`."""
        path = Path(model.path)
        if path not in self._files():
            raise ModelError(f"{model.path!r} is no model of the cache {self.folder!r}", hint="list it again")
        try:
            with contextlib.ExitStack() as held:
                if (lock := path.parent / "lock").exists():
                    claim = Claim.taken(str(lock), 0, max(model.file_bytes, 1))
                    if claim is None:
                        return False
                    held.enter_context(claim)
                if open_elsewhere(path):
                    return False
                # the data first: without it the journal is not believed
                path.unlink()
                shutil.rmtree(path.parent)
            self._drop_names()
            forget_lost()
        except OSError as error:
            raise _unusable(path, error) from error
        return True

    def _files(self) -> list[Path]:
        places = (self._cache / "gguf", self._cache / "remote")
        return [path for place in places for path in place.glob("*/*") if path.name not in _SERVING]

    def _drop_names(self) -> None:
        """Removes the notes of which digest a package's file had, where no file has it any more."""
        for note in (self._cache / "names").glob("*"):
            digest = note.read_text("ascii", "replace").partition("\n")[0].strip()
            if not digest or not (self._cache / "gguf" / digest).is_dir():
                note.unlink(missing_ok=True)


def _described(path: Path, sources: list[ModelSource]) -> CachedModel | None:
    """None for a file that has just gone."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return CachedModel(
        key=path.parent.name[:12],
        name=path.name,
        path=str(path),
        nbytes=disk_bytes(state),
        file_bytes=state.st_size,
        used=max(state.st_atime, state.st_mtime),
        in_use=_being_fetched(path.parent / "lock", state.st_size) or open_elsewhere(path),
        sources=tuple(sources),
    )


def _being_fetched(lock: Path, size: int) -> bool:
    if not lock.exists() or not os.access(lock, os.W_OK):
        return False
    claim = Claim.taken(str(lock), 0, max(size, 1))
    if claim is not None:
        claim.release()
    return claim is None


def _unusable(path: Path, error: OSError) -> ModelError:
    return ModelError(
        f"the cache cannot be changed or read at {str(path)!r}: {error.strerror or error}",
        hint=WRITABLE,
        cause=ModelFailure.CACHE_UNUSABLE,
    )
