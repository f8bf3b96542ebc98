"""What the machines promise, end to end on the mocks: reasons, bounds and refusals reach their hearers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from mock_run import MOCKS, MockRun
from swactor_core.machines.run import RunBounds
from swactor_core.machines.run_effects import RunOutcome
from swactor_core.plugins import REGISTRATION_HOOKS, Plugins, load_plugins
from swactor_core.spi.provider import Kind, Provider
from swactor_testing.echo import EchoBackend
from swactor_testing.memory.hub import HUB

LONG = 300


def of(run: MockRun, name: str) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == name]


class Raises(EchoBackend):
    """Raises what no interface names, at sequence 2."""

    def configure(self, *arguments: Any, **options: Any) -> Any:
        role = super().configure(*arguments, **options)
        role._misbehave = self._defect
        return role

    @staticmethod
    def _defect(sequence: int) -> None:
        if sequence == 2:
            raise ZeroDivisionError("a defect of the worker")


async def test_a_worker_that_ends_itself_is_fatal_and_names_its_reason() -> None:
    plugins = load_plugins()
    provider = Provider(Kind.WORKER, "raises", "of a test", Raises, capabilities={"in_process": True})
    hooks = SimpleNamespace(__name__="raises", **{REGISTRATION_HOOKS[Kind.WORKER]: lambda: [provider]})
    plugins.register(hooks, name="raises")
    run = MockRun(plugins, choice=MOCKS.model_copy(update={"worker": "raises"}))
    await run.go()
    run.check_fault("WorkerFatal")
    assert run.result.fault is not None
    assert (run.result.fault.cause, run.result.fault.component) == ("UnhandledException", "Worker")
    [faulted] = of(run, "run_faulted")
    assert (faulted["cause"], faulted["component"]) == ("UnhandledException", "Worker")


async def test_a_teardown_that_runs_out_of_time_says_so_with_its_reason(plugins: Plugins) -> None:
    """Everything that stage 1 sends is held back: the run ends all the same, and names what is unproven."""

    def act(run: MockRun) -> None:
        HUB.hold(sender=run.ids[1])

    bounds = RunBounds(readiness=0.5, execution=0.5, teardown=0.5)
    run = MockRun(plugins, at=3, act=act, bounds=bounds, max_tokens=LONG)
    result = await run.go()
    assert result.outcome is RunOutcome.FAULTED
    assert str(result.fault.reason) == "ExecutionTimeout"
    assert "stage 1 did not say StageStopped within 0.5 s" in result.unproven
    [torn] = of(run, "run_torn_down")
    assert (torn["reason"], torn["component"]) == ("TeardownTimeout", "Run")
    assert torn["detail"] == "stage 1 did not say StageStopped within 0.5 s"


async def test_a_stream_for_an_edge_that_the_node_sends_on_harms_nothing(plugins: Plugins) -> None:
    """Node 2 opens a stream for the edge that node 0 sends on: refused in the end, and the run completes."""
    opening: list[asyncio.Future[Any]] = []

    def act(run: MockRun) -> None:
        stage = run.pool[0].stages.controller
        stranger = run.pool[2].transport
        assert stage is not None
        assert stranger is not None
        opened = stranger.open_edge(run.ids[0], stage.provisioned.outbound.edge_id, deadline=5.0)
        opening.append(asyncio.ensure_future(opened))

    run = MockRun(plugins, at=2, act=act)
    result = await run.go()
    assert result.outcome is RunOutcome.COMPLETED
    assert result.unproven == ()
    assert list(result.token_ids) == run.reference
    assert [event["reason"] for event in of(run, "edge_refused")] == ["UnknownEdge"]
    assert opening[0].exception() is None
    run.check()
