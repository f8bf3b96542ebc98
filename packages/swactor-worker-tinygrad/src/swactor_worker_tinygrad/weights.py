"""The stage's weights: bytes of a model file, mapped read-only and handed to the device as they are.

Knows files, maps and tensor types. Must not know the model's graph. On a device that runs on host memory a
tensor is the file's own pages, quantised as stored: nothing is copied, several stages of one host share them,
and only the ranges of this stage's tensors are ever read. Elsewhere the bytes are copied to the device.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from swactor_core.faults import RoleFailure
from swactor_core.spi.loader import TensorRef
from swactor_core.spi.worker import RoleError
from swactor_core.values import frozen

from swactor_worker_tinygrad.device_memory import on_host
from swactor_worker_tinygrad.tensor_types import F32

if TYPE_CHECKING:
    from tinygrad import Tensor

ALIGNMENT = 32
UNPACKED_AT_ONCE = 1 << 20  # values that are for a moment held twice
PAGE = mmap.PAGESIZE


@dataclass(frozen=True)  # without slots: `blob` is made when it is first asked for, native kernels never do
class Weight:
    """`stored` are the bytes on the host, of values of `ggml_type`; `shape` is row-major. `copy` are the same
    bytes on a device with memory of its own, 1-D uint8."""

    name: str
    stored: NDArray[np.uint8]
    ggml_type: int
    shape: tuple[int, ...]
    device: str
    copy: Tensor | None = None

    @cached_property
    def blob(self) -> Tensor:
        """1-D uint8 on the device."""
        if self.copy is not None:
            return self.copy
        from swactor_worker_tinygrad import internals

        nbytes = len(self.stored)
        return internals.tensor_in_memory(
            self.address, nbytes, (nbytes,), internals.UINT8, device=self.device
        )

    @property
    def address(self) -> int:
        """Where the bytes on the host begin."""
        return int(self.stored.ctypes.data)

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def values(self) -> Tensor:
        """Lazy f32 values, unpacked inside the kernel that reads them."""
        from swactor_worker_tinygrad import internals

        return internals.dequantise(self.blob, self.elements, self.ggml_type).reshape(self.shape)


@frozen
class Ends:
    """What turns the last block's rows into logits."""

    norm: Weight
    head: Weight
    bias: Weight | None

    def weights(self) -> list[Weight]:
        return [self.norm, self.head, *([] if self.bias is None else [self.bias])]


class WeightFiles:
    """Read-only maps of the model files that hold the stage's tensors, kept open until `close`."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._on_host = on_host(device)
        self._maps: dict[str, mmap.mmap] = {}
        self._views: dict[str, NDArray[np.uint8]] = {}
        self._owned: list[NDArray[np.uint8]] = []
        self._descriptors: dict[str, int] = {}

    def open(self, refs: Iterable[TensorRef]) -> None:
        """Maps every file named by `refs`. Raises RoleError when one is missing, or shorter than a tensor."""
        for ref in refs:
            if ref.path not in self._maps:
                self._map(ref.path)
            # the system begins to read this range now, while others are checked and bound
            start = ref.offset // PAGE * PAGE
            if 0 <= start < len(self._maps[ref.path]) and ref.nbytes > 0:
                self._maps[ref.path].madvise(mmap.MADV_WILLNEED, start, ref.offset + ref.nbytes - start)
            if ref.offset < 0 or ref.offset + ref.nbytes > len(self._views[ref.path]):
                raise RoleError(
                    RoleFailure.WEIGHTS_UNREADABLE,
                    f"{ref.path} ends before tensor {ref.name!r} "
                    f"(bytes {ref.offset} to {ref.offset + ref.nbytes} of {len(self._views[ref.path])})",
                    hint="the file is incomplete: fetch it again",
                )

    def _map(self, path: str) -> None:
        try:
            self._descriptors[path] = descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(descriptor).st_size
            self._maps[path] = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise RoleError(
                RoleFailure.WEIGHTS_UNREADABLE,
                f"the model file {path!r} cannot be read: {error}",
                hint="the same file must be readable on every node that runs a stage of it",
            ) from error
        self._views[path] = np.frombuffer(self._maps[path], np.uint8)

    def stored(self, ref: TensorRef) -> NDArray[np.uint8]:
        """The tensor's bytes as they are in the file, without a copy."""
        return self._views[ref.path][ref.offset : ref.offset + ref.nbytes]

    def rows(self, ref: TensorRef, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows `ids` of a matrix as f32 (len(ids), dims[0]); only their bytes are read."""
        table = self.stored(ref).reshape(ref.dims[1], -1)
        return unpack_on_host(table[ids], ref.ggml_type, ref.dims[0])

    def read_rows(self, ref: TensorRef, ids: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """Rows `ids` of a matrix as stored (len(ids), row bytes), read from the file and not through the map,
        so that none of its pages are held for them. The first row is aligned. Raises OSError."""
        row_bytes = ref.nbytes // ref.dims[1]
        room = np.empty(len(ids) * row_bytes + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        rows = room[start : start + len(ids) * row_bytes].reshape(-1, row_bytes)
        descriptor = self._descriptors[ref.path]
        for row, index in zip(rows, ids, strict=True):
            if os.preadv(descriptor, [row.data], ref.offset + int(index) * row_bytes) != row_bytes:
                raise OSError(f"{ref.path} ended while it was in use, before row {index} of {ref.name!r}")
        return rows

    def bind(self, ref: TensorRef, readable: Container[int]) -> Weight:
        """The tensor on the device, as f32 where kernels cannot read its type. Raises MemoryError."""
        shape = tuple(reversed(ref.dims))
        stored, ggml_type = self.stored(ref), ref.ggml_type
        if ggml_type not in readable:
            values = unpack_on_host(stored.reshape(-1, ref.nbytes // _rows(ref)), ggml_type, ref.dims[0])
            stored, ggml_type = np.ascontiguousarray(values).view(np.uint8).reshape(-1), F32
        if not self._on_host:
            from swactor_worker_tinygrad import internals

            buffer = internals.new_buffer(self.device, len(stored))
            internals.write_bytes(buffer, 0, stored.data)
            copy = internals.tensor_of(buffer, (len(stored),), internals.UINT8)
        else:
            copy = None
            if stored.ctypes.data % ALIGNMENT:
                # kernels load whole vectors: a file with a smaller alignment is copied
                stored = _aligned_copy(stored)
            if ggml_type != ref.ggml_type or stored.base is not self._views[ref.path]:
                self._owned.append(stored)
            stored[::PAGE].max()  # reads the pages now, so that the first token does not wait for the disk
        return Weight(ref.name, stored, ggml_type, shape, self.device, copy)

    def let_go(self, ref: TensorRef) -> None:
        """Says that the tensor's bytes are not needed soon; reading them again is slower, not wrong."""
        start = -(-ref.offset // PAGE) * PAGE
        end = (ref.offset + ref.nbytes) // PAGE * PAGE
        if end > start:
            self._maps[ref.path].madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmaps the files. Tensors bound on host memory must not be used afterwards. Idempotent."""
        self._owned.clear()
        self._views.clear()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        while self._maps:
            # a view that somebody still holds keeps its map, which then goes with the view
            with contextlib.suppress(BufferError):
                self._maps.popitem()[1].close()


def _rows(ref: TensorRef) -> int:
    return int(np.prod(ref.dims[1:], dtype=np.int64))


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]


def _aligned_copy(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    copy = _aligned(len(data))
    copy[:] = data
    return copy


def unpack_on_host(rows: NDArray[np.uint8], ggml_type: int, width: int) -> NDArray[np.float32]:
    """(n, row bytes) of any usable type to f32 (n, width)."""
    native = {24: np.int8, 25: np.int16, 26: np.int32, 27: np.int64, 28: np.float64}
    rows = np.ascontiguousarray(rows)
    if ggml_type == F32:
        return rows.view(np.float32)
    if ggml_type in native:
        return rows.view(native[ggml_type]).astype(np.float32)
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(ggml_type)
    values = _aligned(len(rows) * width * 4).view(np.float32).reshape(-1, width)
    step = max(1, UNPACKED_AT_ONCE // width)
    try:
        for start in range(0, len(rows), step):
            values[start : start + step] = dequantize(rows[start : start + step], kind).reshape(-1, width)
        return values
    except NotImplementedError:
        from tinygrad import Tensor

        from swactor_worker_tinygrad import internals

        blob = Tensor(rows.reshape(-1).copy())
        return np.asarray(internals.dequantise(blob, len(rows) * width, ggml_type).numpy()).reshape(-1, width)


def bind_all(
    files: WeightFiles,
    refs: list[TensorRef],
    readable: Container[int],
    *,
    progress: Callable[[int, int], None],
    should_abort: Callable[[], bool],
) -> dict[str, Weight]:
    """Binds every tensor, reporting (bytes bound, all bytes) after each. Raises RoleError when aborted."""
    total = sum(ref.nbytes for ref in refs)
    done, bound = 0, {}
    for ref in refs:
        if should_abort():
            raise RoleError(RoleFailure.BACKEND_ERROR, "stopped while loading weights")
        bound[ref.name] = files.bind(ref, readable)
        done += ref.nbytes
        progress(done, total)
    return bound
