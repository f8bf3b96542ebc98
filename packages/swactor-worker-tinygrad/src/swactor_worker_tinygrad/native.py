"""Hand-written CPU kernels (`native/*.c`): built by tinygrad's compiler, run as lists.

Knows C sources, argument words and the team of threads that runs a list. Must not know models. tinygrad's own
CPU kernels unpack quantised weights value by value; these read whole blocks into vector registers, which is
some ten times faster and gives the same numbers. The sources need only Clang, as tinygrad itself does.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray
from swactor_core.errors import ResourceError

from swactor_worker_tinygrad.building import Builder
from swactor_worker_tinygrad.machine_code import NativeFunction
from swactor_worker_tinygrad.tensor_types import LANES

# as `native/run.c` has them
ENTRY_WORDS = 21
MOST_PARTS = 1023
_ALONE, _CALL, _END = 0, 1, 2
_FIRST = ctypes.c_uint64(0)
# ggml type -> the macro of its block in `native/types.h`
TYPES = {
    0: "TYPE_F32",
    1: "TYPE_F16",
    2: "TYPE_Q4_0",
    3: "TYPE_Q4_1",
    6: "TYPE_Q5_0",
    7: "TYPE_Q5_1",
    8: "TYPE_Q8_0",
    10: "TYPE_Q2_K",
    11: "TYPE_Q3_K",
    12: "TYPE_Q4_K",
    13: "TYPE_Q5_K",
    14: "TYPE_Q6_K",
    16: "TYPE_IQ2_XXS",
    17: "TYPE_IQ2_XS",
    18: "TYPE_IQ3_XXS",
    19: "TYPE_IQ1_S",
    20: "TYPE_IQ4_NL",
    21: "TYPE_IQ3_S",
    22: "TYPE_IQ2_S",
    23: "TYPE_IQ4_XS",
    29: "TYPE_IQ1_M",
    30: "TYPE_BF16",
    34: "TYPE_TQ1_0",
    35: "TYPE_TQ2_0",
    39: "TYPE_MXFP4",
    40: "TYPE_NVFP4",
    41: "TYPE_Q1_0",
}
# those of them whose blocks are in `native/coded.h`
_CODED = frozenset({16, 17, 18, 19, 21, 22, 29})
QUERIES = 4  # that `attention.c` takes at once, at most
_PANEL = 4  # rows that `experts.c` takes at once, at most


# types that `native/matmul_fast.c` multiplies as bytes -> the bytes of a block that it reads by fours
QUADS = {
    2: (2, 18),  # Q4_0
    3: (4, 20),  # Q4_1
    6: (2, 22),  # Q5_0
    7: (4, 24),  # Q5_1
    8: (2, 34),  # Q8_0
    10: (16, 80),  # Q2_K
    11: (0, 96),  # Q3_K
    12: (16, 144),  # Q4_K
    13: (16, 176),  # Q5_K
    14: (0, 192),  # Q6_K
}


# what stands before a kernel, behind `common.h`; `types.h` alone for others that read weights
_HEADERS = {
    "matmul": ("types.h", "product.h"),
    "experts": ("types.h", "product.h"),
    "matmul_lanes": ("lanes.h",),
    "matmul_fast": ("rounded.h", "lanes.h", "quads.h"),
    "round": ("rounded.h",),
}


def matmul_words(columns: int, tokens: int, *, threads: int) -> int:
    """f32 words of scratch that any matmul needs for `tokens` rows of `columns` values."""
    return threads * (18 * columns + tokens * columns // LANES)


def expert_words(columns: int, slots: int, *, threads: int) -> int:
    """f32 words of scratch that `experts.c` needs for a chunk's slots and experts of `columns` values."""
    return threads * _PANEL * (columns + slots)


def rounded_words(columns: int, tokens: int) -> int:
    """f32 words of `tokens` rows of `columns` values as `native/rounded.h` says: 16 for each 32 values."""
    return tokens * columns // 2


def shares_words(context: int, threads: int) -> int:
    """f32 words of scratch that `attention.c` needs for a cache of `context` rows."""
    return QUERIES * context * threads


def float_bits(value: float) -> int:
    """The 32 bits of an f32, as kernels take floats."""
    return int.from_bytes(struct.pack("<f", value), "little")


def source(kernel: str, ggml_type: int | None = None) -> str:
    """The whole C text of a kernel, for one weight type where it reads weights."""
    folder = files(__package__) / "native"
    headers = _HEADERS.get(kernel, ("types.h",) if ggml_type is not None else ())
    if ggml_type in _CODED:
        coded = ("codebooks.h", "coded.h")
        headers = tuple(part for name in headers for part in (coded if name == "types.h" else (name,)))
    parts = [] if ggml_type is None else [f"#define {TYPES[ggml_type]}\n"]
    return "\n".join(
        [*parts, *((folder / name).read_text() for name in ("common.h", *headers, f"{kernel}.c"))]
    )


class Kernels:
    """Built kernels by name and type, each built once. Raises what the compiler raises."""

    def __init__(self) -> None:
        self._built: dict[tuple[str, int | None], NativeFunction] = {}
        self._builder = Builder()

    def address(self, kernel: str, ggml_type: int | None = None) -> int:
        """Where the kernel's code begins."""
        return self.function(kernel, ggml_type).address

    def function(self, kernel: str, ggml_type: int | None = None) -> NativeFunction:
        key = kernel, ggml_type
        if key not in self._built:
            self._built[key] = NativeFunction(source(kernel, ggml_type), self._builder)
        return self._built[key]

    def close(self) -> None:
        """No more kernels are built for now: the process that builds them ends. Idempotent."""
        self._builder.close()


class Team:
    """`threads` threads that run a list of kernels together; the caller is the first of them.

    The others never leave machine code: every other call stays on the caller's thread.
    """

    def __init__(self, kernels: Kernels, threads: int) -> None:
        """Raises ResourceError when this user may not have as many threads; none is left then."""
        self.threads = threads
        self._run = kernels.function("run").function
        words = 48 + 32 * threads  # as `struct team` of native/run.c lays them
        room = np.zeros(words + 16, np.uint64)
        start = (-room.ctypes.data % 128) // 8
        self._state = room[start : start + words]
        library = ctypes.CDLL(None)
        calls = [
            ctypes.cast(call, ctypes.c_void_p).value or 0 for call in (library.sched_yield, library.syscall)
        ]
        self._state[32:35] = threads, *calls
        self._end = KernelList([], self._state.ctypes.data, _END)
        self._members = [
            threading.Thread(target=self._serve, args=(index,), name=f"kernels-{index}", daemon=True)
            for index in range(1, threads)
        ]
        try:
            for member in self._members:
                member.start()
        except RuntimeError as error:
            self._members = [member for member in self._members if member.is_alive()]
            have = 1 + len(self._members)
            self.close()
            raise ResourceError(
                f"only {have} of {threads} threads for kernels can be started: {error}",
                hint=f"use the worker option threads={have}, or let this user have more threads (ulimit -u)",
            ) from error

    def prepare(self, entries: Sequence[Sequence[int] | Group]) -> KernelList:
        """A list of (kernel address, parts, argument words...) to run many times."""
        return KernelList(entries, self._state.ctypes.data, _ALONE if self.threads == 1 else _CALL)

    def run(self, work: KernelList) -> None:
        """Runs the list; all of its results are in memory on return."""
        self._run(work.cell, _FIRST)

    def _serve(self, index: int) -> None:
        self._run(self._end.cell, ctypes.c_uint64(index))

    def close(self) -> None:
        """Ends the other threads. Idempotent."""
        self._run(self._end.cell, _FIRST)
        for member in self._members:
            member.join(timeout=5.0)
        self._members.clear()


class Group(tuple[Sequence[int], ...]):
    """Entries of as many parts each: who takes a part does it for all of them in turn. An entry may read what
    those before it write in the same part, and nothing else that they write."""

    __slots__ = ()


class KernelList:
    """Entries as `native/run.c` reads them, kept in memory as long as the list lives."""

    def __init__(self, entries: Sequence[Sequence[int] | Group], team: int, how: int) -> None:
        """Raises ValueError for a group of different parts, or of more than `MOST_PARTS`."""
        groups = [entry if isinstance(entry, Group) else Group([entry]) for entry in entries]
        self.entries: NDArray[np.uint64] = np.zeros((max(1, sum(map(len, groups))), ENTRY_WORDS), np.uint64)
        shared, place = False, 0
        for group in groups:
            parts = group[0][1]
            if not 0 < parts <= MOST_PARTS or any(entry[1] != parts for entry in group):
                raise ValueError(f"a group of kernels in {[entry[1] for entry in group]} parts")
            shared |= parts > 1
            for kernel, _, *words in group:
                self.entries[place, : 3 + len(words)] = kernel, len(group), parts, *words
                place += 1
        how = _ALONE if how == _CALL and not shared else how
        self._head = np.array([self.entries.ctypes.data, place, team, how], np.uint64)
        self.cell = ctypes.c_uint64(self._head.ctypes.data)
