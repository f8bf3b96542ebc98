"""Builds `swactor_arena._native` from `_csrc` (cffi, API mode, stable ABI). Run by setup.py only.

The binding's declarations are the C header itself, so the two cannot differ. The system call for pages needs
no C of ours: the binding declares it beside them.
"""

from pathlib import Path

from cffi import FFI

_CSRC = Path(__file__).parent / "_csrc"
_ROOT = Path(__file__).parents[2]
_PREAMBLE = ("#ifndef", "#define SWACTOR_RING_H", "#include", "#endif")
_PAGES = """
#define FALLOC_FL_KEEP_SIZE ...
#define FALLOC_FL_PUNCH_HOLE ...
int fallocate(int fd, int mode, int64_t offset, int64_t length);
"""


def _declarations() -> str:
    lines = (_CSRC / "ring.h").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith(_PREAMBLE))


builder = FFI()
builder.cdef(_declarations() + _PAGES)
builder.set_source(
    "swactor_arena._native",
    '#include <fcntl.h>\n#include "ring.h"\n',
    sources=[str((_CSRC / "ring.c").relative_to(_ROOT))],
    include_dirs=[str(_CSRC.relative_to(_ROOT))],
    depends=[str((_CSRC / "ring.h").relative_to(_ROOT))],
    extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64"],
)
