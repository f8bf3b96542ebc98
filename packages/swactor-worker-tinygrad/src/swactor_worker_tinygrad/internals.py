"""Every use of tinygrad below its public surface, in one place, each with a test of its own.

tinygrad 0.14.0 calls almost all of this internal or alpha; the version is pinned and `environment.py` refuses
another. Knows buffers, captured graphs and their replay. Must not know models, stages or files.

Import only after `environment.prepare`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

import numpy as np
from swactor_core.values import frozen
from tinygrad import Device, Tensor, TinyJit, dtypes, helpers
from tinygrad.codegen import to_program_cache
from tinygrad.device import Buffer, TinyELF
from tinygrad.dtype import DType
from tinygrad.engine.jit import graph_split_rewrite
from tinygrad.engine.realize import resolve_params, run_linear, runtime_cache
from tinygrad.helpers import ContextVar, diskcache_get, diskcache_put
from tinygrad.llm.gguf import _GGML_NATIVE, _GGML_QUANT, ggml_data_to_tensor
from tinygrad.runtime.support.elf import jit_loader
from tinygrad.schedule import indexing, schedule_cache
from tinygrad.uop import divandmod
from tinygrad.uop.ops import Ops, UOp

from swactor_worker_tinygrad.environment import require_tinygrad
from swactor_worker_tinygrad.kernel_search import Found, KernelSearch

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
    "bytes_view",
    "copy_within_device",
    "cpu_compiler",
    "dequantise",
    "finish",
    "forget_captures",
    "graph_types",
    "in_one",
    "is_kept",
    "new_buffer",
    "open_device",
    "position_variable",
    "read_bytes",
    "release_unused",
    "tensor_in_memory",
    "tensor_of",
    "write_bytes",
]


def open_device(name: str) -> str:
    """Opens the device and returns its canonical name; whatever its driver raises goes through. Raises
    ResourceError for another tinygrad than this is written for."""
    require_tinygrad()
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
    """Gives memory that tinygrad keeps for reuse back to the system. A device that has failed, as it says at
    every call, has its memory until the process ends."""
    allocator = Device[device].allocator
    if hasattr(allocator, "free_cache"):
        with contextlib.suppress(RuntimeError):  # or it would hide what the device failed of
            # freeing waits for the device, which may allocate in the middle of its own walk through the cache
            Device[device].synchronize()
            allocator.free_cache()


def finish(device: str) -> None:
    """Waits until the device has done all that it was given. Raises RuntimeError where that failed."""
    Device[device].synchronize()


def tensor_of(buffer: Buffer, shape: tuple[int, ...], dtype: DType, byte_offset: int = 0) -> Tensor:
    """A tensor over part of a buffer, without a copy; writing to one writes to the other."""
    count = _count_within(buffer.nbytes, shape, dtype, byte_offset)
    view = buffer.view(count, dtype, byte_offset).ensure_allocated()
    return Tensor(UOp.from_buffer(view)).reshape(shape)


def tensor_in_memory(
    address: int, nbytes: int, shape: tuple[int, ...], dtype: DType, *, device: str
) -> Tensor:
    """A tensor over `nbytes` of host memory that the caller keeps alive, as `tensor_of` is one over a buffer;
    only where kernels run on host memory."""
    _count_within(nbytes, shape, dtype, 0)
    return Tensor.from_blob(address, shape, dtype=dtype, device=device)


def _count_within(nbytes: int, shape: tuple[int, ...], dtype: DType, byte_offset: int) -> int:
    count = int(np.prod(shape, dtype=np.int64))
    if byte_offset + count * dtype.itemsize > nbytes:
        raise ValueError(f"{shape} of {dtype} at byte {byte_offset} does not fit {nbytes} bytes")
    return count


def buffer_of(tensor: Tensor) -> Buffer:
    """The allocated buffer of a realized tensor."""
    return tensor.uop.base.buffer.ensure_allocated()


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
    runtime. `function` takes ctypes words; `address` is where the code begins, valid while this lives.
    `image` is the code as it may lie at the beginning of any page, in any process; None where it cannot."""

    def __init__(self, source: str, name: str) -> None:
        open_device("CPU")
        device = Device["CPU"]
        code = cpu_compiler().compile_cached(source)
        self._program = device.runtime(TinyELF(code, name, device.renderer.target, ()))
        self.function = self._program.fxn
        self.address = int(self._program.addr)
        self.image = portable_code(code)


def portable_code(code: bytes) -> bytes | None:
    """An object file's code, if it calls nothing outside of itself and does not depend on where it lies."""
    try:
        here, elsewhere = (jit_loader(code, base=base, link_libs=[]) for base in (0, 1 << 16))
    except RuntimeError:  # a symbol that others define
        return None
    return here if here == elsewhere else None


# Captured graphs.


def position_variable(name: str, last: int) -> UOp:
    """An integer 0..last that a captured graph takes at each replay. `last` must be positive: a variable
    with one possible value is folded away."""
    return UOp.variable(name, 0, max(1, last))


class _Is(IntEnum):
    """What an argument of a kernel is: a byte of an input, a byte of a buffer of the graph's own, a value."""

    INPUT = 0
    OWN = 1
    VALUE = 2


@frozen
class _Recipe:
    """A captured graph without tinygrad's graph: programs with their arguments, in order, as they are kept on
    disk. An argument is (what it is, which, byte offset). `own` are the sizes of the buffers that only its
    kernels read and write; `portable` says that nothing was in those before the first kernel ran. `choices`
    are the search's results that its kernels follow from."""

    programs: tuple[tuple[TinyELF, tuple[tuple[int, Any, int], ...]], ...]
    own: tuple[int, ...]
    portable: bool
    choices: tuple[tuple[str, Found | None], ...] = ()


@frozen
class _Replay:
    """A captured graph as tinygrad replays it, for devices whose kernels are not called directly: compiled
    programs over the inputs' places, with the buffers between them, which are empty on disk."""

    linear: UOp
    choices: tuple[tuple[str, Found | None], ...] = ()


def _recipe_of(linear: UOp, inputs: tuple[UOp, ...]) -> tuple[_Recipe, list[Buffer]] | None:
    """The graph over `inputs` as programs, and its own buffers; None when a call is anything else than a
    program on the CPU device's one-function kernels."""
    given = {id(uop.buffer.base): index for index, uop in enumerate(inputs)}
    own: dict[int, tuple[int, Buffer]] = {}
    programs, written, portable = [], set(), True

    def place(buffer: Buffer) -> tuple[int, Any, int]:
        base = buffer.base
        if id(base) in given:
            return _Is.INPUT, given[id(base)], buffer.offset
        index, _ = own.setdefault(id(base), (len(own), base))
        return _Is.OWN, index, buffer.offset

    for call in linear.src:
        program = call.src[0]
        if program.op is not Ops.PROGRAM:
            return None
        device = call.src[1].device
        if not isinstance(device, str) or device.split(":")[0] != "CPU":
            return None
        info = program.arg
        if info.runtimevars or info.target.renderer == "LVP":
            return None
        if any(not isinstance(size, int) for size in info.global_size):
            return None
        buffers = [uop.buffer.ensure_allocated() for uop in resolve_params(call, inputs)]
        read = {(*place(buffers[i]), buffers[i].nbytes) for i in info.ins}
        portable = portable and all(each[0] == _Is.INPUT or each in written for each in read)
        written |= {(*place(buffers[i]), buffers[i].nbytes) for i in info.outs}
        arguments = [place(buffers[i]) for i in info.globals]
        arguments += [(_Is.VALUE, variable.expr, 0) for variable in info.vars]
        # the signature holds graph nodes and is of no use to a program that is called directly
        programs.append((replace(program.to_elf(), signature=(), profile_key=None), tuple(arguments)))
    bases = [base for _, base in own.values()]
    return _Recipe(tuple(programs), tuple(base.nbytes for base in bases), portable), bases


class Graph:
    """A function of tensors, captured once and replayed over other tensors of the same shapes.

    On the CPU device the capture is reduced to programs and their arguments, and with a `key` that is kept on
    disk: the next start with the same key, inputs and variables takes seconds less, and none of the memory
    that capturing takes. Capturing with the first call, not the second, is sound because every input is
    realized beforehand.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        variables: dict[str, UOp],
        *,
        key: str = "",
        direct: bool = True,
        search: KernelSearch | None = None,
    ) -> None:
        """`function(inputs, **variables)` must write all its results into inputs and return None or a
        tensor that it realized. `variables` are unbound; capture runs with each at zero. `key` must name
        everything that the function depends on besides them; empty: nothing is kept. Without `direct` the
        graph is replayed through tinygrad, as devices other than the CPU do. With a `search` its kernels are
        those that it chooses; a kept graph whose kernels it would choose otherwise is captured anew."""
        self._linear: UOp | None = None
        self._recipe: _Recipe | None = None
        self._search = search
        self._choices: dict[str, Found | None] = {}
        kept = _kept_under(key, inputs, variables, search) if key and direct else ""
        found = _found(kept, search) if kept else None
        #: whether tinygrad had to capture, rather than read what an earlier process had captured
        self.captured = found is None
        if isinstance(found, _Recipe):
            self._recipe, self._choices = found, dict(found.choices)
            self._own = [new_buffer("CPU", nbytes) for nbytes in found.own]
        elif found is not None:
            self._linear, self._choices = found.linear, dict(found.choices)
        else:
            self._capture(function, inputs, variables, kept=kept, direct=direct)
        self._programs = [] if self._recipe is None else [_load(code) for code, _ in self._recipe.programs]

    def _capture(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        variables: dict[str, UOp],
        *,
        kept: str,
        direct: bool,
    ) -> None:
        bound = {name: variable.bind(0) for name, variable in variables.items()}
        jit = TinyJit(function)
        jit.cnt = 1
        with self._search or contextlib.nullcontext():
            jit(list(inputs), **bound)
        linear = jit.captured.linear
        made = _recipe_of(linear, tuple(tensor.uop.base for tensor in inputs)) if direct else None
        if self._search is not None:
            self._choices = dict(self._search.choices)
        choices = tuple(self._choices.items())
        if made is None:
            self._linear = linear
            if kept:
                jit.captured.free_intermediates()
                diskcache_put(_RECIPES, kept, _Replay(linear, choices))
            return
        self._recipe, self._own = replace(made[0], choices=choices), made[1]
        if kept and self._recipe.portable:
            diskcache_put(_RECIPES, kept, self._recipe)
        del jit, linear, made
        forget_captures()

    @property
    def choices(self) -> dict[str, Found | None]:
        """What a search found for kernels of this graph, and for others that the process made before."""
        return dict(self._choices)

    @property
    def kernels(self) -> int:
        return len(self._programs) if self._linear is None else len(self._linear.src)

    def bind(self, inputs: Sequence[Tensor]) -> Launches:
        """The graph over these inputs, which must have the shapes of the capture and distinct buffers."""
        if self._recipe is None:
            assert self._linear is not None
            bases = tuple(tensor.uop.base for tensor in inputs)
            return Launches(tuple(inputs), linear=self._linear, bases=bases)
        cells: dict[str, ctypes.c_uint64] = {}
        places = [[address_of(buffer_of(tensor)) for tensor in inputs], [address_of(b) for b in self._own]]

        def argument(kind: int, which: Any, offset: int) -> ctypes.c_uint64:
            if kind == _Is.VALUE:
                return cells.setdefault(which, ctypes.c_uint64(0))
            return ctypes.c_uint64(places[kind][which] + offset)

        launches = [
            _Launch(program.fxn, tuple(argument(*each) for each in arguments))
            for program, (_, arguments) in zip(self._programs, self._recipe.programs, strict=True)
        ]
        return Launches((*inputs, *self._own, *self._programs), launches=launches, cells=cells)


_RECIPES = "swactor_graph"


def is_kept(
    inputs: Sequence[Tensor], variables: dict[str, UOp], *, key: str, search: KernelSearch | None = None
) -> bool:
    """Whether a `Graph` of these would find itself captured."""
    return _found(_kept_under(key, inputs, variables, search), search) is not None


def _found(kept: str, search: KernelSearch | None) -> _Recipe | _Replay | None:
    found = diskcache_get(_RECIPES, kept)
    if not isinstance(found, _Recipe | _Replay):
        return None
    return found if search is None or search.holds(dict(found.choices)) else None


def forget_captures() -> None:
    """Empties tinygrad's caches of graphs, schedules and generated programs, which hold tens of MiB and never
    let go: a recipe needs none of them. What is captured again is made again, but not compiled again."""
    for cache in (to_program_cache, schedule_cache, runtime_cache):
        cache.clear()
    for function in (indexing.apply_movement_op, indexing._apply_reshape, divandmod.fold_divmod_general):
        function.cache_clear()


def _load(code: TinyELF) -> Any:
    return Device["CPU"].runtime(code)


def _kept_under(
    key: str, inputs: Sequence[Tensor], variables: dict[str, UOp], search: KernelSearch | None
) -> str:
    """The name on disk of a graph over such inputs: `key`, and what tinygrad's code generation depends on."""
    switches = sorted((v.key, repr(v.value)) for v in vars(helpers).values() if isinstance(v, ContextVar))
    shapes = [(tensor.shape, str(tensor.dtype), buffer_of(tensor).nbytes) for tensor in inputs]
    bounds = [(name, v.vmin, v.vmax) for name, v in variables.items()]
    devices = sorted({str(t.device) for t in inputs})
    targets = [Device[name].renderer.target for name in devices]
    key += ", searched" * bool(search)
    text = repr((key, switches, shapes, bounds, devices, targets))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


@frozen
class _Launch:
    """One kernel with its arguments: those that are values are cells that they are written into."""

    function: Callable[..., Any]
    arguments: tuple[ctypes.c_uint64, ...]


class Launches:
    """A captured graph bound to buffers. On the CPU device the kernels are called directly with arguments
    prepared once; elsewhere tinygrad replays the graph."""

    def __init__(
        self,
        keep: tuple[Any, ...],
        *,
        linear: UOp | None = None,
        bases: tuple[UOp, ...] = (),
        launches: Sequence[_Launch] = (),
        cells: dict[str, ctypes.c_uint64] | None = None,
    ) -> None:
        """`keep` lives as long as this; `bases` are the buffers that a `linear` runs over."""
        self._keep, self._linear, self._bases = keep, linear, bases
        self._launches, self._cells = launches, cells or {}

    @property
    def direct(self) -> bool:
        """Whether kernels are called without tinygrad's replay."""
        return self._linear is None

    def run(self, values: dict[str, int]) -> None:
        """Runs all kernels in order; on CPU complete on return, elsewhere queued."""
        if self._linear is not None:
            run_linear(self._linear, values, input_uops=self._bases, jit=True)
            return
        for name, cell in self._cells.items():
            cell.value = values[name]
        for launch in self._launches:
            launch.function(*launch.arguments)

    def calls(self) -> list[UOp]:
        """What tinygrad would replay, over this one's own buffers instead of places for them."""
        assert self._linear is not None
        made = []
        for call in self._linear.src:
            graphed = call.src[0].op is Ops.CUSTOM_FUNCTION and call.src[0].arg == "graph"
            for each in call.src[0].src[0].src if graphed else (call,):
                program, *arguments = each.src
                made.append(each.replace(src=(program, *map(self._placed, arguments))))
        return made

    def _placed(self, argument: UOp) -> UOp:
        places = {uop: self._bases[uop.arg.slot] for uop in argument.toposort() if uop.op is Ops.PARAM}
        return argument.substitute(places) if places else argument


def in_one(launches: Sequence[Launches]) -> list[Launches]:
    """The same work in as few replays as can be. A graph that is replayed over one set of buffers after
    another has all its kernels' arguments set each time, one over its own buffers those that changed: half
    the host's time for a token. Where kernels are called directly, as on the CPU, nothing is to be gained."""
    if any(each.direct for each in launches) or len(launches) < 2:
        return list(launches)
    calls = tuple(call for each in launches for call in each.calls())
    linear = graph_split_rewrite(UOp(Ops.LINEAR, src=calls), max_batch_size=helpers.JIT_BATCH_SIZE.value)
    return [Launches(tuple(launches), linear=linear)]
