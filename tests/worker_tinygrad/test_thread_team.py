"""The team that runs lists of native kernels: every part once, in whatever shares; no thread outlives it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_support import address
from swactor_core.errors import ResourceError
from swactor_worker_tinygrad.native import MOST_PARTS, Group, KernelList, Team, float_bits

LANES = 16
LONG = 24  # groups of a list
CAREFUL = 2  # the word of `struct team` that says for how many groups shares are halved
TURNS = 200


class Work:
    """A long list over one array. Each group gates and caps it in place: a part that is done twice, never or
    too early gives other bits."""

    def __init__(self, kernels: Any, units: int) -> None:
        self.values, self.up = np.zeros(units * LANES, np.float32), np.zeros(units * LANES, np.float32)
        self.gate = kernels.address("gate"), address(self.values), address(self.up), len(self.values), 0
        self.cap = kernels.address("cap"), address(self.values), len(self.values), float_bits(3.0)

    def entries(self, *parts: int) -> list[Group | list[int]]:
        made: list[Group | list[int]] = []
        for index in range(LONG):
            (gate, *gated), (cap, *capped), some = self.gate, self.cap, parts[index % len(parts)]
            both = [gate, some, *gated], [cap, some, *capped]
            made += [Group(both)] if index % 2 else list(both)
        return made

    def run(self, team: Team, work: KernelList) -> bytes:
        generator = np.random.default_rng(3)
        self.values[:] = generator.standard_normal(len(self.values)) * 4
        self.up[:] = generator.uniform(-2, 2, len(self.up))
        team.run(work)
        return self.values.tobytes()


@pytest.fixture(params=[2, 3, 8])
def helped(request: pytest.FixtureRequest, kernels: Any) -> Iterator[Team]:
    made = Team(kernels, request.param)
    yield made
    made.close()


@pytest.fixture
def alone(kernels: Any) -> Iterator[Team]:
    made = Team(kernels, 1)
    yield made
    made.close()


@pytest.mark.parametrize("parts", [(2,), (7, 1, 3), (48,), (16, 1, 5, 48)], ids=str)
@pytest.mark.parametrize("careful", [False, True], ids=["whole shares", "halves"])
def test_every_part_is_done_once_and_in_order(
    kernels: Any, helped: Team, alone: Team, parts: tuple[int, ...], careful: bool
) -> None:
    work = Work(kernels, 48)
    expected = work.run(alone, alone.prepare(work.entries(1)))
    assert np.isfinite(work.values).all()
    assert np.abs(work.values).max() > 0
    helped._state[CAREFUL] = (1 << 40) if careful else 0
    prepared = helped.prepare(work.entries(*parts))
    assert {work.run(helped, prepared) for _ in range(TURNS)} == {expected}


def test_a_short_list_leaves_members_without_a_share(kernels: Any, helped: Team, alone: Team) -> None:
    """Fewer units than threads, and parts without any unit."""
    work = Work(kernels, 2)
    expected = work.run(alone, alone.prepare(work.entries(1)))
    prepared = [helped.prepare(work.entries(parts)) for parts in (2, 5, 48)]
    assert {work.run(helped, one) for _ in range(TURNS) for one in prepared} == {expected}


def test_helpers_that_never_come_are_not_waited_for(kernels: Any, helped: Team, alone: Team) -> None:
    """As when the system keeps them off their cores: their shares are done by who called."""
    work = Work(kernels, 48)
    expected = work.run(alone, alone.prepare(work.entries(1)))
    prepared = helped.prepare(work.entries(48, 7))
    prepared._head[3] = 0  # calls nobody: they sleep, or soon will
    assert {work.run(helped, prepared) for _ in range(20)} == {expected}


def test_a_list_may_be_empty(helped: Team, kernels: Any, alone: Team) -> None:
    helped.run(helped.prepare([]))
    work = Work(kernels, 48)
    assert work.run(helped, helped.prepare(work.entries(4))) == work.run(
        alone, alone.prepare(work.entries(1))
    )


def test_more_parts_than_a_ticket_counts_and_unequal_groups_are_refused(kernels: Any, alone: Team) -> None:
    work = Work(kernels, 48)
    (gate, *words) = work.gate
    alone.prepare([[gate, MOST_PARTS, *words]])
    for entries in ([gate, MOST_PARTS + 1, *words], Group([[gate, 2, *words], [gate, 3, *words]])):
        with pytest.raises(ValueError, match="parts"):
            alone.prepare([entries])


def seconds_of(thread: int) -> float:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def asleep(thread: int) -> bool:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("threads", [3, 16])
def test_helpers_sleep_between_lists_and_end_with_the_team(kernels: Any, threads: int) -> None:
    before = set(threading.enumerate())
    team = Team(kernels, threads)
    helpers = [thread for thread in threading.enumerate() if thread not in before]
    assert len(helpers) == threads - 1
    work = Work(kernels, 48)
    prepared = team.prepare(work.entries(48))
    for _ in range(5):
        work.run(team, prepared)
        identities = [helper.native_id or 0 for helper in helpers]
        spent: list[float] = []
        while spent != (now := [seconds_of(each) for each in identities]) or not all(map(asleep, identities)):
            spent = now
            os.sched_yield()
        for _ in range(1000):
            os.sched_yield()
        assert [seconds_of(each) for each in identities] == spent
    team.close()
    assert not any(helper.is_alive() for helper in helpers)
    team.close()


def test_a_team_that_is_closed_at_once_ends(kernels: Any) -> None:
    for _ in range(TURNS):
        before = threading.active_count()
        team = Team(kernels, 4)
        team.close()
        assert threading.active_count() == before


def test_a_team_that_cannot_have_its_threads_leaves_none_behind(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, started = threading.active_count(), []
    start = threading.Thread.start

    def some(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", some)
    with pytest.raises(ResourceError, match="only 3 of 8 threads") as caught:
        Team(kernels, 8)
    assert "threads=3" in caught.value.hint
    assert not any(thread.is_alive() for thread in started)
    assert threading.active_count() == before
