"""The script kit can fail: wrong actions, wrong ends, refusals that change, rows that nobody takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import find, given
from hypothesis import strategies as st
from swactor_core.fsm import InvalidTransition, Machine, Outcome, Row
from swactor_core.ids import EdgeId
from swactor_core.messages import TimerFired
from swactor_testing.scripts import Script, event_strategies, snapshot, step_or_refuse, walk
from swactor_testing.values import plainest, small, values, wide


class DoorState(StrEnum):
    OPEN = "Open"
    SHUT = "Shut"


@dataclass(frozen=True, slots=True)
class Push:
    force: int


@dataclass(frozen=True, slots=True)
class Knock:
    pass


D = DoorState


class Door(Machine[DoorState]):
    NAME = "Door"
    INITIAL = D.OPEN
    TABLE = (
        Row(D.OPEN, Push, "_push", (D.SHUT, D.OPEN)),
        Row(D.SHUT, Push, "_push_back", (D.OPEN,)),
        Row(D.SHUT, Knock, None, (D.SHUT,)),
        Row(D.SHUT, TimerFired, "_creak", (D.OPEN,)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.pushed = 0

    def _push(self, event: Push, now: float) -> Outcome[DoorState]:
        return (D.SHUT, (self.set_timer("creak", now + 1),)) if event.force else (D.OPEN, ())

    def _push_back(self, event: Push, now: float) -> Outcome[DoorState]:
        self.pushed += 1  # before it decides: what a handler must not do
        if event.force > 1:
            raise self.invalid(event)
        return D.OPEN, self.cancel_timer("creak")

    def _creak(self, event: TimerFired, now: float) -> Outcome[DoorState]:
        return D.OPEN, ()


SHUT = Door().step(Push(1), 0.0)
SCENARIOS = {"shut": ([(Push(1), SHUT)], D.SHUT)}
GOOD = Script(Door, SCENARIOS, {D.SHUT: (Knock,)})


def test_a_scenario_with_other_actions_or_another_end_fails() -> None:
    GOOD.play("shut")
    with pytest.raises(AssertionError, match="shut, step 0, Push"):
        Script(Door, {"shut": ([(Push(1), ())], D.SHUT)}).play("shut")
    with pytest.raises(AssertionError, match="shut ended in Shut"):
        Script(Door, {"shut": ([(Push(1), SHUT)], D.OPEN)}).play("shut")


def test_what_is_stated_to_be_ignored_is_played_and_not_read_from_the_table() -> None:
    assert GOOD.ignored() == [(D.SHUT, Knock)]
    GOOD.play_ignored(D.SHUT, Knock)
    assert Script(Door, SCENARIOS).ignored() == []
    assert (D.SHUT, "Knock", D.SHUT) in Script(Door, SCENARIOS).missing()
    with pytest.raises(InvalidTransition, match="Open cannot take Knock"):
        GOOD.play_ignored(D.OPEN, Knock)
    with pytest.raises(AssertionError):
        GOOD.play_ignored(D.SHUT, Push)  # it opens the door


def test_a_state_is_reached_by_a_scenario_that_ends_or_comes_through_there() -> None:
    assert GOOD.reach(D.SHUT).state is D.SHUT
    assert GOOD.reach(D.OPEN).state is D.OPEN
    with pytest.raises(LookupError, match="no scenario of Door comes to Shut"):
        Script(Door, {"nothing": ([], D.OPEN)}).reach(D.SHUT)


def test_rows_that_no_scenario_takes_are_named() -> None:
    assert GOOD.missing() == {
        (D.OPEN, "Push", D.OPEN),
        (D.SHUT, "Push", D.OPEN),
        (D.SHUT, "TimerFired", D.OPEN),
    }


def test_a_refusal_that_has_changed_something_is_found() -> None:
    door = GOOD.play("shut")
    with pytest.raises(AssertionError, match="Door refused Push"):
        step_or_refuse(door, Push(2))
    assert step_or_refuse(Door(), Knock()) is None


def test_a_walk_finds_it_too() -> None:
    events = event_strategies(Door)

    def breaks(data: st.DataObject) -> bool:
        try:
            walk(data, Door(), events)
        except AssertionError:
            return True
        return False

    assert find(st.data(), breaks) is not None


@given(st.data())
def test_a_walk_reaches_timers_of_both_kinds(data: st.DataObject) -> None:
    steps: list[object] = []
    events = {Push: st.just(Push(1)), Knock: st.just(Knock()), TimerFired: st.nothing()}
    walk(data, Door(), events, check=lambda event, actions: steps.append(event))
    assert all(isinstance(event, (Push, Knock, TimerFired)) for event in steps)


@given(st.data())
def test_somewhere_is_a_state_that_a_scenario_comes_through(data: st.DataObject) -> None:
    assert GOOD.somewhere(data).state in DoorState


def test_a_snapshot_is_a_copy() -> None:
    door = Door()
    before = snapshot(door)
    door.step(Push(1), 0.0)
    assert before["_timers"] == {}


@dataclass(frozen=True, slots=True)
class Letter:
    edge_id: EdgeId
    weight: float
    stamps: tuple[str, ...]
    size: tuple[int, int]
    kind: DoorState
    answer: Push | None
    notes: dict[str, Any]


def test_the_plainest_message_is_always_the_same() -> None:
    expected = Letter(EdgeId(1), 1.0, (), (1, 1), D.OPEN, None, {})
    assert plainest(Letter) == plainest(Letter) == expected


@pytest.mark.parametrize("leaves", [small(), wide()], ids=["small", "wide"])
@given(data=st.data())
def test_values_have_the_types_of_their_annotations(leaves: Any, data: st.DataObject) -> None:
    letter = data.draw(values(Letter, leaves))
    assert isinstance(letter, Letter)
    assert isinstance(letter.edge_id, int)
    assert isinstance(letter.weight, float)
    assert all(isinstance(stamp, str) for stamp in letter.stamps)
    assert len(letter.size) == 2
    assert letter.kind in DoorState
    assert letter.answer is None or isinstance(letter.answer, Push)


def test_an_override_goes_before_everything() -> None:
    leaves = small({EdgeId: st.just(99), DoorState: st.just(D.SHUT)})
    letter = find(values(Letter, leaves), lambda letter: True)
    assert (letter.edge_id, letter.kind) == (99, D.SHUT)


def test_an_annotation_that_no_message_uses_is_named() -> None:
    for make in (plainest, lambda annotation: values(annotation, small())):
        with pytest.raises(TypeError, match="set"):
            make(set[int])
