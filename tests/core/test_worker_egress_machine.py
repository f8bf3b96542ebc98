"""Egress ring FSM alone (spec section 32): each row, every transition, any event in any state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.faults import RingFaultReason, UninstallReason
from swactor_core.fsm import InvalidTransition, Send
from swactor_core.ids import EdgeId, ObjectId, PortId, RingId, Sequence
from swactor_core.machines.egress import (
    BytesWritable,
    Commit,
    CopyToHost,
    EgressMachine,
    EgressState,
    OutputBound,
    WriteBytes,
)
from swactor_core.machines.ingress import WORKER, CloseRing, CopyComplete, CopyFailed, RingBroken
from swactor_core.messages import InstallRing, ObjectProduced, RingFault, RingQuiesced, UninstallRing
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingLayout
from swactor_core.wire import ObjectHeader
from swactor_testing.scripts import Script, step_or_refuse

S = EgressState
SPEC = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
LAYOUT = RingLayout(RingId(9), 0, 4096, 0, 64, 128, 64)
INSTALL = InstallRing(RingId(9), EdgeId(6), PortId(1), RingDirection.EGRESS, LAYOUT, SPEC)
UNINSTALL = UninstallRing(RingId(9), UninstallReason.EDGE_STOPPED)
HEADER = ObjectHeader(ObjectId(90), Sequence(0), 8)
DATA = HEADER.encode()
BROKEN = RingBroken(RingFaultReason.RING_STATE_INVALID, "consume went back")
QUIESCED = (CloseRing(), Send(WORKER, RingQuiesced(RingId(9))))
PRODUCED = Send(WORKER, ObjectProduced(RingId(9), EdgeId(6), PortId(1), ObjectId(90), Sequence(0), 8))


def fault(reason: RingFaultReason, detail: str) -> Send:
    return Send(WORKER, RingFault(RingId(9), EdgeId(6), PortId(1), reason, detail))


BROKEN_FAULT = fault(BROKEN.reason, BROKEN.detail)
COPY_FAULT = fault(RingFaultReason.DEVICE_COPY_FAILED, "dma")

Steps = list[tuple[object, tuple[object, ...]]]
TO_HEADER: Steps = [(INSTALL, ()), (OutputBound(HEADER), ())]
TO_PAYLOAD: Steps = [*TO_HEADER, (BytesWritable(64), (WriteBytes(DATA), Commit(40)))]
TO_COPY: Steps = [*TO_PAYLOAD, (BytesWritable(5), (CopyToHost(0, 5),))]

SCENARIOS: dict[str, tuple[Steps, EgressState]] = {
    "one object": (
        [*TO_PAYLOAD, (BytesWritable(64), (CopyToHost(0, 8),)), (CopyComplete(), (Commit(8), PRODUCED))],
        S.WAITING_FOR_OUTPUT,
    ),
    "header in pieces": (
        [
            *TO_HEADER,
            (BytesWritable(1), (WriteBytes(DATA[:1]), Commit(1))),
            (BytesWritable(38), (WriteBytes(DATA[1:39]), Commit(38))),
            (BytesWritable(64), (WriteBytes(DATA[39:]), Commit(1))),
        ],
        S.NEED_WRITABLE_FOR_PAYLOAD,
    ),
    "payload in prefixes": (
        [
            *TO_COPY,
            (CopyComplete(), (Commit(5),)),
            (BytesWritable(99), (CopyToHost(5, 3),)),
            (CopyComplete(), (Commit(3), PRODUCED)),
        ],
        S.WAITING_FOR_OUTPUT,
    ),
    "copy fails": ([*TO_COPY, (CopyFailed("dma"), (COPY_FAULT,))], S.FAULTED),
    "broken while waiting, and again": ([(INSTALL, ()), (BROKEN, (BROKEN_FAULT,)), (BROKEN, ())], S.FAULTED),
    "broken in the header": ([*TO_HEADER, (BROKEN, (BROKEN_FAULT,))], S.FAULTED),
    "broken between prefixes": ([*TO_PAYLOAD, (BROKEN, (BROKEN_FAULT,))], S.FAULTED),
    "broken during a copy: the report waits for it": (
        [*TO_COPY, (BROKEN, ()), (CopyComplete(), (BROKEN_FAULT,))],
        S.FAULTED,
    ),
    "broken during a copy, which fails": (
        [*TO_COPY, (BROKEN, ()), (CopyFailed("dma"), (BROKEN_FAULT,))],
        S.FAULTED,
    ),
    "uninstall while waiting": ([(INSTALL, ()), (UNINSTALL, QUIESCED)], S.UNINSTALLED),
    "uninstall in the header": ([*TO_HEADER, (UNINSTALL, QUIESCED)], S.UNINSTALLED),
    "uninstall between prefixes": ([*TO_PAYLOAD, (UNINSTALL, QUIESCED)], S.UNINSTALLED),
    "uninstall during a copy": ([*TO_COPY, (UNINSTALL, ())], S.UNINSTALLING),
    "uninstall during a copy waits for it": (
        [*TO_COPY, (UNINSTALL, ()), (UNINSTALL, ()), (BROKEN, ()), (CopyComplete(), QUIESCED)],
        S.UNINSTALLED,
    ),
    "uninstall during a copy, which fails": (
        [*TO_COPY, (UNINSTALL, ()), (CopyFailed("dma"), QUIESCED)],
        S.UNINSTALLED,
    ),
    "uninstall after a fault": (
        [(INSTALL, ()), (BROKEN, (BROKEN_FAULT,)), (UNINSTALL, QUIESCED)],
        S.UNINSTALLED,
    ),
    "uninstall after a fault with a copy in flight: no fault is reported any more": (
        [*TO_COPY, (BROKEN, ()), (UNINSTALL, ()), (CopyComplete(), QUIESCED)],
        S.UNINSTALLED,
    ),
    "installed again, everything starts from zero": (
        [*TO_COPY, (CopyComplete(), (Commit(5),)), (UNINSTALL, QUIESCED), *TO_COPY],
        S.NEED_WRITABLE_FOR_PAYLOAD,
    ),
}


SCRIPT = Script(EgressMachine, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


def test_broken_host_binds_a_second_output_while_one_is_going_out() -> None:
    machine = EgressMachine()
    for event, _ in TO_PAYLOAD:
        machine.step(event, 0.0)
    with pytest.raises(InvalidTransition, match="NeedWritableForPayload cannot take OutputBound"):
        machine.step(OutputBound(HEADER), 0.0)


def test_broken_host_offers_room_while_a_copy_is_in_flight() -> None:
    machine = EgressMachine()
    for event, _ in TO_COPY:
        machine.step(event, 0.0)
    with pytest.raises(InvalidTransition):
        machine.step(BytesWritable(3), 0.0)
    assert machine.step(CopyComplete(), 0.0) == (Commit(5),)


def test_broken_host_installs_an_ingress_ring() -> None:
    ingress = InstallRing(RingId(9), EdgeId(6), PortId(1), RingDirection.INGRESS, LAYOUT, SPEC)
    with pytest.raises(InvalidTransition):
        EgressMachine().step(ingress, 0.0)


EVENTS: list[Any] = [
    INSTALL,
    UNINSTALL,
    BROKEN,
    OutputBound(HEADER),
    BytesWritable(0),
    BytesWritable(1),
    BytesWritable(39),
    BytesWritable(64),
    CopyComplete(),
    CopyFailed("dma"),
    "not an event",
]


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_any_event_in_any_state_is_taken_or_refused_and_commits_are_exact(events: list[Any]) -> None:
    machine = EgressMachine()
    committed = 0
    for event in events:
        actions = step_or_refuse(machine, event)
        if actions is None:
            continue
        if isinstance(event, OutputBound):
            committed = 0
        committed += sum(action.count for action in actions if isinstance(action, Commit))
        if PRODUCED in actions:
            assert committed == 48
        assert committed <= 48
