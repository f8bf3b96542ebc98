"""Builds `swactor_arena._native` from `_csrc` (cffi, API mode, stable ABI). Run by setup.py only."""

from pathlib import Path

from cffi import FFI

_CSRC = Path(__file__).parent / "_csrc"
_ROOT = Path(__file__).parents[2]

builder = FFI()
builder.cdef((_CSRC / "ring.cdef.h").read_text())
builder.set_source(
    "swactor_arena._native",
    '#include "ring.h"\n#include "pages.h"\n',
    sources=[str((_CSRC / name).relative_to(_ROOT)) for name in ("ring.c", "pages.c")],
    include_dirs=[str(_CSRC.relative_to(_ROOT))],
    depends=[str((_CSRC / name).relative_to(_ROOT)) for name in ("ring.h", "pages.h", "ring.cdef.h")],
    extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra"],
)
