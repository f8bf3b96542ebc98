"""The one shape of every machine, on a small lamp: table, refusal, timers of old generations, observers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import pytest
from swactor_core.fsm import Action, CancelTimer, Effect, InvalidTransition, Machine, Outcome, Row, SetTimer
from swactor_core.messages import TimerFired


class LampState(StrEnum):
    DARK = "Dark"
    LIT = "Lit"
    BROKEN = "Broken"


@dataclass(frozen=True, slots=True)
class Press:
    button: int = 1


@dataclass(frozen=True, slots=True)
class Drop:
    pass


@dataclass(frozen=True, slots=True)
class Glow(Effect):
    button: int


S = LampState


class Lamp(Machine[LampState]):
    NAME = "Lamp"
    INITIAL = S.DARK
    TABLE = (
        Row(S.DARK, Press, "_press", (S.LIT,)),
        Row(S.LIT, Press, "_press_again", (S.LIT, S.DARK)),
        Row(S.LIT, TimerFired, "_burnt_down", (S.DARK,)),
        Row(S.LIT, Drop, None, (S.BROKEN,)),
        Row(S.DARK, Drop, None, (S.BROKEN,)),
        Row(S.BROKEN, Drop, "_lie", (S.BROKEN,)),
    )

    def _press(self, event: Press, now: float) -> Outcome[LampState]:
        if event.button != 1:
            raise self.invalid(event)
        return S.LIT, (Glow(event.button), self.set_timer("burn", now + 5))

    def _press_again(self, event: Press, now: float) -> Outcome[LampState]:
        if event.button == 2:
            return S.LIT, (self.set_timer("burn", now + 5),)
        return S.DARK, self.cancel_timer("burn")

    def _burnt_down(self, event: TimerFired, now: float) -> Outcome[LampState]:
        return S.DARK, ()

    def _lie(self, event: Drop, now: float) -> Outcome[LampState]:
        return S.DARK, ()


LIGHT: tuple[Action, ...] = (Glow(1), SetTimer("burn", 1, 7.0))


def test_a_step_gives_its_actions_and_the_next_state() -> None:
    lamp = Lamp()
    assert lamp.step(Press(), 2.0) == LIGHT
    assert lamp.state is S.LIT
    assert lamp.step(TimerFired("burn", 1), 7.0) == ()
    assert lamp.state is S.DARK


def test_an_event_without_a_row_is_refused_by_name_and_changes_nothing() -> None:
    lamp = Lamp()
    with pytest.raises(InvalidTransition, match="Lamp in state Dark cannot take str") as refused:
        lamp.step("dance", 0.0)
    assert (refused.value.machine, refused.value.state, refused.value.event) == ("Lamp", S.DARK, "dance")
    assert lamp.state is S.DARK


def test_a_handler_refuses_before_it_changes_anything() -> None:
    lamp = Lamp()
    with pytest.raises(InvalidTransition, match="cannot take Press"):
        lamp.step(Press(button=9), 0.0)
    assert lamp.state is S.DARK
    assert lamp.step(Press(), 2.0) == LIGHT


def test_a_timer_of_an_older_generation_is_dropped_and_counted() -> None:
    lamp = Lamp()
    lamp.step(Press(), 0.0)
    assert lamp.step(Press(button=2), 1.0) == (SetTimer("burn", 2, 6.0),)
    assert lamp.step(TimerFired("burn", 1), 5.0) == ()
    assert (lamp.state, lamp.late_timers) == (S.LIT, 1)
    lamp.step(TimerFired("burn", 2), 6.0)
    assert lamp.state is S.DARK


def test_a_timer_fires_once_even_when_the_host_tells_it_twice() -> None:
    lamp = Lamp()
    lamp.step(Press(), 0.0)
    lamp.step(TimerFired("burn", 1), 5.0)
    lamp.step(Press(), 6.0)
    assert lamp.step(TimerFired("burn", 1), 6.0) == ()
    assert (lamp.state, lamp.late_timers) == (S.LIT, 1)


def test_a_cancelled_timer_is_late_in_any_state_and_cancelling_twice_asks_nothing() -> None:
    lamp = Lamp()
    lamp.step(Press(), 0.0)
    assert lamp.step(Press(), 1.0) == (CancelTimer("burn"),)
    assert lamp.step(TimerFired("burn", 1), 5.0) == ()
    assert lamp.cancel_timer("burn") == ()


def test_a_live_timer_in_a_state_without_a_row_is_refused_and_stays_armed() -> None:
    lamp = Lamp()
    lamp.step(Press(), 0.0)
    lamp.step(Drop(), 1.0)
    for _ in range(2):
        with pytest.raises(InvalidTransition, match="Broken cannot take TimerFired"):
            lamp.step(TimerFired("burn", 1), 5.0)


def test_a_handler_that_leaves_its_row_is_a_defect_that_is_named() -> None:
    lamp = Lamp()
    lamp.step(Drop(), 0.0)
    with pytest.raises(AssertionError, match="_lie went to Dark"):
        lamp.step(Drop(), 0.0)


def test_accepts_tells_what_the_state_can_take() -> None:
    lamp = Lamp()
    assert lamp.accepts(Press)
    assert not lamp.accepts(TimerFired)


def test_observers_see_every_transition_and_no_refusal() -> None:
    seen: list[tuple[object, ...]] = []

    def observe(*transition: object) -> None:
        seen.append(transition)

    Machine.observers.append(observe)
    try:
        lamp = Lamp()
        lamp.step(Press(), 0.0)
        with pytest.raises(InvalidTransition):
            lamp.step("dance", 0.0)
        lamp.step(TimerFired("burn", 99), 0.0)
        lamp.step(Drop(), 0.0)
    finally:
        Machine.observers.remove(observe)
    assert seen == [("Lamp", S.DARK, Press, S.LIT), ("Lamp", S.LIT, Drop, S.BROKEN)]


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (
            (Row(S.DARK, Drop, None, (S.DARK,)), Row(S.DARK, Drop, None, (S.LIT,))),
            "two rows for Dark on Drop",
        ),
        ((Row(S.DARK, Drop, "_nowhere", (S.DARK,)),), "no handler _nowhere"),
        ((Row(S.DARK, Drop, None, (S.DARK, S.LIT)),), "no handler, several targets"),
    ],
)
def test_a_table_with_a_mistake_is_refused_when_the_class_is_made(
    table: tuple[Row, ...], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        type("Wrong", (Machine,), {"NAME": "Wrong", "INITIAL": S.DARK, "TABLE": table})
