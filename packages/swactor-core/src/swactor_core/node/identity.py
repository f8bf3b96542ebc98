"""The node's secret: 32 bytes made at first start and kept in a file that only its owner may read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from swactor_core.errors import ConfigError, ResourceError
from swactor_core.whole_files import WholeFile

SEED_BYTES = 32
_MOST = 4096
_OTHER = "name another with --key-file, or set SWACTOR_STATE_DIR"
COARSEST_FILE_TIME = 2_000_000_000
"""Nanoseconds: FAT keeps every second second of a modification."""


def fresh_epoch() -> int:
    """The epoch of a process that starts now, in 64 bits: later than that of any earlier start of the same
    name, as membership and transport ask (wall-clock nanoseconds)."""
    return time.time_ns()


def later_epoch(key_file: Path) -> int:
    """A fresh epoch, also later than those that were given for this key before where the clock was set back:
    the file's time of modification is the latest. For the process that has the key in use."""
    now, state = fresh_epoch(), key_file.stat()
    epoch = now if now > state.st_mtime_ns else state.st_mtime_ns + COARSEST_FILE_TIME
    with contextlib.suppress(OSError):  # a disk that is not written to
        os.utime(key_file, ns=(state.st_atime_ns, epoch))
    return epoch


def state_directory() -> Path:
    """`SWACTOR_STATE_DIR`, else the XDG state directory, else `~/.local/state`, with `swactor` below it.
    Raises ConfigError for a user without a home."""
    explicit = os.environ.get("SWACTOR_STATE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "state") / "swactor"
    except RuntimeError:
        raise ConfigError(
            "this user has no home folder to keep keys in", hint="set SWACTOR_STATE_DIR to a folder"
        ) from None


def load_or_create_seed(path: Path) -> bytes:
    """The seed in `path`, created with mode 0600 when absent. The file is whole from its first moment: of
    several processes that start at once one makes the key, and all have it. Raises ConfigError, also for a
    loose mode."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
    except OSError as error:
        raise ConfigError(f"key file {str(path)!r}: {error.strerror}", hint="set SWACTOR_STATE_DIR") from None
    return _load(path)


def _create(path: Path) -> None:
    """Writes a fresh seed to `path`, unless another process was faster."""
    seed = secrets.token_bytes(SEED_BYTES)
    with (
        contextlib.suppress(FileExistsError),
        contextlib.closing(WholeFile(str(path), private=True, replace=False)) as file,
    ):
        file.write(f"{seed.hex()}\n".encode())
        file.commit(durable=True)


def _load(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"key file {str(path)!r} is not a regular file", hint=_OTHER)
        if status.st_mode & 0o077:
            raise ConfigError(
                f"key file {str(path)!r} can be read by others", hint=f"chmod 600 {shlex.quote(str(path))}"
            )
        with path.open("rb") as file:
            seed = bytes.fromhex(file.read(_MOST).decode("ascii").strip())
    except OSError as error:
        raise ConfigError(f"key file {str(path)!r}: {error.strerror}", hint=_OTHER) from None
    except ValueError:
        raise ConfigError(
            f"key file {str(path)!r} is not hexadecimal", hint="remove it to make a new key"
        ) from None
    if len(seed) != SEED_BYTES:
        raise ConfigError(
            f"key file {str(path)!r} holds {len(seed)} bytes, not {SEED_BYTES}",
            hint="remove it to make a new key",
        )
    return seed


@contextlib.contextmanager
def key_in_use(path: Path) -> Iterator[None]:
    """Holds the key of an existing key file for this process: a second life of one identity on this machine
    would displace the first. Raises ResourceError when another process has it; the end of that frees it."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"another process of this machine uses the key {str(path)!r}",
                hint="wait for its end, or set SWACTOR_STATE_DIR to a folder with another key",
            ) from None
        yield
