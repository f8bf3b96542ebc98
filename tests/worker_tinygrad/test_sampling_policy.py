"""Sampling of a token from logits: the documented order, ties, masks, bad numbers, seeds."""

from __future__ import annotations

import numpy as np
import pytest
from swactor_core.faults import StepFailure
from swactor_core.plan import SamplingPolicy
from swactor_core.spi.worker import StepError
from swactor_worker_tinygrad.sampling import Sampler


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def drawn(policy: SamplingPolicy, logits: np.ndarray, count: int = 400, tokens: int = 0) -> dict[int, int]:
    sampler = Sampler(policy, tokens)
    ids, counts = np.unique([sampler.pick(logits) for _ in range(count)], return_counts=True)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def test_greedy_takes_the_largest_and_the_lowest_of_equals() -> None:
    assert Sampler(SamplingPolicy(), 0).pick(row(1, 3, 3, 2)) == 1
    assert Sampler(SamplingPolicy(temperature=-1.0), 0).pick(row(5, 3)) == 0


def test_padded_ids_are_masked() -> None:
    assert Sampler(SamplingPolicy(), 2).pick(row(1, 2, 9)) == 1
    assert set(drawn(SamplingPolicy(temperature=5.0), row(1, 2, 9), tokens=2)) == {0, 1}
    assert Sampler(SamplingPolicy(), 7).pick(row(1, 2, 9)) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_are_a_failure_and_no_token(temperature: float, bad: float) -> None:
    with pytest.raises(StepError, match="logits hold") as caught:
        Sampler(SamplingPolicy(temperature=temperature), 0).pick(row(1, bad, 2))
    assert caught.value.reason is StepFailure.TINYGRAD_ERROR
    with pytest.raises(StepError, match="-inf"):
        Sampler(SamplingPolicy(temperature=temperature), 0).pick(row(-np.inf, -np.inf))


def test_bad_numbers_among_masked_ids_do_not_matter() -> None:
    assert Sampler(SamplingPolicy(), 2).pick(row(1, 2, np.nan)) == 1


def test_shares_follow_the_softmax_of_the_temperature() -> None:
    counts = drawn(SamplingPolicy(temperature=2.0, seed=3), row(0.0, 2 * np.log(3.0)), count=4000)
    assert 0.72 < counts[1] / 4000 < 0.78


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    assert set(drawn(SamplingPolicy(temperature=1e-6), row(1000.0, 999.0, -1000.0))) == {0}


def test_top_k_keeps_exactly_k_in_order_of_id() -> None:
    assert set(drawn(SamplingPolicy(temperature=1.0, top_k=2), row(1, 1, 1, 1))) == {0, 1}
    assert set(drawn(SamplingPolicy(temperature=1.0, top_k=1), row(0, 5, 4))) == {1}


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    logits = np.log(row(0.5, 0.3, 0.15, 0.05))
    assert set(drawn(SamplingPolicy(temperature=1.0, top_p=0.6), logits)) == {0, 1}
    assert set(drawn(SamplingPolicy(temperature=1.0, top_p=0.01), logits)) == {0}
    assert set(drawn(SamplingPolicy(temperature=1.0, top_p=0.0), logits)) == {0}


def test_min_p_is_relative_to_the_largest() -> None:
    logits = np.log(row(0.5, 0.3, 0.15, 0.05))
    assert set(drawn(SamplingPolicy(temperature=1.0, min_p=0.25), logits)) == {0, 1, 2}


def test_masked_logits_are_never_drawn() -> None:
    assert set(drawn(SamplingPolicy(temperature=1.0), row(-np.inf, 0.0, -np.inf))) == {1}


def test_a_seed_repeats_and_restart_begins_anew() -> None:
    logits = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    first, second = (Sampler(SamplingPolicy(temperature=1.0, seed=-9), 0) for _ in range(2))
    ids = [first.pick(logits) for _ in range(30)]
    assert [second.pick(logits) for _ in range(30)] == ids
    first.restart()
    assert [first.pick(logits) for _ in range(30)] == ids
    other = Sampler(SamplingPolicy(temperature=1.0, seed=10), 0)
    assert [other.pick(logits) for _ in range(30)] != ids
