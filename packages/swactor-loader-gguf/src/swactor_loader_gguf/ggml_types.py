"""The ggml tensor types: name, weights per block, bytes per block.

Knows the numbers of the `gguf` package and nothing of files. A type number that this table lacks is not an
error here: it has a name (`type-42`) and no size, and only who needs its bytes refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class GgmlType:
    """`block` weights take `block_bytes` bytes; a row is a whole number of blocks."""

    number: int
    name: str
    block: int
    block_bytes: int


@lru_cache(maxsize=1)
def _table() -> dict[int, GgmlType]:
    from gguf.constants import GGML_QUANT_SIZES

    return {
        int(kind): GgmlType(int(kind), kind.name, int(block), int(block_bytes))
        for kind, (block, block_bytes) in GGML_QUANT_SIZES.items()
    }


def ggml_type(number: int) -> GgmlType | None:
    """The type of that number, or None when its block layout is not known."""
    return _table().get(number)


def type_name(number: int) -> str:
    """`Q4_K`, or `type-42` for a number without a known layout."""
    known = ggml_type(number)
    return known.name if known else f"type-{number}"
