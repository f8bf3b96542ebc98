"""Helpers of the kernels' tests: random weights of every type, and running one kernel over arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

FLOATS = ["F32", "F16", "BF16"]
PACKED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
CODED = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"]
BLOCKS = [*PACKED, *CODED, "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0"]
TYPES = [*FLOATS, *BLOCKS]
# where a block holds f16 scale fields, as byte offsets; random bits there would be infinities. MXFP4 has a
# power of two, IQ1_M four bits in each of its last four pairs of bytes.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    **{name: (0,) for name in CODED if name != "IQ1_M"},
    "IQ1_M": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
    "Q1_0": (0,),
}


def stored_weights(name: str, rows: int, columns: int, seed: int = 1) -> tuple[int, np.ndarray, np.ndarray]:
    """(ggml type, stored bytes (rows, row bytes), values (rows, columns)) of random weights."""
    kind = GGMLQuantizationType[name]
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((rows, columns)).astype(np.float32)
    if name == "F32":
        stored = values.view(np.uint8)
    elif name == "F16":
        values[0, 0] = 3e-6  # a subnormal
        stored = values.astype(np.float16).view(np.uint8)
    elif name == "BF16":
        stored = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = generator.integers(0, 256, (rows * columns // per_block, block_bytes), dtype=np.uint8)
        set_scales(name, blocks, generator)
        stored = blocks.reshape(rows, -1)
    stored = np.ascontiguousarray(stored.reshape(rows, -1))
    return int(kind), stored, dequantised(name, stored, columns)


def set_scales(name: str, blocks: np.ndarray, generator: np.random.Generator) -> None:
    """Writes scales of up to a tenth into the (count, block bytes) blocks."""
    for offset in SCALES[name]:
        scale = generator.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = generator.integers(118, 125, len(blocks))
    if name == "IQ1_M":
        scale = generator.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint16)
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | (scale >> [0, 4, 8, 12] & 15) << 4


def dequantised(name: str, stored: np.ndarray, columns: int) -> np.ndarray:
    """(rows, columns) f32 values of rows of stored bytes, by gguf or, for Q1_0 which it lacks, by hand."""
    if name != "Q1_0":
        values = dequantize(stored, GGMLQuantizationType[name])
        return np.asarray(values, np.float32).reshape(len(stored), columns)
    blocks = stored.reshape(-1, 18)
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") * np.float32(2) - 1
    return (signs * blocks[:, :2].copy().view(np.float16).astype(np.float32)).reshape(len(stored), columns)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def run(team: Any, *entries: Sequence[int]) -> None:
    team.run(team.prepare(entries))


def packed(
    kernels: Any, team: Any, kind: int, stored: np.ndarray, *, quads: tuple[int, ...] = ()
) -> np.ndarray:
    """The stored rows as `native/pack.c` lays them out, in memory that was not zero before."""
    from swactor_worker_tinygrad.tensor_types import BLOCKS

    rows, row_bytes = stored.shape
    made = np.full(-(-rows // 16) * 16 * row_bytes, 0xEE, np.uint8)
    words = [address(made), address(stored), rows, row_bytes, BLOCKS[kind][1], *quads]
    run(team, [kernels.address("pack"), 2, *words])
    return made
