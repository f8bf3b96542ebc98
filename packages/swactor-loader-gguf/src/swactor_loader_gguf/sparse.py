"""A local file of which some ranges are here: sparse data, a journal of what is on the disk, and claims.

Knows the folder of one content in the cache and nothing of networks. Several processes fill one file: a range
is claimed with a lock of the kernel's on the same range of a lock file (an open file description lock, Linux
fcntl(2)), which the kernel lets go when its process dies; what is written becomes true by a record in the
journal, appended after the data is on the disk. A record that a crash has torn fails its checksum and costs a
second fetch, never a wrong byte.

A folder has `FILE.gguf` (its full size from the beginning), `journal`, and `lock`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure

from swactor_loader_gguf.ranges import Range, Ranges

ROOM = "free some space (`swactor-cli cache clear`), or set SWACTOR_CACHE_DIR to another disk"
WRITABLE = "set SWACTOR_CACHE_DIR to a folder that you may write to, on a local disk"

_RECORD = struct.Struct("<QQII")  # start, end, checksum of both, kind
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process
_BYTES, _VERIFIED, _NOTHING = 1, 2, 3
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def _record(kind: int, start: int, end: int) -> bytes:
    return _RECORD.pack(start, end, zlib.crc32(struct.pack("<QQI", start, end, kind)), kind)


class SparseFile:
    """The file `name` of `size` bytes in `folder`. Raises ModelError when the folder cannot be used.

    One object belongs to one thread; objects in any number of processes share the file.
    """

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.path = str(folder / name)
        self.size = size
        self.present = Ranges()
        self.verified = False
        self.writable = True
        self._journal_read = 0
        self._lock = self._journal = self._data = -1
        try:
            self._open(folder)
        except OSError as error:
            self.close()
            self._refuse(error)
        except BaseException:
            self.close()
            raise
        self.refresh()

    def _open(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", flags, 0o644)
            self._journal = os.open(folder / "journal", flags | os.O_APPEND, 0o644)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            # a cache that somebody else has filled: what is there can be read
            self.writable = False
            try:
                self._journal = os.open(folder / "journal", os.O_RDONLY | os.O_CLOEXEC)
                self._data = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise error from None  # nothing is there: what matters is that nothing can be put there
            return
        with self._journal_locked():
            self._data = os.open(self.path, flags, 0o644)
            if os.fstat(self._data).st_size != self.size:
                # new, or not what the journal speaks of
                os.ftruncate(self._journal, 0)
                os.ftruncate(self._data, 0)
                os.ftruncate(self._data, self.size)

    def _refuse(self, error: OSError) -> NoReturn:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise ModelError(
            f"{self.path!r} cannot be written: {error.strerror or error}",
            hint=ROOM if full else WRITABLE,
            cause=ModelFailure.DISK_FULL if full else ModelFailure.CACHE_UNUSABLE,
        ) from error

    @contextmanager
    def _journal_locked(self) -> Iterator[None]:
        fcntl.flock(self._journal, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._journal, fcntl.LOCK_UN)

    def refresh(self) -> None:
        """Takes in what other processes have brought since."""
        unread = os.fstat(self._journal).st_size - self._journal_read
        raw = os.pread(self._journal, max(unread, 0), self._journal_read)
        raw = raw[: len(raw) // _RECORD.size * _RECORD.size]
        self._journal_read += len(raw)
        for start, end, checksum, kind in _RECORD.iter_unpack(raw):
            if checksum != zlib.crc32(struct.pack("<QQI", start, end, kind)) or not start < end <= self.size:
                continue
            if kind == _BYTES:
                self.present.add(start, end)
            elif kind == _NOTHING:
                self.present = Ranges()
            self.verified = kind == _VERIFIED or (self.verified and kind != _NOTHING)

    def missing(self, ranges: list[Range]) -> list[Range]:
        """What of `ranges` is not here, of this object's knowledge."""
        return [gap for start, end in ranges for gap in self.present.missing(start, end)]

    def claim(self, start: int, end: int) -> Claim | None:
        """The right to write [start, end), or None while another thread or process has some of it."""
        return Claim.taken(os.path.join(os.path.dirname(self.path), "lock"), start, end)

    def write(self, offset: int, data: bytes) -> None:
        """Puts `data` in place. Raises ModelError for a full disk."""
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._data, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            self._refuse(error)

    def commit(self, start: int, end: int) -> None:
        """Says in the journal that [start, end) is here, once it is on the disk. Raises ModelError."""
        if start < end:
            self._append(_BYTES, start, end)
            self.present.add(start, end)

    def mark_verified(self) -> None:
        """The whole file has the checksum that its source names."""
        self._append(_VERIFIED, 0, self.size)
        self.verified = True

    def _append(self, kind: int, start: int, end: int) -> None:
        try:
            if os.fstat(self._data).st_nlink == 0:
                raise OSError(errno.ENOENT, "somebody has removed it")
            os.fdatasync(self._data)
            with self._journal_locked():
                torn = os.fstat(self._journal).st_size % _RECORD.size
                if torn:
                    os.ftruncate(self._journal, os.fstat(self._journal).st_size - torn)
                os.write(self._journal, _record(kind, start, end))
        except OSError as error:
            self._refuse(error)

    def forget(self) -> None:
        """Nothing that is here can be trusted: every byte is fetched anew."""
        self._append(_NOTHING, 0, self.size)
        self.refresh()

    def free_bytes(self) -> int:
        """Bytes that an ordinary user may still write where the file is."""
        held = os.statvfs(os.path.dirname(self.path))
        return held.f_bavail * held.f_frsize

    def close(self) -> None:
        """Idempotent."""
        for descriptor in (self._lock, self._journal, self._data):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self._journal = self._data = -1


class Claim:
    """A claim on a range, until `release` or the end of the process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def taken(cls, lock_file: str, start: int, end: int) -> Claim | None:
        """None while somebody else has some of it. Raises ModelError where files cannot be locked."""
        try:
            # A descriptor of its own: threads of one process exclude each other too.
            descriptor = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(
                f"{lock_file!r} cannot be opened: {error.strerror}",
                hint=WRITABLE,
                cause=ModelFailure.CACHE_UNUSABLE,
            ) from error
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, asked)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise ModelError(
                f"{lock_file!r} cannot be locked: {error.strerror}",
                hint=WRITABLE,
                cause=ModelFailure.CACHE_UNUSABLE,
            ) from error
        return cls(descriptor)

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
