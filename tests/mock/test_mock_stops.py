"""The operator's stop at every moment of the canonical scenario (spec sections 13, 36 and 42), and defects.

Every event of a happy run is a moment: the stop comes right after it, once or twice, alone or with a fault.
Orchestrator teardown and stage teardown (spec section 38) follow every one of these ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import event_checker
import pytest
from fault_sources import SOURCES
from mock_run import MockRun
from swactor_core.faults import Component
from swactor_core.ids import NodeId
from swactor_core.machines.run import RunOutcome
from swactor_core.messages import Address
from swactor_core.plugins import Plugins
from swactor_testing.memory.hub import HUB

MOMENTS = 100
"""More than a run of two nodes and three tokens has; what is beyond its last event is no moment."""


def small(plugins: Plugins, **options: Any) -> MockRun:
    return MockRun(plugins, nodes=2, max_tokens=3, seed=5, **options)


@pytest.fixture(scope="module")
def happy(plugins: Plugins) -> list[str]:
    run = small(plugins)
    assert run.play().outcome is RunOutcome.COMPLETED
    names = run.names()
    assert len(names) <= MOMENTS
    return names


def at_every_event(happy: list[str], play: Callable[[int], None], *, step: int = 1) -> None:
    for number in range(0, len(happy), step):
        try:
            play(number)
        except BaseException:
            print(f"at event {number}, {happy[number]}")
            raise
        HUB.clear()


@pytest.mark.parametrize("times", [1, 2])
def test_the_operator_stops_it_at_any_event(plugins: Plugins, happy: list[str], times: int) -> None:
    end = next(i for i, name in enumerate(happy) if name in event_checker.OUTCOMES)

    def act(run: MockRun) -> None:
        for _ in range(times):
            run.session.stop_run()

    def play(number: int) -> None:
        run = small(plugins, at_event=number, act=act)
        result = run.play()
        if number < end:
            assert result.outcome in (RunOutcome.OPERATOR_STOPPED, RunOutcome.COMPLETED)
        else:
            assert result.outcome is RunOutcome.COMPLETED
        if result.outcome is RunOutcome.COMPLETED:
            assert happy[:number].count("token_received") >= 2, "it could still have been stopped"
        assert result.fault is None
        assert result.unproven == ()
        assert list(result.token_ids) == run.reference[: len(result.token_ids)]
        run.check()
        run.check_bounds()

    at_every_event(happy, play)


def test_a_stop_before_the_run_stops_nothing(plugins: Plugins) -> None:
    run = small(plugins, at_event=-1, act=lambda run: run.session.stop_run())
    assert run.play().outcome is RunOutcome.COMPLETED
    run.check()


@pytest.mark.parametrize("seed", range(40))
def test_a_stop_and_a_fault_at_once_give_one_outcome(plugins: Plugins, happy: list[str], seed: int) -> None:
    chance = random.Random(seed)
    name = chance.choice([name for name, source in sorted(SOURCES.items()) if not source.at])
    source = SOURCES[name]
    stop_first = chance.random() < 0.5
    number, index = chance.randrange(len(happy)), chance.randrange(2)
    print(f"{name!r} on node {index} at event {number}, the stop {'before' if stop_first else 'after'} it")

    def act(run: MockRun) -> None:
        if stop_first:
            run.session.stop_run()
        source.act(run, index, chance)
        if not stop_first:
            run.session.stop_run()

    run = small(plugins, at_event=number, act=act)
    result = run.play()
    if result.outcome is RunOutcome.FAULTED:
        assert result.fault is not None
        assert str(result.fault.reason) in source.reasons
    killed = (run.ids[index],) if source.kills else ()
    run.check(killed=killed, unproven=True)
    run.check_bounds()


def test_a_run_can_be_had_again_as_it_was(plugins: Plugins, happy: list[str]) -> None:
    """Same seed, same events at the same virtual times."""

    def told() -> list[tuple[Any, ...]]:
        HUB.delay(0.003)
        run = small(plugins, at_event=60, act=lambda run: HUB.lose(run.ids[0], run.ids[1]))
        run.play()
        run.check()
        HUB.clear()
        keys = ("event", "node_id", "number", "stage_index", "edge_id", "sequence", "reason")
        events = [tuple(event.get(key) for key in keys) for event in run.events]
        return list(zip(events, run.moments, strict=True))

    assert told() == told()


# --- defects: an actor that raises ---

OF_NODE = (
    Address(Component.NODE),
    Address(Component.STAGE_CONTROLLER),
    Address(Component.GPU_WORKER_CTL),
    Address(Component.ARENA_MANAGER),
    Address(Component.EDGE_ESTABLISHER),
    Address(Component.DRIVER),
)
OF_ORCHESTRATOR = (
    Address(Component.POOL),
    Address(Component.TOKEN_ENDPOINT),
    Address(Component.TOKEN_ENDPOINT, 1),
    Address(Component.ARENA_MANAGER),
    Address(Component.EDGE_ESTABLISHER),
    Address(Component.DRIVER),
    Address(Component.RUN),
)


SOME = 4
"""Every so many events is a defect's moment: there are many actors."""


class Nonsense:
    """A message that no actor takes."""


def defect(plugins: Plugins, number: int, address: Address, *, on_node: bool) -> None:
    met: list[bool] = []

    def act(run: MockRun) -> None:
        system = run.pool[1].system if on_node else run.session.orchestrator.system
        met.append(system.lives(address))
        system.tell(address, Nonsense())

    run = small(plugins, at_event=number, act=act)
    result = run.play()
    names = run.names()
    end = next(i for i, name in enumerate(names) if name in event_checker.OUTCOMES)
    # Without its run nobody tells a stage to stop: nodes do so by themselves when their link ends.
    of_run = not on_node and address.component is Component.RUN
    killed: tuple[NodeId, ...] = (run.home, *run.ids) if of_run else ()
    killed = (run.ids[1],) if on_node else killed
    if number < end and met and met[0] and result.outcome is RunOutcome.FAULTED:
        assert result.fault is not None
        line = result.fault.line()
        assert str(result.fault.reason) in ("Internal", "NodeUnavailable", "StreamFault"), line
        if str(result.fault.reason) == "Internal":
            assert str(result.fault.component) == str(address.component), line
    event_checker.check(run.events, killed_nodes=[f"{node_id:016x}" for node_id in killed], unproven=True)
    run.check_bounds()


@pytest.mark.parametrize("address", OF_NODE, ids=lambda address: str(address.component))
def test_a_defect_of_a_node_at_any_event(plugins: Plugins, happy: list[str], address: Address) -> None:
    at_every_event(happy, lambda number: defect(plugins, number, address, on_node=True), step=SOME)


@pytest.mark.parametrize(
    "address", OF_ORCHESTRATOR, ids=lambda address: f"{address.component}{address.key or ''}"
)
def test_a_defect_of_the_orchestrator_at_any_event(
    plugins: Plugins, happy: list[str], address: Address
) -> None:
    at_every_event(happy, lambda number: defect(plugins, number, address, on_node=False), step=SOME)
