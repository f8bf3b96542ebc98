"""Rotary position embedding: what turns a family's heads, as the model's metadata have it.

Knows frequencies and their scalings (Su et al. 2021; linear; Llama 3.1's factors; YaRN, Peng et al. 2023;
long and short factors). Must not know metadata, layers or engines, and imports no numpy: every process that
checks a model reads these. The numbers that follow are `rope_tables.py`'s.
"""

from __future__ import annotations

import math

from swactor_core.values import frozen


@frozen
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


@frozen
class Rope:
    """`dims` elements of a head turn; pair i by position * base**(-2i/dims) / factors[i] / divisor. Both
    tables are `magnitude` times as large. `base` 0: nothing turns."""

    dims: int
    base: float
    divisor: float = 1.0
    magnitude: float = 1.0
    yarn: Yarn | None = None


@frozen
class Temperature:
    """Queries at position p are 1 + scale * log(floor(p / length) + 1) times as large (Llama 4)."""

    scale: float
    length: int
