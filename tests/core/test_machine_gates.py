"""Tx and Rx edge actors (spec section 27): coarse events to the owner, stops to the establisher, no bytes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.faults import Component, Fault, FaultReason, ObjectFailure
from swactor_core.fsm import Action, InvalidTransition, Send
from swactor_core.ids import DeviceObjectHandle, EdgeId, ObjectId, PortId, RingId, Sequence, WorkerGeneration
from swactor_core.machines.gates import ObjectConsumed, ProduceObject, RxEdge, RxState, TxEdge, TxState
from swactor_core.messages import (
    Address,
    EdgeFailed,
    EdgeReady,
    EdgeStopped,
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
    StopEdge,
)
from swactor_testing.scripts import Script, Steps, event_strategies, walk

T, R = TxState, RxState
EDGE, RING, PORT = EdgeId(6), RingId(9), PortId(0)
OWNER = Address(Component.STAGE_CONTROLLER)
READY, STOP, STOPPED = EdgeReady(EDGE, RING), StopEdge(EDGE), EdgeStopped(EDGE, "unproven")
PROVED = EdgeStopped(EDGE)
FAILED = EdgeFailed(EDGE, Fault(FaultReason.STREAM_FAULT, Component.DRIVER))
PRODUCE, CONSUMED = ProduceObject(EDGE), ObjectConsumed(EDGE)
PRODUCED = ObjectProduced(RING, EDGE, PORT, ObjectId(1), Sequence(0), 8)
BAD_OBJECT = ObjectFailed(RING, EDGE, PORT, None, None, ObjectFailure.EOF_MID_OBJECT, "3 of 8 bytes")
STOP_RECORD = (Send(Address(Component.EDGE_ESTABLISHER), STOP),)


def loaded(sequence: int) -> ObjectLoaded:
    handle = DeviceObjectHandle(WorkerGeneration(1), sequence)
    return ObjectLoaded(RING, EDGE, PORT, ObjectId(sequence), Sequence(sequence), 8, handle)


def owner(*messages: object) -> tuple[Action, ...]:
    return tuple(Send(OWNER, message) for message in messages)


EOF = EdgeFailed(
    EDGE,
    Fault(
        FaultReason.EOF_MID_OBJECT,
        Component.WORKER,
        "3 of 8 bytes",
        "EofMidObject",
        edge_id=EDGE,
        ring_id=RING,
    ),
)


def unasked(state: TxState) -> EdgeFailed:
    detail = f"object of sequence {PRODUCED.sequence} was produced while {state}, no step asked for it"
    fault = Fault(
        FaultReason.SEQUENCE_VIOLATION, Component.TX_EDGE, detail, edge_id=EDGE, ring_id=PRODUCED.ring_id
    )
    return EdgeFailed(EDGE, fault)


TX_UP: Steps = [(READY, owner(READY))]
TX_PRODUCING: Steps = [*TX_UP, (PRODUCE, ())]
TX: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], T.PROVISIONING),
    "ready": (TX_UP, T.READY),
    "producing": (TX_PRODUCING, T.PRODUCING),
    "an object that nobody asked for, before it was ready": (
        [(PRODUCED, owner(unasked(T.PROVISIONING)))],
        T.FAULTED,
    ),
    "an object that nobody asked for": ([*TX_UP, (PRODUCED, owner(unasked(T.READY)))], T.FAULTED),
    "one object out": ([*TX_PRODUCING, (PRODUCED, owner(PRODUCED))], T.READY),
    "its whole life": ([*TX_UP, (STOP, STOP_RECORD), (STOPPED, owner(STOPPED))], T.STOPPED),
    "proved after its time": (
        [*TX_UP, (STOP, STOP_RECORD), (STOPPED, owner(STOPPED)), (PROVED, owner(PROVED))],
        T.STOPPED,
    ),
    "stopping": ([*TX_UP, (STOP, STOP_RECORD)], T.STOPPING),
    "stopped before it was ready": ([(STOP, STOP_RECORD)], T.STOPPING),
    "stopped in the middle of an object": ([*TX_PRODUCING, (STOP, STOP_RECORD)], T.STOPPING),
    "the object is whole after the stop": (
        [*TX_PRODUCING, (STOP, STOP_RECORD), (PRODUCED, owner(PRODUCED))],
        T.STOPPING,
    ),
    "fails before it was ready": ([(FAILED, owner(FAILED))], T.FAULTED),
    "fails": ([*TX_UP, (FAILED, owner(FAILED))], T.FAULTED),
    "fails in the middle of an object": ([*TX_PRODUCING, (FAILED, owner(FAILED))], T.FAULTED),
    "a failed edge is stopped by its owner": ([(FAILED, owner(FAILED)), (STOP, STOP_RECORD)], T.STOPPING),
    "a failed edge ends by itself": ([(FAILED, owner(FAILED)), (STOPPED, owner(STOPPED))], T.STOPPED),
    "the record ends without a word from here: before ready": ([(STOPPED, owner(STOPPED))], T.STOPPED),
    "the record ends without a word from here": ([*TX_UP, (STOPPED, owner(STOPPED))], T.STOPPED),
    "the record ends in the middle of an object": ([*TX_PRODUCING, (STOPPED, owner(STOPPED))], T.STOPPED),
}

RX_UP: Steps = [(READY, owner(READY))]
RX_HOLDING: Steps = [*RX_UP, (loaded(0), owner(loaded(0)))]
RX_LOADING: Steps = [*RX_HOLDING, (CONSUMED, ())]
RX: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], R.PROVISIONING),
    "ready": (RX_UP, R.READY),
    "an object": (RX_HOLDING, R.OBJECT_READY),
    "consumed": (RX_LOADING, R.LOADING_OBJECT),
    "two objects, one after the other": ([*RX_LOADING, (loaded(1), owner(loaded(1)))], R.OBJECT_READY),
    "the next object is loaded before the first is consumed": (
        [*RX_HOLDING, (loaded(1), owner(loaded(1))), (CONSUMED, ())],
        R.OBJECT_READY,
    ),
    "both consumed": (
        [*RX_HOLDING, (loaded(1), owner(loaded(1))), (CONSUMED, ()), (CONSUMED, ())],
        R.LOADING_OBJECT,
    ),
    "objects that come before readiness follow it, in order": (
        [(loaded(0), ()), (loaded(1), ()), (READY, owner(READY, loaded(0), loaded(1))), (CONSUMED, ())],
        R.OBJECT_READY,
    ),
    "its whole life": ([*RX_LOADING, (STOP, STOP_RECORD), (STOPPED, owner(STOPPED))], R.STOPPED),
    "proved after its time": (
        [*RX_LOADING, (STOP, STOP_RECORD), (STOPPED, owner(STOPPED)), (PROVED, owner(PROVED))],
        R.STOPPED,
    ),
    "stopping": ([*RX_UP, (STOP, STOP_RECORD)], R.STOPPING),
    "stopped before it was ready": ([(STOP, STOP_RECORD)], R.STOPPING),
    "stopped with an object": ([*RX_HOLDING, (STOP, STOP_RECORD)], R.STOPPING),
    "stopped while loading": ([*RX_LOADING, (STOP, STOP_RECORD)], R.STOPPING),
    "fails before it was ready": ([(FAILED, owner(FAILED))], R.FAULTED),
    "fails": ([*RX_UP, (FAILED, owner(FAILED))], R.FAULTED),
    "fails with an object": ([*RX_HOLDING, (FAILED, owner(FAILED))], R.FAULTED),
    "fails while loading": ([*RX_LOADING, (FAILED, owner(FAILED))], R.FAULTED),
    "a bad object before it was ready": ([(BAD_OBJECT, owner(EOF))], R.FAULTED),
    "a bad object": ([*RX_UP, (BAD_OBJECT, owner(EOF))], R.FAULTED),
    "a bad object behind a good one": ([*RX_HOLDING, (BAD_OBJECT, owner(EOF))], R.FAULTED),
    "a bad object while loading": ([*RX_LOADING, (BAD_OBJECT, owner(EOF))], R.FAULTED),
    "a failed edge is stopped by its owner": ([(FAILED, owner(FAILED)), (STOP, STOP_RECORD)], R.STOPPING),
    "a failed edge ends by itself": ([(FAILED, owner(FAILED)), (STOPPED, owner(STOPPED))], R.STOPPED),
    "the record ends without a word from here: before ready": ([(STOPPED, owner(STOPPED))], R.STOPPED),
    "the record ends without a word from here": ([*RX_UP, (STOPPED, owner(STOPPED))], R.STOPPED),
    "the record ends, with an object": ([*RX_HOLDING, (STOPPED, owner(STOPPED))], R.STOPPED),
    "the record ends, while loading": ([*RX_LOADING, (STOPPED, owner(STOPPED))], R.STOPPED),
}

# What each state expects and ignores, stated here and not read from the table.
OF_TX = (EdgeReady, EdgeFailed, ObjectProduced, ProduceObject)
OF_RX = (EdgeReady, EdgeFailed, ObjectLoaded, ObjectFailed, ObjectConsumed)
LATE_TX: dict[StrEnum, tuple[type[Any], ...]] = {
    T.FAULTED: OF_TX,
    T.STOPPING: (EdgeReady, EdgeFailed, ProduceObject, StopEdge),
    T.STOPPED: (*OF_TX, StopEdge),
}
LATE_RX: dict[StrEnum, tuple[type[Any], ...]] = {
    R.FAULTED: OF_RX,
    R.STOPPING: (*OF_RX, StopEdge),
    R.STOPPED: (*OF_RX, StopEdge),
}
SCRIPT_TX = Script(lambda: TxEdge(EDGE, OWNER), TX, LATE_TX)
SCRIPT_RX = Script(lambda: RxEdge(EDGE, OWNER), RX, LATE_RX)
TX_EVENTS, RX_EVENTS = event_strategies(TxEdge), event_strategies(RxEdge)


@pytest.mark.parametrize("name", TX)
def test_tx_scenario(name: str) -> None:
    SCRIPT_TX.play(name)


@pytest.mark.parametrize("name", RX)
def test_rx_scenario(name: str) -> None:
    SCRIPT_RX.play(name)


@pytest.mark.parametrize(("state", "event"), SCRIPT_TX.ignored())
def test_tx_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT_TX.play_ignored(state, event)


@pytest.mark.parametrize(("state", "event"), SCRIPT_RX.ignored())
def test_rx_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT_RX.play_ignored(state, event)


@pytest.mark.parametrize("script", [SCRIPT_TX, SCRIPT_RX])
def test_every_transition_of_the_table_is_taken(script: Script) -> None:
    assert script.missing() == set()


@pytest.mark.parametrize("failure", ObjectFailure)
def test_every_object_failure_has_a_run_level_reason(failure: ObjectFailure) -> None:
    gate = SCRIPT_RX.play("ready")
    (sent,) = gate.step(ObjectFailed(RING, EDGE, PORT, None, None, failure), 0.0)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, EdgeFailed)
    assert sent.message.fault.cause == str(failure)
    assert sent.message.fault.reason in FaultReason


def test_nothing_is_produced_to_an_edge_that_is_not_ready() -> None:
    with pytest.raises(InvalidTransition):
        SCRIPT_TX.play("fresh").step(PRODUCE, 0.0)


def test_broken_owner_produces_twice_or_consumes_what_it_does_not_have() -> None:
    with pytest.raises(InvalidTransition):
        SCRIPT_TX.play("producing").step(PRODUCE, 0.0)
    for name in ("ready", "consumed"):
        with pytest.raises(InvalidTransition):
            SCRIPT_RX.play(name).step(CONSUMED, 0.0)


@settings(max_examples=60)
@given(st.data())
def test_tx_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject) -> None:
    walk(data, SCRIPT_TX.somewhere(data), TX_EVENTS)


@settings(max_examples=60)
@given(st.data())
def test_rx_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject) -> None:
    walk(data, SCRIPT_RX.somewhere(data), RX_EVENTS)


@settings(max_examples=60)
@given(st.data())
def test_the_owner_gets_objects_in_the_order_in_which_they_were_loaded(data: st.DataObject) -> None:
    told: list[object] = []
    fed: list[object] = []

    def check(event: object, actions: tuple[Action, ...]) -> None:
        if isinstance(event, ObjectLoaded):
            fed.append(event)
        told.extend(a.message for a in actions if isinstance(a, Send) and isinstance(a.message, ObjectLoaded))

    walk(data, SCRIPT_RX.somewhere(data, check), RX_EVENTS, check=check)
    assert told == fed[: len(told)]
