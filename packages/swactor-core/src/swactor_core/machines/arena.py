"""ArenaManager FSM (spec section 19): mints stable offsets by first fit, reuses a range after its proof only.

Knows offsets and leases. Does not know the memory itself: the adapter maps it, writes ring headers
(`PrepareRing`) and gives pages back (`DiscardRange`). Arena release is safe only after what its proof says
(spec sections 38 and 39, quiescence).
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from swactor_core.events import EventName
from swactor_core.faults import LeaseRejection
from swactor_core.fsm import Action, Effect, Emit, Machine, Outcome, Row, Send
from swactor_core.ids import RingId
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    ArenaConstructionFailed,
    CancelLease,
    ConstructArena,
    LeaseRing,
    ReleaseRing,
    RingLeased,
    RingLeaseRejected,
    RingReleased,
    Shutdown,
)
from swactor_core.specs import (
    CACHE_LINE,
    RING_HEADER_BYTES,
    HostPinning,
    RingLayout,
    RingSpec,
    WakeCoalescing,
    align_up,
)
from swactor_core.values import frozen

PAGE = 4096


class ArenaState(StrEnum):
    BOOTING = "Booting"
    READY = "Ready"
    FAILED = "Failed"
    SHUTTING_DOWN = "ShuttingDown"


@frozen
class RingPrepared:
    """Adapter: the header of this ring is written and its pages exist."""

    ring_id: RingId


@frozen
class RingPreparationFailed:
    ring_id: RingId
    detail: str


@frozen
class MapArena(Effect):
    ceiling: int


@frozen
class PrepareRing(Effect):
    layout: RingLayout


@frozen
class DiscardRange(Effect):
    layout: RingLayout


S = ArenaState
_NO_ARENA = "the arena takes no more leases: its node is ending"


class ArenaManager(Machine[ArenaState]):
    NAME = "ArenaManager"
    INITIAL = S.BOOTING
    TABLE = (
        Row(S.BOOTING, ConstructArena, "_construct", (S.BOOTING,)),
        Row(S.BOOTING, ArenaConstructed, "_constructed", (S.READY,)),
        Row(S.BOOTING, ArenaConstructionFailed, "_failed", (S.FAILED,)),
        Row(S.BOOTING, Shutdown, None, (S.SHUTTING_DOWN,)),
        Row(S.READY, LeaseRing, "_lease", (S.READY,)),
        Row(S.READY, RingPrepared, "_prepared", (S.READY,)),
        Row(S.READY, RingPreparationFailed, "_not_prepared", (S.READY,)),
        Row(S.READY, CancelLease, "_cancel", (S.READY,)),
        Row(S.READY, ReleaseRing, "_release", (S.READY,)),
        Row(S.READY, Shutdown, "_shutdown", (S.SHUTTING_DOWN,)),
        Row(S.SHUTTING_DOWN, ArenaConstructed, None, (S.SHUTTING_DOWN,)),
        Row(S.SHUTTING_DOWN, ArenaConstructionFailed, None, (S.SHUTTING_DOWN,)),
        Row(S.SHUTTING_DOWN, LeaseRing, "_refuse", (S.SHUTTING_DOWN,)),
        # Asked for before the end, ready after it: its requester is refused like any other.
        Row(S.SHUTTING_DOWN, RingPrepared, "_prepared_late", (S.SHUTTING_DOWN,)),
        Row(S.SHUTTING_DOWN, RingPreparationFailed, "_prepared_late", (S.SHUTTING_DOWN,)),
        Row(S.SHUTTING_DOWN, CancelLease, None, (S.SHUTTING_DOWN,)),
        Row(S.SHUTTING_DOWN, ReleaseRing, "_release", (S.SHUTTING_DOWN,)),
        Row(S.SHUTTING_DOWN, Shutdown, None, (S.SHUTTING_DOWN,)),
        Row(S.FAILED, LeaseRing, "_refuse", (S.FAILED,)),
        Row(S.FAILED, CancelLease, None, (S.FAILED,)),
        Row(S.FAILED, Shutdown, None, (S.SHUTTING_DOWN,)),
    )

    def __init__(self, owner: Address) -> None:
        super().__init__()
        self._owner = owner
        self.ceiling = 0
        self.free: list[tuple[int, int]] = []  # (offset, length), by offset, never adjacent
        self.pending: deque[LeaseRing] = deque()
        self.live: dict[RingId, tuple[RingLayout, LeaseRing]] = {}
        self._preparing: set[RingId] = set()
        self._next_ring = 1
        self.stale_releases = 0

    def _construct(self, event: ConstructArena, now: float) -> Outcome[ArenaState]:
        if self.ceiling:
            raise self.invalid(event)
        self.ceiling = max(0, event.ceiling // PAGE * PAGE)
        return S.BOOTING, (MapArena(self.ceiling),)

    def _constructed(self, event: ArenaConstructed, now: float) -> Outcome[ArenaState]:
        self.free = [(0, self.ceiling)] if self.ceiling else []
        return S.READY, (Send(self._owner, event),)

    def _failed(self, event: ArenaConstructionFailed, now: float) -> Outcome[ArenaState]:
        return S.FAILED, (Send(self._owner, event),)

    def _lease(self, event: LeaseRing, now: float) -> Outcome[ArenaState]:
        spec = event.ring_spec
        if not _valid(spec):
            return S.READY, (_rejected(event, LeaseRejection.INVALID_SPEC, f"{spec}"),)
        if _total_len(spec) > self.ceiling:
            detail = f"ring of {_total_len(spec)} bytes in an arena of {self.ceiling}"
            return S.READY, (_rejected(event, LeaseRejection.EXCEEDS_CEILING, detail),)
        if self.pending:  # serial: nobody overtakes an earlier request
            self.pending.append(event)
            return S.READY, ()
        actions = self._try(event)
        if actions is None:
            self.pending.append(event)
            return S.READY, ()
        return S.READY, actions

    def _try(self, event: LeaseRing) -> tuple[Action, ...] | None:
        total = _total_len(event.ring_spec)
        for index, (offset, length) in enumerate(self.free):
            if length >= total:
                self.free[index : index + 1] = [(offset + total, length - total)] if length > total else []
                layout = _layout(RingId(self._next_ring), offset, event.ring_spec)
                self._next_ring += 1
                self.live[layout.ring_id] = (layout, event)
                self._preparing.add(layout.ring_id)
                return (PrepareRing(layout),)
        return None

    def _prepared(self, event: RingPrepared, now: float) -> Outcome[ArenaState]:
        if event.ring_id not in self._preparing:
            raise self.invalid(event)
        layout, request = self.live[event.ring_id]
        self._preparing.discard(event.ring_id)
        return S.READY, (
            Emit(EventName.RING_LEASED, {"ring_id": layout.ring_id, "edge_id": request.edge_id}),
            Send(request.requester, RingLeased(request.request_id, request.edge_id, layout)),
        )

    def _not_prepared(self, event: RingPreparationFailed, now: float) -> Outcome[ArenaState]:
        if event.ring_id not in self._preparing:
            raise self.invalid(event)
        layout, request = self.live.pop(event.ring_id)
        self._preparing.discard(event.ring_id)
        self._give_back(layout)
        rejected = _rejected(request, LeaseRejection.NO_MEMORY, event.detail)
        return S.READY, (DiscardRange(layout), rejected, *self._retry())

    def _prepared_late(self, event: RingPrepared | RingPreparationFailed, now: float) -> Outcome[ArenaState]:
        if event.ring_id not in self._preparing:
            raise self.invalid(event)
        layout, request = self.live.pop(event.ring_id)
        self._preparing.discard(event.ring_id)
        self._give_back(layout)
        rejected = _rejected(request, LeaseRejection.SHUTTING_DOWN, _NO_ARENA)
        return self.state, (DiscardRange(layout), rejected)

    def _cancel(self, event: CancelLease, now: float) -> Outcome[ArenaState]:
        self.pending = deque(r for r in self.pending if r.request_id != event.request_id)
        return S.READY, self._retry()

    def _release(self, event: ReleaseRing, now: float) -> Outcome[ArenaState]:
        # Nobody has heard of a ring that is still being prepared: a release of it is another ring's, late.
        if event.ring_id not in self.live or event.ring_id in self._preparing:
            self.stale_releases += 1
            return self.state, ()
        layout, request = self.live.pop(event.ring_id)
        self._give_back(layout)
        proof = {"pump": str(event.proof.pump), "ring": str(event.proof.ring)}
        released = {"ring_id": layout.ring_id, "edge_id": request.edge_id, "proof": proof}
        return self.state, (
            DiscardRange(layout),
            Emit(EventName.RING_RELEASED, released),
            Send(request.requester, RingReleased(layout.ring_id)),
            *self._retry(),
        )

    def _give_back(self, layout: RingLayout) -> None:
        merged: list[tuple[int, int]] = []
        for offset, length in sorted([*self.free, (layout.arena_offset, layout.total_len)]):
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((offset, length))
        self.free = merged

    def _retry(self) -> tuple[Action, ...]:
        actions: list[Action] = []
        while self.pending and self.state is S.READY:
            leased = self._try(self.pending[0])
            if leased is None:
                break
            self.pending.popleft()
            actions.extend(leased)
        return tuple(actions)

    def _shutdown(self, event: Shutdown, now: float) -> Outcome[ArenaState]:
        answers = tuple(_rejected(r, LeaseRejection.SHUTTING_DOWN, _NO_ARENA) for r in self.pending)
        self.pending.clear()
        return S.SHUTTING_DOWN, answers

    def _refuse(self, event: LeaseRing, now: float) -> Outcome[ArenaState]:
        return self.state, (_rejected(event, LeaseRejection.SHUTTING_DOWN, _NO_ARENA),)


def _valid(spec: RingSpec) -> bool:
    """Whether there can be such a ring: rings here have pending bits, and no page of theirs is pinned."""
    power_of_two = spec.alignment > 0 and spec.alignment & (spec.alignment - 1) == 0
    ours = (spec.host_pinning, spec.wake_coalescing) == (HostPinning.PAGEABLE, WakeCoalescing.PENDING_BIT)
    return ours and spec.data_capacity > 0 and power_of_two and spec.alignment <= PAGE


def _total_len(spec: RingSpec) -> int:
    return align_up(_data_start(spec) + spec.data_capacity, PAGE)


def _data_start(spec: RingSpec) -> int:
    return align_up(RING_HEADER_BYTES, max(spec.alignment, CACHE_LINE))


def _layout(ring_id: RingId, offset: int, spec: RingSpec) -> RingLayout:
    return RingLayout(
        ring_id=ring_id,
        arena_offset=offset,
        total_len=_total_len(spec),
        header_offset=offset,
        data_offset=offset + _data_start(spec),
        data_capacity=spec.data_capacity,
        alignment=spec.alignment,
    )


def _rejected(request: LeaseRing, reason: LeaseRejection, detail: str = "") -> Send:
    return Send(request.requester, RingLeaseRejected(request.request_id, request.edge_id, reason, detail))
