"""Helpers of the kernels' tests: random weights of every type, and running one kernel over arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

FLOATS = ["F32", "F16", "BF16"]
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
TYPES = [*FLOATS, *BLOCKS]
# where a block holds f16 scale fields, as byte offsets; random bits there would be infinities
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
        for offset in SCALES[name]:
            scale = generator.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16)
            blocks[:, offset : offset + 2] = scale.view(np.uint8)
        stored = blocks.reshape(rows, -1)
    stored = np.ascontiguousarray(stored.reshape(rows, -1))
    return int(kind), stored, np.asarray(dequantize(stored, kind), np.float32).reshape(rows, columns)


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
