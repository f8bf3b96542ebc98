"""The tables of cosines and sines that every engine turns heads with, computed in double precision.

Knows `rope.py`'s parameters. Must not know metadata, layers or engines.
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
    if rope.base == 0.0:
        angle = np.zeros((rows, rope.dims // 2))
    else:
        pairs = np.arange(rope.dims // 2, dtype=np.float64)
        speed = rope.base ** (-2.0 * pairs / rope.dims)
        if factors is not None:
            speed = speed / factors.astype(np.float64)
        scaled = speed / rope.divisor
        if rope.yarn is not None:
            share = _unscaled_share(rope.yarn, pairs)
            scaled = scaled * (1.0 - share) + speed * share
        angle = positions * scaled
    tables = [np.cos(angle) * rope.magnitude, np.sin(angle) * rope.magnitude]
    if temperature is not None:
        tables += [table * _query_scale(temperature, positions) for table in tables]
    return tuple(table.astype(np.float32) for table in tables)


def _unscaled_share(yarn: Yarn, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of each pair's frequency stays unscaled, 0 to 1."""
    slope: NDArray[np.float64] = (pairs - yarn.low) / max(0.001, yarn.high - yarn.low)
    return 1.0 - np.clip(slope, 0.0, 1.0)


def _query_scale(temperature: Temperature, positions: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 + temperature.scale * np.log(np.floor(positions / temperature.length) + 1.0)
