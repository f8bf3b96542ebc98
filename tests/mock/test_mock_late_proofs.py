"""A teardown that is proved after its time (spec section 38): the range comes back, and the warning goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mock_run import MockRun
from swactor_core.ids import EdgeId
from swactor_core.machines.run import RunOutcome
from swactor_core.node.data_plane import DataPlane
from swactor_core.plugins import Plugins
from swactor_testing.memory.hub import HUB


def hold_pumps(part: DataPlane) -> Callable[[], None]:
    """Its pumps do not hear that they are to stop until what is returned is called."""
    driver, waiting = part.driver, list[EdgeId]()
    stop, driver._stop = driver._stop, waiting.append

    def release() -> None:
        for edge_id in waiting:
            stop(edge_id)

    return release


def unproven_edges(run: MockRun) -> list[str]:
    return [event["detail"] for event in run.events if event["event"] == "teardown_timed_out"]


def test_a_proof_that_comes_before_the_runs_end_takes_the_warning_back(plugins: Plugins) -> None:
    """Node 0 is not heard of, so the run waits its whole bound; node 1's pumps stop two seconds too late."""

    def act(run: MockRun) -> None:
        HUB.hold(sender=run.ids[0])
        asyncio.get_running_loop().call_later(7.0, hold_pumps(run.pool[1].data_plane))
        run.session.stop_run()

    run = MockRun(plugins, nodes=2, at=3, act=act)
    result = run.play()
    assert result.outcome is RunOutcome.OPERATOR_STOPPED
    assert len([said for said in unproven_edges(run) if "its pump did not stop within 5 s" in said]) == 2
    assert result.unproven == ("stage 0 did not say StageStopped within 15 s",)
    assert run.pool[1].data_plane.leased == 0


def test_the_orchestrators_own_late_proof_takes_the_warning_back(plugins: Plugins) -> None:
    def act(run: MockRun) -> None:
        HUB.hold(sender=run.ids[0])
        asyncio.get_running_loop().call_later(7.0, hold_pumps(run.session.orchestrator.data_plane))
        run.session.stop_run()

    run = MockRun(plugins, nodes=2, at=3, act=act)
    result = run.play()
    assert result.unproven == ("stage 0 did not say StageStopped within 15 s",)
    assert run.session.orchestrator.data_plane.leased == 0


def test_a_proof_that_does_not_come_is_warned_of(plugins: Plugins) -> None:
    run = MockRun(plugins, nodes=2, at=3, act=lambda run: hold_pumps(run.pool[1].data_plane))
    result = run.play()
    assert result.outcome is RunOutcome.COMPLETED
    assert len(result.unproven) == 2
    assert all("its pump did not stop within 5 s" in said for said in result.unproven)
