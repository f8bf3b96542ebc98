"""The last stage's sampler is the core's, and what it refuses is a failure of the step."""

from __future__ import annotations

import numpy as np
import pytest
from swactor_core import sampling
from swactor_core.faults import StepFailure
from swactor_core.plan import SamplingPolicy
from swactor_core.spi.worker import StepError
from swactor_worker_tinygrad.sampling import Sampler


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_are_a_failure_and_no_token(temperature: float, bad: float) -> None:
    with pytest.raises(StepError, match="logits hold") as caught:
        Sampler(SamplingPolicy(temperature=temperature), 0).pick(np.array([1, bad, 2], np.float32))
    assert caught.value.reason is StepFailure.TINYGRAD_ERROR
    with pytest.raises(StepError, match="-inf"):
        Sampler(SamplingPolicy(temperature=temperature), 0).pick(np.full(2, -np.inf, np.float32))


def test_the_same_seed_gives_the_same_ids_as_at_the_orchestrator() -> None:
    policy = SamplingPolicy(1.1, 42, 30, 0.95, 0.05, 1.2, 0.1, 0.1).after((3, 5, 8))
    here, there = Sampler(policy, 90), sampling.Sampler(policy, 90)
    rows = np.random.default_rng(3).standard_normal((40, 100)).astype(np.float32) * 3
    ids = [here.pick(row) for row in rows]
    assert ids == [there.pick(row.tobytes()) for row in rows]
    assert len(set(ids)) > 5
    here.restart()
    assert [here.pick(row) for row in rows] == ids
