"""Files that are written whole: a reader, a crash or a full disk finds the old file or the new one, no half.

What is written has no name until `commit` gives it that of the file, so nothing is left of a process that is
killed. Where the file system has no files without names, what is left is removed when a later file is written
beside it, a day after its writer's last word. Devices, pipes and descriptors under /dev and /proc are written
to as they are. Knows no content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from typing import BinaryIO

_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)  # file system or kernel cannot
_PREFIX, _SUFFIX = ".swactor-", ".part"
_LEFT_AFTER = 24 * 3600.0
"""Seconds without a write after which a part whose lock is free is nobody's any more; the lock alone is no
proof where another machine writes into the folder."""


class WholeFile:
    """The file to be at `path`, through links. Every method but `close` raises OSError.

    `private` makes it readable by its owner alone; without `replace` a file that is there is a
    FileExistsError, now or at `commit`."""

    def __init__(self, path: str, *, private: bool = False, replace: bool = True) -> None:
        self._replace = replace
        self._named = ""
        if not os.path.basename(path):  # nothing, or a folder by its last letter
            wrong = errno.EISDIR if path else errno.ENOENT
            raise OSError(wrong, os.strerror(wrong))
        self._target = os.path.realpath(path)
        old = os.stat(path) if os.path.lexists(path) and os.path.exists(path) else None
        if old is not None and not replace:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        special = os.path.abspath(path).startswith(("/dev/", "/proc/"))
        if special or (old is not None and not stat.S_ISREG(old.st_mode)):
            self._target = ""
            self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by close()
            return
        if old is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = self._begin(0o600 if private else 0o666)
        self._file = os.fdopen(descriptor, "wb")
        if old is not None and not private:
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, old.st_uid, old.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(old.st_mode))

    def _begin(self, mode: int) -> int:
        try:
            return os.open(os.path.dirname(self._target), os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, mode)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
        _remove_left(os.path.dirname(self._target))
        self._named = self._beside()
        descriptor = os.open(self._named, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def _beside(self) -> str:
        return os.path.join(os.path.dirname(self._target), f"{_PREFIX}{os.urandom(8).hex()}{_SUFFIX}")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def commit(self, *, durable: bool = False) -> None:
        """From here on the file is the new one. `durable`: after a power cut, too."""
        try:
            self._file.flush()
            if self._target:
                if durable:
                    os.fsync(self._file.fileno())
                self._give_name()
                if durable:
                    _sync_folder(os.path.dirname(self._target))
        finally:
            self.close()

    def _give_name(self) -> None:
        if not self._named:
            named = self._target if not self._replace else self._beside()
            # Only with a folder given does Python follow the descriptor's link (linkat(2)).
            os.link(f"/proc/self/fd/{self._file.fileno()}", named, src_dir_fd=0, follow_symlinks=True)
            if not self._replace:
                return
            self._named = named
        if not self._replace:
            os.link(self._named, self._target)  # `close` takes the other name away
            return
        os.replace(self._named, self._target)
        self._named = ""

    def close(self) -> None:
        """What was not committed is gone, and the old file is as it was. Idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()
        named, self._named = self._named, ""
        if named:
            with contextlib.suppress(OSError):
                os.unlink(named)


def write_whole(path: str | os.PathLike[str], data: bytes, *, private: bool = False) -> None:
    """The file at `path` is `data`, or as it was. Raises OSError."""
    with contextlib.closing(WholeFile(os.fspath(path), private=private)) as file:
        file.write(data)
        file.commit()


def _remove_left(folder: str) -> None:
    """What writers of this folder left that were killed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode) and time.time() - state.st_mtime > _LEFT_AFTER:
            os.unlink(path)
    finally:
        os.close(descriptor)


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
