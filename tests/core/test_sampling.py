"""Sampling of a token from logits: every filter against a plain computation, their order, shares of draws,
penalties, bias, seeds, bad numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.errors import UndecidableLogits
from swactor_core.plan import SamplingPolicy
from swactor_core.sampling import Sampler


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def shares(
    policy: SamplingPolicy, logits: np.ndarray, count: int = 4000, tokens: int = 0
) -> dict[int, float]:
    sampler = Sampler(policy, tokens)
    counted = Counter(sampler.pick(logits) for _ in range(count))
    return {token: times / count for token, times in sorted(counted.items())}


def plainly(logits: list[float], policy: SamplingPolicy) -> dict[int, float]:
    """What each token's probability should be, written down from the definitions: filters first, in order,
    then the temperature."""
    logits = list(logits)
    for token, bias in policy.logit_bias:
        logits[token] += bias
    recent = policy.history[-policy.repeat_last_n :] if policy.repeat_last_n > 0 else policy.history
    if policy.repeat_last_n:
        for token, times in Counter(recent).items():
            logits[token] *= policy.repeat_penalty if logits[token] <= 0 else 1 / policy.repeat_penalty
            logits[token] -= times * policy.frequency_penalty + policy.presence_penalty
    kept = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if policy.top_k:
        kept = kept[: policy.top_k]
    total = math.fsum(math.exp(logits[token]) for token in kept)
    mass, prefix = 0.0, []
    for token in kept:
        prefix.append(token)
        mass += math.exp(logits[token]) / total
        if mass >= policy.top_p and policy.top_p < 1:
            break
    kept = [
        token
        for token in prefix
        if not policy.min_p or math.exp(logits[token] - logits[prefix[0]]) >= policy.min_p
    ]
    weights = {token: math.exp(logits[token] / policy.temperature) for token in kept}
    return {token: weight / math.fsum(weights.values()) for token, weight in sorted(weights.items())}


CASES = {
    "temperature": SamplingPolicy(temperature=2.0),
    "cold": SamplingPolicy(temperature=0.5),
    "top-k": SamplingPolicy(temperature=1.0, top_k=3),
    "top-p": SamplingPolicy(temperature=1.0, top_p=0.7),
    "min-p": SamplingPolicy(temperature=1.0, min_p=0.2),
    "filters before temperature": SamplingPolicy(temperature=3.0, top_p=0.7, min_p=0.1),
    "all filters": SamplingPolicy(temperature=0.8, top_k=5, top_p=0.9, min_p=0.15),
    "repeat": SamplingPolicy(temperature=1.0, repeat_penalty=1.5, history=(0, 3, 3), repeat_last_n=8),
    "frequency": SamplingPolicy(temperature=1.0, frequency_penalty=0.4, history=(1, 1, 1), repeat_last_n=8),
    "presence": SamplingPolicy(temperature=1.0, presence_penalty=0.7, history=(1, 1, 2), repeat_last_n=8),
    "window": SamplingPolicy(temperature=1.0, presence_penalty=2.0, history=(1, 1, 2), repeat_last_n=1),
    "bias": SamplingPolicy(temperature=1.0, logit_bias=((4, 3.0), (1, -2.0))),
    "everything": SamplingPolicy(
        temperature=1.3,
        top_k=6,
        top_p=0.95,
        min_p=0.02,
        repeat_penalty=1.2,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        history=(2, 5, 5),
        logit_bias=((6, 1.0),),
    ),
}
LOGITS = [1.2, 2.0, 0.3, -0.5, -1.0, 0.9, -2.0, 1.1]


@pytest.mark.parametrize("name", CASES)
def test_draws_have_the_shares_of_a_plain_computation(name: str) -> None:
    """The sampler begins anew before each draw, so that penalties never see one. A share of 8000 draws is
    within five standard deviations."""
    drawn_as(row(*LOGITS), CASES[name], plainly(LOGITS, CASES[name]))


LLAMA_CPP = json.loads((Path(__file__).parents[1] / "data/sampling.json").read_text("utf-8"))


@pytest.mark.parametrize("case", LLAMA_CPP, ids=range(len(LLAMA_CPP)))
def test_draws_have_the_shares_that_llama_cpps_samplers_leave(case: dict[str, Any]) -> None:
    """logit_bias, penalties, top_k, top_p, min_p and temp in a chain of llama.cpp's, in this order."""
    lists = {name: tuple(map(_fixed, value)) for name, value in case["policy"].items() if type(value) is list}
    policy = SamplingPolicy(**case["policy"] | lists)
    drawn_as(row(*case["logits"]), policy, dict(case["shares"]))


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def drawn_as(logits: np.ndarray, policy: SamplingPolicy, expected: dict[int, float]) -> None:
    count = 8000
    generator = np.random.default_rng(7)
    sampler = Sampler(policy, 0)
    counted: Counter[int] = Counter()
    for _ in range(count):
        sampler.restart()
        sampler._generator = generator
        counted[sampler.pick(logits)] += 1
    assert set(counted) <= set(expected)
    for token, share in expected.items():
        assert abs(counted[token] / count - share) < 5 * math.sqrt(share * (1 - share) / count) + 1e-9, token


POLICIES = st.builds(
    SamplingPolicy,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.25]),
    repeat_last_n=st.sampled_from([-1, 0, 2, 64]),
    history=st.lists(st.integers(0, 29), max_size=6).map(tuple),
)


@settings(max_examples=300, deadline=None)
@given(policy=POLICIES, values=st.lists(st.integers(-80, 80), min_size=30, max_size=30))
def test_only_tokens_that_the_definitions_leave_are_drawn(policy: SamplingPolicy, values: list[int]) -> None:
    logits = [value / 8 for value in values]
    expected = plainly(logits, policy)
    drawn = Sampler(policy, 0).pick(row(*logits))
    # Sums are rounded differently: a token at the very edge of top-p may be in one and not in the other.
    looser = plainly(logits, SamplingPolicy(**_fields(policy) | {"top_p": min(1.0, policy.top_p + 1e-6)}))
    assert drawn in expected or drawn in looser


def _fields(policy: SamplingPolicy) -> dict[str, object]:
    return {name: getattr(policy, name) for name in SamplingPolicy.__slots__}


def test_greedy_takes_the_largest_and_the_lowest_of_equals() -> None:
    assert Sampler(SamplingPolicy(), 0).pick(row(1, 3, 3, 2)) == 1
    assert Sampler(SamplingPolicy(top_k=1, top_p=0.1, min_p=1.0), 0).pick(row(1, 3, 3, 2)) == 1


def test_bytes_and_arrays_are_the_same_row() -> None:
    logits = row(1, 2, 5, 0)
    assert (
        Sampler(SamplingPolicy(), 0).pick(logits.tobytes()) == Sampler(SamplingPolicy(), 0).pick(logits) == 2
    )


def test_padded_ids_are_never_chosen() -> None:
    assert Sampler(SamplingPolicy(), 2).pick(row(1, 2, 9)) == 1
    assert set(shares(SamplingPolicy(temperature=5.0), row(1, 2, 9), tokens=2)) == {0, 1}
    assert Sampler(SamplingPolicy(), 7).pick(row(1, 2, 9)) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_numbers_are_no_token(temperature: float, bad: float) -> None:
    policy = SamplingPolicy(temperature=temperature, top_k=2, repeat_penalty=1.1)
    with pytest.raises(UndecidableLogits, match=f"the logits hold {bad} at id 1"):
        Sampler(policy, 0).pick(row(1, bad, 2))
    with pytest.raises(UndecidableLogits, match="every logit is -inf"):
        Sampler(policy, 0).pick(row(-math.inf, -math.inf))
    with pytest.raises(UndecidableLogits, match="no logits"):
        Sampler(policy, 0).pick(b"")
    assert Sampler(policy, 2).pick(row(9, 2, bad)) == 0


def test_masked_logits_are_never_drawn() -> None:
    for policy in (
        SamplingPolicy(temperature=1.0),
        SamplingPolicy(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1),
    ):
        assert set(shares(policy, row(-math.inf, 0.0, -math.inf), count=200)) == {1}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    assert set(shares(SamplingPolicy(temperature=1e-6), row(1000, 999, -1000), count=200)) == {0}


@pytest.mark.parametrize(
    "policy",
    [
        SamplingPolicy(temperature=5e-324),
        SamplingPolicy(temperature=1.0, min_p=1.5),
        SamplingPolicy(temperature=1.0, min_p=5e-324, top_p=1e-300),
        SamplingPolicy(temperature=0.1, logit_bias=((1, 1e308), (0, -1e308))),
        SamplingPolicy(temperature=1.0, repeat_penalty=1e-300, history=(1,)),
        SamplingPolicy(temperature=1.0, frequency_penalty=-1e308, history=(1, 1, 1)),
    ],
)
def test_extreme_policies_leave_the_likeliest(policy: SamplingPolicy) -> None:
    assert Sampler(policy, 0).pick(row(1.0, 2.0, -math.inf, -3.0)) == 1


def test_top_k_keeps_exactly_k_in_order_of_id() -> None:
    assert set(shares(SamplingPolicy(temperature=1.0, top_k=2), row(1, 1, 1, 1))) == {0, 1}
    assert set(shares(SamplingPolicy(temperature=1.0, top_k=99), row(1, 1))) == {0, 1}


def test_a_bias_bans_and_forces() -> None:
    assert Sampler(SamplingPolicy(logit_bias=((1, -1e9),)), 0).pick(row(1, 5, 2)) == 2
    assert Sampler(SamplingPolicy(logit_bias=((0, 1e9),)), 0).pick(row(1, 5, 2)) == 0
    assert Sampler(SamplingPolicy(logit_bias=((7, 1e9),)), 0).pick(row(1, 5, 2)) == 1


@pytest.mark.parametrize(
    "policy",
    [
        SamplingPolicy(),
        SamplingPolicy(presence_penalty=2e9, history=(0, 2)),
        SamplingPolicy(temperature=1e9, seed=1),
        SamplingPolicy(temperature=1e9, seed=1, top_k=3, top_p=0.999, min_p=1e-5),
        SamplingPolicy(temperature=1.0, presence_penalty=1e9, repeat_penalty=1e-300, history=(0, 1, 2)),
    ],
)
def test_a_banned_token_is_never_chosen(policy: SamplingPolicy) -> None:
    """Whatever a temperature or a penalty makes of the other logits: llama.cpp adds -inf."""
    banned = replace(policy, logit_bias=((1, -1e9),))
    assert set(shares(banned, row(1, 90, 2), count=200)) <= {0, 2}
    with pytest.raises(UndecidableLogits, match="banned by its bias"):
        Sampler(replace(policy, logit_bias=((0, -1e9), (2, -1e9))), 0).pick(row(1, -math.inf, 2))


def test_penalties_see_what_was_drawn_and_forget_it() -> None:
    policy = SamplingPolicy(presence_penalty=10.0, repeat_last_n=2)
    sampler = Sampler(policy, 0)
    assert [sampler.pick(row(5, 4, 3, -99)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    sampler.restart()
    assert sampler.pick(row(5, 4, 3, -99)) == 0
    unbounded = Sampler(SamplingPolicy(presence_penalty=10.0, repeat_last_n=-1), 0)
    assert [unbounded.pick(row(5, 4, 3, -1)) for _ in range(4)] == [0, 1, 2, 3]


def test_penalties_see_the_prompts_end() -> None:
    policy = SamplingPolicy(repeat_penalty=2.0, repeat_last_n=2).after((0, 1, 2))
    assert policy.history == (1, 2)
    assert Sampler(policy, 0).pick(row(1.0, 1.5, 0.1)) == 0
    assert SamplingPolicy(repeat_penalty=2.0, repeat_last_n=-1).after((0, 1, 2)).history == (0, 1, 2)
    assert SamplingPolicy(repeat_penalty=2.0, repeat_last_n=0).after((0, 1, 2)).history == ()
    assert SamplingPolicy().after((0, 1, 2)).history == ()


def test_a_seed_repeats_and_restart_begins_anew() -> None:
    logits = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    policy = SamplingPolicy(temperature=1.0, seed=9, repeat_penalty=1.1)
    first, second = Sampler(policy, 0), Sampler(policy, 0)
    ids = [first.pick(logits) for _ in range(30)]
    assert [second.pick(logits) for _ in range(30)] == ids
    first.restart()
    assert [first.pick(logits) for _ in range(30)] == ids
    other = Sampler(SamplingPolicy(temperature=1.0, seed=10, repeat_penalty=1.1), 0)
    assert [other.pick(logits) for _ in range(30)] != ids
