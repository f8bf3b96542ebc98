"""Egress ring FSM of the worker (spec sections 32 and 34): a device object becomes committed ring bytes.

Knows the record layout and that bytes are committed only when they are valid. Must not know memory, cursors
or devices: the adapter (`worker/rings.py`) performs the effects. It never blocks the thread: without room it
waits for the next BytesWritable, and that wait is the system's backpressure (spec sections 35 and 39).
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.faults import RingFaultReason
from swactor_core.fsm import Action, Effect, Machine, Outcome, Row, Send
from swactor_core.machines.ingress import WORKER, CloseRing, CopyComplete, CopyFailed, RingBroken
from swactor_core.messages import InstallRing, ObjectProduced, RingFault, RingQuiesced, UninstallRing
from swactor_core.specs import RingDirection
from swactor_core.values import value
from swactor_core.wire import ObjectHeader


class EgressState(StrEnum):
    UNINSTALLED = "Uninstalled"
    WAITING_FOR_OUTPUT = "WaitingForOutput"
    NEED_WRITABLE_FOR_HEADER = "NeedWritableForHeader"
    NEED_WRITABLE_FOR_PAYLOAD = "NeedWritableForPayload"
    FAULTED = "Faulted"
    UNINSTALLING = "Uninstalling"


# --- events: InstallRing and UninstallRing, those of ingress.py, and ---


@value
class OutputBound:
    """A step's output of `header.extent` bytes lies ready on the device."""

    header: ObjectHeader


@value
class BytesWritable:
    """The ring has `count` contiguous free bytes from the write position on; at least one."""

    count: int


# --- effects ---


@value
class WriteBytes(Effect):
    """Put `data` at the write position; it is valid when this returns."""

    data: bytes


@value
class CopyToHost(Effect):
    """Fill `count` bytes at the write position from `device_offset`; answer CopyComplete or CopyFailed."""

    device_offset: int
    count: int


@value
class Commit(Effect):
    """Publish `count` bytes to the consumer. When it fails, the step's later actions must not happen."""

    count: int


S = EgressState


class EgressMachine(Machine[EgressState]):
    """One ring from InstallRing to RingQuiesced. Its reports go to the worker machine."""

    NAME = "Egress"
    INITIAL = S.UNINSTALLED
    TABLE = (
        Row(S.UNINSTALLED, InstallRing, "_on_install", (S.WAITING_FOR_OUTPUT,)),
        Row(S.WAITING_FOR_OUTPUT, OutputBound, "_on_output", (S.NEED_WRITABLE_FOR_HEADER,)),
        Row(S.WAITING_FOR_OUTPUT, RingBroken, "_on_broken", (S.FAULTED,)),
        Row(S.WAITING_FOR_OUTPUT, UninstallRing, "_on_uninstall", (S.UNINSTALLED,)),
        Row(
            S.NEED_WRITABLE_FOR_HEADER,
            BytesWritable,
            "_on_writable_for_header",
            (S.NEED_WRITABLE_FOR_HEADER, S.NEED_WRITABLE_FOR_PAYLOAD),
        ),
        Row(S.NEED_WRITABLE_FOR_HEADER, RingBroken, "_on_broken", (S.FAULTED,)),
        Row(S.NEED_WRITABLE_FOR_HEADER, UninstallRing, "_on_uninstall", (S.UNINSTALLED,)),
        Row(
            S.NEED_WRITABLE_FOR_PAYLOAD,
            BytesWritable,
            "_on_writable_for_payload",
            (S.NEED_WRITABLE_FOR_PAYLOAD,),
        ),
        Row(
            S.NEED_WRITABLE_FOR_PAYLOAD,
            CopyComplete,
            "_on_prefix_copied",
            (S.NEED_WRITABLE_FOR_PAYLOAD, S.WAITING_FOR_OUTPUT),
        ),
        Row(S.NEED_WRITABLE_FOR_PAYLOAD, CopyFailed, "_on_copy_failed", (S.FAULTED,)),
        Row(S.NEED_WRITABLE_FOR_PAYLOAD, RingBroken, "_on_broken", (S.FAULTED,)),
        Row(
            S.NEED_WRITABLE_FOR_PAYLOAD,
            UninstallRing,
            "_on_uninstall",
            (S.UNINSTALLING, S.UNINSTALLED),
        ),
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
        self._header_bytes = b""
        self._produced = 0
        self._in_flight = 0
        self._fault: RingFault | None = None

    def _on_install(self, event: InstallRing, now: float) -> Outcome[EgressState]:
        if event.direction is not RingDirection.EGRESS:
            raise self.invalid(event)
        self._ring = event
        return S.WAITING_FOR_OUTPUT, ()

    def _on_output(self, event: OutputBound, now: float) -> Outcome[EgressState]:
        self._header = event.header
        self._header_bytes = event.header.encode()
        self._produced = 0
        return S.NEED_WRITABLE_FOR_HEADER, ()

    def _on_writable_for_header(self, event: BytesWritable, now: float) -> Outcome[EgressState]:
        if event.count <= 0:
            raise self.invalid(event)
        piece, rest = self._header_bytes[: event.count], self._header_bytes[event.count :]
        self._header_bytes = rest
        target = S.NEED_WRITABLE_FOR_HEADER if rest else S.NEED_WRITABLE_FOR_PAYLOAD
        return target, (WriteBytes(piece), Commit(len(piece)))

    def _on_writable_for_payload(self, event: BytesWritable, now: float) -> Outcome[EgressState]:
        if self._in_flight or event.count <= 0:
            raise self.invalid(event)
        self._in_flight = min(event.count, self._header.extent - self._produced)
        return S.NEED_WRITABLE_FOR_PAYLOAD, (CopyToHost(self._produced, self._in_flight),)

    def _on_prefix_copied(self, event: CopyComplete, now: float) -> Outcome[EgressState]:
        if not self._in_flight:
            raise self.invalid(event)
        header, ring = self._header, self._ring
        count, self._in_flight = self._in_flight, 0
        self._produced += count
        if self._produced < header.extent:
            return S.NEED_WRITABLE_FOR_PAYLOAD, (Commit(count),)
        produced = ObjectProduced(
            ring_id=ring.ring_id,
            edge_id=ring.edge_id,
            port_id=ring.port_id,
            object_id=header.object_id,
            sequence=header.sequence,
            extent=header.extent,
        )
        return S.WAITING_FOR_OUTPUT, (Commit(count), Send(WORKER, produced))

    def _on_copy_failed(self, event: CopyFailed, now: float) -> Outcome[EgressState]:
        if not self._in_flight:
            raise self.invalid(event)
        self._in_flight = 0
        fault = self._ring_fault(RingFaultReason.DEVICE_COPY_FAILED, event.detail)
        return S.FAULTED, (Send(WORKER, fault),)

    def _on_broken(self, event: RingBroken, now: float) -> Outcome[EgressState]:
        fault = self._ring_fault(event.reason, event.detail)
        if self._in_flight:
            self._fault = fault
            return S.FAULTED, ()
        return S.FAULTED, (Send(WORKER, fault),)

    def _on_copy_after_fault(self, event: CopyComplete | CopyFailed, now: float) -> Outcome[EgressState]:
        # The report waited for this: until now the copy read the step's output allocation.
        if not self._in_flight or self._fault is None:
            raise self.invalid(event)
        self._in_flight = 0
        return S.FAULTED, (Send(WORKER, self._fault),)

    def _on_uninstall(self, event: UninstallRing, now: float) -> Outcome[EgressState]:
        if self._in_flight:
            return S.UNINSTALLING, ()
        return S.UNINSTALLED, self._quiesced()

    def _on_last_copy(self, event: CopyComplete | CopyFailed, now: float) -> Outcome[EgressState]:
        self._in_flight = 0
        return S.UNINSTALLED, self._quiesced()

    def _quiesced(self) -> tuple[Action, ...]:
        self._header_bytes, self._produced, self._fault = b"", 0, None
        return (CloseRing(), Send(WORKER, RingQuiesced(self._ring.ring_id)))

    def _ring_fault(self, reason: RingFaultReason, detail: str) -> RingFault:
        return RingFault(self._ring.ring_id, self._ring.edge_id, self._ring.port_id, reason, detail)
