"""The ggml tensor types: name, weights per block, bytes per block (ggml's `gguf-py/gguf/constants.py`).

Knows numbers and nothing of files. The table is written down, and a test holds it to the `gguf` package's:
orchestrator and nodes would each pay a tenth of a second and more to import that package and numpy with it.
A type number that the table lacks is not an error here: it has a name (`type-99` at worst) and no size, and
only who needs its bytes refuses it.
"""

from __future__ import annotations

from swactor_core.values import frozen


@frozen
class GgmlType:
    """`block` weights take `block_bytes` bytes; a row is a whole number of blocks."""

    number: int
    name: str
    block: int
    block_bytes: int


TYPES = {
    kind.number: kind
    for kind in (
        GgmlType(0, "F32", 1, 4),
        GgmlType(1, "F16", 1, 2),
        GgmlType(2, "Q4_0", 32, 18),
        GgmlType(3, "Q4_1", 32, 20),
        GgmlType(6, "Q5_0", 32, 22),
        GgmlType(7, "Q5_1", 32, 24),
        GgmlType(8, "Q8_0", 32, 34),
        GgmlType(9, "Q8_1", 32, 40),
        GgmlType(10, "Q2_K", 256, 84),
        GgmlType(11, "Q3_K", 256, 110),
        GgmlType(12, "Q4_K", 256, 144),
        GgmlType(13, "Q5_K", 256, 176),
        GgmlType(14, "Q6_K", 256, 210),
        GgmlType(15, "Q8_K", 256, 292),
        GgmlType(16, "IQ2_XXS", 256, 66),
        GgmlType(17, "IQ2_XS", 256, 74),
        GgmlType(18, "IQ3_XXS", 256, 98),
        GgmlType(19, "IQ1_S", 256, 50),
        GgmlType(20, "IQ4_NL", 32, 18),
        GgmlType(21, "IQ3_S", 256, 110),
        GgmlType(22, "IQ2_S", 256, 82),
        GgmlType(23, "IQ4_XS", 256, 136),
        GgmlType(24, "I8", 1, 1),
        GgmlType(25, "I16", 1, 2),
        GgmlType(26, "I32", 1, 4),
        GgmlType(27, "I64", 1, 8),
        GgmlType(28, "F64", 1, 8),
        GgmlType(29, "IQ1_M", 256, 56),
        GgmlType(30, "BF16", 1, 2),
        GgmlType(34, "TQ1_0", 256, 54),
        GgmlType(35, "TQ2_0", 256, 66),
        GgmlType(39, "MXFP4", 32, 17),
        GgmlType(40, "NVFP4", 64, 36),
        GgmlType(41, "Q1_0", 128, 18),
    )
}

# Types that files have or had, and whose layout is not known here: repacked ones, which llama.cpp reads no
# more, and those that are newer than the `gguf` package.
_NAMES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    42: "Q2_0",
}


def ggml_type(number: int) -> GgmlType | None:
    """The type of that number, or None when its block layout is not known."""
    return TYPES.get(number)


def type_name(number: int) -> str:
    """`Q4_K`, or `type-99` for a number that nobody has named."""
    known = ggml_type(number)
    return known.name if known else _NAMES.get(number, f"type-{number}")
