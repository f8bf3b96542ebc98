"""Functions of machine code: as an earlier process kept them, else as tinygrad's compiler builds them.

Knows C sources with one function, and files of finished code in the folder of this processor's kernels. Must
not know what the functions do. Imports tinygrad only to build: a start that finds its code needs none of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import stat
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from swactor_core.whole_files import write_whole

from swactor_worker_tinygrad.building import Builder
from swactor_worker_tinygrad.environment import require_tinygrad

_DIGEST_BYTES = 16


class NativeFunction:
    """A C source with one function, called `kernel`. `function` takes ctypes words; `address` is where the
    code begins, valid while this lives. Only after `environment.prepare`. Raises what the compiler raises,
    and ResourceError where there is no tinygrad to build with."""

    def __init__(self, source: str, builder: Builder | None = None) -> None:
        """With a `builder`, code that is not kept yet is built by that one if it can."""
        code = _mapped(_kept_at(source))
        #: whether no compiler was asked
        self.kept = code is not None
        if code is None and builder is not None and builder.build(source):
            code = _mapped(_kept_at(source))
        if code is not None:
            self._held: Any = code
            self.address = code.address
            self.function: Any = ctypes.CFUNCTYPE(None)(self.address)
            return
        require_tinygrad()
        from swactor_worker_tinygrad import internals

        built = internals.NativeFunction(source, "kernel")
        if built.image is not None:
            keep(source, built.image)
        self._held, self.address, self.function = built, built.address, built.function


def _kept_at(source: str) -> Path:
    """The file for this source's code: the folder is of one tinygrad, processor and compiler, DEV may name
    another processor to build for."""
    name = hashlib.blake2b(f"{os.environ['DEV']}\n{source}".encode(), digest_size=20).hexdigest()
    return Path(os.environ["CACHEDB"]).parent / f"{name}.code"


@cache
def _libc() -> ctypes.CDLL:
    """One for all: each is garbage that only a collection finds, and a worker's collections are rare."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


class _Mapped:
    """A file's code, ready to run at `address` while this lives. Python's own mmap would keep a descriptor
    for each. Raises OSError, as on a file system that nothing may be run from."""

    def __init__(self, descriptor: int, size: int) -> None:
        libc = _libc()
        address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address = int(address)
        self.data = memoryview((ctypes.c_char * size).from_address(self.address)).cast("B")
        weakref.finalize(self, libc.munmap, self.address, size).atexit = False  # a thread may be in it still


def _mapped(path: Path) -> _Mapped | None:
    """The file's code, ready to run; None where there is none, not all of it, or others may have written it:
    whatever has become of the folder since it was looked at."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        state = os.fstat(descriptor)
        if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        code = _Mapped(descriptor, state.st_size)
    except OSError:  # a file system that nothing may be run from; an empty file
        return None
    finally:
        os.close(descriptor)
    intact = _digest(code.data[:-_DIGEST_BYTES]) == code.data[-_DIGEST_BYTES:]
    return code if intact else None


def keep(source: str, image: bytes) -> bool:
    """Writes the source's code to the disk, whole or not at all; False where the folder cannot be written."""
    try:
        write_whole(_kept_at(source), image + _digest(image), private=True)
    except OSError:
        return False
    return True


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
