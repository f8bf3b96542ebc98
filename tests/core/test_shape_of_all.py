"""What holds of every machine alike (architecture: the one shape of a machine), on the scenarios of each.

Lays the whole vocabulary before every state: an event without a row is refused by name and changes nothing,
whatever it is; a timer that is not armed is late, never an error; no handler leaves its row.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import is_dataclass
from enum import StrEnum
from functools import cache
from types import ModuleType
from typing import Any, get_args

import pytest
import swactor_core.machines
import swactor_core.messages
from swactor_core.diagram import all_machines
from swactor_core.fsm import Action, InvalidTransition, Machine
from swactor_core.messages import TimerFired
from swactor_testing.scripts import Script, snapshot
from swactor_testing.values import plainest


@pytest.fixture(scope="module")
def scripts(scenario_modules: list[ModuleType]) -> dict[str, Script]:
    """By name of the machine: the first script of the contract modules that plays it."""
    found: dict[str, Script] = {}
    for module in scenario_modules:
        for value in vars(module).values():
            if isinstance(value, Script):
                found.setdefault(value.machine.NAME, value)
    return found


def called(name: str) -> type[Machine[Any]]:
    return {machine.NAME: machine for machine in all_machines()}[name]


def states(machine: type[Machine[Any]]) -> list[StrEnum]:
    return list(type(machine.INITIAL))


PLACES = [(machine, state) for machine in all_machines() for state in states(machine)]
by_place = pytest.mark.parametrize(
    ("machine", "state"), PLACES, ids=[f"{machine.NAME}-{state}" for machine, state in PLACES]
)


WHERE = ("swactor_core.messages", "swactor_core.machines")


@cache
def vocabulary() -> tuple[object, ...]:
    """The plainest of every message and of every event and effect that a machine's module names."""
    names = [info.name for info in pkgutil.iter_modules(swactor_core.machines.__path__)]
    machines = [importlib.import_module(f"swactor_core.machines.{name}") for name in names]
    modules: list[ModuleType] = [swactor_core.messages, *machines]
    kinds = {
        value: None
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and is_dataclass(value) and value.__module__.startswith(WHERE)
        if value.__hash__  # frozen, or a `value`: what a ledger keeps can change and has none
    }
    plain: list[object] = []
    for kind in kinds:
        try:
            plain.append(plainest(kind))
        except TypeError:
            assert issubclass(kind, Action), f"{kind} is no action and has no plainest value"
    return (*plain, "a word", 7, None, object())


def test_every_machine_has_its_script_and_the_vocabulary_is_whole(scripts: dict[str, Script]) -> None:
    assert set(scripts) == {machine.NAME for machine in all_machines()}
    spoken = {type(event) for event in vocabulary()}
    for machine in all_machines():
        assert {row.event for row in machine.TABLE} <= spoken
    assert len(spoken) > 150


def test_every_contract_has_a_broken_host_and_a_random_walk(scenario_modules: list[ModuleType]) -> None:
    for module in scenario_modules:
        tests = {name: value for name, value in vars(module).items() if name.startswith("test_")}
        if not any(isinstance(value, Script) for value in vars(module).values()):
            continue
        assert any("broken" in name for name in tests), f"{module.__name__} has no broken host"
        walks = [name for name, test in tests.items() if getattr(test, "is_hypothesis_test", False)]
        assert any("any_event" in name or "whatever" in name for name in walks), module.__name__


@by_place
def test_every_state_is_reached(
    machine: type[Machine[Any]], state: StrEnum, scripts: dict[str, Script]
) -> None:
    assert scripts[machine.NAME].reach(state).state is state


@by_place
def test_an_event_without_a_row_is_refused_and_changes_nothing(
    machine: type[Machine[Any]], state: StrEnum, scripts: dict[str, Script]
) -> None:
    there = scripts[machine.NAME].reach(state)
    before = snapshot(there)
    refused = 0
    for event in vocabulary():
        if there.accepts(type(event)) or isinstance(event, TimerFired):
            continue
        with pytest.raises(InvalidTransition) as refusal:
            there.step(event, 0.0)
        assert (refusal.value.machine, refusal.value.state) == (machine.NAME, state)
        assert refusal.value.event is event
        refused += 1
    assert refused > 100
    assert snapshot(there) == before


@by_place
def test_an_event_with_a_row_goes_where_the_row_says_or_is_refused_whole(
    machine: type[Machine[Any]], state: StrEnum, scripts: dict[str, Script]
) -> None:
    rows = [row for row in machine.TABLE if row.source is state and row.event is not TimerFired]
    for row in rows:
        there = scripts[machine.NAME].reach(state)
        before = snapshot(there)
        try:
            actions = there.step(plainest(row.event), 0.0)
        except InvalidTransition:
            assert snapshot(there) == before
        else:
            assert there.state in row.targets
            assert all(isinstance(action, Action) for action in actions)


@by_place
def test_a_timer_that_is_not_armed_is_late_and_nothing_else(
    machine: type[Machine[Any]], state: StrEnum, scripts: dict[str, Script]
) -> None:
    there = scripts[machine.NAME].reach(state)
    armed = dict(there._timers)
    stale = [TimerFired(name, generation + step) for name, generation in armed.items() for step in (-1, 1)]
    late = [TimerFired("never set", 1), *stale]
    before = snapshot(there) | {"late_timers": there.late_timers + len(late)}
    for timer in late:
        assert there.step(timer, 0.0) == ()
    assert snapshot(there) == before


@by_place
def test_an_armed_timer_is_one_that_its_state_can_take(
    machine: type[Machine[Any]], state: StrEnum, scripts: dict[str, Script]
) -> None:
    """A host that fires what it was told to fire is never refused; what an end leaves armed would be."""
    for name, (steps, _) in scripts[machine.NAME].scenarios.items():
        there = scripts[machine.NAME].make()
        for event, _ in steps:
            there.step(event, 0.0)
            if there.state is state and there._timers:
                assert there.accepts(TimerFired), f"{name}: {there._timers} armed after {event}"


def test_the_states_are_those_of_the_specification() -> None:
    """Names as in spec sections 8, 13, 14, 19, 25, 26, 27, 31, 32 and 38; what stands beside them is more."""
    named = {machine.NAME: {str(state) for state in states(machine)} for machine in all_machines()}
    assert named["Run"] >= {
        *("Planning", "Provisioning", "WaitingReady", "Running"),
        *("Completed", "Faulted", "TearingDown", "Done"),
    }
    assert named["StageController"] == {
        *("Unprovisioned", "Preparing", "Ready", "Executing", "Faulted", "Stopping", "Stopped"),
    }
    assert named["ArenaManager"] == {"Booting", "Ready", "Failed", "ShuttingDown"}
    assert named["RecvPump"] == {
        *("WaitingForSpecAndStream", "Streaming", "Backpressured", "Closed", "Faulted"),
    }
    assert named["SendPump"] == {
        *("WaitingForConnection", "WaitingForBytes", "OpenStream", "Streaming", "Backpressured"),
        *("Closed", "Faulted"),
    }
    assert named["EdgeRecord"] == {
        *("New", "WaitingForLease", "WaitingForWorkerRing", "WaitingForDriver", "Ready"),
        *("StoppingPump", "StoppingWorkerRing", "ReleasingArena", "Stopped", "Failed"),
    }
    assert named["TxEdge"] == {"Provisioning", "Ready", "Producing", "Stopping", "Stopped", "Faulted"}
    assert named["RxEdge"] == {
        *("Provisioning", "Ready", "LoadingObject", "ObjectReady", "Stopping", "Stopped", "Faulted"),
    }
    assert named["GpuWorkerCtl"] == {
        *("NotStarted", "Spawning", "Initializing", "Running", "Stopping", "Killing"),
        *("Crashed", "Restarting", "Stopped", "Failed"),
    }
    assert named["Worker"] == {"Booting", "Initializing", "Running", "Draining", "Fatal"}
    assert named["Ingress"] == {
        *("Uninstalled", "NeedHeader", "NeedPayload", "ObjectComplete", "Faulted", "Uninstalling"),
    }
    assert named["Egress"] == {
        *("Uninstalled", "WaitingForOutput", "NeedWritableForHeader", "NeedWritableForPayload"),
        *("Faulted", "Uninstalling"),
    }
    assert named["Node"] >= {
        *("ContainerStarting", "NodeProcessStarting", "ArenaReady", "WorkerReady"),
        *("TransportReady", "MembershipJoining", "NodeAvailable"),
    }
    assert named["Pool"] >= {"PoolReady"}


# `StopEdge` in every state of everything that an edge is made of (spec sections 24 to 27 and 38).
OF_AN_EDGE = ("EdgeRecord", "TxEdge", "RxEdge", "RecvPump", "SendPump", "Rendezvous")
# The end of the worker, in every state in which there is or may be one (spec section 31).
ENDS_OF_THE_WORKER = {
    "StageController": (
        "WorkerCrashed",
        {"Unprovisioned"},
    ),
    "GpuWorkerCtl": ("ProcessNotification", {"NotStarted"}),
    "Node": ("WorkerGone", {"ContainerStarting", "NodeProcessStarting"}),
}


@pytest.mark.parametrize("name", OF_AN_EDGE)
def test_an_edge_can_be_stopped_in_every_state(name: str) -> None:
    machine = called(name)
    taken = {row.source for row in machine.TABLE if row.event.__name__ == "StopEdge"}
    assert set(states(machine)) - taken == set()


@pytest.mark.parametrize("name", ENDS_OF_THE_WORKER)
def test_the_worker_can_end_in_every_state(name: str) -> None:
    event, without = ENDS_OF_THE_WORKER[name]
    machine = called(name)
    taken = {str(row.source) for row in machine.TABLE if row.event.__name__ == event}
    assert {str(state) for state in states(machine)} - taken == without


def test_no_type_alias_hides_an_event() -> None:
    """A row's event is one class: `step` looks rows up by the exact type."""
    for machine in all_machines():
        for row in machine.TABLE:
            assert isinstance(row.event, type)
            assert not get_args(row.event)
