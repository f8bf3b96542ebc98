"""The one shape of every machine: a transition table, `step(event, now) -> actions`, and nothing else.

A machine is pure: `now` is monotonic seconds from the driver, effects are actions it returns. The driver
performs all actions of a step before the next step. A step that raises has changed nothing:
`InvalidTransition` is raised before a handler runs, and handlers decide before they assign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from swactor_core.errors import SwactorError
from swactor_core.events import EventName
from swactor_core.messages import Address, TimerFired
from swactor_core.values import frozen, value

StateT = TypeVar("StateT", bound=StrEnum)


class Action:
    """What a step asks its driver to do: Send, SetTimer, CancelTimer, Emit, or a subclass of Effect."""

    __slots__ = ()


@value
class Send(Action):
    to: Address
    message: object


@value
class SetTimer(Action):
    """Replaces a timer of the same name; `at` in the driver's monotonic seconds."""

    name: str
    generation: int
    at: float


@frozen
class CancelTimer(Action):
    name: str


@value
class Emit(Action):
    """A lifecycle event with the identities the machine knows; the bus adds node, time and number."""

    name: EventName
    fields: dict[str, Any] = field(default_factory=dict)


class Effect(Action):
    """Base of what an owner's adapter performs (map memory, spawn a process, open an edge)."""

    __slots__ = ()


@frozen
class Row:
    """One transition: in `source`, on an event of this type, `handler` runs and the machine goes to one of
    `targets`. No handler: the event is expected here and changes nothing (or only the state)."""

    source: StrEnum
    event: type[Any]
    handler: str | None
    targets: tuple[StrEnum, ...]


class InvalidTransition(SwactorError):
    """A wrong local call: this event cannot happen in this state. Nothing was changed."""

    def __init__(self, machine: str, state: StrEnum, event: object) -> None:
        super().__init__(f"{machine} in state {state} cannot take {type(event).__name__}")
        self.machine = machine
        self.state = state
        self.event = event


Outcome = tuple[StateT, tuple[Action, ...]]
Handler = Callable[[Any, Any, float], Any]
"""A handler as its class has it, unbound."""
Index = dict[tuple[StrEnum, type[Any]], tuple[Handler | None, tuple[StrEnum, ...]]]
"""The table as a step looks it up: handler and targets by source and event."""
TransitionObserver = Callable[[str, StrEnum, type[Any], StrEnum], None]


class Machine(Generic[StateT]):
    """Base of all machines. Subclasses: `NAME`, `INITIAL`, `TABLE`, handlers `(event, now) -> Outcome`."""

    NAME: ClassVar[str]
    INITIAL: ClassVar[StrEnum]
    TABLE: ClassVar[tuple[Row, ...]]
    _INDEX: ClassVar[Index]
    observers: ClassVar[list[TransitionObserver]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._INDEX = cls._index()

    @classmethod
    def _index(cls) -> Index:
        index: Index = {}
        for row in cls.TABLE:
            key = (row.source, row.event)
            assert key not in index, f"{cls.NAME}: two rows for {row.source} on {row.event.__name__}"
            assert row.handler is None or hasattr(cls, row.handler), f"{cls.NAME}: no handler {row.handler}"
            assert row.handler or len(row.targets) == 1, f"{cls.NAME}: no handler, several targets"
            index[key] = (getattr(cls, row.handler) if row.handler else None), row.targets
        return index

    def __init__(self) -> None:
        self.state: StateT = self.INITIAL  # type: ignore[assignment] # ClassVar cannot name the class's StateT
        self._timers: dict[str, int] = {}
        self._generation = 0
        self.late_timers = 0

    def accepts(self, event_type: type[Any]) -> bool:
        return (self.state, event_type) in self._INDEX

    def step(self, event: object, now: float) -> tuple[Action, ...]:
        """Takes one event. Raises InvalidTransition, having changed nothing."""
        kind = type(event)
        timer = event if isinstance(event, TimerFired) else None
        if timer is not None and self._timers.get(timer.name) != timer.generation:
            self.late_timers += 1
            return ()
        source = self.state
        entry = self._INDEX.get((source, kind))
        if entry is None:
            raise InvalidTransition(self.NAME, source, event)
        handler, targets = entry
        if timer is not None:
            del self._timers[timer.name]
        if handler is None:
            target, actions = targets[0], ()
        else:
            target, actions = handler(self, event, now)
            assert target in targets, f"{self.NAME}: {handler.__name__} went to {target}, not in its row"
        self.state = target  # type: ignore[assignment] # rows hold this machine's own states
        if self.observers:
            for observer in self.observers:
                observer(self.NAME, source, kind, target)
        return actions

    def invalid(self, event: object) -> InvalidTransition:
        """For a handler to raise before it changes anything: the event names what this machine has not."""
        return InvalidTransition(self.NAME, self.state, event)

    def set_timer(self, name: str, at: float) -> SetTimer:
        """A timer action with a fresh generation; an earlier timer of this name becomes late."""
        self._generation += 1
        self._timers[name] = self._generation
        return SetTimer(name, self._generation, at)

    def cancel_timer(self, name: str) -> tuple[Action, ...]:
        return (CancelTimer(name),) if self._timers.pop(name, None) is not None else ()
