"""The tables of cosines and sines that every engine turns heads with, of the angles that ggml turns by.

Knows `rope.py`'s parameters. Must not know metadata, layers or engines. An angle grows with the position, and
what f32 rounds off it with both: the reference makes each pair's angle by multiplying the pair's before it
(`ggml_rope_cache_init`), and only the same products in the same precision turn late positions as far.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swactor_worker_tinygrad.rope import Rope, Temperature, Yarn

#: (cosines, sines), each (rows, dims / 2); or those of keys followed by those of queries, where they differ
Tables = tuple[NDArray[np.float32], ...]


def rope_tables(
    rope: Rope, rows: int, *, factors: NDArray[np.float32] | None, temperature: Temperature | None
) -> Tables:
    """The tables of positions 0 to `rows` - 1."""
    positions = np.arange(rows, dtype=np.float64)[:, None]
    angle = np.zeros((rows, rope.dims // 2)) if rope.base == 0.0 else _angles(rope, rows, factors)
    tables = [np.cos(angle) * rope.magnitude, np.sin(angle) * rope.magnitude]
    if temperature is not None:
        tables += [table * _query_scale(temperature, positions) for table in tables]
    return tuple(table.astype(np.float32) for table in tables)


def _angles(rope: Rope, rows: int, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """(rows, dims / 2), each rounded to f32 wherever ggml rounds it."""
    single = np.float32
    # the power itself in double precision: that of f32 is in its last bit each mathematics library's own
    step = single(float(single(rope.base)) ** float(single(-2.0) / single(rope.dims)))
    steps = np.full((rows, rope.dims // 2), step, single)
    steps[:, 0] = np.arange(rows)
    angles = np.multiply.accumulate(steps, axis=1)
    if factors is not None:
        angles /= factors
    scaled = angles * (single(1.0) / single(rope.divisor))
    if rope.yarn is not None:
        share = _unscaled_share(rope.yarn, np.arange(rope.dims // 2, dtype=single))
        # a fused multiply-add, as compilers make it of the reference's sum: the first product is not rounded
        first = scaled.astype(np.float64) * (single(1.0) - share)
        scaled = (first + angles * share).astype(single)
    return scaled.astype(np.float64)


def _unscaled_share(yarn: Yarn, pairs: NDArray[np.float32]) -> NDArray[np.float32]:
    """How much of each pair's frequency stays unscaled, 0 to 1."""
    slope: NDArray[np.float32] = (pairs - np.float32(yarn.low)) / np.float32(max(0.001, yarn.high - yarn.low))
    return np.float32(1.0) - np.clip(slope, np.float32(0.0), np.float32(1.0))


def _query_scale(temperature: Temperature, positions: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 + temperature.scale * np.log(np.floor(positions / temperature.length) + 1.0)
