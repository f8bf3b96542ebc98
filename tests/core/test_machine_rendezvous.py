"""Receive rendezvous (spec section 25): spec and stream in either order, strangers refused and counted."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.events import EventName
from swactor_core.faults import Component, StreamFaultReason
from swactor_core.fsm import Action, CancelTimer, Emit, Send, SetTimer
from swactor_core.ids import EdgeId, NodeId, RingId
from swactor_core.machines.rendezvous import (
    RefuseStream,
    Rendezvous,
    RendezvousState,
    StartRecvPump,
    StopRecvPump,
)
from swactor_core.messages import (
    Address,
    DriverEdgeReady,
    EstablishRecv,
    PumpStopped,
    StopEdge,
    StreamArrived,
    TimerFired,
)
from swactor_core.specs import RingLayout
from swactor_testing.scripts import Script, Steps, event_strategies, step_or_refuse, walk

S = RendezvousState
EDGE, RING, PEER, STRANGER = EdgeId(6), RingId(9), NodeId(77), NodeId(78)
LAYOUT = RingLayout(RING, 0, 4096, 0, 64, 4032, 64)
SPEC = EstablishRecv(EDGE, PEER, RING, LAYOUT, Address(Component.RX_EDGE, EDGE))
STOP = StopEdge(EDGE)
ESTABLISHER = Address(Component.EDGE_ESTABLISHER)
READY = Send(ESTABLISHER, DriverEdgeReady(EDGE))


def stream(number: int, peer: NodeId = PEER) -> StreamArrived:
    return StreamArrived(EDGE, peer, number)


def refuse(number: int, reason: StreamFaultReason, peer: NodeId = PEER) -> tuple[Action, ...]:
    fields = {"edge_id": EDGE, "peer": f"{peer:016x}", "reason": str(reason)}
    return RefuseStream(number, reason), Emit(EventName.EDGE_REFUSED, fields)


WAITING: Steps = [(SPEC, (READY,))]
PENDING: Steps = [(stream(1), (SetTimer("pending", 1, 30.0),))]
PAIRED: Steps = [*WAITING, (stream(1), (StartRecvPump(SPEC, 1),))]
UNKNOWN: Steps = [*PENDING, (TimerFired("pending", 1), refuse(1, StreamFaultReason.UNKNOWN_EDGE))]

SCENARIOS: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], S.EMPTY),
    "spec first": (PAIRED, S.PAIRED),
    "stream first: it waits unread for the spec": (
        [*PENDING, (SPEC, (CancelTimer("pending"), READY, StartRecvPump(SPEC, 1)))],
        S.PAIRED,
    ),
    "waiting for the stream": (WAITING, S.RECV_SPEC),
    "waiting for the spec": (PENDING, S.PENDING_STREAM),
    "its whole life": ([*PAIRED, (STOP, (StopRecvPump(EDGE),))], S.CLOSED),
    "stopped before a stream came: there was no pump": (
        [*WAITING, (STOP, (Send(ESTABLISHER, PumpStopped(EDGE, RING)),))],
        S.CLOSED,
    ),
    "a second stream does not harm the edge": (
        [*PAIRED, (stream(2), refuse(2, StreamFaultReason.DUPLICATE_STREAM))],
        S.PAIRED,
    ),
    "a second stream while the first waits": (
        [*PENDING, (stream(2), refuse(2, StreamFaultReason.DUPLICATE_STREAM))],
        S.PENDING_STREAM,
    ),
    "a stream from the wrong peer, then the right one": (
        [
            *WAITING,
            (stream(1, STRANGER), refuse(1, StreamFaultReason.WRONG_PEER, STRANGER)),
            (stream(2), (StartRecvPump(SPEC, 2),)),
        ],
        S.PAIRED,
    ),
    "the stream that waited was the wrong peer's": (
        [
            (stream(1, STRANGER), (SetTimer("pending", 1, 30.0),)),
            (
                SPEC,
                (CancelTimer("pending"), READY, *refuse(1, StreamFaultReason.WRONG_PEER, STRANGER)),
            ),
        ],
        S.RECV_SPEC,
    ),
    "the edge is one that this end only sends on: the stop of it refuses the stream": (
        [*PENDING, (STOP, (CancelTimer("pending"), *refuse(1, StreamFaultReason.UNKNOWN_EDGE)))],
        S.CLOSED,
    ),
    "nobody asks for the stream": (UNKNOWN, S.CLOSED),
    "asked for after it was refused: the next stream pairs": (
        [*UNKNOWN, (SPEC, (READY,)), (stream(2), (StartRecvPump(SPEC, 2),))],
        S.PAIRED,
    ),
    "a stream after the end": (
        [*PAIRED, (STOP, (StopRecvPump(EDGE),)), (stream(2), refuse(2, StreamFaultReason.UNKNOWN_EDGE))],
        S.CLOSED,
    ),
    "the timer of a stream that was paired is late": (
        [
            *PENDING,
            (SPEC, (CancelTimer("pending"), READY, StartRecvPump(SPEC, 1))),
            (TimerFired("pending", 1), ()),
        ],
        S.PAIRED,
    ),
}


def make() -> Rendezvous:
    return Rendezvous(EDGE, pending_bound=30.0)


SCRIPT = Script(make, SCENARIOS, {S.EMPTY: (StopEdge,), S.CLOSED: (StopEdge,)})
EVENTS = event_strategies(Rendezvous, {RingLayout: st.just(LAYOUT)})


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


@pytest.mark.parametrize(("state", "event"), SCRIPT.ignored())
def test_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT.play_ignored(state, event)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


def test_refusals_are_counted() -> None:
    machine = make()
    machine.step(SPEC, 0.0)
    for number in range(3):
        machine.step(stream(number, STRANGER), 0.0)
    assert machine.refused == 3


@pytest.mark.parametrize("name", ["waiting for the stream", "spec first", "its whole life"])
def test_broken_host_establishes_twice(name: str) -> None:
    assert step_or_refuse(SCRIPT.play(name), SPEC) is None


@settings(max_examples=60)
@given(st.data())
def test_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject) -> None:
    walk(data, SCRIPT.somewhere(data), EVENTS)


@settings(max_examples=60)
@given(st.data())
def test_every_stream_is_waiting_paired_or_refused_and_at_most_one_pump_starts(data: st.DataObject) -> None:
    came = refused = pumps = 0

    def check(event: object, actions: tuple[Action, ...]) -> None:
        nonlocal came, refused, pumps
        came += isinstance(event, StreamArrived)
        refused += sum(isinstance(a, RefuseStream) for a in actions)
        pumps += sum(isinstance(a, StartRecvPump) for a in actions)

    machine = SCRIPT.somewhere(data, check)
    walk(data, machine, EVENTS, check=check)
    waiting = machine.state is S.PENDING_STREAM
    assert came == refused + pumps + waiting
    assert pumps <= 1
    assert isinstance(machine, Rendezvous)
    assert machine.refused == refused
