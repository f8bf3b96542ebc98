"""Writes native/codebooks.h: the codebooks of the IQ types, as the gguf package has them.

    python scripts/write_codebooks.py

Values are packed as indices into the few that a type has: the text is what kernels are built from and kept
by. A test holds the file against what this writes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

HEADER = (
    Path(__file__).resolve().parents[1]
    / "packages/swactor-worker-tinygrad/src/swactor_worker_tinygrad/native/codebooks.h"
)
# the types that look their values up, by the one whose codebook they use
USERS = {
    "IQ2_XXS": ("IQ2_XXS",),
    "IQ2_XS": ("IQ2_XS",),
    "IQ2_S": ("IQ2_S",),
    "IQ3_XXS": ("IQ3_XXS",),
    "IQ3_S": ("IQ3_S",),
    "IQ1_S": ("IQ1_S", "IQ1_M"),
}
EIGHTHS = ("IQ1_S",)  # whose values are written eightfold, for their offset of an eighth to be whole
PER_LINE = 12
OPENING = """\
/* The codebooks of the IQ types, from the gguf package (MIT). Written by scripts/write_codebooks.py.
 *
 * An entry is eight values of a byte each, or four where a type has eight different ones. It is written as
 * their indices into VALUES, the lowest bits first. */
#define OF(x, i, bits) ((u64)(VALUES >> 8 * ((x) >> bits * (i) & ((1 << bits) - 1)) & 255) << 8 * (i))
#define HALF(x, i) (OF(x, i, 2) | OF(x, i + 1, 2) | OF(x, i + 2, 2) | OF(x, i + 3, 2))
#define E(x) (HALF(x, 0) | HALF(x, 4))
#define F(x) (uint32_t)(OF(x, 0, 3) | OF(x, 1, 3) | OF(x, 2, 3) | OF(x, 3, 3))
"""


def codebook(name: str) -> list[str]:
    """The lines that define the type's codebook."""
    kind = quants._type_traits[GGMLQuantizationType[name]]
    kind.init_grid()
    count, width = kind.grid_shape
    values = np.array(kind.grid_map)
    bits = 2 if width == 8 else 3
    entries = np.searchsorted(values, kind.grid.reshape(count, width))
    assert (values[entries] == kind.grid.reshape(count, width)).all()
    packed = (entries << np.arange(width) * bits).sum(axis=1)
    bytes_of = values * 8 if name in EIGHTHS else values
    number = sum((int(value) & 255) << 8 * index for index, value in enumerate(bytes_of))
    entry, integer = ("E", "u64") if width == 8 else ("F", "uint32_t")
    lines = [f"#define VALUES 0x{number:x}ull", f"static const {integer} codebook[{count}] = {{"]
    written = [f"{entry}({value})," for value in packed]
    lines += [" ".join(written[start : start + PER_LINE]) for start in range(0, count, PER_LINE)]
    return [*lines, "};"]


def text() -> str:
    """The whole header."""
    lines = [OPENING]
    for index, (name, users) in enumerate(USERS.items()):
        condition = " || ".join(f"defined(TYPE_{user})" for user in users)
        lines += [f"#{'elif' if index else 'if'} {condition}", *codebook(name)]
    return "\n".join([*lines, "#endif", ""])


if __name__ == "__main__":
    HEADER.write_text(text())
