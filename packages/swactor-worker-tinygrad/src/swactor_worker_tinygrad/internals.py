"""Every use of tinygrad below its public surface, in one place, each with a test of its own.

tinygrad 0.14.0 calls almost all of this internal or alpha; the version is pinned and `environment.py` refuses
another. Knows buffers, captured graphs and their replay. Must not know models, stages or files.

Import only after `environment.prepare`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.device import Buffer, TinyELF
from tinygrad.dtype import DType
from tinygrad.engine.realize import get_runtime, resolve_params, run_linear
from tinygrad.helpers import diskcache_get, diskcache_put
from tinygrad.llm.gguf import _GGML_NATIVE, _GGML_QUANT, ggml_data_to_tensor
from tinygrad.uop.ops import Ops, UOp

UINT8, UINT32, FLOAT32 = dtypes.uint8, dtypes.uint32, dtypes.float32
_BF16 = 30

__all__ = [
    "FLOAT32",
    "UINT8",
    "UINT32",
    "Buffer",
    "Graph",
    "Launches",
    "NativeFunction",
    "address_of",
    "buffer_of",
    "builds_native",
    "bytes_view",
    "copy_within_device",
    "cpu_compiler",
    "dequantise",
    "graph_types",
    "large_memory",
    "new_buffer",
    "open_device",
    "position_variable",
    "read_bytes",
    "release_unused",
    "tensor_at_address",
    "tensor_of",
    "write_bytes",
]


def open_device(name: str) -> str:
    """Opens the device and returns its canonical name; whatever its driver raises goes through."""
    if name.partition(":")[0] != "CPU":
        return str(Device[name].device)
    with _own_programs_from_disk():
        return str(Device[name].device)


class _Made:
    """What the CPU device asks of a program."""

    def __init__(self, code: TinyELF) -> None:
        self._code = code

    def to_elf(self) -> TinyELF:
        return self._code


@contextlib.contextmanager
def _own_programs_from_disk() -> Iterator[None]:
    """The CPU device generates the source of its four own programs whenever it is opened, a sixth of a second
    for the same bytes. Inside this they come from tinygrad's cache on disk, where compiled code is kept."""
    from tinygrad.runtime import ops_cpu

    generate = ops_cpu.do_to_program

    def remembered(program: UOp, renderer: Any) -> Any:
        key = f"{program.key.hex()} {renderer.target!r}"
        code = diskcache_get("swactor_device_program", key)
        if not isinstance(code, TinyELF):
            code = diskcache_put("swactor_device_program", key, generate(program, renderer).to_elf())
        return _Made(code)

    ops_cpu.do_to_program = remembered
    try:
        yield
    finally:
        ops_cpu.do_to_program = generate


def graph_types() -> frozenset[int]:
    """The ggml types that `dequantise` can unpack inside a kernel."""
    return frozenset(_GGML_NATIVE) | frozenset(_GGML_QUANT)


def dequantise(blob: Tensor, elements: int, ggml_type: int) -> Tensor:
    """A lazy flat f32 tensor of the blob's values; `blob` is 1-D uint8 from the tensor's first byte on."""
    if ggml_type == _BF16:  # by bits: compilers before clang 15 have no bfloat16 on x86
        return blob.bitcast(dtypes.uint16).cast(dtypes.uint32).lshift(16).bitcast(dtypes.float32)
    return ggml_data_to_tensor(blob, elements, ggml_type).flatten()[:elements].cast(dtypes.float32)


# Buffers.


def new_buffer(device: str, nbytes: int) -> Buffer:
    """`nbytes` of device memory, contents undefined. Raises MemoryError when there is none."""
    try:
        return Buffer(device, nbytes, dtypes.uint8, preallocate=True)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"{nbytes} bytes cannot be had on {device}") from error
        raise


def release_unused(device: str) -> None:
    """Gives memory that tinygrad keeps for reuse back to the system."""
    allocator = Device[device].allocator
    if hasattr(allocator, "free_cache"):
        # Freeing waits for the device, which may allocate: in the middle of its own walk through the cache.
        Device[device].synchronize()
        allocator.free_cache()


def large_memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed host memory in large pages where the system has them. Raises MemoryError."""
    try:
        room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes cannot be had on the host") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, np.uint8)


def tensor_of(buffer: Buffer, shape: tuple[int, ...], dtype: DType, byte_offset: int = 0) -> Tensor:
    """A tensor over part of a buffer, without a copy; writing to one writes to the other."""
    count = int(np.prod(shape, dtype=np.int64))
    if byte_offset + count * dtype.itemsize > buffer.nbytes:
        raise ValueError(f"{shape} of {dtype} at byte {byte_offset} does not fit {buffer.nbytes} bytes")
    view = buffer.view(count, dtype, byte_offset).ensure_allocated()
    return Tensor(UOp.from_buffer(view)).reshape(shape)


def buffer_of(tensor: Tensor) -> Buffer:
    """The allocated buffer of a realized tensor."""
    return tensor.uop.base.buffer.ensure_allocated()


def tensor_at_address(address: int, nbytes: int, device: str) -> Tensor:
    """A uint8 tensor over host memory that the caller keeps alive; only where kernels run on host memory."""
    return Tensor.from_blob(address, (nbytes,), dtype=dtypes.uint8, device=device)


def address_of(buffer: Buffer) -> int:
    """Where the memory of a buffer on the CPU device begins."""
    return int(buffer.ensure_allocated()._buf.va_addr)


def bytes_view(buffer: Buffer) -> memoryview | None:
    """The buffer's own memory as writable bytes, or None where the host cannot reach it."""
    if not hasattr(buffer.allocator, "_as_buffer"):
        return None
    return memoryview(buffer.as_memoryview(force_zero_copy=True)).cast("B")


def write_bytes(buffer: Buffer, byte_offset: int, source: memoryview) -> None:
    """Copies host bytes into the buffer; complete, with `source` free again, on return.

    Through a writable host copy, because CUDA's copy takes the address of a writable buffer and does not
    finish before the next synchronisation.
    """
    raw = source.cast("B")
    direct = bytes_view(buffer)
    if direct is not None:
        direct[byte_offset : byte_offset + len(raw)] = raw
        return
    staging = Buffer("PYTHON", len(raw), dtypes.uint8, opaque=memoryview(bytearray(raw)))
    buffer.view(len(raw), dtypes.uint8, byte_offset).ensure_allocated().copy_from(staging)
    Device[buffer.device].synchronize()


def read_bytes(buffer: Buffer, byte_offset: int, target: memoryview) -> None:
    """Fills `target` from the buffer; complete on return."""
    direct = bytes_view(buffer)
    if direct is not None:
        target[:] = direct[byte_offset : byte_offset + len(target)]
        return
    target[:] = buffer.view(len(target), dtypes.uint8, byte_offset).ensure_allocated().as_memoryview()


def copy_within_device(
    target: Buffer, target_offset: int, source: Buffer, source_offset: int, nbytes: int
) -> None:
    """Copies bytes between two buffers of one device."""
    to, of = bytes_view(target), bytes_view(source)
    if to is not None and of is not None:
        to[target_offset : target_offset + nbytes] = of[source_offset : source_offset + nbytes]
        return
    piece = source.view(nbytes, dtypes.uint8, source_offset).ensure_allocated()
    target.view(nbytes, dtypes.uint8, target_offset).ensure_allocated().copy_from(piece)


# Machine code of our own.


def cpu_compiler() -> Any:
    """The CPU device's compiler, with its cache on disk."""
    return Device["CPU"].renderer.compiler


class NativeFunction:
    """A C source with one function, built by the CPU device's compiler (and its cache) and loaded by its
    runtime. `function` takes ctypes words; `address` is where the code begins, valid while this lives."""

    def __init__(self, source: str, name: str) -> None:
        device = Device["CPU"]
        program = TinyELF(cpu_compiler().compile_cached(source), name, device.renderer.target, ())
        self._program = device.runtime(program)
        self.function = self._program.fxn
        self.address = int(self._program.addr)


def builds_native(device: str) -> bool:
    """Whether the device runs machine code built from C: the CPU device with its Clang renderer."""
    return device.partition(":")[0] == "CPU" and type(Device[device].renderer).__name__ == "ClangRenderer"


# Captured graphs.


def position_variable(name: str, last: int) -> UOp:
    """An integer 0..last that a captured graph takes at each replay. `last` must be positive: a variable
    with one possible value is folded away."""
    return UOp.variable(name, 0, max(1, last))


@dataclass(frozen=True, slots=True)
class _Launch:
    """One kernel with its arguments: `values` are shared cells that the position is written into."""

    function: Callable[..., Any]
    arguments: tuple[ctypes.c_uint64, ...]


class Graph:
    """A function of tensors, captured once and replayed over other tensors of the same shapes.

    Capturing with the first call, not the second, is sound because every input is realized beforehand.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Tensor], variables: dict[str, UOp]
    ) -> None:
        """`function(inputs, **variables)` must write all its results into inputs and return None or a
        tensor that it realized. `variables` are unbound; capture runs with each at zero."""
        bound = {name: variable.bind(0) for name, variable in variables.items()}
        jit = TinyJit(function)
        jit.cnt = 1
        jit(list(inputs), **bound)
        self._linear = jit.captured.linear

    @property
    def kernels(self) -> int:
        return len(self._linear.src)

    def bind(self, inputs: Sequence[Tensor]) -> Launches:
        """The graph over these inputs, which must have the shapes of the capture and distinct buffers."""
        return Launches(self._linear, tuple(tensor.uop.base for tensor in inputs), tuple(inputs))


class Launches:
    """A captured graph bound to buffers. On the CPU device the kernels are called directly with arguments
    prepared once; elsewhere tinygrad replays the graph."""

    def __init__(self, linear: UOp, inputs: tuple[UOp, ...], keep: tuple[Tensor, ...]) -> None:
        self._linear, self._inputs, self._keep = linear, inputs, keep
        self._cells: dict[str, ctypes.c_uint64] = {}
        self._prepared = self._prepare()

    def _prepare(self) -> list[_Launch] | None:
        """None when a call is anything else than a program on the CPU device's one-function kernels."""
        prepared = []
        for call in self._linear.src:
            program = call.src[0]
            if program.op is not Ops.PROGRAM:
                return None
            device = call.src[1].device
            if not isinstance(device, str) or device.split(":")[0] != "CPU":
                return None
            runtime = get_runtime(device, program)
            info = program.arg
            if info.runtimevars or runtime.lvp or any(not isinstance(size, int) for size in info.global_size):
                return None
            buffers = [uop.buffer.ensure_allocated() for uop in resolve_params(call, self._inputs)]
            self._keep += tuple(buffers)
            arguments = [ctypes.c_uint64(buffers[i].get_buf(device).va_addr) for i in info.globals]
            arguments += [self._cells.setdefault(v.expr, ctypes.c_uint64(0)) for v in info.vars]
            prepared.append(_Launch(runtime.fxn, tuple(arguments)))
        return prepared

    @property
    def direct(self) -> bool:
        """Whether kernels are called without tinygrad's replay."""
        return self._prepared is not None

    def forget_direct(self) -> None:
        """Replays through tinygrad from now on, as devices other than the CPU do."""
        self._prepared = None

    def run(self, values: dict[str, int]) -> None:
        """Runs all kernels in order; on CPU complete on return, elsewhere queued."""
        if self._prepared is None:
            run_linear(self._linear, values, input_uops=self._inputs, jit=True)
            return
        for name, cell in self._cells.items():
            cell.value = values[name]
        for launch in self._prepared:
            launch.function(*launch.arguments)
