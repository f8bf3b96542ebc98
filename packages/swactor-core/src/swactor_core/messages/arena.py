"""ArenaManager and whoever leases rings (spec section 19), with the proofs of spec section 38."""

from __future__ import annotations

from enum import StrEnum

from swactor_core.faults import LeaseRejection
from swactor_core.ids import EdgeId, LeaseRequestId, RingId
from swactor_core.messages.address import Address
from swactor_core.specs import RingDirection, RingLayout, RingSpec
from swactor_core.values import frozen


@frozen
class ConstructArena:
    ceiling: int


@frozen
class ArenaConstructed:
    pass


@frozen
class ArenaConstructionFailed:
    detail: str


@frozen
class LeaseRing:
    request_id: LeaseRequestId
    requester: Address
    edge_id: EdgeId
    direction: RingDirection
    ring_spec: RingSpec


@frozen
class CancelLease:
    request_id: LeaseRequestId


@frozen
class RingLeased:
    request_id: LeaseRequestId
    edge_id: EdgeId
    layout: RingLayout


@frozen
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


@frozen
class QuiescenceProof:
    """Without one, no arena range is reused (spec sections 38 and 39)."""

    pump: PumpProof
    ring: RingProof


@frozen
class ReleaseRing:
    ring_id: RingId
    proof: QuiescenceProof


@frozen
class RingReleased:
    ring_id: RingId


@frozen
class Shutdown:
    """Ordered end of a component."""
