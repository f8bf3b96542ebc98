"""One row of logits to one token id (spec section 10): the same code wherever sampling happens.

Pure numpy on the host, seeded, one generator draw a token. Must not know devices, models or edges. The order
is llama.cpp's (`common_params_sampling`): logit bias, penalties over the last tokens, top-k, top-p, min-p,
temperature, draw. Equal logits count in order of id. What is equal here is not equal bit by bit to another
implementation's draws: only the distribution is.
"""

from __future__ import annotations

import math
from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from swactor_core.errors import UndecidableLogits
from swactor_core.plan import BAN, SamplingPolicy

_LARGEST = 1e300  # what a policy makes of a logit stays finite, and so do differences of two

Row = NDArray[np.float64]
Ids = NDArray[np.intp]


class Sampler:
    """One per run. Ids from `token_count` on are padding and never chosen; 0: all are real."""

    def __init__(self, policy: SamplingPolicy, token_count: int) -> None:
        self._policy, self._token_count = policy, token_count
        self._biased = np.array([token for token, _ in policy.logit_bias], np.intp)
        biases = [bias if bias > BAN else -math.inf for _, bias in policy.logit_bias]
        self._bias = np.array(biases, np.float64)
        self.restart()

    def restart(self) -> None:
        """The state of a fresh run: the seed, and the prompt's end as history."""
        window = self._policy.repeat_last_n
        self._generator = None
        if self._policy.temperature > 0.0:  # numpy imports its generators when they are first asked for
            self._generator = np.random.default_rng(self._policy.seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._recent: deque[int] = deque(maxlen=window if window >= 0 else None)
        self._recent.extend(self._policy.history)

    def pick(self, logits: bytes | memoryview | NDArray[np.float32]) -> int:
        """The id that follows, from f32 little-endian logits. Raises UndecidableLogits for logits that are
        not numbers: they mean a broken model or device, and no token may be made of them."""
        row = np.frombuffer(logits, "<f4")
        if 0 < self._token_count < len(row):
            row = row[: self._token_count]
        if not len(row):
            raise UndecidableLogits("there are no logits")
        best = int(np.argmax(row))
        # argmax finds a NaN first if there is one, so one look is enough
        if not row[best] < np.inf:
            raise UndecidableLogits(f"the logits hold {row[best]} at id {best}")
        if row[best] == -np.inf:
            raise UndecidableLogits("every logit is -inf")
        with np.errstate(over="ignore"):  # a tiny temperature makes infinities of differences, rightly
            if self._policy.logit_bias or self._policy.penalises:
                weighed = self._weighed(row)
                best = int(np.argmax(weighed))
                if weighed[best] == -np.inf:
                    raise UndecidableLogits("every token that the logits leave is banned by its bias")
            else:
                weighed = row
            token = best if self._policy.temperature <= 0.0 else self._draw(weighed.astype(np.float64))
        if self._policy.penalises:
            self._recent.append(token)
        return token

    def _weighed(self, row: NDArray[np.float32]) -> Row:
        """The row with bias and penalties. [vocabulary]"""
        policy, result = self._policy, row.astype(np.float64)
        real = self._biased < len(result)
        result[self._biased[real]] += self._bias[real]
        counts = Counter(token for token in self._recent if token < len(result))
        if counts and policy.penalises:
            ids = np.fromiter(counts.keys(), np.intp, len(counts))
            times = np.fromiter(counts.values(), np.float64, len(counts))
            held: Row = result[ids]
            # Dividing a negative logit would make its token likelier.
            held = np.where(held <= 0, held * policy.repeat_penalty, held / policy.repeat_penalty)
            held -= times * policy.frequency_penalty + policy.presence_penalty
            result[ids] = np.minimum(held, _LARGEST)
        return result

    def _draw(self, row: Row) -> int:
        ids, logits = _kept(row, self._policy)
        scaled = (logits - logits.max()) / self._policy.temperature
        mass = np.cumsum(np.exp(scaled))
        assert self._generator is not None
        drawn = self._generator.random() * mass[-1]
        return int(ids[min(int(np.searchsorted(mass, drawn, side="right")), len(ids) - 1)])


def _kept(row: Row, policy: SamplingPolicy) -> tuple[Ids, Row]:
    """Ids and logits that the filters leave, the likeliest first where one of them needs an order."""
    ids: Ids = np.arange(len(row))
    if 0 < policy.top_k < len(row):
        # Everything that could be among the k largest, ties included; then exactly k in order of id.
        ids = np.flatnonzero(row >= np.partition(row, len(row) - policy.top_k)[len(row) - policy.top_k])
        ids = _descending(row, ids)[: policy.top_k]
    if policy.top_p < 1.0:
        share = np.exp(row[ids] - row[ids].max())
        share /= share.sum()
        # What is left out here weighs less than 1 - top_p in all, so the mass is reached without it.
        likely = share > (1.0 - policy.top_p) / len(ids) / 2
        ids, share = ids[likely], share[likely]
        order = np.argsort(-share, kind="stable")
        ids, share = ids[order], share[order]
        ids = ids[np.cumsum(share) - share < policy.top_p]  # the id that crosses the mass stays
    logits = row[ids]
    if policy.min_p > 0.0:
        likely = logits >= logits.max() + math.log(min(policy.min_p, 1.0))  # the likeliest stays
        ids, logits = ids[likely], logits[likely]
    return ids, logits


def _descending(row: Row, ids: Ids) -> Ids:
    return ids[np.argsort(-row[ids], kind="stable")]
