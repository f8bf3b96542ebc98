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

_DIGEST_BYTES = 16


class NativeFunction:
    """A C source with one function, called `kernel`. `function` takes ctypes words; `address` is where the
    code begins, valid while this lives. Only after `environment.prepare`. Raises what the compiler raises."""

    def __init__(self, source: str) -> None:
        path = _kept_at(source)
        code = _mapped(path)
        #: whether no compiler was asked
        self.kept = code is not None
        if code is not None:
            self._held: Any = code
            self.address = int(np.frombuffer(code, np.uint8).ctypes.data)
            self.function: Any = ctypes.CFUNCTYPE(None)(self.address)
            return
        from swactor_worker_tinygrad import internals

        built = internals.NativeFunction(source, "kernel")
        if built.image is not None:
            _keep(path, built.image)
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


def _keep(path: Path, image: bytes) -> None:
    """Writes the file whole or not at all; a folder that cannot be written keeps nothing."""
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with open(descriptor, "wb") as file:
                file.write(image + _digest(image))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
