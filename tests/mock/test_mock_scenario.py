"""The canonical scenario (spec sections 7 and 42) on mocks: every phase, every event, nothing left."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from mock_run import MOCKS, MockRun
from swactor_core.config import PluginChoice
from swactor_core.errors import UsageError
from swactor_core.machines.run import RunOutcome
from swactor_core.orchestrator.session import LocalSession
from swactor_core.plugins import Plugins
from swactor_testing import virtual_time

SCENARIO = (
    "node_available",
    "pool_ready",
    "run_planned",
    "stage_provision_started",
    "weights_downloaded",
    "weights_loaded",
    "stage_ready",
    "readiness_barrier_passed",
    "prompt_injected",
    "token_received",
    "run_completed",
    "ring_released",
    "run_torn_down",
)


@pytest.mark.parametrize("nodes", [1, 2, 3, 12])
async def test_the_canonical_scenario(plugins: Plugins, nodes: int) -> None:
    run = MockRun(plugins, nodes=nodes)
    result = await run.go()
    assert result.outcome is RunOutcome.COMPLETED
    assert list(result.token_ids) == run.reference
    names = run.names()
    # The first of each in the scenario's order: nobody begins a part before its condition.
    firsts = [names.index(name) for name in SCENARIO]
    assert firsts == sorted(firsts)
    assert names.count("stage_ready") == nodes
    assert names.count("ring_leased") == names.count("ring_released") == 2 * (nodes + 1)
    run.check()


def test_it_takes_less_than_a_second(plugins: Plugins) -> None:
    """Of computing, at the best of three, since others may use the machine; and of waiting, which is virtual:
    nothing but the pool's convergence window is waited for."""
    took = []
    for _ in range(3):
        began = time.process_time()
        run = MockRun(plugins)
        run.play()
        took.append(time.process_time() - began)
        assert run.moments[-1] - virtual_time.START == pytest.approx(0.05)
    assert min(took) < 0.5


async def test_the_operator_stops_it(plugins: Plugins) -> None:
    run = MockRun(plugins, at=3, act=lambda run: run.session.stop_run(), max_tokens=500)
    result = await run.go()
    assert result.outcome is RunOutcome.OPERATOR_STOPPED
    assert 4 <= len(result.token_ids) < 500
    assert run.names().count("run_stopped") == 1
    run.check()


async def test_nothing_outside_the_process_is_used(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """No child, no socket of the network, no file: each would go through one of these."""

    def forbidden(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"used something outside: {arguments}")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", forbidden)
    loop = asyncio.get_running_loop()
    for name in ("create_datagram_endpoint", "create_server", "create_connection", "subprocess_exec"):
        monkeypatch.setattr(loop, name, forbidden)
    monkeypatch.setattr("socket.socket", forbidden)
    monkeypatch.setattr("builtins.open", forbidden)
    run = MockRun(plugins)
    assert (await run.go()).outcome is RunOutcome.COMPLETED


async def test_two_sessions_in_one_process_do_not_meet(plugins: Plugins) -> None:
    left, right = MockRun(plugins, nodes=2, model="left"), MockRun(plugins, nodes=2, model="right")
    results = await asyncio.gather(left.go(), right.go())
    assert [r.outcome for r in results] == [RunOutcome.COMPLETED] * 2
    assert [list(r.token_ids) for r in results] == [left.reference, right.reference]
    left.check()
    right.check()


@pytest.mark.parametrize("ring", [64, 256])
async def test_objects_larger_than_their_rings_stream_through(plugins: Plugins, ring: int) -> None:
    run = MockRun(plugins, prompt="a longer prompt " * 8, ring_capacity=ring, max_tokens=4)
    assert (await run.go()).outcome is RunOutcome.COMPLETED
    assert list(run.result.token_ids) == run.reference
    run.check()


@pytest.mark.parametrize("polls", [1, 3])
async def test_a_device_whose_copies_take_time(plugins: Plugins, polls: int) -> None:
    run = MockRun(plugins, session_options={"worker": {"copy_polls": polls}}, max_tokens=4)
    assert (await run.go()).outcome is RunOutcome.COMPLETED
    assert list(run.result.token_ids) == run.reference
    run.check()


# --- one mock beside real parts ---


@pytest.mark.parametrize(
    "others",
    [
        {"transport": "quic"},
        {"membership": "swim"},
        {"arena": "memfd"},
        {"transport": "quic", "arena": "memfd"},
    ],
    ids=lambda others: "+".join(others.values()),
)
async def test_real_parts_take_the_place_of_mocks(plugins: Plugins, others: dict[str, str]) -> None:
    """Nodes stay in this process, since one of transport and membership does not leave it."""
    run = MockRun(plugins, nodes=2, choice=MOCKS.model_copy(update=others), max_tokens=4)
    assert (await run.go()).outcome is RunOutcome.COMPLETED
    assert list(run.result.token_ids) == run.reference
    run.check()
    assert threading.active_count() < 50


async def test_a_heap_arena_needs_a_worker_for_it(plugins: Plugins) -> None:
    choice = PluginChoice(arena="heap", worker="tinygrad")
    with pytest.raises(UsageError, match=r"'heap' does not leave .* 'tinygrad'") as refused:
        LocalSession(plugins, choice, nodes=2)
    assert "echo" in refused.value.hint
    assert "memfd" in refused.value.hint
