"""StageController (spec sections 14 to 16): prepare, one step at a time, report, give everything back."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_stage_scenarios import SCENARIOS
from machine_stage_words import (
    ENDED,
    IN,
    OTHER_ROLE,
    OUT,
    PROVISION,
    READY,
    ROLE,
    RUN,
    WORKER,
    S,
    loaded,
    produced,
    provision,
)
from swactor_core.fsm import Action, Send
from swactor_core.ids import (
    EdgeId,
    RoleId,
)
from swactor_core.machines.stage import StageController
from swactor_core.machines.stage_effects import ModelFetch, ModelOpened, ModelRefused
from swactor_core.messages import (
    DeviceObjectReleased,
    EdgeFailed,
    EdgeReady,
    ExecuteStep,
    ObjectLoaded,
    ObjectProduced,
    ProvisionStage,
    ReleaseFailed,
    ResetRole,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    RoleReset,
    StageFault,
    StageReady,
    StageStopped,
    StepCompleted,
    StepFailed,
    StopRun,
    TimerFired,
)
from swactor_core.plan import EdgeKind
from swactor_testing.scripts import Script, event_strategies, walk


def make() -> StageController:
    return StageController(teardown_bound=10.0)


# What each state expects and ignores, stated here and not read from the table.
ROLE_IS_THERE = (RoleProgress, RoleConfigured, RoleReset, DeviceObjectReleased)
# After a fault, and while it stops: all that edges, the worker and the model's adapter had still to say.
ANY_WORD = (
    EdgeReady,
    EdgeFailed,
    ObjectLoaded,
    ObjectProduced,
    ModelFetch,
    ModelOpened,
    ModelRefused,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    StepCompleted,
    StepFailed,
    DeviceObjectReleased,
    ReleaseFailed,
)
LATE: dict[StrEnum, tuple[type[Any], ...]] = {
    S.PREPARING: (RoleReset, DeviceObjectReleased, ReleaseFailed),  # of the run before this one
    S.READY: ROLE_IS_THERE,
    S.EXECUTING: ROLE_IS_THERE,
    S.FAULTED: (*ANY_WORD, RoleReset),
    S.STOPPING: (*(word for word in ANY_WORD if word not in (ObjectProduced, StepCompleted)), StopRun),
    S.STOPPED: (*ANY_WORD, StopRun),
}
SCRIPT = Script(make, SCENARIOS, LATE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


@pytest.mark.parametrize(("state", "event"), SCRIPT.ignored())
def test_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT.play_ignored(state, event)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


def test_the_last_stage_answers_a_prefill_of_many_rows_with_one_token() -> None:
    machine = make()
    machine.step(provision(EdgeKind.TOKEN_OUT), 0.0)
    for event, _ in READY[1:]:
        machine.step(event, 0.0)
    *_, execute_step, _ = machine.step(loaded(0, rows=3), 0.0)
    assert isinstance(execute_step, Send)
    assert isinstance(execute_step.message, ExecuteStep)
    assert execute_step.message.outputs[0].extent == 4


def test_broken_host_fires_the_teardown_timer_late_and_twice() -> None:
    machine = SCRIPT.play("the whole life without a step")
    for _ in range(2):
        assert machine.step(TimerFired("teardown", 1), 0.0) == ()
    assert machine.late_timers == 2


def test_broken_host_repeats_every_event_of_a_life_and_nothing_is_reported_twice() -> None:
    machine = make()
    reports: list[type] = []
    for event, _ in ENDED:
        for _ in range(2):
            actions = machine.step(event, 0.0) if machine.accepts(type(event)) else ()
            reports += [type(a.message) for a in actions if isinstance(a, Send) and a.to == RUN]
    assert reports == [StageReady, StageStopped]


EVENTS = event_strategies(
    StageController,
    {
        ProvisionStage: st.sampled_from((PROVISION, provision(EdgeKind.TOKEN_OUT))),
        EdgeId: st.sampled_from((IN, OUT)),
        RoleId: st.sampled_from((ROLE, ROLE, ROLE, OTHER_ROLE)),
        ObjectLoaded: st.builds(loaded, st.integers(0, 2), st.integers(1, 3)),
        ObjectProduced: st.builds(produced, st.integers(0, 2)),
    },
)


@settings(max_examples=100)
@given(st.data())
def test_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject) -> None:
    walk(data, SCRIPT.somewhere(data), EVENTS)


@settings(max_examples=100)
@given(st.data())
def test_steps_are_one_at_a_time_in_sequence_and_only_between_ready_and_the_end(data: st.DataObject) -> None:
    sent: list[object] = []

    def check(event: object, actions: tuple[Action, ...]) -> None:
        sent.extend(a.message for a in actions if isinstance(a, Send) and a.to in (RUN, WORKER))

    machine = SCRIPT.somewhere(data, check)
    walk(data, machine, EVENTS, steps=25, check=check)
    steps = [m for m in sent if isinstance(m, ExecuteStep)]
    assert [s.inputs[0].sequence for s in steps] == list(range(len(steps)))
    assert [s.step_id for s in steps] == list(range(1, len(steps) + 1))
    kinds = [type(m) for m in sent]
    assert kinds.count(StageReady) <= 1
    assert kinds.count(StageFault) <= 1
    assert (StageStopped in kinds) == (machine.state is S.STOPPED)
    left = [len(message.unproven) for message in sent if isinstance(message, StageStopped)]
    assert left == sorted(set(left), reverse=True), "it is said again only when a proof has come"
    if steps:
        assert kinds.index(StageReady) < kinds.index(ExecuteStep)
    for end in (StageFault, StageStopped, ResetRole):
        if end in kinds:
            assert ExecuteStep not in kinds[kinds.index(end) :]
