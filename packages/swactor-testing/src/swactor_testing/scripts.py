"""Scripts for machines: scenarios with their exact actions, rows that must change nothing, and random walks.

A test module of one machine makes a `Script` and asks it everything: that each scenario gives the actions
it states, that events which are only expected late change nothing, that every row of the table was taken,
and that no event in any reachable state does more than transition or raise InvalidTransition. Knows `fsm.py`
only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy
from swactor_core.fsm import Action, InvalidTransition, Machine
from swactor_core.messages import TimerFired

from swactor_testing.transitions import Transition, declared, recorded
from swactor_testing.values import plainest, small, values

Steps = Sequence[tuple[object, tuple[Action, ...]]]
Check = Callable[[object, tuple[Action, ...]], None]


def snapshot(machine: Machine[Any]) -> dict[str, Any]:
    """All that a machine knows, for comparison."""
    return copy.deepcopy(vars(machine))


def step_or_refuse(machine: Machine[Any], event: object, now: float = 0.0) -> tuple[Action, ...] | None:
    """The actions of a step, or None when it was refused: then nothing may have changed."""
    before = snapshot(machine)
    try:
        return machine.step(event, now)
    except InvalidTransition:
        assert snapshot(machine) == before, f"{machine.NAME} refused {event} and changed"
        return None


@dataclass(frozen=True)
class Script:
    """`make` gives a fresh machine; a scenario is the steps from there, each with the actions it must give,
    and the state in which they end. `late` states, by state, the events that are expected there and change
    nothing; `examples` are events for these, where the plainest event of the type is not what is meant."""

    make: Callable[[], Machine[Any]]
    scenarios: Mapping[str, tuple[Steps, StrEnum]]
    late: Mapping[StrEnum, Sequence[type[Any]]] = field(default_factory=dict)
    examples: Mapping[type[Any], object] = field(default_factory=dict)

    @property
    def machine(self) -> type[Machine[Any]]:
        return type(self.make())

    def play(self, name: str) -> Machine[Any]:
        machine = self.make()
        steps, end = self.scenarios[name]
        for number, (event, actions) in enumerate(steps):
            taken = machine.step(event, 0.0)
            assert taken == actions, f"{name}, step {number}, {event}:\n  {taken}\n  {actions}"
        assert machine.state is end, f"{name} ended in {machine.state}"
        return machine

    def reach(self, state: StrEnum) -> Machine[Any]:
        """A machine in `state`, by the first scenario that ends there, or else that comes through there."""
        for name, (_, end) in self.scenarios.items():
            if end is state:
                return self.play(name)
        for steps, _ in self.scenarios.values():
            machine = self.make()
            for event, _ in steps:
                if machine.state is state:
                    return machine
                machine.step(event, 0.0)
        raise LookupError(f"no scenario of {self.machine.NAME} comes to {state}")

    def somewhere(self, data: DataObject, check: Check | None = None) -> Machine[Any]:
        """A machine in any state that a scenario comes through, for a walk from there."""
        machine = self.make()
        steps, _ = self.scenarios[data.draw(st.sampled_from(tuple(self.scenarios)))]
        for event, _ in steps[: data.draw(st.integers(0, len(steps)))]:
            actions = machine.step(event, 0.0)
            if check is not None:
                check(event, actions)
        return machine

    def ignored(self) -> list[tuple[StrEnum, type[Any]]]:
        """What `late` states, pair by pair. It is never read from the table, which must agree with it."""
        return [(state, event) for state, events in self.late.items() for event in events]

    def play_ignored(self, state: StrEnum, event: type[Any]) -> None:
        machine = self.reach(state)
        before = snapshot(machine)
        example = self.examples.get(event, None)
        assert machine.step(example if example is not None else plainest(event), 0.0) == ()
        assert snapshot(machine) == before

    def taken(self) -> set[Transition]:
        """Plays everything; the transitions that the scenarios and the ignored rows take."""
        with recorded(self.machine) as taken:
            for name in self.scenarios:
                self.play(name)
            for state, event in self.ignored():
                self.play_ignored(state, event)
        return taken

    def missing(self) -> set[Transition]:
        """Transitions of the table that this script does not take."""
        return declared(self.machine) - self.taken()


def event_strategies(
    machine: type[Machine[Any]], overrides: Mapping[Any, SearchStrategy[Any]] | None = None
) -> dict[type[Any], SearchStrategy[Any]]:
    """A strategy of small identities for every event type of the machine's table."""
    leaves = small(overrides)
    types = dict.fromkeys(row.event for row in machine.TABLE)
    return {event: values(event, leaves) for event in types}


def walk(
    data: DataObject,
    machine: Machine[Any],
    strategies: Mapping[type[Any], SearchStrategy[Any]],
    *,
    steps: int = 15,
    check: Check | None = None,
) -> None:
    """Any events of `strategies` in any order, mostly such as the state expects, so that all states are
    reached. Timers are armed ones, old generations of them, or none that ever was. `check(event, actions)`
    sees each step."""
    everything = tuple(strategies)
    for number in range(data.draw(st.integers(1, steps))):
        accepted = tuple(event for event in strategies if machine.accepts(event))
        expected = bool(accepted) and data.draw(st.integers(0, 4)) > 0
        event_type = data.draw(st.sampled_from(accepted if expected else everything))
        if event_type is TimerFired:
            event: object = data.draw(_timer(machine))
        else:
            event = data.draw(strategies[event_type])
        actions = step_or_refuse(machine, event, float(number))
        if actions is not None and check is not None:
            check(event, actions)


def _timer(machine: Machine[Any]) -> SearchStrategy[TimerFired]:
    timers = [TimerFired(name, generation) for name, generation in machine._timers.items()]
    stale = [TimerFired(t.name, t.generation - 1) for t in timers] or [TimerFired("never set", 1)]
    return st.sampled_from(timers * 3 + stale)
