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

from swactor_worker_tinygrad.building import Builder
from swactor_worker_tinygrad.machine_code import NativeFunction

ENTRY_WORDS = 20
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
LANES = 16
_QUERIES = 4
_PANEL = 4  # rows that `experts.c` takes at once, at most


# types that `native/lanes.h` reads from blocks laid side by side; others are read as stored
LANE_TYPES = frozenset({2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23})
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


def matmul_words(columns: int, tokens: int, threads: int) -> int:
    """f32 words of scratch that any matmul needs for `tokens` rows of `columns` values."""
    return threads * (18 * columns + tokens * columns // LANES)


def expert_words(columns: int, slots: int, threads: int) -> int:
    """f32 words of scratch that `experts.c` needs for a chunk's slots and experts of `columns` values."""
    return threads * _PANEL * (columns + slots)


def rounded_words(columns: int, tokens: int) -> int:
    """f32 words of `tokens` rows of `columns` values as `native/rounded.h` says: 16 for each 32 values."""
    return tokens * columns // 2


def shares_words(context: int, threads: int) -> int:
    """f32 words of scratch that `attention.c` needs for a cache of `context` rows."""
    return _QUERIES * context * threads


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

    The others only wait for work and run machine code: every other call stays on the caller's thread.
    """

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self.threads = threads
        self._run = kernels.function("run").function
        give_way = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
        # `struct team` of native/run.c: ticket (closed), entry, parts, done, active,
        # give_way; on a cache line of its own
        room = np.zeros(16, np.uint64)
        start = (-room.ctypes.data % 64) // 8
        self._state = room[start : start + 8]
        self._state[0], self._state[5] = 0xFFFF, give_way
        self._stopping = False
        self._cell = ctypes.c_uint64(0)
        self._calls = [threading.Semaphore(0) for _ in range(threads - 1)]
        self._members = [
            threading.Thread(target=self._serve, args=(index,), name=f"kernels-{index}", daemon=True)
            for index in range(1, threads)
        ]
        self._idle = KernelList([], self._state.ctypes.data)
        for member in self._members:
            member.start()

    def prepare(self, entries: Sequence[Sequence[int]]) -> KernelList:
        """A list of (kernel address, parts, argument words...) to run many times."""
        return KernelList(entries, self._state.ctypes.data)

    def run(self, work: KernelList) -> None:
        """Runs the list; all of its results are in memory on return."""
        first = ctypes.c_uint64(0)
        if self.threads == 1 or not work.shared:
            self._run(work.cell, first)
            return
        self._state[4] = 1
        for call in self._calls:
            call.release()
        try:
            self._run(work.cell, first)
        finally:
            self._state[4] = 0

    def _serve(self, index: int) -> None:
        own = ctypes.c_uint64(index)
        while True:
            self._calls[index - 1].acquire()
            if self._stopping:
                return
            self._run(self._idle.cell, own)

    def close(self) -> None:
        """Ends the other threads. Idempotent."""
        self._stopping = True
        self._state[4] = 0
        for call in self._calls:
            call.release()
        for member in self._members:
            member.join(timeout=5.0)
        self._members.clear()
        self._calls.clear()


class KernelList:
    """Entries as `native/run.c` reads them, kept in memory as long as the list lives."""

    def __init__(self, entries: Sequence[Sequence[int]], team: int) -> None:
        self.entries: NDArray[np.uint64] = np.zeros((max(1, len(entries)), ENTRY_WORDS), np.uint64)
        for row, entry in zip(self.entries, entries, strict=False):
            row[: len(entry)] = entry
        #: whether any entry has parts for others to take
        self.shared = any(entry[1] > 1 for entry in entries)
        self._head = np.array([self.entries.ctypes.data, len(entries), team], np.uint64)
        self.cell = ctypes.c_uint64(self._head.ctypes.data)
