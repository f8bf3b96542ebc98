"""Node boot and life (spec section 8): what must stand before this node accepts run provisioning.

Steps are taken in the spec's order, each started only when the one before it stands. Knows no process, socket
or memory: it tells the parts to start and hears that they have.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Action, Effect, Emit, Machine, Outcome, Row, Send
from swactor_core.ids import NodeId
from swactor_core.machines.bounds import teardown_timed_out
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    ArenaConstructionFailed,
    ConstructArena,
    NodeFaulted,
    Shutdown,
    ShutdownMode,
    ShutdownWorker,
    StartWorker,
    TimerFired,
    WorkerCrashed,
    WorkerGone,
    WorkerRunning,
)
from swactor_core.values import frozen


class NodeState(StrEnum):
    CONTAINER_STARTING = "ContainerStarting"
    NODE_PROCESS_STARTING = "NodeProcessStarting"
    ARENA_READY = "ArenaReady"
    WORKER_READY = "WorkerReady"
    TRANSPORT_READY = "TransportReady"
    MEMBERSHIP_JOINING = "MembershipJoining"
    NODE_AVAILABLE = "NodeAvailable"
    FAULTED = "Faulted"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


@frozen
class ProcessStarted:
    """Adapter: the actor system runs and can receive control messages."""


@frozen
class TransportStarted:
    host: str
    port: int


@frozen
class MembershipStarted:
    """Adapter: the participant has joined or is joining the intended pool."""


@frozen
class PartFailed:
    """Adapter: a part could not start, or has ended unasked."""

    component: Component
    detail: str


@frozen
class PartsClosed:
    """Adapter: transport and membership are closed."""


@frozen
class Continue:
    """Self-sent: leaves a state that is only passed through."""


@frozen
class StartTransport(Effect):
    pass


@frozen
class StartMembership(Effect):
    pass


@frozen
class AnnounceAvailable(Effect):
    """Tell the watching orchestrator, now and whenever one begins to watch."""

    worker: dict[str, Any]


@frozen
class WithdrawAvailable(Effect):
    """The worker is gone and may come again: until AnnounceAvailable no run can be served."""


@frozen
class AnnounceFault(Effect):
    message: NodeFaulted


@frozen
class CloseParts(Effect):
    pass


@frozen
class ExitProcess(Effect):
    """The node has ended; `fault` is why, or None after an ordered stop."""

    fault: Fault | None


S = NodeState
_BOOT = (
    S.CONTAINER_STARTING,
    S.NODE_PROCESS_STARTING,
    S.ARENA_READY,
    S.WORKER_READY,
    S.TRANSPORT_READY,
    S.MEMBERSHIP_JOINING,
)
_STARTING = {  # a part has been told to start: who it is
    S.WORKER_READY: (Component.DRIVER, "the transport"),
    S.MEMBERSHIP_JOINING: (Component.MEMBERSHIP, "membership"),
}
_AFTER_WORKER = (S.WORKER_READY, S.TRANSPORT_READY, S.MEMBERSHIP_JOINING)


class NodeLife(Machine[NodeState]):
    NAME = "Node"
    INITIAL = S.CONTAINER_STARTING
    TABLE = (
        Row(S.CONTAINER_STARTING, ProcessStarted, "_process_started", (S.NODE_PROCESS_STARTING,)),
        Row(S.NODE_PROCESS_STARTING, ArenaConstructed, "_arena", (S.ARENA_READY,)),
        Row(S.NODE_PROCESS_STARTING, ArenaConstructionFailed, "_arena_failed", (S.FAULTED,)),
        Row(S.ARENA_READY, WorkerRunning, "_worker", (S.WORKER_READY,)),
        Row(S.ARENA_READY, WorkerGone, "_worker_failed", (S.FAULTED,)),
        Row(S.WORKER_READY, TransportStarted, "_transport", (S.TRANSPORT_READY,)),
        Row(S.TRANSPORT_READY, Continue, "_join", (S.MEMBERSHIP_JOINING,)),
        Row(S.MEMBERSHIP_JOINING, MembershipStarted, "_membership", (S.NODE_AVAILABLE,)),
        *(
            Row(state, PartFailed, "_part_failed", (S.FAULTED,))
            for state in (*_AFTER_WORKER, S.NODE_AVAILABLE)
        ),
        *(Row(state, TimerFired, "_boot_timeout", (S.FAULTED,)) for state in _STARTING),
        *(
            Row(state, WorkerGone, "_worker_failed", (S.FAULTED,))
            for state in (*_AFTER_WORKER, S.NODE_AVAILABLE)
        ),
        *(Row(state, WorkerCrashed, None, (state,)) for state in (S.ARENA_READY, *_AFTER_WORKER)),
        Row(S.NODE_AVAILABLE, WorkerCrashed, "_worker_crashed", (S.NODE_AVAILABLE,)),
        *(
            Row(state, WorkerRunning, "_worker_again", (state,))
            for state in (*_AFTER_WORKER, S.NODE_AVAILABLE)
        ),
        *(
            Row(state, Shutdown, "_shutdown", (S.STOPPING,))
            for state in (*_BOOT, S.NODE_AVAILABLE, S.FAULTED)
        ),
        *(
            Row(S.FAULTED, late, None, (S.FAULTED,))
            for late in (
                ArenaConstructed,
                ArenaConstructionFailed,
                WorkerRunning,
                WorkerCrashed,
                WorkerGone,
                TransportStarted,
                MembershipStarted,
                PartFailed,
                Continue,
            )
        ),
        *(
            Row(S.STOPPING, late, None, (S.STOPPING,))
            for late in (
                ProcessStarted,
                ArenaConstructed,
                ArenaConstructionFailed,
                WorkerRunning,
                WorkerCrashed,
                TransportStarted,
                MembershipStarted,
                PartFailed,
                Continue,
                Shutdown,
            )
        ),
        Row(S.STOPPING, WorkerGone, "_worker_stopped", (S.STOPPING, S.STOPPED)),
        Row(S.STOPPING, PartsClosed, "_parts_closed", (S.STOPPING, S.STOPPED)),
        Row(S.STOPPING, TimerFired, "_stop_timeout", (S.STOPPED,)),
        *(
            Row(S.STOPPED, late, None, (S.STOPPED,))
            for late in (
                ProcessStarted,
                ArenaConstructed,
                ArenaConstructionFailed,
                WorkerRunning,
                WorkerCrashed,
                WorkerGone,
                TransportStarted,
                MembershipStarted,
                PartFailed,
                PartsClosed,
                Continue,
                Shutdown,
            )
        ),
    )

    def __init__(self, node_id: NodeId, *, arena_ceiling: int, boot_bound: float, stop_bound: float) -> None:
        """Bounds in seconds: for each of transport and membership to start; for all to end."""
        super().__init__()
        self.fault: Fault | None = None
        self._node_id = node_id
        self._ceiling = arena_ceiling
        self._boot_bound = boot_bound
        self._stop_bound = stop_bound
        self._backend: dict[str, Any] = {}
        self._worker_gone = False
        self._closed = False

    def _process_started(self, event: ProcessStarted, now: float) -> Outcome[NodeState]:
        return S.NODE_PROCESS_STARTING, (
            Emit(EventName.NODE_STARTED, {}),
            Send(Address(Component.ARENA_MANAGER), ConstructArena(self._ceiling)),
        )

    def _arena(self, event: ArenaConstructed, now: float) -> Outcome[NodeState]:
        return S.ARENA_READY, (Send(Address(Component.GPU_WORKER_CTL), StartWorker()),)

    def _worker(self, event: WorkerRunning, now: float) -> Outcome[NodeState]:
        self._backend = event.backend
        return S.WORKER_READY, (StartTransport(), self.set_timer("boot", now + self._boot_bound))

    def _transport(self, event: TransportStarted, now: float) -> Outcome[NodeState]:
        return S.TRANSPORT_READY, (*self.cancel_timer("boot"), Send(Address(Component.NODE), Continue()))

    def _join(self, event: Continue, now: float) -> Outcome[NodeState]:
        return S.MEMBERSHIP_JOINING, (StartMembership(), self.set_timer("boot", now + self._boot_bound))

    def _membership(self, event: MembershipStarted, now: float) -> Outcome[NodeState]:
        return S.NODE_AVAILABLE, (
            *self.cancel_timer("boot"),
            Emit(EventName.NODE_AVAILABLE, {}),
            AnnounceAvailable(self._backend),
        )

    def _boot_timeout(self, event: TimerFired, now: float) -> Outcome[NodeState]:
        component, part = _STARTING[self.state]
        detail = f"{part} did not start within {self._boot_bound:g} s"
        return self._faulted(FaultReason.NODE_UNAVAILABLE, component, detail)

    def _worker_crashed(self, event: WorkerCrashed, now: float) -> Outcome[NodeState]:
        return S.NODE_AVAILABLE, (WithdrawAvailable(),)

    def _worker_again(self, event: WorkerRunning, now: float) -> Outcome[NodeState]:
        self._backend = event.backend
        again: tuple[Action, ...] = (
            (AnnounceAvailable(self._backend),) if self.state is S.NODE_AVAILABLE else ()
        )
        return self.state, again

    def _arena_failed(self, event: ArenaConstructionFailed, now: float) -> Outcome[NodeState]:
        return self._faulted(FaultReason.ARENA_BOOT_FAILED, Component.ARENA_MANAGER, event.detail)

    def _worker_failed(self, event: WorkerGone, now: float) -> Outcome[NodeState]:
        self._worker_gone = True
        cause = "" if event.fatal is None else str(event.fatal)
        detail = event.reason.removeprefix(f"{cause}: ")
        return self._faulted(FaultReason.WORKER_FATAL, Component.GPU_WORKER_CTL, detail, cause=cause)

    def _part_failed(self, event: PartFailed, now: float) -> Outcome[NodeState]:
        return self._faulted(FaultReason.NODE_UNAVAILABLE, event.component, event.detail)

    def _faulted(
        self, reason: FaultReason, component: Component, detail: str, *, cause: str = ""
    ) -> Outcome[NodeState]:
        self.fault = Fault(reason, component, detail, cause, node_id=self._node_id)
        fields = {"reason": str(reason), "component": str(component), "cause": cause, "detail": detail}
        return S.FAULTED, (
            *self.cancel_timer("boot"),
            Emit(EventName.NODE_FAULTED, fields),
            AnnounceFault(NodeFaulted(self._node_id, self.fault)),
        )

    def _shutdown(self, event: Shutdown, now: float) -> Outcome[NodeState]:
        if self.state in (S.CONTAINER_STARTING, S.NODE_PROCESS_STARTING):
            self._worker_gone = True
        return S.STOPPING, (
            *self.cancel_timer("boot"),
            Send(Address(Component.GPU_WORKER_CTL), ShutdownWorker(ShutdownMode.ABORT_IN_FLIGHT)),
            Send(Address(Component.ARENA_MANAGER), Shutdown()),
            CloseParts(),
            self.set_timer("stop", now + self._stop_bound),
        )

    def _worker_stopped(self, event: WorkerGone, now: float) -> Outcome[NodeState]:
        self._worker_gone = True
        return self._if_stopped()

    def _parts_closed(self, event: PartsClosed, now: float) -> Outcome[NodeState]:
        self._closed = True
        return self._if_stopped()

    def _if_stopped(self) -> Outcome[NodeState]:
        if not (self._worker_gone and self._closed):
            return S.STOPPING, ()
        return S.STOPPED, (*self.cancel_timer("stop"), ExitProcess(self.fault))

    def _stop_timeout(self, event: TimerFired, now: float) -> Outcome[NodeState]:
        worker = () if self._worker_gone else ("the worker process",)
        parts = () if self._closed else ("transport and membership",)
        missing = tuple(f"{part} did not end within {self._stop_bound:g} s" for part in (*worker, *parts))
        return S.STOPPED, (teardown_timed_out(Component.NODE, missing), ExitProcess(self.fault))
