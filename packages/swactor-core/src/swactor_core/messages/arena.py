"""ArenaManager and whoever leases rings (spec section 19), with the proofs of spec section 38."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swactor_core.faults import LeaseRejection
from swactor_core.ids import EdgeId, LeaseRequestId, RingId
from swactor_core.messages.address import Address
from swactor_core.specs import RingDirection, RingLayout, RingSpec


@dataclass(frozen=True, slots=True)
class ConstructArena:
    ceiling: int


@dataclass(frozen=True, slots=True)
class ArenaConstructed:
    pass


@dataclass(frozen=True, slots=True)
class ArenaConstructionFailed:
    detail: str


@dataclass(frozen=True, slots=True)
class LeaseRing:
    request_id: LeaseRequestId
    requester: Address
    edge_id: EdgeId
    direction: RingDirection
    ring_spec: RingSpec


@dataclass(frozen=True, slots=True)
class CancelLease:
    request_id: LeaseRequestId


@dataclass(frozen=True, slots=True)
class RingLeased:
    request_id: LeaseRequestId
    edge_id: EdgeId
    layout: RingLayout


@dataclass(frozen=True, slots=True)
class RingLeaseRejected:
    request_id: LeaseRequestId
    edge_id: EdgeId
    reason: LeaseRejection
    detail: str = ""


class PumpProof(StrEnum):
    STOPPED = "Stopped"
    NEVER_STARTED = "NeverStarted"


class RingProof(StrEnum):
    QUIESCED = "Quiesced"
    PROCESS_REAPED = "ProcessReaped"
    NEVER_INSTALLED = "NeverInstalled"


@dataclass(frozen=True, slots=True)
class QuiescenceProof:
    """Without one, no arena range is reused (spec sections 38 and 39)."""

    pump: PumpProof
    ring: RingProof


@dataclass(frozen=True, slots=True)
class ReleaseRing:
    ring_id: RingId
    proof: QuiescenceProof


@dataclass(frozen=True, slots=True)
class RingReleased:
    ring_id: RingId


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Ordered end of a component."""
