"""Worker process FSM alone (spec sections 29 to 31): which command when, every answer, every transition."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.faults import (
    RingFaultReason,
    RoleFailure,
    StepFailure,
    WorkerFatalReason,
)
from swactor_core.fsm import Action, InvalidTransition, Send
from swactor_core.ids import (
    DeviceObjectHandle,
    ObjectId,
    PortId,
    RingId,
    Sequence,
    WorkerGeneration,
)
from swactor_core.machines.worker import WorkerMachine
from swactor_core.machines.worker_effects import (
    ArenaAttached,
    ArenaSelected,
    BackendCreated,
    CloseRole,
    ControlClosed,
    Crashed,
    InitializeFailed,
    MalformedCommand,
    OutputBlocked,
    RingOpened,
    RingRefused,
    RoleBuilt,
    RoleRejected,
    RunStep,
    StepComputed,
    StepRaised,
)
from swactor_core.messages import (
    ConfigureRole,
    ExecuteStep,
    ReleaseDeviceObject,
    ResetRole,
    RingQuiesced,
    RingReadable,
    RingWritable,
    StepCompleted,
    StepFailed,
    StepRuntime,
)
from swactor_testing.scripts import Script, step_or_refuse
from worker_machine_scenarios import SCENARIOS
from worker_machine_words import (
    ABORT,
    COPY_FAULT,
    EGRESS,
    GENERATION,
    GRACEFUL,
    HANDLE,
    IN,
    INGRESS,
    INITIALIZE,
    KEEPING,
    LOADED,
    OBJECT_FAILED,
    OTHER_ROLE,
    OUT,
    PRODUCED,
    ROLE,
    RUN,
    STEP,
    TO_LOADED,
    TO_OUTPUT,
    TO_RINGS,
    TO_RUNNING,
    Steps,
    uninstall,
)

SCRIPT = Script(lambda: WorkerMachine(77), SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


def test_useless_hints_are_counted() -> None:
    machine = SCRIPT.play("hints reach only rings that can use them")
    assert isinstance(machine, WorkerMachine)
    assert machine.stale_hints == 3


def bound(**changes: Any) -> ExecuteStep:
    return dataclasses.replace(STEP, inputs=(dataclasses.replace(STEP.inputs[0], **changes),))


def out(**changes: Any) -> ExecuteStep:
    return dataclasses.replace(STEP, outputs=(dataclasses.replace(STEP.outputs[0], **changes),))


REFUSED: dict[str, tuple[ExecuteStep, StepFailure, str]] = {
    "another role": (
        dataclasses.replace(STEP, role_id=OTHER_ROLE),
        StepFailure.ROLE_UNAVAILABLE,
        "role 2 is not configured",
    ),
    "no input": (
        dataclasses.replace(STEP, inputs=()),
        StepFailure.INVALID_INPUT_HANDLE,
        "a step takes one input",
    ),
    "two inputs": (
        dataclasses.replace(STEP, inputs=STEP.inputs * 2),
        StepFailure.INVALID_INPUT_HANDLE,
        "a step takes one input",
    ),
    "negative position": (
        dataclasses.replace(STEP, runtime=StepRuntime(-1)),
        StepFailure.INVALID_INPUT_HANDLE,
        "position from 0 on",
    ),
    "handle of another generation": (
        bound(device_handle=DeviceObjectHandle(WorkerGeneration(3), 1)),
        StepFailure.INVALID_INPUT_HANDLE,
        "handle of generation 3, this is 4",
    ),
    "unknown handle": (
        bound(device_handle=DeviceObjectHandle(GENERATION, 5)),
        StepFailure.INVALID_INPUT_HANDLE,
        "no device object 5",
    ),
    "another object": (
        bound(object_id=ObjectId(71)),
        StepFailure.INVALID_INPUT_HANDLE,
        "device object 1 is object 70, sequence 0",
    ),
    "another sequence": (
        bound(sequence=Sequence(1)),
        StepFailure.INVALID_INPUT_HANDLE,
        "device object 1 is object 70, sequence 0",
    ),
    "another port": (bound(port_id=PortId(1)), StepFailure.INVALID_INPUT_HANDLE, "on port 0"),
    "no output": (
        dataclasses.replace(STEP, outputs=()),
        StepFailure.INVALID_OUTPUT_RING,
        "a step has one output",
    ),
    "output to an ingress ring": (
        out(ring_id=IN),
        StepFailure.INVALID_OUTPUT_RING,
        "ring 11 is not an installed egress ring",
    ),
    "output to no ring": (
        out(ring_id=RingId(99)),
        StepFailure.INVALID_OUTPUT_RING,
        "ring 99 is not an installed egress ring",
    ),
    "output port of another ring": (
        out(port_id=PortId(0)),
        StepFailure.INVALID_OUTPUT_RING,
        "ring 12 is of port 1",
    ),
    "output out of sequence": (
        out(sequence=Sequence(1)),
        StepFailure.INVALID_OUTPUT_RING,
        "sequence 1 on ring 12, expected 0",
    ),
    "output above the edge's extent": (
        out(extent=68),
        StepFailure.OUTPUT_EXTENT_INVALID,
        "extent 68 above 64",
    ),
    "unaligned output": (out(extent=6), StepFailure.OUTPUT_EXTENT_INVALID, "extent 6"),
    "empty output": (out(extent=0), StepFailure.OUTPUT_EXTENT_INVALID, "extent 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_with_a_wrong_binding_fails_and_the_right_one_still_runs(name: str) -> None:
    command, reason, detail = REFUSED[name]
    machine = WorkerMachine(77)
    for event, _ in TO_LOADED:
        machine.step(event, 0.0)
    (answer,) = machine.step(command, 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, StepFailed)
    assert answer.message.reason is reason
    assert detail in answer.message.detail
    assert machine.step(STEP, 0.0) == (RUN,)


def test_broken_host_answers_for_a_step_that_does_not_exist() -> None:
    machine = WorkerMachine(77)
    for event, _ in TO_LOADED:
        machine.step(event, 0.0)
    for event in (StepComputed(4, 0.1), StepRaised(StepFailure.TINYGRAD_ERROR, ""), PRODUCED):
        with pytest.raises(InvalidTransition, match=f"Running cannot take {type(event).__name__}"):
            machine.step(event, 0.0)
    assert machine.step(STEP, 0.0) == (RUN,)


EVENTS: list[Any] = [
    INITIALIZE,
    OBJECT_FAILED,
    ArenaSelected(1),
    ArenaAttached(),
    BackendCreated({}),
    InitializeFailed(WorkerFatalReason.BACKEND_INIT_FAILED, "no"),
    ConfigureRole(ROLE, {}),
    ConfigureRole(OTHER_ROLE, {}),
    RoleBuilt(ROLE),
    RoleRejected(ROLE, RoleFailure.CONFIG_INVALID, "no"),
    ResetRole(ROLE),
    INGRESS,
    EGRESS,
    RingOpened(IN),
    RingOpened(OUT),
    RingRefused(OUT, RingFaultReason.RING_LAYOUT_INVALID, "no"),
    uninstall(IN),
    uninstall(OUT),
    RingQuiesced(IN),
    RingQuiesced(OUT),
    RingReadable(IN),
    RingWritable(OUT),
    LOADED,
    OBJECT_FAILED,
    COPY_FAULT,
    STEP,
    KEEPING,
    StepComputed(4, 0.5),
    StepComputed(8, 0.5),
    StepRaised(StepFailure.TINYGRAD_ERROR, "no"),
    PRODUCED,
    OutputBlocked(OUT),
    ReleaseDeviceObject(HANDLE),
    GRACEFUL,
    ABORT,
    MalformedCommand("no"),
    Crashed("no"),
    ControlClosed(),
    "not an event",
]
PREFIXES = st.sampled_from([[], TO_RUNNING, TO_RINGS, TO_LOADED, TO_OUTPUT])


@given(PREFIXES, st.lists(st.sampled_from(EVENTS), max_size=30))
def test_any_event_in_any_state_is_taken_or_refused_and_every_step_ends_once(
    prefix: Steps, events: list[Any]
) -> None:
    machine = WorkerMachine(77)
    for event, _ in prefix:
        machine.step(event, 0.0)
    in_flight = prefix is TO_OUTPUT
    for event in events:
        actions = step_or_refuse(machine, event)
        if actions is None:
            continue
        started = any(isinstance(action, RunStep) for action in actions)
        assert not (started and in_flight)
        ended = sum(_ends_a_step(action) for action in actions)
        if isinstance(event, ExecuteStep) and not started:
            ended -= _refusals(actions)
        assert ended <= (1 if in_flight else 0)
        in_flight = started or (in_flight and not ended)
        if any(isinstance(action, CloseRole) for action in actions):
            assert not in_flight


def _ends_a_step(action: Action) -> bool:
    return isinstance(action, Send) and isinstance(action.message, (StepCompleted, StepFailed))


def _refusals(actions: tuple[Action, ...]) -> int:
    return sum(_ends_a_step(action) for action in actions)
