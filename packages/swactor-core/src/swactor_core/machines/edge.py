"""Record FSM of the EdgeEstablisher, Edge teardown FSM (spec sections 26, 38): lease, ring, pump, and back.

The record is the only place that knows which of the three it has, and so the only one that can hand
ArenaManager a proof. Knows no bytes, no worker and no socket. Teardown waits are bounded: what could not be
proved in time is named in EdgeStopped and its range stays leased. The record goes on waiting where it is:
when the proof comes after all the range is released, and EdgeStopped is said again without the name.
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.events import EventName
from swactor_core.faults import (
    RING_FAULTS,
    STREAM_FAULTS,
    Component,
    EstablishmentFailure,
    Fault,
    FaultReason,
    LeaseRejection,
    UninstallReason,
)
from swactor_core.fsm import Action, Emit, Machine, Outcome, Row, Send
from swactor_core.ids import EdgeId, LeaseRequestId, RingId
from swactor_core.machines.bounds import teardown_timed_out
from swactor_core.messages import (
    Address,
    CancelLease,
    DriverEdgeReady,
    EdgeFailed,
    EdgeReady,
    EdgeStopped,
    EstablishRecv,
    EstablishSend,
    InstallRing,
    LeaseRing,
    ProvisionRx,
    ProvisionTx,
    PumpProof,
    PumpStopped,
    QuiescenceProof,
    ReleaseRing,
    RingFault,
    RingInstalled,
    RingLeased,
    RingLeaseRejected,
    RingProof,
    RingQuiesced,
    RingReleased,
    StopEdge,
    StreamClosed,
    StreamFault,
    TimerFired,
    UninstallRing,
)
from swactor_core.specs import RingDirection, RingLayout
from swactor_core.values import frozen


class EdgeProvisionState(StrEnum):
    NEW = "New"
    WAITING_FOR_LEASE = "WaitingForLease"
    WAITING_FOR_WORKER_RING = "WaitingForWorkerRing"
    WAITING_FOR_DRIVER = "WaitingForDriver"
    READY = "Ready"
    STOPPING_PUMP = "StoppingPump"
    STOPPING_WORKER_RING = "StoppingWorkerRing"
    RELEASING_ARENA = "ReleasingArena"
    STOPPED = "Stopped"
    FAILED = "Failed"


@frozen
class EdgeBounds:
    """Seconds that a record waits: for a queued lease, for each step of establishment and of teardown."""

    lease: float = 20.0
    establish: float = 20.0
    teardown: float = 5.0


S = EdgeProvisionState
_ENDED = (S.STOPPED, S.FAILED)
_UNPROVEN = {
    S.STOPPING_PUMP: "its pump did not stop",
    S.STOPPING_WORKER_RING: "its ring did not quiesce",
    S.RELEASING_ARENA: "the arena did not confirm the release",
}
_OF_DRIVER = (DriverEdgeReady, StreamClosed, StreamFault, PumpStopped)


class EdgeRecord(Machine[EdgeProvisionState]):
    NAME = "EdgeRecord"
    INITIAL = S.NEW
    TABLE = (
        Row(S.NEW, ProvisionTx, "_begin", (S.WAITING_FOR_LEASE,)),
        Row(S.NEW, ProvisionRx, "_begin", (S.WAITING_FOR_LEASE,)),
        Row(S.NEW, StopEdge, None, (S.STOPPED,)),  # nothing was begun, and no gate waits
        Row(S.WAITING_FOR_LEASE, RingLeased, "_leased", (S.WAITING_FOR_WORKER_RING, S.WAITING_FOR_LEASE)),
        Row(S.WAITING_FOR_LEASE, RingLeaseRejected, "_rejected", (S.FAILED, S.WAITING_FOR_LEASE)),
        Row(S.WAITING_FOR_LEASE, StopEdge, "_stop_waiting", (S.STOPPED,)),
        Row(S.WAITING_FOR_LEASE, TimerFired, "_lease_timeout", (S.FAILED,)),
        Row(S.WAITING_FOR_WORKER_RING, RingInstalled, "_installed", (S.WAITING_FOR_DRIVER,)),
        Row(S.WAITING_FOR_WORKER_RING, RingFault, "_ring_fault_early", (S.STOPPING_WORKER_RING,)),
        Row(S.WAITING_FOR_WORKER_RING, RingQuiesced, "_reaped_early", (S.RELEASING_ARENA,)),
        Row(S.WAITING_FOR_WORKER_RING, StopEdge, "_stop_early", (S.STOPPING_WORKER_RING,)),
        Row(S.WAITING_FOR_WORKER_RING, TimerFired, "_establish_timeout_early", (S.STOPPING_WORKER_RING,)),
        Row(S.WAITING_FOR_DRIVER, DriverEdgeReady, "_driver_ready", (S.READY,)),
        Row(S.WAITING_FOR_DRIVER, StreamFault, "_stream_fault", (S.STOPPING_PUMP,)),
        Row(S.WAITING_FOR_DRIVER, RingFault, "_ring_fault", (S.STOPPING_PUMP,)),
        Row(S.WAITING_FOR_DRIVER, RingQuiesced, "_reaped", (S.STOPPING_PUMP,)),
        Row(S.WAITING_FOR_DRIVER, StopEdge, "_stop", (S.STOPPING_PUMP,)),
        Row(S.WAITING_FOR_DRIVER, TimerFired, "_establish_timeout", (S.STOPPING_PUMP,)),
        Row(S.READY, StreamFault, "_stream_fault", (S.STOPPING_PUMP,)),
        Row(S.READY, RingFault, "_ring_fault", (S.STOPPING_PUMP,)),
        Row(S.READY, RingQuiesced, "_reaped", (S.STOPPING_PUMP,)),
        Row(S.READY, StreamClosed, None, (S.READY,)),  # the worker's parser judges it
        Row(S.READY, StopEdge, "_stop", (S.STOPPING_PUMP,)),
        Row(S.STOPPING_PUMP, PumpStopped, "_pump_stopped", (S.STOPPING_WORKER_RING, S.RELEASING_ARENA)),
        Row(S.STOPPING_PUMP, RingQuiesced, "_note_quiesced", (S.STOPPING_PUMP,)),
        Row(S.STOPPING_PUMP, RingFault, None, (S.STOPPING_PUMP,)),
        Row(S.STOPPING_PUMP, StreamFault, None, (S.STOPPING_PUMP,)),
        Row(S.STOPPING_PUMP, StreamClosed, None, (S.STOPPING_PUMP,)),
        Row(S.STOPPING_PUMP, DriverEdgeReady, None, (S.STOPPING_PUMP,)),
        Row(S.STOPPING_PUMP, StopEdge, None, (S.STOPPING_PUMP,)),
        # A worker that says it twice.
        *(
            Row(state, RingInstalled, None, (state,))
            for state in (S.WAITING_FOR_DRIVER, S.READY, S.STOPPING_PUMP)
        ),
        Row(S.STOPPING_WORKER_RING, RingQuiesced, "_quiesced", (S.RELEASING_ARENA,)),
        Row(S.RELEASING_ARENA, RingReleased, "_released", (S.STOPPED,)),
        *(Row(state, TimerFired, "_timed_out", (state,)) for state in _UNPROVEN),
        *(
            Row(state, late, None, (state,))
            for state in (S.STOPPING_WORKER_RING, S.RELEASING_ARENA)
            for late in (RingInstalled, RingFault, *_OF_DRIVER, StopEdge)
        ),
        Row(S.RELEASING_ARENA, RingQuiesced, None, (S.RELEASING_ARENA,)),
        *(Row(state, RingLeased, "_release_fresh", (state,)) for state in _ENDED),
        *(
            Row(state, stale, None, (state,))
            for state in _ENDED
            for stale in (
                RingLeaseRejected,
                RingInstalled,
                RingFault,
                RingQuiesced,
                RingReleased,
                *_OF_DRIVER,
            )
        ),
        Row(S.STOPPED, StopEdge, None, (S.STOPPED,)),
        Row(S.FAILED, StopEdge, "_stop_failed", (S.STOPPED,)),
    )

    def __init__(
        self,
        edge_id: EdgeId,
        *,
        address: Address,
        ring_host: Address,
        lease_request_id: LeaseRequestId,
        bounds: EdgeBounds,
    ) -> None:
        super().__init__()
        self.edge_id = edge_id
        self.lease_request_id = lease_request_id
        self.direction: RingDirection | None = None
        self.ring_id: RingId | None = None
        self._address = address
        self._ring_host = ring_host
        self._bounds = bounds
        self._provision: ProvisionTx | ProvisionRx | None = None
        self._layout: RingLayout | None = None
        self._pump = PumpProof.NEVER_STARTED
        self._ring_proof: RingProof | None = None
        self._overdue = False

    @property
    def ended(self) -> bool:
        """Whether nothing is owed any more, to the arena or by anybody."""
        return self.state in (S.NEW, *_ENDED)

    @property
    def local_edge_actor(self) -> Address:
        """The Tx or Rx gate of this edge."""
        kind = Component.TX_EDGE if self.direction is RingDirection.EGRESS else Component.RX_EDGE
        return Address(kind, self.edge_id)

    def _provisioned(self) -> ProvisionTx | ProvisionRx:
        assert self._provision is not None
        return self._provision

    # --- establishment ---

    def _begin(self, event: ProvisionTx | ProvisionRx, now: float) -> Outcome[EdgeProvisionState]:
        self._provision = event
        self.direction = RingDirection.EGRESS if isinstance(event, ProvisionTx) else RingDirection.INGRESS
        lease = LeaseRing(self.lease_request_id, self._address, self.edge_id, self.direction, event.ring_spec)
        return S.WAITING_FOR_LEASE, (
            Emit(
                EventName.EDGE_PROVISION_STARTED, {"edge_id": self.edge_id, "direction": str(self.direction)}
            ),
            Send(Address(Component.ARENA_MANAGER), lease),
            self.set_timer("bound", now + self._bounds.lease),
        )

    def _leased(self, event: RingLeased, now: float) -> Outcome[EdgeProvisionState]:
        if event.request_id != self.lease_request_id:
            return S.WAITING_FOR_LEASE, (self._give_back(event),)
        provision = self._provisioned()
        assert self.direction is not None
        self.ring_id = event.layout.ring_id
        self._layout = event.layout
        install = InstallRing(
            ring_id=event.layout.ring_id,
            edge_id=self.edge_id,
            port_id=provision.port_id,
            direction=self.direction,
            layout=event.layout,
            object_spec=provision.object_spec,
        )
        return S.WAITING_FOR_WORKER_RING, (
            Send(self._ring_host, install),
            self.set_timer("bound", now + self._bounds.establish),
        )

    def _rejected(self, event: RingLeaseRejected, now: float) -> Outcome[EdgeProvisionState]:
        if event.request_id != self.lease_request_id:
            return S.WAITING_FOR_LEASE, ()
        too_large = event.reason is LeaseRejection.EXCEEDS_CEILING
        reason = FaultReason.RING_REQUEST_TOO_LARGE if too_large else FaultReason.EDGE_ESTABLISHMENT_FAILED
        fault = self._fault(
            reason, cause=str(event.reason), detail=event.detail, component=Component.ARENA_MANAGER
        )
        return S.FAILED, (*self.cancel_timer("bound"), self._failed(fault))

    def _lease_timeout(self, event: TimerFired, now: float) -> Outcome[EdgeProvisionState]:
        detail = f"no arena range became free within {self._bounds.lease:g} s"
        fault = self._fault(FaultReason.ARENA_PRESSURE_TIMEOUT, detail=detail)
        return S.FAILED, (self._cancel_lease(), self._failed(fault))

    def _installed(self, event: RingInstalled, now: float) -> Outcome[EdgeProvisionState]:
        provision = self._provisioned()
        assert self._layout is not None
        ring = (self._layout.ring_id, self._layout, self.local_edge_actor)
        establish: EstablishSend | EstablishRecv
        if isinstance(provision, ProvisionTx):
            establish = EstablishSend(self.edge_id, provision.rx_node_id, *ring)
        else:
            establish = EstablishRecv(self.edge_id, provision.tx_node_id, *ring)
        self._pump = PumpProof.STOPPED  # from here on the driver must say so
        return S.WAITING_FOR_DRIVER, (
            Send(Address(Component.DRIVER), establish),
            self.set_timer("bound", now + self._bounds.establish),
        )

    def _driver_ready(self, event: DriverEdgeReady, now: float) -> Outcome[EdgeProvisionState]:
        assert self.ring_id is not None
        return S.READY, (
            *self.cancel_timer("bound"),
            Emit(EventName.EDGE_READY, {"edge_id": self.edge_id, "ring_id": self.ring_id}),
            Send(self.local_edge_actor, EdgeReady(self.edge_id, self.ring_id)),
        )

    # --- faults and stops before a pump exists ---

    def _stop_waiting(self, event: StopEdge, now: float) -> Outcome[EdgeProvisionState]:
        return S.STOPPED, (*self.cancel_timer("bound"), self._cancel_lease(), self._stopped())

    def _ring_fault_early(self, event: RingFault, now: float) -> Outcome[EdgeProvisionState]:
        failed = self._failed(self._of_ring(event))
        return S.STOPPING_WORKER_RING, (failed, *self._uninstall(UninstallReason.RING_FAULTED, now))

    def _stop_early(self, event: StopEdge, now: float) -> Outcome[EdgeProvisionState]:
        return S.STOPPING_WORKER_RING, self._uninstall(UninstallReason.EDGE_STOPPED, now)

    def _establish_timeout_early(self, event: TimerFired, now: float) -> Outcome[EdgeProvisionState]:
        what, cause = "the worker did not install the ring", EstablishmentFailure.RING_NOT_INSTALLED
        failed = self._failed(self._establishment_fault(what, str(cause)))
        return S.STOPPING_WORKER_RING, (failed, *self._uninstall(UninstallReason.EDGE_STOPPED, now))

    def _reaped_early(self, event: RingQuiesced, now: float) -> Outcome[EdgeProvisionState]:
        failed = self._failed(self._fault(FaultReason.WORKER_CRASHED, detail="the worker is gone"))
        return S.RELEASING_ARENA, (failed, *self._release(_proof_of(event), now))

    # --- faults and stops with a pump ---

    def _stop(self, event: StopEdge, now: float) -> Outcome[EdgeProvisionState]:
        return S.STOPPING_PUMP, self._stop_pump(now)

    def _stream_fault(self, event: StreamFault, now: float) -> Outcome[EdgeProvisionState]:
        reason = STREAM_FAULTS.get(event.reason, FaultReason.STREAM_FAULT)
        fault = self._fault(reason, cause=str(event.reason), detail=event.detail, component=Component.DRIVER)
        return S.STOPPING_PUMP, (self._failed(fault), *self._stop_pump(now))

    def _ring_fault(self, event: RingFault, now: float) -> Outcome[EdgeProvisionState]:
        return S.STOPPING_PUMP, (self._failed(self._of_ring(event)), *self._stop_pump(now))

    def _reaped(self, event: RingQuiesced, now: float) -> Outcome[EdgeProvisionState]:
        self._ring_proof = _proof_of(event)
        failed = self._failed(self._fault(FaultReason.WORKER_CRASHED, detail="the worker is gone"))
        return S.STOPPING_PUMP, (failed, *self._stop_pump(now))

    def _establish_timeout(self, event: TimerFired, now: float) -> Outcome[EdgeProvisionState]:
        failed = self._failed(self._establishment_fault("the connection to the peer was not made"))
        return S.STOPPING_PUMP, (failed, *self._stop_pump(now))

    # --- teardown (spec section 38) ---

    def _note_quiesced(self, event: RingQuiesced, now: float) -> Outcome[EdgeProvisionState]:
        self._ring_proof = _proof_of(event)
        return S.STOPPING_PUMP, ()

    def _pump_stopped(self, event: PumpStopped, now: float) -> Outcome[EdgeProvisionState]:
        if self._ring_proof is not None:
            return S.RELEASING_ARENA, self._release(self._ring_proof, now)
        return S.STOPPING_WORKER_RING, self._uninstall(UninstallReason.EDGE_STOPPED, now)

    def _quiesced(self, event: RingQuiesced, now: float) -> Outcome[EdgeProvisionState]:
        return S.RELEASING_ARENA, self._release(_proof_of(event), now)

    def _released(self, event: RingReleased, now: float) -> Outcome[EdgeProvisionState]:
        in_time = () if self._overdue else self.cancel_timer("bound")
        return S.STOPPED, (*in_time, self._stopped())

    def _timed_out(self, event: TimerFired, now: float) -> Outcome[EdgeProvisionState]:
        """Nobody waits any more, and this record goes on waiting."""
        self._overdue = True
        missing = f"{_UNPROVEN[self.state]} within {self._bounds.teardown:g} s"
        what = f"edge {self.edge_id}, ring {self.ring_id}: {missing}"
        identities = {"edge_id": self.edge_id, "ring_id": self.ring_id}
        timed_out = teardown_timed_out(Component.EDGE_ESTABLISHER, (what,), **identities)
        return self.state, (timed_out, self._stopped(what))

    def _release_fresh(self, event: RingLeased, now: float) -> Outcome[EdgeProvisionState]:
        if event.layout.ring_id == self.ring_id:  # told twice: this one was installed, it is not fresh
            return self.state, ()
        return self.state, (self._give_back(event),)

    def _stop_failed(self, event: StopEdge, now: float) -> Outcome[EdgeProvisionState]:
        return S.STOPPED, (self._stopped(),)

    # --- what the handlers share ---

    def _stop_pump(self, now: float) -> tuple[Action, ...]:
        return Send(Address(Component.DRIVER), StopEdge(self.edge_id)), *self._bound(now)

    def _uninstall(self, reason: UninstallReason, now: float) -> tuple[Action, ...]:
        assert self.ring_id is not None
        return Send(self._ring_host, UninstallRing(self.ring_id, reason)), *self._bound(now)

    def _release(self, ring: RingProof, now: float) -> tuple[Action, ...]:
        assert self.ring_id is not None
        release = ReleaseRing(self.ring_id, QuiescenceProof(self._pump, ring))
        return Send(Address(Component.ARENA_MANAGER), release), *self._bound(now)

    def _bound(self, now: float) -> tuple[Action, ...]:
        """Of one step of teardown; none once one has passed."""
        return () if self._overdue else (self.set_timer("bound", now + self._bounds.teardown),)

    def _give_back(self, event: RingLeased) -> Send:
        proof = QuiescenceProof(PumpProof.NEVER_STARTED, RingProof.NEVER_INSTALLED)
        return Send(Address(Component.ARENA_MANAGER), ReleaseRing(event.layout.ring_id, proof))

    def _cancel_lease(self) -> Send:
        return Send(Address(Component.ARENA_MANAGER), CancelLease(self.lease_request_id))

    def _failed(self, fault: Fault) -> Send:
        return Send(self.local_edge_actor, EdgeFailed(self.edge_id, fault))

    def _stopped(self, unproven: str = "") -> Send:
        return Send(self.local_edge_actor, EdgeStopped(self.edge_id, unproven))

    def _of_ring(self, event: RingFault) -> Fault:
        reason = RING_FAULTS.get(event.reason, FaultReason.RING_FAULT)
        return self._fault(reason, cause=str(event.reason), detail=event.detail, component=Component.WORKER)

    def _establishment_fault(self, what: str, cause: str = "") -> Fault:
        detail = f"{what} within {self._bounds.establish:g} s"
        return self._fault(FaultReason.EDGE_ESTABLISHMENT_FAILED, cause=cause, detail=detail)

    def _fault(
        self,
        reason: FaultReason,
        *,
        cause: str = "",
        detail: str = "",
        component: Component = Component.EDGE_ESTABLISHER,
    ) -> Fault:
        return Fault(reason, component, detail, cause, edge_id=self.edge_id, ring_id=self.ring_id)


def _proof_of(event: RingQuiesced) -> RingProof:
    return RingProof.PROCESS_REAPED if event.process_reaped else RingProof.QUIESCED
