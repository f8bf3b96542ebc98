"""The arena's memory (spec section 19): a sealed memfd, its one mapping in this process, its pages.

Knows the operating system and nothing of rings. Every failure is a ResourceError that says what the machine
lacks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

from swactor_core.errors import ResourceError
from swactor_core.free_memory import available_memory

from swactor_arena._native import ffi, lib

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MEMORY_HINT = "lower the arena ceiling or the ring capacities, or free memory on this machine"
_ATTEMPTS = 64


def create_memory(ceiling: int) -> int:
    """A sparse memfd of `ceiling` bytes, sealed against shrinking and growing: no process can ever make a
    mapped page vanish. Close-on-exec, so only a child that is given it (`pass_fds`) inherits it.

    Raises ResourceError.
    """
    if not 0 < ceiling < 1 << 63:
        raise ResourceError(f"an arena cannot have {ceiling} bytes", hint=_MEMORY_HINT)
    try:
        fd = os.memfd_create("swactor-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ResourceError(
            f"no memfd: {error.strerror}", hint="raise the open-file limit (ulimit -n)"
        ) from error
    try:
        os.ftruncate(fd, ceiling)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        hint = "raise the file-size limit (ulimit -f)" if error.errno == errno.EFBIG else _MEMORY_HINT
        raise ResourceError(f"an arena of {ceiling} bytes: {error.strerror}", hint=hint) from error
    return fd


def check_inherited(fd: int, ceiling: int) -> None:
    """Raises ResourceError unless `fd` is a memfd of at least `ceiling` bytes that cannot shrink."""
    try:
        size = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        message = f"descriptor {fd} is not an inherited arena: {error.strerror}"
        raise ResourceError(message, hint="start the child with pass_fds=(arena.fd,)") from error
    if not 0 < ceiling <= size:
        raise ResourceError(
            f"the arena has {size} bytes, {ceiling} were announced", hint="pass the ceiling unchanged"
        )
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ResourceError(
            f"descriptor {fd} is not sealed against shrinking", hint="create it with this plug-in"
        )


def map_memory(fd: int, ceiling: int) -> mmap.mmap:
    """The shared mapping of the whole arena. Raises ResourceError."""
    try:
        mapping = mmap.mmap(fd, ceiling, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        message = f"{ceiling} bytes of address space for the arena: {error}"
        raise ResourceError(message, hint="lower the arena ceiling, or raise ulimit -v") from error
    with contextlib.suppress(
        OSError
    ):  # advice: a core file should hold neither payload nor terabytes of holes
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def reserve(fd: int, offset: int, *, length: int) -> None:
    """Makes the pages of a range exist, so that no later access can fail. Raises ResourceError.

    The kernel would rather end a process than refuse the last pages, hence the look at what is left first.
    """
    available = available_memory()
    if available is not None and length > available:
        raise ResourceError(
            f"a ring of {length} bytes, {available} bytes of memory are left", hint=_MEMORY_HINT
        )
    code = _allocate(fd, 0, offset, length)
    if code != 0:
        raise ResourceError(f"pages for a ring of {length} bytes: {os.strerror(code)}", hint=_MEMORY_HINT)


def discard(fd: int, offset: int, *, length: int) -> None:
    """Frees the whole pages of a range and zeroes the rest of it. Raises ResourceError."""
    code = _allocate(fd, lib.FALLOC_FL_PUNCH_HOLE | lib.FALLOC_FL_KEEP_SIZE, offset, length)
    if code != 0:
        raise ResourceError(f"pages at {offset} cannot be given back: {os.strerror(code)}")


def _allocate(fd: int, mode: int, offset: int, length: int) -> int:
    """fallocate(2): 0 or an errno. tmpfs undoes an interrupted allocation, so a process that gets signals all
    the time must not try for ever, which os.posix_fallocate does."""
    for _ in range(_ATTEMPTS):
        if lib.fallocate(fd, mode, offset, length) == 0:
            return 0
        if ffi.errno != errno.EINTR:
            return ffi.errno
    return errno.EINTR
