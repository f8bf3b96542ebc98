"""Recv-pump FSM, Send-pump FSM (spec section 25): one effect in flight, back-pressure, every end."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.faults import Component, StreamFaultReason
from swactor_core.fsm import Action, Effect, Send
from swactor_core.ids import EdgeId, RingId
from swactor_core.machines.pumps import (
    AwaitReadable,
    AwaitRoom,
    AwaitWritable,
    BytesAccepted,
    BytesRead,
    CloseRing,
    CommitRing,
    Connected,
    EndPump,
    NoFreeSpace,
    NothingCommitted,
    OpenEdgeStream,
    Paired,
    ReadStream,
    RecvPump,
    RecvPumpState,
    ReleaseBytes,
    SendPump,
    SendPumpState,
    StreamBroke,
    StreamEnded,
    StreamOpened,
    WritePending,
    WriteStream,
)
from swactor_core.messages import (
    Address,
    DriverEdgeReady,
    RingReadable,
    RingWritable,
    StopEdge,
    StreamClosed,
    StreamFault,
)
from swactor_testing.scripts import Script, Steps, event_strategies, step_or_refuse, walk

R, P = RecvPumpState, SendPumpState
EDGE, RING = EdgeId(6), RingId(9)
ESTABLISHER = Address(Component.EDGE_ESTABLISHER)
STOP = StopEdge(EDGE)
READABLE, WRITABLE = RingReadable(RING), RingWritable(RING)
RESET = StreamBroke(StreamFaultReason.STREAM_BROKEN, "reset")
FAULT = (Send(ESTABLISHER, StreamFault(EDGE, StreamFaultReason.STREAM_BROKEN, "reset")), EndPump(False))
ABORT, FINISH = (EndPump(orderly=False),), (EndPump(orderly=True),)

RECV_UP: Steps = [(Paired(), (ReadStream(),))]
RECV_FULL: Steps = [*RECV_UP, (NoFreeSpace(), (AwaitWritable(),))]
RECV: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], R.WAITING_FOR_SPEC_AND_STREAM),
    "streaming": ([*RECV_UP, (BytesRead(7), (CommitRing(7), ReadStream()))], R.STREAMING),
    "full": (RECV_FULL, R.BACKPRESSURED),
    "room again": ([*RECV_FULL, (WRITABLE, (ReadStream(),))], R.STREAMING),
    "its whole life": (
        [
            *RECV_UP,
            (BytesRead(7), (CommitRing(7), ReadStream())),
            (
                StreamEnded(),
                (CloseRing(), Send(ESTABLISHER, StreamClosed(EDGE)), EndPump(orderly=True)),
            ),
        ],
        R.CLOSED,
    ),
    "the stream breaks": ([*RECV_UP, (RESET, FAULT)], R.FAULTED),
    "the stream breaks while the ring is full": ([*RECV_FULL, (RESET, FAULT)], R.FAULTED),
    "stopped before it began": ([(STOP, ABORT)], R.CLOSED),
    "stopped": ([*RECV_UP, (STOP, ABORT)], R.CLOSED),
    "stopped while the ring is full": ([*RECV_FULL, (STOP, ABORT)], R.CLOSED),
}

SEND_UP: Steps = [(Connected(), (Send(ESTABLISHER, DriverEdgeReady(EDGE)), AwaitReadable()))]
SEND_OPENING: Steps = [*SEND_UP, (READABLE, (OpenEdgeStream(),))]
SEND_STREAMING: Steps = [*SEND_OPENING, (StreamOpened(), (WriteStream(),))]
SEND_PENDING: Steps = [*SEND_STREAMING, (WritePending(), (AwaitRoom(),))]
SEND_DRAINED: Steps = [*SEND_STREAMING, (NothingCommitted(), (AwaitReadable(),))]
SEND: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], P.WAITING_FOR_CONNECTION),
    "ready, no stream before the first bytes": (SEND_UP, P.WAITING_FOR_BYTES),
    "opening": (SEND_OPENING, P.OPEN_STREAM),
    "streaming": (
        [*SEND_STREAMING, (BytesAccepted(40), (ReleaseBytes(40), WriteStream()))],
        P.STREAMING,
    ),
    "the network is slow": (SEND_PENDING, P.BACKPRESSURED),
    "room again": (
        [*SEND_PENDING, (BytesAccepted(5), (ReleaseBytes(5), WriteStream()))],
        P.STREAMING,
    ),
    "drained, and the next object goes over the same stream": (
        [*SEND_DRAINED, (READABLE, (WriteStream(),))],
        P.STREAMING,
    ),
    "its whole life": ([*SEND_DRAINED, (STOP, FINISH)], P.CLOSED),
    "no connection": ([(RESET, FAULT)], P.FAULTED),
    "the connection breaks before the stream": ([*SEND_UP, (RESET, FAULT)], P.FAULTED),
    "the stream cannot be opened": ([*SEND_OPENING, (RESET, FAULT)], P.FAULTED),
    "the stream breaks": ([*SEND_STREAMING, (RESET, FAULT)], P.FAULTED),
    "the stream breaks while a write waits": ([*SEND_PENDING, (RESET, FAULT)], P.FAULTED),
    "stopped before the connection": ([(STOP, ABORT)], P.CLOSED),
    "stopped before the first bytes": ([*SEND_UP, (STOP, ABORT)], P.CLOSED),
    "stopped while the stream opens": ([*SEND_OPENING, (STOP, ABORT)], P.CLOSED),
    "stopped while streaming": ([*SEND_STREAMING, (STOP, FINISH)], P.CLOSED),
    "stopped while a write waits": ([*SEND_PENDING, (STOP, FINISH)], P.CLOSED),
}

# Every pump that has ended may be told to stop.
SCRIPT_RECV = Script(lambda: RecvPump(EDGE), RECV, {R.CLOSED: (StopEdge,), R.FAULTED: (StopEdge,)})
SCRIPT_SEND = Script(lambda: SendPump(EDGE), SEND, {P.CLOSED: (StopEdge,), P.FAULTED: (StopEdge,)})
RECV_EVENTS, SEND_EVENTS = event_strategies(RecvPump), event_strategies(SendPump)
IMMEDIATE = (CommitRing, ReleaseBytes, CloseRing)


@pytest.mark.parametrize("name", RECV)
def test_recv_scenario(name: str) -> None:
    SCRIPT_RECV.play(name)


@pytest.mark.parametrize("name", SEND)
def test_send_scenario(name: str) -> None:
    SCRIPT_SEND.play(name)


@pytest.mark.parametrize(("state", "event"), [*SCRIPT_RECV.ignored(), *SCRIPT_SEND.ignored()])
def test_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    script = SCRIPT_RECV if isinstance(state, RecvPumpState) else SCRIPT_SEND
    script.play_ignored(state, event)


@pytest.mark.parametrize("script", [SCRIPT_RECV, SCRIPT_SEND])
def test_every_transition_of_the_table_is_taken(script: Script) -> None:
    assert script.missing() == set()


def test_counts_are_of_bytes_committed_and_accepted() -> None:
    recv, send = SCRIPT_RECV.play("streaming"), SCRIPT_SEND.play("streaming")
    recv.step(BytesRead(3), 0.0)
    send.step(BytesAccepted(2), 0.0)
    assert isinstance(recv, RecvPump)
    assert isinstance(send, SendPump)
    assert (recv.received, send.sent) == (10, 42)


@pytest.mark.parametrize("event", [BytesRead(1), StreamEnded(), WRITABLE, RESET])
def test_broken_host_answers_a_pump_that_has_ended(event: object) -> None:
    for name in ("its whole life", "the stream breaks"):
        assert step_or_refuse(SCRIPT_RECV.play(name), event) is None


def test_broken_host_hints_a_pump_that_is_not_waiting() -> None:
    assert step_or_refuse(SCRIPT_RECV.play("streaming"), WRITABLE) is None
    assert step_or_refuse(SCRIPT_SEND.play("streaming"), READABLE) is None
    assert step_or_refuse(SCRIPT_SEND.play("fresh"), READABLE) is None


@settings(max_examples=60)
@given(st.data())
def test_any_event_in_any_state_and_never_two_effects_to_answer(data: st.DataObject) -> None:
    for script, events in ((SCRIPT_RECV, RECV_EVENTS), (SCRIPT_SEND, SEND_EVENTS)):

        def check(event: object, actions: tuple[Action, ...]) -> None:
            asked = [a for a in actions if isinstance(a, Effect) and not isinstance(a, IMMEDIATE)]
            assert len(asked) <= 1
            assert not asked or asked[0] is actions[-1]

        walk(data, script.somewhere(data, check), events, check=check)
