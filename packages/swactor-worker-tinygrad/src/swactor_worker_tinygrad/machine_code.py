"""Functions of machine code: as an earlier process kept them, else as tinygrad's compiler builds them.

Knows C sources with one function, and files of finished code in the folder of this processor's kernels. Must
not know what the functions do. Imports tinygrad only to build: a start that finds its code needs none of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

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
            self.address = int(np.frombuffer(code, np.uint8).ctypes.data)
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


def _mapped(path: Path) -> mmap.mmap | None:
    """The file's code, ready to run; None where there is none, or not all of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        code = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    except (OSError, ValueError):  # a file system that nothing may be run from; an empty file
        return None
    finally:
        os.close(descriptor)
    with memoryview(code) as whole:
        intact = _digest(whole[:-_DIGEST_BYTES]) == whole[-_DIGEST_BYTES:]
    return code if intact else None


def keep(source: str, image: bytes) -> bool:
    """Writes the source's code to the disk, whole or not at all; False where the folder cannot be written."""
    path = _kept_at(source)
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(image + _digest(image))
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        return False
    return True


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
