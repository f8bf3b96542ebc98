"""Rotary position embedding: the tables of cosines and sines that every engine turns heads with.

Knows frequencies and their scalings (Su et al. 2021; linear; Llama 3.1's factors; YaRN, Peng et al. 2023;
long and short factors). Must not know metadata, layers or engines. Computed in double precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: (cosines, sines), each (rows, dims / 2); or those of keys followed by those of queries, where they differ
Tables = tuple[NDArray[np.float32], ...]


@dataclass(frozen=True, slots=True)
class Yarn:
    """Between `low` and `high`, counted in pairs, the scaled frequency takes over from the unscaled one."""

    low: float
    high: float

    @classmethod
    def of(cls, *, dims: int, base: float, context: int, fast: float, slow: float) -> Yarn:
        """From the rotations `fast` and `slow` that a pair makes in the `context` it was trained with."""

        def pair(rotations: float) -> float:
            return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

        return cls(max(0.0, math.floor(pair(fast))), min(dims - 1.0, math.ceil(pair(slow))))

    def share(self, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        """How much of each pair's frequency stays unscaled, 0 to 1."""
        slope: NDArray[np.float64] = (pairs - self.low) / max(0.001, self.high - self.low)
        return 1.0 - np.clip(slope, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Rope:
    """`dims` elements of a head turn; pair i by position * base**(-2i/dims) / factors[i] / divisor. Both
    tables are `magnitude` times as large. `base` 0: nothing turns."""

    dims: int
    base: float
    divisor: float = 1.0
    magnitude: float = 1.0
    yarn: Yarn | None = None


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are 1 + scale * log(floor(p / length) + 1) times as large (Llama 4)."""

    scale: float
    length: int

    def of(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        return 1.0 + self.scale * np.log(np.floor(positions / self.length) + 1.0)


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
            share = rope.yarn.share(pairs)
            scaled = scaled * (1.0 - share) + speed * share
        angle = positions * scaled
    tables = [np.cos(angle) * rope.magnitude, np.sin(angle) * rope.magnitude]
    if temperature is not None:
        tables += [table * temperature.of(positions) for table in tables]
    return tuple(table.astype(np.float32) for table in tables)
