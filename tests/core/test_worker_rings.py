"""Ring ends on heap rings (spec section 34): byte-equal objects in any chunks, bad copies, broken rings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.faults import ObjectFailure, RingFaultReason, UninstallReason
from swactor_core.ids import ObjectId, RingId, Sequence
from swactor_core.machines.egress import EgressState
from swactor_core.machines.ingress import IngressState
from swactor_core.messages import (
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
    RingFault,
    RingQuiesced,
    RingReadable,
    RingWritable,
    UninstallRing,
)
from swactor_core.specs import OBJECT_HEADER_BYTES, RingDirection
from swactor_core.spi.arena import RingState
from swactor_core.wire import ObjectHeader
from swactor_core.worker.rings import DeviceObjects, EgressEnd, IngressEnd
from swactor_testing.echo import EchoBridge, LateBridge
from swactor_testing.heap import COMMIT_OFFSET, HeapArenas
from swactor_testing.worker_kit import (
    GENERATION,
    IN_RING,
    OUT_RING,
    NodeConsumer,
    NodeProducer,
    install,
    record,
    ring_layout,
    token_spec,
)

SPEC = token_spec(64)
UNINSTALL = UninstallRing(IN_RING, UninstallReason.EDGE_STOPPED)


class Rig:
    """A ring end over a heap ring; `reports` and `hints` are what it said."""

    def __init__(self, capacity: int, *, polls: int = 0, memory_bytes: int = 1 << 20) -> None:
        self.arena = HeapArenas().create(1 << 14)
        self.bridge = LateBridge(memory_bytes, polls) if polls else EchoBridge(memory_bytes)
        self.objects = DeviceObjects(self.bridge, GENERATION)
        self.reports: list[Any] = []
        self.hints: list[RingReadable | RingWritable] = []
        self.sent: list[Any] = []
        self._capacity = capacity

    def send(self, message: object) -> None:
        """From the node's end of the ring to the worker."""
        self.sent.append(message)

    def ingress(self) -> tuple[IngressEnd, NodeProducer]:
        layout = ring_layout(IN_RING, self._capacity, offset=0)
        node = self.arena.create_ring(layout)
        command = install(layout, RingDirection.INGRESS, SPEC)
        ring = self.arena.open_ring(layout)
        end = IngressEnd(command, ring, self.objects, report=self.reports.append, hint=self.hints.append)
        return end, NodeProducer(node, self)

    def egress(self) -> tuple[EgressEnd, NodeConsumer]:
        layout = ring_layout(OUT_RING, self._capacity, offset=0)
        node = self.arena.create_ring(layout)
        command = install(layout, RingDirection.EGRESS, SPEC)
        ring = self.arena.open_ring(layout)
        end = EgressEnd(command, ring, self.bridge, report=self.reports.append, hint=self.hints.append)
        return end, NodeConsumer(node, self)

    def loaded_bytes(self) -> list[bytes]:
        return [bytes(self.objects.allocation(r.device_handle)) for r in self.reports]


def settle(end: IngressEnd | EgressEnd) -> None:
    """Completes copies until the end waits for the other side."""
    for _ in range(10_000):
        if not end.copying:
            return
        end.pump()
    raise AssertionError("a copy does not end")


capacities = st.integers(1, 97)
chunks = st.lists(st.integers(1, 120), min_size=1, max_size=30)
payloads = st.lists(st.integers(1, 64).map(lambda rows: bytes(range(1, 5)) * rows), min_size=1, max_size=4)


@given(capacities, payloads, chunks, st.integers(0, 2))
def test_ingress_gives_byte_equal_objects_for_any_ring_and_chunking(
    capacity: int, objects: list[bytes], sizes: list[int], polls: int
) -> None:
    objects = [bytes((i * 31 + j) % 256 for j in range(len(data))) for i, data in enumerate(objects)]
    rig = Rig(capacity, polls=polls)
    end, producer = rig.ingress()
    stream = b"".join(record(i, i, data) for i, data in enumerate(objects))
    position = 0
    for turn in range(50_000):
        if position < len(stream) and producer.done:
            size = sizes[turn % len(sizes)]
            producer.write(stream[position : position + size])
            position += size
        elif rig.sent:
            rig.sent.clear()
            end.wake()
        elif end.copying:
            end.pump()
        elif rig.hints:
            hint = rig.hints.pop(0)
            assert isinstance(hint, RingWritable)
            producer.on_writable(hint)
        else:
            break
    assert position >= len(stream)
    assert producer.done, "a hint was lost"
    assert [(r.object_id, r.sequence, r.extent) for r in rig.reports] == [
        (i, i, len(data)) for i, data in enumerate(objects)
    ]
    assert rig.loaded_bytes() == objects
    assert end.machine.state is IngressState.NEED_HEADER


@given(capacities, payloads, chunks, st.integers(0, 2))
def test_egress_gives_byte_equal_records_for_any_ring_and_chunking(
    capacity: int, objects: list[bytes], sizes: list[int], polls: int
) -> None:
    objects = [bytes((i * 17 + j) % 256 for j in range(len(data))) for i, data in enumerate(objects)]
    rig = Rig(capacity, polls=polls)
    end, consumer = rig.egress()
    waiting = list(enumerate(objects))
    for turn in range(50_000):
        if waiting and end.machine.state is EgressState.WAITING_FOR_OUTPUT:
            number, data = waiting.pop(0)
            header = ObjectHeader(ObjectId(number), Sequence(number), len(data))
            end.begin(header, bytearray(data))
        elif rig.hints:
            assert isinstance(rig.hints.pop(0), RingReadable)
            consumer.read(chunk=sizes[turn % len(sizes)])
        elif rig.sent:
            rig.sent.clear()
            end.wake()
        elif end.copying:
            end.pump()
        else:
            break
    assert consumer.data == b"".join(record(i, i, data) for i, data in enumerate(objects))
    assert [(r.object_id, r.sequence, r.extent) for r in rig.reports] == [
        (i, i, len(data)) for i, data in enumerate(objects)
    ]
    assert all(isinstance(report, ObjectProduced) for report in rig.reports)


def test_a_blocked_egress_returns_and_says_so() -> None:
    rig = Rig(64)
    end, consumer = rig.egress()
    end.begin(ObjectHeader(ObjectId(1), Sequence(0), 64), bytearray(64))
    assert end.blocked
    assert rig.reports == []
    consumer.read()
    end.wake()
    assert not end.blocked
    assert isinstance(rig.reports[0], ObjectProduced)


def test_a_byte_is_not_released_before_its_copy_is_complete() -> None:
    rig = Rig(128, polls=3)
    end, producer = rig.ingress()
    producer.write(record(0, 0, bytes(range(32))))
    end.wake()
    assert end.copying
    assert producer.ring.consume == OBJECT_HEADER_BYTES
    end.pump()
    assert producer.ring.consume == OBJECT_HEADER_BYTES
    settle(end)
    assert producer.ring.consume == OBJECT_HEADER_BYTES + 32
    assert rig.loaded_bytes() == [bytes(range(32))]


def test_bytes_committed_before_a_close_are_still_loaded() -> None:
    rig = Rig(256)
    end, producer = rig.ingress()
    producer.write(record(0, 0, bytes(8)))
    producer.ring.set_state(RingState.CLOSED)
    end.wake()
    assert len(rig.reports) == 1
    assert isinstance(rig.reports[0], ObjectLoaded)
    assert end.machine.state is IngressState.NEED_HEADER


@pytest.mark.parametrize(("length", "known"), [(1, False), (39, False), (40, True), (47, True)])
def test_a_close_inside_a_record_fails_the_object_and_frees_it(length: int, known: bool) -> None:
    rig = Rig(256)
    end, producer = rig.ingress()
    producer.write(record(0, 0, bytes(8))[:length])
    end.wake()
    producer.ring.set_state(RingState.CLOSED)
    end.wake()
    (report,) = rig.reports
    assert isinstance(report, ObjectFailed)
    assert report.reason is ObjectFailure.EOF_MID_OBJECT
    assert (report.object_id is not None) is known
    assert rig.bridge.live == 0


def test_a_rejected_header_stops_consumption_and_allocates_nothing() -> None:
    rig = Rig(256)
    end, producer = rig.ingress()
    producer.write(record(0, 3, bytes(8)))
    end.wake()
    (report,) = rig.reports
    assert report.reason is ObjectFailure.SEQUENCE_VIOLATION
    assert producer.ring.consume == 0
    assert rig.bridge.live == 0
    producer.write(bytes(100))
    end.wake()
    assert len(rig.reports) == 1


def test_no_device_memory_fails_the_object() -> None:
    rig = Rig(256, memory_bytes=7)
    end, producer = rig.ingress()
    producer.write(record(5, 0, bytes(8)))
    end.wake()
    (report,) = rig.reports
    assert report.reason is ObjectFailure.DEVICE_ALLOCATION_FAILED
    assert "echo device has 7 bytes left" in report.detail


class BrokenDevice(EchoBridge):
    """Copies fail: at once, or when they are asked for completion."""

    def __init__(self, when: str) -> None:
        super().__init__(1 << 20)
        self._when = when
        self.asked = 0

    def host_to_device(self, source: memoryview, allocation: bytearray, device_offset: int) -> None:
        self._fail("start")

    def device_to_host(self, allocation: bytearray, device_offset: int, target: memoryview) -> None:
        self._fail("start")

    def copy_event_complete(self, event: object) -> bool:
        self.asked += 1
        if self.asked == 1 and self._when == "later":
            return False
        self._fail(self._when)
        return True

    def _fail(self, now: str) -> None:
        if now == self._when:
            raise OSError(5, "device gone")


@pytest.mark.parametrize("when", ["start", "poll", "later"])
def test_a_failing_copy_to_the_device_fails_the_object(when: str) -> None:
    rig = Rig(256)
    rig.bridge = BrokenDevice(when)
    rig.objects = DeviceObjects(rig.bridge, GENERATION)
    end, producer = rig.ingress()
    producer.write(record(0, 0, bytes(8)))
    end.wake()
    settle(end)
    (report,) = rig.reports
    assert report.reason is ObjectFailure.DEVICE_COPY_FAILED
    assert "device gone" in report.detail
    assert rig.bridge.live == 0
    assert producer.ring.consume == OBJECT_HEADER_BYTES


@pytest.mark.parametrize("when", ["start", "poll", "later"])
def test_a_failing_copy_to_the_host_faults_the_ring(when: str) -> None:
    rig = Rig(256)
    rig.bridge = BrokenDevice(when)
    end, consumer = rig.egress()
    end.begin(ObjectHeader(ObjectId(1), Sequence(0), 8), bytearray(8))
    settle(end)
    (report,) = rig.reports
    assert isinstance(report, RingFault)
    assert report.reason is RingFaultReason.DEVICE_COPY_FAILED
    assert consumer.ring.commit == OBJECT_HEADER_BYTES


def damage(rig: Rig, offset: int) -> None:
    rig.arena.memory[offset] ^= 0xFF


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0, RingFaultReason.RING_LAYOUT_INVALID),
        (4, RingFaultReason.UNSUPPORTED_RING_VERSION),
        (COMMIT_OFFSET + 6, RingFaultReason.RING_STATE_INVALID),
        (40, RingFaultReason.RING_STATE_INVALID),
    ],
)
def test_a_damaged_ring_header_faults_both_directions(offset: int, reason: RingFaultReason) -> None:
    rig = Rig(256)
    end, producer = rig.ingress()
    producer.write(record(0, 0, bytes(8))[:44])
    end.wake()
    damage(rig, offset)
    end.wake()
    end.wake()
    (report,) = rig.reports
    assert isinstance(report, RingFault)
    assert report.reason is reason
    assert rig.bridge.live == 0
    end.uninstall(UNINSTALL)
    assert rig.reports[1:] == [RingQuiesced(IN_RING)]

    rig = Rig(256)
    sender, _ = rig.egress()
    damage(rig, offset)
    sender.begin(ObjectHeader(ObjectId(1), Sequence(0), 8), bytearray(8))
    sender.wake()
    (report,) = rig.reports
    assert isinstance(report, RingFault)
    assert report.reason is reason


def test_a_ring_that_breaks_between_copy_and_commit_produces_nothing() -> None:
    rig = Rig(256, polls=2)
    end, _ = rig.egress()
    end.begin(ObjectHeader(ObjectId(1), Sequence(0), 8), bytearray(8))
    assert end.copying
    damage(rig, COMMIT_OFFSET + 6)
    settle(end)
    (report,) = rig.reports
    assert isinstance(report, RingFault)
    assert end.machine.state is EgressState.FAULTED


def test_a_ring_that_breaks_between_copy_and_release_still_gives_the_object() -> None:
    rig = Rig(256, polls=2)
    end, producer = rig.ingress()
    producer.write(record(0, 0, bytes(8)))
    end.wake()
    assert end.copying
    damage(rig, COMMIT_OFFSET + 6)
    settle(end)
    loaded, fault = rig.reports
    assert isinstance(loaded, ObjectLoaded)
    assert isinstance(fault, RingFault)
    assert rig.bridge.live == 1


@pytest.mark.parametrize("direction", list(RingDirection))
def test_a_ring_that_the_other_end_faulted_is_a_fault(direction: RingDirection) -> None:
    rig = Rig(256)
    if direction is RingDirection.INGRESS:
        end, producer = rig.ingress()
        producer.write(b"x")
        producer.ring.set_state(RingState.FAULTED)
        end.wake()
    else:
        sender, consumer = rig.egress()
        consumer.ring.set_state(RingState.FAULTED)
        sender.begin(ObjectHeader(ObjectId(1), Sequence(0), 8), bytearray(8))
    (report,) = rig.reports
    assert report.reason is RingFaultReason.RING_STATE_INVALID


def test_uninstall_waits_for_a_copy_in_flight_and_frees_the_half_loaded_object() -> None:
    rig = Rig(256, polls=3)
    end, producer = rig.ingress()
    producer.write(record(0, 0, bytes(8))[:44])
    end.wake()
    assert end.copying
    end.uninstall(UNINSTALL)
    assert rig.reports == []
    assert rig.bridge.live == 1
    settle(end)
    assert rig.reports == [RingQuiesced(IN_RING)]
    assert rig.bridge.live == 0
    assert isinstance(rig.bridge, LateBridge)
    assert rig.bridge.in_flight == []


def test_uninstall_of_an_egress_ring_waits_for_its_copy() -> None:
    rig = Rig(256, polls=3)
    end, consumer = rig.egress()
    end.begin(ObjectHeader(ObjectId(1), Sequence(0), 8), bytearray(8))
    end.uninstall(UninstallRing(OUT_RING, UninstallReason.EDGE_STOPPED))
    assert rig.reports == []
    settle(end)
    assert rig.reports == [RingQuiesced(RingId(OUT_RING))]
    assert consumer.ring.commit == OBJECT_HEADER_BYTES
