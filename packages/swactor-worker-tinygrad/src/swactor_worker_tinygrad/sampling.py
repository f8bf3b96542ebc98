"""From one row of logits to a token id, on the host: exact, seeded, and the same in every placement.

Pure numpy. Must not know devices or models. The order is: mask ids that are no tokens, divide by the
temperature, keep the `top_k` largest, keep the smallest prefix whose mass reaches `top_p`, keep what has at
least `min_p` of the largest probability, draw.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from swactor_core.faults import StepFailure
from swactor_core.plan import SamplingPolicy
from swactor_core.spi.worker import StepError


class Sampler:
    """One run's sampler: its generator is seeded once and drawn from once a token."""

    def __init__(self, policy: SamplingPolicy, token_count: int) -> None:
        """`token_count` is how many ids are tokens, 0 when every logit is one."""
        self._policy, self._token_count = policy, token_count
        self._generator = np.random.default_rng(policy.seed & 0xFFFF_FFFF_FFFF_FFFF)

    def restart(self) -> None:
        """The state of a fresh run."""
        self._generator = np.random.default_rng(self._policy.seed & 0xFFFF_FFFF_FFFF_FFFF)

    def pick(self, logits: NDArray[np.float32]) -> int:
        """The id that follows; equal logits fall to the lowest id. Raises StepError for logits that are not
        numbers: they mean a broken model or device, and no token may be made of them."""
        row = logits[: self._token_count] if 0 < self._token_count < len(logits) else logits
        best = int(np.argmax(row))
        # argmax finds a NaN first if there is one, so one look is enough
        if not row[best] < np.inf:
            raise StepError(StepFailure.TINYGRAD_ERROR, f"the logits hold {row[best]} at id {best}")
        if row[best] == -np.inf:
            raise StepError(StepFailure.TINYGRAD_ERROR, "every logit is -inf")
        if self._policy.temperature <= 0.0:
            return best
        return self._draw(row)

    def _draw(self, row: NDArray[np.float32]) -> int:
        policy = self._policy
        scaled = (row.astype(np.float64) - float(row.max())) / policy.temperature
        order = np.argsort(-scaled, kind="stable")  # ties in order of id
        if policy.top_k > 0:
            order = order[: policy.top_k]
        weight = np.exp(scaled[order])
        weight /= weight.sum()
        keep = np.ones(len(order), bool)
        if policy.top_p < 1.0:
            keep &= np.cumsum(weight) - weight < policy.top_p  # the id that crosses the mass stays
        if policy.min_p > 0.0:
            keep &= weight >= policy.min_p * weight[0]
        keep[0] = True
        kept = np.cumsum(np.where(keep, weight, 0.0))
        drawn = self._generator.random() * kept[-1]
        return int(order[min(int(np.searchsorted(kept, drawn, side="right")), len(order) - 1)])
