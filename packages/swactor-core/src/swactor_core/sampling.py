"""Sampling where logits travel to the orchestrator (spec section 10): one row of f32 logits to one id.

Pure Python on an `array`: a row is tens of thousands of numbers, once a token. Same conventions as the last
stage's sampler: temperature 0 is greedy with ties to the lowest id, then temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
import random
from array import array

from swactor_core.errors import SwactorError
from swactor_core.plan import SamplingPolicy


class UndecidableLogits(SwactorError):
    """A logit is NaN, or no token is left to choose from."""


class Sampler:
    """One per run. Ids from `token_count` on are padding and never chosen; 0: all are real."""

    def __init__(self, policy: SamplingPolicy, token_count: int) -> None:
        self._policy = policy
        self._token_count = token_count
        self._random = random.Random(policy.seed)  # noqa: S311 - sampling, not a secret

    def sample(self, row: bytes) -> int:
        """`row`: f32 little-endian logits. Raises UndecidableLogits."""
        logits = array("f")
        logits.frombytes(row)
        if self._token_count:
            logits = logits[: self._token_count]
        if not logits or any(map(math.isnan, logits)):
            raise UndecidableLogits("the logits hold NaN, or there are none")
        if self._policy.temperature <= 0.0:
            return logits.index(max(logits))
        return self._draw(logits)

    def _draw(self, logits: array[float]) -> int:
        policy = self._policy
        order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
        if policy.top_k > 0:
            order = order[: policy.top_k]
        peak = logits[order[0]]
        weights = [math.exp((logits[i] - peak) / policy.temperature) for i in order]
        if policy.min_p > 0.0:
            kept = sum(w >= policy.min_p for w in weights)
            order, weights = order[:kept], weights[:kept]
        if policy.top_p < 1.0:
            total, mass, kept = sum(weights), 0.0, 0
            for weight in weights:
                kept, mass = kept + 1, mass + weight
                if mass >= policy.top_p * total:
                    break
            order, weights = order[:kept], weights[:kept]
        return self._random.choices(order, weights)[0]
