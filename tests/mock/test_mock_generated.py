"""Every fault source of spec section 36 at any moment of the canonical scenario (spec section 42), by seed.

The happy run of a drawn configuration is played first; then the same run, with a fault when the event of a
drawn number is seen, on a drawn node. Whatever comes of it: one outcome, a reason that fits, every lease
given back, every actor stopped, no task left, in bounded virtual time. A failure names its seed and its
scenario; `SWACTOR_MOCK_SEEDS=1000-3000` plays others.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import event_checker
import pytest
from fault_sources import SOURCES, Source
from mock_run import MockRun
from swactor_core.machines.run import RunOutcome
from swactor_core.plugins import Plugins
from swactor_testing.memory.hub import HUB
from swactor_testing.static import CLUSTERS

_FIRST, _, _LAST = os.environ.get("SWACTOR_MOCK_SEEDS", "0-199").partition("-")
SEEDS = range(int(_FIRST), int(_LAST or _FIRST) + 1)

NO_FAULT_IN_PLAY = ("run_completed", "run_faulted", "run_stopped")
SPARE_TOKENS = 3
"""A pipeline is this many tokens ahead of what is seen of it, at most, when a fault strikes."""


@dataclass(frozen=True)
class Scenario:
    """One configuration of a run, and what happens to it."""

    seed: int
    nodes: int
    prompt: str
    max_tokens: int
    ring_capacity: int | None
    prefill_chunk: int
    latency: float
    worker: dict[str, object]
    source: str
    index: int
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, plugins: Plugins, *, faulty: bool) -> MockRun:
        options = dict(self.options) if faulty else {}
        session: dict[str, Any] = {
            "worker": dict(self.worker) if faulty else {"copy_polls": self.worker["copy_polls"]}
        }
        if "arena_ceiling" in options:
            session["arena_ceiling"] = options.pop("arena_ceiling")
        if "ring_capacity" not in options:
            options["ring_capacity"] = self.ring_capacity
        return MockRun(
            plugins,
            nodes=self.nodes,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            prefill_chunk=self.prefill_chunk,
            seed=self.seed,
            session_options=session,
            **options,
        )


def draw(seed: int, chance: random.Random) -> Scenario:
    source = chance.choice(sorted(SOURCES))
    worker: dict[str, object] = {"copy_polls": chance.choice((0, 0, 0, 1, 3))}
    worker |= SOURCES[source].worker(chance)
    nodes = chance.randint(1, 5)
    return Scenario(
        seed=seed,
        nodes=nodes,
        prompt="".join(chance.choice("ab cä") for _ in range(chance.choice((1, 5, 40)))),
        max_tokens=chance.choice((1, 4, 12)),
        ring_capacity=chance.choice((None, None, 64, 128, 4096)),
        prefill_chunk=chance.choice((1, 4, 32)),
        latency=chance.choice((0.0, 0.0, 0.002, 0.05)),
        worker=worker,
        source=source,
        index=chance.randrange(nodes),
        options=dict(SOURCES[source].options),
    )


def happy(scenario: Scenario, plugins: Plugins) -> MockRun:
    HUB.delay(scenario.latency)
    run = scenario.run(plugins, faulty=False)
    assert run.play().outcome is RunOutcome.COMPLETED
    assert list(run.result.token_ids) == run.reference
    run.check()
    run.check_bounds()
    return run


def moment(names: list[str], source: Source, chance: random.Random) -> int:
    if source.at == "-":
        return len(names)  # it is there from the start, and needs no moment
    return names.index(source.at) if source.at else chance.randrange(-1, len(names))


def judge(run: MockRun, source: Source, *, struck_at: int, struck: bool, index: int) -> None:
    """What must hold of the run's end, whatever the moment."""
    result, names = run.result, run.names()
    outcome_at = next(i for i, name in enumerate(names) if name in event_checker.OUTCOMES)
    tokens_then = names[: max(struck_at, 0)].count("token_received")
    late = struck_at >= outcome_at or len(run.reference) - tokens_then <= SPARE_TOKENS
    killed = (run.ids[index],) if source.kills else ()
    if result.outcome is RunOutcome.COMPLETED:
        assert not struck or late or not source.certain, "a fault that must end the run did not"
        assert result.fault is None
        assert list(result.token_ids) == run.reference
    else:
        assert struck, "nothing had happened"
        assert struck_at < outcome_at
        assert result.outcome is RunOutcome.FAULTED
        assert result.fault is not None
        assert str(result.fault.reason) in source.reasons, result.fault.line()
        assert result.fault.detail, result.fault.line()
        assert "\n" not in result.fault.line()
        assert names[outcome_at] == "run_faulted"
        assert run.events[outcome_at]["reason"] == str(result.fault.reason)
        assert run.events[outcome_at]["component"] == str(result.fault.component)
        assert list(result.token_ids) == run.reference[: len(result.token_ids)]
    if not (source.kills or source.unproven):
        assert result.unproven == ()
    run.check(killed=tuple(killed), unproven=source.unproven)
    run.check_bounds()


def clean() -> None:
    HUB.clear()
    assert not HUB.endpoints
    assert not CLUSTERS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_at_any_moment(plugins: Plugins, seed: int) -> None:
    chance = random.Random(seed)
    scenario = draw(seed, chance)
    source = SOURCES[scenario.source]
    names = happy(scenario, plugins).names()
    clean()
    at = moment(names, source, chance)
    struck: list[bool] = [True] if source.at == "-" else []

    def act(run: MockRun) -> None:
        struck.append(source.act(run, scenario.index, chance))

    print(f"{scenario}\n{scenario.source!r} on node {scenario.index} at event {at} of {len(names)}")
    HUB.delay(scenario.latency)
    run = scenario.run(plugins, faulty=True)
    run.at_event, run.act = at, act
    run.play()
    judge(run, source, struck_at=-1 if source.at == "-" else at, struck=any(struck), index=scenario.index)
    clean()
