"""Ingress ring FSM alone (spec section 32): each row, every transition, any event in any state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.faults import ObjectFailure, RingFaultReason, UninstallReason
from swactor_core.fsm import InvalidTransition, Send
from swactor_core.ids import DeviceObjectHandle, EdgeId, ObjectId, PortId, RingId, Sequence, WorkerGeneration
from swactor_core.machines.ingress import (
    WORKER,
    AllocateObject,
    AllocationFailed,
    BytesReadable,
    CloseRing,
    Consume,
    CopyComplete,
    CopyFailed,
    CopyToDevice,
    DeviceAllocated,
    FreeObject,
    HeaderRead,
    IngressMachine,
    IngressState,
    ReadHeader,
    RingBroken,
    RingClosed,
)
from swactor_core.messages import (
    InstallRing,
    ObjectFailed,
    ObjectLoaded,
    RingFault,
    RingQuiesced,
    UninstallRing,
)
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingLayout
from swactor_core.wire import ObjectHeader
from swactor_testing.scripts import Script, step_or_refuse

S = IngressState
SPEC = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
LAYOUT = RingLayout(RingId(7), 0, 4096, 0, 64, 128, 64)
INSTALL = InstallRing(RingId(7), EdgeId(5), PortId(0), RingDirection.INGRESS, LAYOUT, SPEC)
UNINSTALL = UninstallRing(RingId(7), UninstallReason.EDGE_STOPPED)
HANDLE = DeviceObjectHandle(WorkerGeneration(1), 3)
BROKEN = RingBroken(RingFaultReason.RING_STATE_INVALID, "commit went back")
FAULT = Send(WORKER, RingFault(RingId(7), EdgeId(5), PortId(0), BROKEN.reason, BROKEN.detail))
QUIESCED = (CloseRing(), Send(WORKER, RingQuiesced(RingId(7))))


def header(*, sequence: int = 0, extent: int = 8) -> bytes:
    return ObjectHeader(ObjectId(70 + sequence), Sequence(sequence), extent).encode()


def failed(reason: ObjectFailure, detail: str, *, known: bool = True) -> Send:
    identity = (ObjectId(70), Sequence(0)) if known else (None, None)
    return Send(WORKER, ObjectFailed(RingId(7), EdgeId(5), PortId(0), *identity, reason, detail))


LOADED = Send(WORKER, ObjectLoaded(RingId(7), EdgeId(5), PortId(0), ObjectId(70), Sequence(0), 8, HANDLE))

# Each step: event, the exact actions it must return. The state after the last one is the scenario's.
TO_PAYLOAD: list[tuple[object, tuple[object, ...]]] = [
    (INSTALL, ()),
    (BytesReadable(48), (ReadHeader(40),)),
    (HeaderRead(header()), (Consume(40), AllocateObject(8))),
    (DeviceAllocated(HANDLE), ()),
]
TO_COMPLETE = [*TO_PAYLOAD, (BytesReadable(8), (CopyToDevice(HANDLE, 0, 8),))]
TO_PREFIX = [*TO_PAYLOAD, (BytesReadable(5), (CopyToDevice(HANDLE, 0, 5),))]

SCENARIOS: dict[str, tuple[list[tuple[object, tuple[object, ...]]], IngressState]] = {
    "one object": ([*TO_COMPLETE, (CopyComplete(), (LOADED, Consume(8)))], S.NEED_HEADER),
    "header in pieces": (
        [
            (INSTALL, ()),
            (BytesReadable(3), (ReadHeader(3),)),
            (HeaderRead(header()[:3]), (Consume(3),)),
            (BytesReadable(100), (ReadHeader(37),)),
            (HeaderRead(header()[3:]), (Consume(37), AllocateObject(8))),
        ],
        S.NEED_PAYLOAD,
    ),
    "payload in prefixes": (
        [
            *TO_PREFIX,
            (CopyComplete(), (Consume(5),)),
            (BytesReadable(50), (CopyToDevice(HANDLE, 5, 3),)),
            (CopyComplete(), (LOADED, Consume(3))),
        ],
        S.NEED_HEADER,
    ),
    "second object has sequence 1": (
        [
            *TO_COMPLETE,
            (CopyComplete(), (LOADED, Consume(8))),
            (BytesReadable(40), (ReadHeader(40),)),
            (HeaderRead(header(sequence=1, extent=4)), (Consume(40), AllocateObject(4))),
        ],
        S.NEED_PAYLOAD,
    ),
    "header out of sequence": (
        [
            (INSTALL, ()),
            (
                HeaderRead(ObjectHeader(ObjectId(70), Sequence(1), 8).encode()),
                (
                    Send(
                        WORKER,
                        ObjectFailed(
                            RingId(7),
                            EdgeId(5),
                            PortId(0),
                            ObjectId(70),
                            Sequence(1),
                            ObjectFailure.SEQUENCE_VIOLATION,
                            "sequence 1, expected 0",
                        ),
                    ),
                ),
            ),
        ],
        S.FAULTED,
    ),
    "aligned close": ([(INSTALL, ()), (RingClosed(), ()), (RingClosed(), ())], S.NEED_HEADER),
    "close inside the header": (
        [
            (INSTALL, ()),
            (HeaderRead(header()[:39]), (Consume(39),)),
            (
                RingClosed(),
                (
                    failed(
                        ObjectFailure.EOF_MID_OBJECT, "ring closed after 39 of 40 header bytes", known=False
                    ),
                ),
            ),
        ],
        S.FAULTED,
    ),
    "close inside the payload": (
        [
            *TO_PREFIX,
            (CopyComplete(), (Consume(5),)),
            (
                RingClosed(),
                (
                    FreeObject(HANDLE),
                    failed(ObjectFailure.EOF_MID_OBJECT, "ring closed after 5 of 8 payload bytes"),
                ),
            ),
        ],
        S.FAULTED,
    ),
    "no device memory": (
        [
            *TO_PAYLOAD[:3],
            (AllocationFailed("full"), (failed(ObjectFailure.DEVICE_ALLOCATION_FAILED, "8 bytes: full"),)),
        ],
        S.FAULTED,
    ),
    "copy fails in a prefix": (
        [
            *TO_PREFIX,
            (
                CopyFailed("dma"),
                (FreeObject(HANDLE), failed(ObjectFailure.DEVICE_COPY_FAILED, "dma")),
            ),
        ],
        S.FAULTED,
    ),
    "copy of the last bytes fails": (
        [
            *TO_COMPLETE,
            (
                CopyFailed("dma"),
                (FreeObject(HANDLE), failed(ObjectFailure.DEVICE_COPY_FAILED, "dma")),
            ),
        ],
        S.FAULTED,
    ),
    "broken while idle, and again": ([(INSTALL, ()), (BROKEN, (FAULT,)), (BROKEN, ())], S.FAULTED),
    "broken between prefixes": ([*TO_PAYLOAD, (BROKEN, (FreeObject(HANDLE), FAULT))], S.FAULTED),
    "broken during a copy: the report waits for it": (
        [*TO_PREFIX, (BROKEN, ()), (CopyComplete(), (FreeObject(HANDLE), FAULT))],
        S.FAULTED,
    ),
    "broken during the last copy, which fails": (
        [*TO_COMPLETE, (BROKEN, ()), (CopyFailed("dma"), (FreeObject(HANDLE), FAULT))],
        S.FAULTED,
    ),
    "uninstall while idle": ([(INSTALL, ()), (UNINSTALL, QUIESCED)], S.UNINSTALLED),
    "uninstall between prefixes frees the half-loaded object": (
        [*TO_PAYLOAD, (UNINSTALL, (FreeObject(HANDLE), *QUIESCED))],
        S.UNINSTALLED,
    ),
    "uninstall during a copy": ([*TO_PREFIX, (UNINSTALL, ())], S.UNINSTALLING),
    "uninstall during a prefix waits for its copy": (
        [
            *TO_PREFIX,
            (UNINSTALL, ()),
            (UNINSTALL, ()),
            (BROKEN, ()),
            (CopyComplete(), (FreeObject(HANDLE), *QUIESCED)),
        ],
        S.UNINSTALLED,
    ),
    "uninstall during the last copy, which fails": (
        [*TO_COMPLETE, (UNINSTALL, ()), (CopyFailed("dma"), (FreeObject(HANDLE), *QUIESCED))],
        S.UNINSTALLED,
    ),
    "uninstall after a fault": ([(INSTALL, ()), (BROKEN, (FAULT,)), (UNINSTALL, QUIESCED)], S.UNINSTALLED),
    "uninstall after a fault with a copy in flight: no fault is reported any more": (
        [*TO_PREFIX, (BROKEN, ()), (UNINSTALL, ()), (CopyComplete(), (FreeObject(HANDLE), *QUIESCED))],
        S.UNINSTALLED,
    ),
    "installed again, everything starts from zero": (
        [
            *TO_COMPLETE,
            (CopyComplete(), (LOADED, Consume(8))),
            (UNINSTALL, QUIESCED),
            *TO_COMPLETE,
            (CopyComplete(), (LOADED, Consume(8))),
        ],
        S.NEED_HEADER,
    ),
}


SCRIPT = Script(IngressMachine, SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


BAD_HEADERS: dict[str, tuple[bytes, ObjectFailure, bool]] = {
    "magic": (b"\0" + header()[1:], ObjectFailure.HEADER_MALFORMED, False),
    "version": (header()[:4] + b"\x09" + header()[5:], ObjectFailure.UNSUPPORTED_OBJECT_VERSION, False),
    "header length": (header()[:6] + b"\x29" + header()[7:], ObjectFailure.HEADER_MALFORMED, False),
    "reserved": (header()[:-1] + b"\x01", ObjectFailure.HEADER_MALFORMED, False),
    "extent above max": (header(extent=68), ObjectFailure.EXTENT_EXCEEDS_MAX, True),
    "extent zero": (header(extent=0), ObjectFailure.EXTENT_ALIGNMENT_INVALID, True),
    "extent unaligned": (header(extent=6), ObjectFailure.EXTENT_ALIGNMENT_INVALID, True),
    "sequence": (header(sequence=1), ObjectFailure.SEQUENCE_VIOLATION, True),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_header_is_rejected_before_a_device_object_exists(name: str) -> None:
    data, reason, identified = BAD_HEADERS[name]
    machine = IngressMachine()
    machine.step(INSTALL, 0.0)
    (report,) = machine.step(HeaderRead(data), 0.0)
    assert isinstance(report, Send)
    message = report.message
    assert isinstance(message, ObjectFailed)
    assert message.reason is reason
    assert (message.object_id is not None) is identified
    assert machine.state is S.FAULTED
    with pytest.raises(InvalidTransition):
        machine.step(BytesReadable(8), 0.0)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


def test_broken_host_completes_a_copy_that_was_never_started() -> None:
    machine = IngressMachine()
    for event, _ in TO_PAYLOAD:
        machine.step(event, 0.0)
    with pytest.raises(InvalidTransition, match="NeedPayload cannot take CopyComplete"):
        machine.step(CopyComplete(), 0.0)
    assert machine.step(BytesReadable(8), 0.0) == (CopyToDevice(HANDLE, 0, 8),)


def test_broken_host_offers_bytes_while_a_copy_is_in_flight() -> None:
    machine = IngressMachine()
    for event, _ in TO_PREFIX:
        machine.step(event, 0.0)
    with pytest.raises(InvalidTransition):
        machine.step(BytesReadable(3), 0.0)
    assert machine.step(CopyComplete(), 0.0) == (Consume(5),)


def test_broken_host_installs_an_egress_ring() -> None:
    egress = InstallRing(RingId(7), EdgeId(5), PortId(0), RingDirection.EGRESS, LAYOUT, SPEC)
    with pytest.raises(InvalidTransition):
        IngressMachine().step(egress, 0.0)


EVENTS: list[Any] = [
    INSTALL,
    UNINSTALL,
    BROKEN,
    BytesReadable(0),
    BytesReadable(1),
    BytesReadable(40),
    BytesReadable(64),
    HeaderRead(b""),
    HeaderRead(header()[:7]),
    HeaderRead(header()),
    HeaderRead(header(sequence=1)),
    HeaderRead(bytes(41)),
    DeviceAllocated(HANDLE),
    AllocationFailed("full"),
    CopyComplete(),
    CopyFailed("dma"),
    RingClosed(),
    "not an event",
]


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_any_event_in_any_state_is_taken_or_refused_and_objects_are_freed_once(events: list[Any]) -> None:
    machine = IngressMachine()
    held = 0
    for event in events:
        actions = step_or_refuse(machine, event)
        if actions is None:
            continue
        held += isinstance(event, DeviceAllocated)
        held -= sum(isinstance(action, FreeObject) for action in actions)
        held -= sum(isinstance(a, Send) and isinstance(a.message, ObjectLoaded) for a in actions)
        assert held in (0, 1)
        if machine.state is S.UNINSTALLED:
            assert held == 0
