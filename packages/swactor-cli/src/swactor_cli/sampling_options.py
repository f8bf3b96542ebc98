"""The options of sampling to a policy. What depends on the model's vocabulary is checked with the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from secrets import randbits

from swactor_core.errors import UsageError
from swactor_core.plan import BAN, SamplingPolicy

from swactor_cli.prompts import token_id

LARGEST = 1e9


def sampling_policy(
    *,
    temperature: float,
    seed: int | None,
    top_k: int,
    top_p: float,
    min_p: float,
    repeat_penalty: float,
    frequency_penalty: float,
    presence_penalty: float,
    repeat_last_n: int,
    logit_bias: Sequence[str],
) -> SamplingPolicy:
    """Raises UsageError naming the option. Without `seed` one is drawn."""
    for option, value in (
        ("--temperature", temperature),
        ("--top-p", top_p),
        ("--min-p", min_p),
        ("--repeat-penalty", repeat_penalty),
        ("--frequency-penalty", frequency_penalty),
        ("--presence-penalty", presence_penalty),
    ):
        if not math.isfinite(value):
            raise UsageError(f"{option} is {value}", hint="give a number")
        if abs(value) > LARGEST:
            raise UsageError(f"{option} is {value:g}", hint=f"give at most {LARGEST:g}")
    if top_p <= 0:
        raise UsageError(
            f"--top-p is {top_p:g}, which leaves no token", hint="give more than 0 and at most 1"
        )
    if repeat_penalty <= 0:
        raise UsageError(f"--repeat-penalty is {repeat_penalty:g}", hint="give more than 0; 1 is off")
    return SamplingPolicy(
        temperature=temperature,
        seed=randbits(32) if seed is None else seed,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repeat_last_n=repeat_last_n,
        logit_bias=_biases(logit_bias),
    )


def _biases(options: Sequence[str]) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for option in options:
        written, equals, value = option.partition("=")
        token = token_id(written)
        try:
            bias = float(value)
        except ValueError:
            bias = math.nan
        if token is None or not equals or math.isnan(bias) or bias == math.inf:
            raise UsageError(
                f"--logit-bias {option[:60]!r} is not a token id and a number",
                hint="write it like 42=-1.5; 42=-inf bans the token",
            )
        if abs(bias) > LARGEST and bias != -math.inf:
            raise UsageError(f"--logit-bias {option[:60]!r} is too large", hint=f"give at most {LARGEST:g}")
        if token in biases:
            raise UsageError(f"--logit-bias names the token {token} twice", hint="give one of them")
        biases[token] = BAN if bias == -math.inf else bias
    return tuple(sorted(biases.items()))


def fitted(policy: SamplingPolicy, vocab_size: int, suppressed: frozenset[int]) -> SamplingPolicy:
    """The policy for a model: tokens that it suppresses are banned, unless the operator gave them a bias.
    Raises UsageError for a bias of a token that the model does not have."""
    outside = next((token for token, _ in policy.logit_bias if token >= vocab_size), None)
    if outside is not None:
        raise UsageError(
            f"--logit-bias: {outside} is outside the vocabulary of {vocab_size}",
            hint=f"this model's token ids are 0 to {vocab_size - 1}",
        )
    banned = {token: BAN for token in suppressed if token < vocab_size}
    return replace(policy, logit_bias=tuple(sorted((banned | dict(policy.logit_bias)).items())))
