"""Ingress ring FSM of the worker (spec sections 32 and 34): committed ring bytes become device objects.

Knows the record layout, the sequence rule and when a byte may be released. Must not know memory, cursors or
devices: the adapter (`worker/rings.py`) performs the effects and reports what they did. One copy is in flight
at a time; a prefix is released only after its copy is complete, so an object may be larger than the ring.
Compute visibility (spec section 39) begins with ObjectLoaded, said when the whole object is on the device.
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.faults import Component, ObjectFailure, RingFaultReason
from swactor_core.fsm import Action, Effect, Machine, Outcome, Row, Send
from swactor_core.ids import DeviceObjectHandle, Sequence
from swactor_core.messages import (
    Address,
    InstallRing,
    ObjectFailed,
    ObjectLoaded,
    RingFault,
    RingQuiesced,
    UninstallRing,
)
from swactor_core.specs import OBJECT_HEADER_BYTES, RingDirection
from swactor_core.values import value
from swactor_core.wire import HeaderRejected, ObjectHeader, check_object_header, decode_object_header

WORKER = Address(Component.WORKER)


class IngressState(StrEnum):
    UNINSTALLED = "Uninstalled"
    NEED_HEADER = "NeedHeader"
    NEED_PAYLOAD = "NeedPayload"
    OBJECT_COMPLETE = "ObjectComplete"
    FAULTED = "Faulted"
    UNINSTALLING = "Uninstalling"


# --- events: InstallRing and UninstallRing, and what the adapter saw or did ---


@value
class BytesReadable:
    """The ring has `count` contiguous committed bytes from the consume cursor on; at least one."""

    count: int


@value
class HeaderRead:
    """Result of ReadHeader: that many bytes, taken out of the ring's memory but not yet released."""

    data: bytes


@value
class DeviceAllocated:
    handle: DeviceObjectHandle


@value
class AllocationFailed:
    detail: str


@value
class CopyComplete:
    """The one copy in flight no longer touches host memory."""


@value
class CopyFailed:
    """The one copy in flight ended without its bytes."""

    detail: str


@value
class RingClosed:
    """The producer closed the ring and every byte it committed has been taken."""


@value
class RingBroken:
    """The ring's shared header cannot be used any more."""

    reason: RingFaultReason
    detail: str


# --- effects ---


@value
class ReadHeader(Effect):
    """Copy `count` bytes from the consume cursor on; answer HeaderRead."""

    count: int


@value
class AllocateObject(Effect):
    """Allocate a device object of `extent` bytes; answer DeviceAllocated or AllocationFailed."""

    extent: int


@value
class CopyToDevice(Effect):
    """Copy `count` bytes from the consume cursor on to `device_offset`; answer CopyComplete or CopyFailed."""

    handle: DeviceObjectHandle
    device_offset: int
    count: int


@value
class Consume(Effect):
    """Release `count` bytes to the producer."""

    count: int


@value
class FreeObject(Effect):
    handle: DeviceObjectHandle


@value
class CloseRing(Effect):
    """Close the helper's handle; no copy touches the ring any more."""


S = IngressState


class IngressMachine(Machine[IngressState]):
    """One ring from InstallRing to RingQuiesced. Its reports go to the worker machine."""

    NAME = "Ingress"
    INITIAL = S.UNINSTALLED
    TABLE = (
        Row(S.UNINSTALLED, InstallRing, "_on_install", (S.NEED_HEADER,)),
        Row(S.NEED_HEADER, BytesReadable, "_on_header_readable", (S.NEED_HEADER,)),
        Row(S.NEED_HEADER, HeaderRead, "_on_header_read", (S.NEED_HEADER, S.NEED_PAYLOAD, S.FAULTED)),
        Row(S.NEED_HEADER, RingClosed, "_on_closed_at_header", (S.NEED_HEADER, S.FAULTED)),
        Row(S.NEED_HEADER, RingBroken, "_on_broken", (S.FAULTED,)),
        Row(S.NEED_HEADER, UninstallRing, "_on_uninstall", (S.UNINSTALLED,)),
        Row(S.NEED_PAYLOAD, DeviceAllocated, "_on_allocated", (S.NEED_PAYLOAD,)),
        Row(S.NEED_PAYLOAD, AllocationFailed, "_on_allocation_failed", (S.FAULTED,)),
        Row(S.NEED_PAYLOAD, BytesReadable, "_on_payload_readable", (S.NEED_PAYLOAD, S.OBJECT_COMPLETE)),
        Row(S.NEED_PAYLOAD, CopyComplete, "_on_prefix_copied", (S.NEED_PAYLOAD,)),
        Row(S.NEED_PAYLOAD, CopyFailed, "_on_copy_failed", (S.FAULTED,)),
        Row(S.NEED_PAYLOAD, RingClosed, "_on_closed_mid_object", (S.FAULTED,)),
        Row(S.NEED_PAYLOAD, RingBroken, "_on_broken", (S.FAULTED,)),
        Row(S.NEED_PAYLOAD, UninstallRing, "_on_uninstall", (S.UNINSTALLING, S.UNINSTALLED)),
        Row(S.OBJECT_COMPLETE, CopyComplete, "_on_object_copied", (S.NEED_HEADER,)),
        Row(S.OBJECT_COMPLETE, CopyFailed, "_on_copy_failed", (S.FAULTED,)),
        Row(S.OBJECT_COMPLETE, RingBroken, "_on_broken", (S.FAULTED,)),
        Row(S.OBJECT_COMPLETE, UninstallRing, "_on_uninstall", (S.UNINSTALLING,)),
        Row(S.FAULTED, CopyComplete, "_on_copy_after_fault", (S.FAULTED,)),
        Row(S.FAULTED, CopyFailed, "_on_copy_after_fault", (S.FAULTED,)),
        Row(S.FAULTED, RingBroken, None, (S.FAULTED,)),
        Row(S.FAULTED, UninstallRing, "_on_uninstall", (S.UNINSTALLING, S.UNINSTALLED)),
        Row(S.UNINSTALLING, CopyComplete, "_on_last_copy", (S.UNINSTALLED,)),
        Row(S.UNINSTALLING, CopyFailed, "_on_last_copy", (S.UNINSTALLED,)),
        Row(S.UNINSTALLING, RingBroken, None, (S.UNINSTALLING,)),
        Row(S.UNINSTALLING, UninstallRing, None, (S.UNINSTALLING,)),
    )

    _ring: InstallRing
    _header: ObjectHeader

    def __init__(self) -> None:
        super().__init__()
        self._expected = Sequence(0)
        self._header_bytes = b""
        self._handle: DeviceObjectHandle | None = None
        self._copied = 0
        self._in_flight = 0
        self._fault: RingFault | None = None

    def _on_install(self, event: InstallRing, now: float) -> Outcome[IngressState]:
        if event.direction is not RingDirection.INGRESS:
            raise self.invalid(event)
        self._ring = event
        return S.NEED_HEADER, ()

    # --- NeedHeader: a header may come in pieces, and a ring may be smaller than one ---

    def _on_header_readable(self, event: BytesReadable, now: float) -> Outcome[IngressState]:
        if event.count <= 0:
            raise self.invalid(event)
        return S.NEED_HEADER, (ReadHeader(min(event.count, OBJECT_HEADER_BYTES - len(self._header_bytes))),)

    def _on_header_read(self, event: HeaderRead, now: float) -> Outcome[IngressState]:
        data = self._header_bytes + event.data
        if not event.data or len(data) > OBJECT_HEADER_BYTES:
            raise self.invalid(event)
        release = Consume(len(event.data))
        if len(data) < OBJECT_HEADER_BYTES:
            self._header_bytes = data
            return S.NEED_HEADER, (release,)
        try:
            header = decode_object_header(data)
            check_object_header(header, self._ring.object_spec, self._expected)
        except HeaderRejected as rejected:
            return S.FAULTED, (self._failed(rejected.reason, str(rejected), rejected.header),)
        self._header_bytes = b""
        self._header = header
        self._copied = 0
        return S.NEED_PAYLOAD, (release, AllocateObject(header.extent))

    def _on_closed_at_header(self, event: RingClosed, now: float) -> Outcome[IngressState]:
        if not self._header_bytes:
            return S.NEED_HEADER, ()
        detail = f"ring closed after {len(self._header_bytes)} of {OBJECT_HEADER_BYTES} header bytes"
        return S.FAULTED, (self._failed(ObjectFailure.EOF_MID_OBJECT, detail, None),)

    # --- NeedPayload and ObjectComplete: prefixes to the device ---

    def _on_allocated(self, event: DeviceAllocated, now: float) -> Outcome[IngressState]:
        if self._handle is not None:
            raise self.invalid(event)
        self._handle = event.handle
        return S.NEED_PAYLOAD, ()

    def _on_allocation_failed(self, event: AllocationFailed, now: float) -> Outcome[IngressState]:
        if self._handle is not None:
            raise self.invalid(event)
        detail = f"{self._header.extent} bytes: {event.detail}"
        return S.FAULTED, (self._failed(ObjectFailure.DEVICE_ALLOCATION_FAILED, detail, self._header),)

    def _on_payload_readable(self, event: BytesReadable, now: float) -> Outcome[IngressState]:
        if self._handle is None or self._in_flight or event.count <= 0:
            raise self.invalid(event)
        rest = self._header.extent - self._copied
        count = min(event.count, rest)
        self._in_flight = count
        target = S.OBJECT_COMPLETE if count == rest else S.NEED_PAYLOAD
        return target, (CopyToDevice(self._handle, self._copied, count),)

    def _on_prefix_copied(self, event: CopyComplete, now: float) -> Outcome[IngressState]:
        if not self._in_flight:
            raise self.invalid(event)
        count, self._in_flight = self._in_flight, 0
        self._copied += count
        return S.NEED_PAYLOAD, (Consume(count),)

    def _on_object_copied(self, event: CopyComplete, now: float) -> Outcome[IngressState]:
        handle, header, ring = self._handle, self._header, self._ring
        if handle is None or not self._in_flight:
            raise self.invalid(event)
        count, self._in_flight, self._handle = self._in_flight, 0, None
        self._expected = Sequence(self._expected + 1)
        loaded = ObjectLoaded(
            ring_id=ring.ring_id,
            edge_id=ring.edge_id,
            port_id=ring.port_id,
            object_id=header.object_id,
            sequence=header.sequence,
            extent=header.extent,
            device_handle=handle,
        )
        # The object stands whatever becomes of the ring, so it is told before the ring is touched again.
        return S.NEED_HEADER, (Send(WORKER, loaded), Consume(count))

    def _on_copy_failed(self, event: CopyFailed, now: float) -> Outcome[IngressState]:
        if not self._in_flight:
            raise self.invalid(event)
        self._in_flight = 0
        failed = self._failed(ObjectFailure.DEVICE_COPY_FAILED, event.detail, self._header)
        return S.FAULTED, (*self._free(), failed)

    def _on_closed_mid_object(self, event: RingClosed, now: float) -> Outcome[IngressState]:
        if self._in_flight:
            raise self.invalid(event)
        detail = f"ring closed after {self._copied} of {self._header.extent} payload bytes"
        return S.FAULTED, (
            *self._free(),
            self._failed(ObjectFailure.EOF_MID_OBJECT, detail, self._header),
        )

    # --- faults and the end ---

    def _on_broken(self, event: RingBroken, now: float) -> Outcome[IngressState]:
        ring = self._ring
        fault = RingFault(ring.ring_id, ring.edge_id, ring.port_id, event.reason, event.detail)
        if self._in_flight:
            self._fault = fault
            return S.FAULTED, ()
        return S.FAULTED, (*self._free(), Send(WORKER, fault))

    def _on_copy_after_fault(self, event: CopyComplete | CopyFailed, now: float) -> Outcome[IngressState]:
        if not self._in_flight or self._fault is None:
            raise self.invalid(event)
        self._in_flight = 0
        return S.FAULTED, (*self._free(), Send(WORKER, self._fault))

    def _on_uninstall(self, event: UninstallRing, now: float) -> Outcome[IngressState]:
        if self._in_flight:
            return S.UNINSTALLING, ()
        return S.UNINSTALLED, self._quiesced()

    def _on_last_copy(self, event: CopyComplete | CopyFailed, now: float) -> Outcome[IngressState]:
        self._in_flight = 0
        return S.UNINSTALLED, self._quiesced()

    def _quiesced(self) -> tuple[Action, ...]:
        actions = (*self._free(), CloseRing(), Send(WORKER, RingQuiesced(self._ring.ring_id)))
        self._expected, self._header_bytes, self._copied, self._fault = Sequence(0), b"", 0, None
        return actions

    def _free(self) -> tuple[Action, ...]:
        handle, self._handle = self._handle, None
        return () if handle is None else (FreeObject(handle),)

    def _failed(self, reason: ObjectFailure, detail: str, header: ObjectHeader | None) -> Send:
        ring = self._ring
        failed = ObjectFailed(
            ring_id=ring.ring_id,
            edge_id=ring.edge_id,
            port_id=ring.port_id,
            object_id=None if header is None else header.object_id,
            sequence=None if header is None else header.sequence,
            reason=reason,
            detail=detail,
        )
        return Send(WORKER, failed)
