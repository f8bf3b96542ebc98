"""The first bytes of one file, read as they are asked for, each piece compared with what is left before.

Knows files and the container's numbers and names (little-endian); must not know which fields there are. A
file that is still on its way is read like one that is here: `Contents.need` is asked before every step. The
header is read, not mapped: a map of a file that is cut short meanwhile ends the process, and this one may
be the run's authority.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import NoReturn, Protocol

from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure

MAX_HEADER = 1 << 28  # what is read, and fetched, before a tensor was shown
FIRST_READ = 1 << 20  # bytes of a file that is here
READ_MORE = 4  # times as much, where that was not the whole header

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class Contents(Protocol):
    """The bytes of a file that may still be on their way into the local file `path` of `size` bytes. People
    know it by `name`."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    def need(self, end: int) -> int:
        """Makes the first `end` bytes readable, or all there are; returns how many bytes from the beginning
        on are. Raises ModelError."""


class HeaderReader:
    """Reads the file at `path` from its first byte on; it stays open until `close`. `contents` brings the
    bytes of a file that is not whole yet. Whatever is wrong is a ModelError with field and byte offset."""

    def __init__(self, path: str, contents: Contents | None = None) -> None:
        self.path = os.path.abspath(path)
        self.name = self.path if contents is None else contents.name
        self._contents = contents
        self._data = b""  # the file's first `_readable` bytes, while the header is read
        self._readable = 0
        self._position = 0
        self._descriptor, self.file_bytes = _open_file(self.path)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def fail_value(self, message: str, offset: int) -> NoReturn:
        """`fail` for a value that stands in a well-formed file and cannot be: who wrote it was wrong, unless
        bytes have changed."""
        self.fail(
            message,
            offset,
            hint="whatever wrote the file gave it this value, or it was damaged later: take another "
            "conversion of the model, or fetch it again",
        )

    def fail(self, message: str, offset: int, *, hint: str = "") -> NoReturn:
        """Raises the ModelError that names this file and the byte."""
        raise ModelError(
            f"{self.name}: {message} (at byte {offset})",
            hint=hint or "the file is damaged or is not a GGUF model; fetch it again",
            cause=ModelFailure.MALFORMED,
        )

    def _take(self, nbytes: int, field: str) -> int:
        """Moves past `nbytes` bytes of `field` and returns where they begin."""
        start, left = self._position, self.file_bytes - self._position
        if nbytes > left:
            self.fail(f"{field} needs {nbytes} bytes and the file has {left} left", start)
        self._position = start + nbytes
        if self._position > self._readable:
            self._need(self._position)
        return start

    def _need(self, end: int) -> None:
        """Reads at least the bytes before `end`, and waits for those of a file that is on its way."""
        if end <= self._readable:
            return
        if end > MAX_HEADER:
            self.fail(f"the header goes beyond {MAX_HEADER >> 20} MiB", self._position)
        here = self.file_bytes if self._contents is None else self._contents.need(end)
        self._read_to(min(max(end, READ_MORE * self._readable, FIRST_READ), here, MAX_HEADER))

    def _read_to(self, end: int) -> None:
        """All of it again, in one piece: cheaper than to put pieces together."""
        self._data = self._bytes(0, end)
        self._readable = end

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        """That much of the file. Raises ModelError."""
        found, end = b"", offset + nbytes
        try:
            while offset + len(found) < end:
                more = os.pread(self._descriptor, end - offset - len(found), offset + len(found))
                if not more:
                    self._shortened()
                found = found + more if found else more
        except OSError as error:
            raise ModelError(
                f"{self.name}: cannot be read: {error.strerror}",
                hint="look in the kernel's log for errors of disk or network",
            ) from error
        return found

    def _shortened(self) -> NoReturn:
        now = os.fstat(self._descriptor).st_size
        raise ModelError(
            f"{self.name}: the file was shortened while it was read: {self.file_bytes} bytes when opened, "
            f"{now} now",
            hint="put the whole file there again, by a rename and never while it is used",
            cause=ModelFailure.CONTENT_CHANGED,
        )

    def _u32(self, field: str) -> int:
        at = self._take(4, field)
        return int(U32.unpack_from(self._data, at)[0])

    def _u64(self, field: str) -> int:
        at = self._take(8, field)
        return int(U64.unpack_from(self._data, at)[0])

    def _count(self, field: str, *, cap: int) -> int:
        start = self._position
        count = self._u64(field)
        if count > cap:
            self.fail(f"{field} is {count}, more than the {cap} that are accepted", start)
        return count

    def _name(self, field: str, *, cap: int) -> str:
        start = self._position
        length = self._u64(f"length of {field}")
        if not 1 <= length <= cap:
            self.fail(f"{field} is {length} bytes long, not 1 to {cap}", start)
        at = self._take(length, field)
        try:
            return self._data[at : at + length].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{field} is not valid UTF-8", at)


def _open_file(path: str) -> tuple[int, int]:
    """A descriptor of a regular file and its size."""
    try:
        # O_NONBLOCK: a named pipe must be refused, not waited for
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        missing = isinstance(error, FileNotFoundError)
        raise ModelError(
            f"cannot open the model {path!r}: {reason}",
            hint="check the path",
            cause=ModelFailure.NOT_FOUND if missing else ModelFailure.ACCESS_DENIED,
        ) from error
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ModelError(
                f"the model {path!r} is not a regular file", hint="give the path of a .gguf file"
            )
        if info.st_size == 0:
            raise ModelError(
                f"{path}: the file is empty (at byte 0)",
                hint="fetch it again",
                cause=ModelFailure.MALFORMED,
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, info.st_size
