"""Pool readiness (spec section 9): the gate before planning. Observes, never decides placement.

PoolReady means that every candidate is known, alive in membership, has said NodeAvailable, has an endpoint,
is not suspect or faulted, and that this has stayed so for the convergence window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Action, Effect, Emit, Machine, Outcome, Row, Send
from swactor_core.ids import NodeId, node_hex
from swactor_core.messages import (
    Address,
    NodeAvailable,
    NodeFaulted,
    NodeLost,
    Shutdown,
    TimerFired,
    WatchRefused,
)
from swactor_core.spi.membership import Member, MemberState
from swactor_core.values import frozen


class PoolState(StrEnum):
    WAITING_FOR_NODES = "WaitingForNodes"
    CONVERGING = "Converging"
    POOL_READY = "PoolReady"
    COMMITTED = "Committed"
    ABORTED = "Aborted"
    CLOSED = "Closed"


@frozen
class MemberChanged:
    member: Member


@frozen
class BeginPool:
    """Start the clock that bounds the wait for the pool."""


@frozen
class PlanCommitted:
    """From here on a lost node faults the run (spec section 9)."""


@frozen
class PoolReady:
    """To the run: these nodes are ready, in candidate order."""

    nodes: tuple[NodeAvailable, ...]


@frozen
class PoolAborted:
    fault: Fault


@frozen
class ReportPool(Effect):
    """For people: which candidates are still waited for, and why."""

    ready: int
    total: int
    waiting: tuple[str, ...]


S = PoolState
RUN = Address(Component.RUN)
_GATE = (S.WAITING_FOR_NODES, S.CONVERGING, S.POOL_READY)
_JUDGED = {  # where a changed view can lead; only the window's timer leads to PoolReady
    S.WAITING_FOR_NODES: (S.WAITING_FOR_NODES, S.CONVERGING),
    S.CONVERGING: (S.WAITING_FOR_NODES, S.CONVERGING),
    S.POOL_READY: (S.WAITING_FOR_NODES, S.POOL_READY),
}


class PoolGate(Machine[PoolState]):
    NAME = "Pool"
    INITIAL = S.WAITING_FOR_NODES
    TABLE = (
        Row(S.WAITING_FOR_NODES, BeginPool, "_begin", (S.WAITING_FOR_NODES,)),
        *(Row(state, MemberChanged, "_member", targets) for state, targets in _JUDGED.items()),
        *(Row(state, NodeAvailable, "_available", targets) for state, targets in _JUDGED.items()),
        *(Row(state, NodeFaulted, "_node_faulted", (state, S.ABORTED)) for state in _GATE),
        Row(S.WAITING_FOR_NODES, WatchRefused, "_refused", (S.WAITING_FOR_NODES, S.ABORTED)),
        *(
            Row(state, WatchRefused, "_refused", (state, S.WAITING_FOR_NODES, S.ABORTED))
            for state in (S.CONVERGING, S.POOL_READY)
        ),
        Row(S.WAITING_FOR_NODES, NodeLost, "_lost_early", (S.WAITING_FOR_NODES, S.ABORTED)),
        *(
            Row(state, NodeLost, "_lost_early", (state, S.WAITING_FOR_NODES, S.ABORTED))
            for state in (S.CONVERGING, S.POOL_READY)
        ),
        Row(S.WAITING_FOR_NODES, TimerFired, "_deadline", (S.ABORTED,)),
        Row(S.CONVERGING, TimerFired, "_timer", (S.POOL_READY, S.ABORTED)),
        Row(S.POOL_READY, PlanCommitted, "_committed", (S.COMMITTED,)),
        Row(S.WAITING_FOR_NODES, PlanCommitted, "_committed_lost", (S.COMMITTED,)),
        Row(S.CONVERGING, PlanCommitted, "_committed_lost", (S.COMMITTED,)),
        Row(S.COMMITTED, MemberChanged, "_member_committed", (S.COMMITTED,)),
        Row(S.COMMITTED, NodeLost, "_tell_run", (S.COMMITTED,)),
        Row(S.COMMITTED, NodeFaulted, "_tell_run", (S.COMMITTED,)),
        *(Row(S.COMMITTED, late, None, (S.COMMITTED,)) for late in (NodeAvailable, WatchRefused)),
        *(Row(state, Shutdown, "_close", (S.CLOSED,)) for state in (*_GATE, S.COMMITTED, S.ABORTED)),
        *(
            Row(state, late, None, (state,))
            for state in (S.ABORTED, S.CLOSED)
            for late in (MemberChanged, NodeAvailable, NodeFaulted, NodeLost, PlanCommitted, WatchRefused)
        ),
        Row(S.CLOSED, Shutdown, None, (S.CLOSED,)),
    )

    def __init__(
        self,
        candidates: Iterable[NodeId],
        *,
        convergence_window: float,
        deadline: float,
        wait_for_lost: bool,
        names: Mapping[NodeId, str] | None = None,
    ) -> None:
        """`wait_for_lost`: before a plan is committed, wait for a node that was lost; otherwise abort.
        `names` are for people, of candidates that membership may never show."""
        super().__init__()
        self.candidates = tuple(candidates)
        self._window = convergence_window
        self._deadline_after = deadline
        self._wait_for_lost = wait_for_lost
        self._names = dict(names or {})
        self._members: dict[NodeId, Member] = {}
        self._nodes: dict[NodeId, NodeAvailable] = {}
        self._refusals: dict[NodeId, str] = {}

    def _begin(self, event: BeginPool, now: float) -> Outcome[PoolState]:
        return S.WAITING_FOR_NODES, (self.set_timer("deadline", now + self._deadline_after), self._report())

    def _why_not(self, node_id: NodeId) -> str:
        member = self._members.get(node_id)
        if member is None:
            return "not in membership"
        if member.state is not MemberState.ALIVE:
            return f"{member.state} in membership"
        node = self._nodes.get(node_id)
        if node is None or node.epoch != member.epoch:
            return self._refusals.get(node_id) or "not available yet"
        return ""

    def _waiting(self) -> tuple[str, ...]:
        reasons = ((node_id, self._why_not(node_id)) for node_id in self.candidates)
        return tuple(f"{self._name(node_id)}: {why}" for node_id, why in reasons if why)

    def _name(self, node_id: NodeId) -> str:
        member = self._members.get(node_id)
        return member.name if member is not None else self._names.get(node_id, node_hex(node_id))

    def _report(self) -> ReportPool:
        waiting = self._waiting()
        return ReportPool(len(self.candidates) - len(waiting), len(self.candidates), waiting)

    def _judge(self, now: float, *, changed: bool) -> Outcome[PoolState]:
        if self._waiting():
            lost = (Emit(EventName.POOL_LOST, {"waiting": list(self._waiting())}),)
            return S.WAITING_FOR_NODES, (
                *self.cancel_timer("window"),
                *(lost if self.state is S.POOL_READY else ()),
                self._report(),
            )
        if self.state is S.WAITING_FOR_NODES or (self.state is S.CONVERGING and changed):
            return S.CONVERGING, (self.set_timer("window", now + self._window), self._report())
        return self.state, ()

    def _member(self, event: MemberChanged, now: float) -> Outcome[PoolState]:
        node_id = event.member.node_id
        if node_id not in self.candidates:
            return self.state, ()
        before = self._members.get(node_id)
        self._members[node_id] = event.member
        changed = before is None or (before.state, before.epoch) != (event.member.state, event.member.epoch)
        return self._judge(now, changed=changed)

    def _available(self, event: NodeAvailable, now: float) -> Outcome[PoolState]:
        if event.node_id not in self.candidates:
            return self.state, ()
        changed = self._nodes.get(event.node_id) != event
        self._nodes[event.node_id] = event
        self._refusals.pop(event.node_id, None)
        return self._judge(now, changed=changed)

    def _node_faulted(self, event: NodeFaulted, now: float) -> Outcome[PoolState]:
        if event.node_id not in self.candidates:
            return self.state, ()
        return self._abort(event.fault)

    def _refused(self, event: WatchRefused, now: float) -> Outcome[PoolState]:
        node_id = event.node_id
        if node_id not in self.candidates:
            return self.state, ()
        if event.final:
            detail = f"{self._name(node_id)}: {event.detail}"
            return self._abort(
                Fault(FaultReason.PROVISIONING_REJECTED, Component.NODE, detail, node_id=node_id)
            )
        self._nodes.pop(node_id, None)
        self._refusals[node_id] = event.detail
        return self._judge(now, changed=True)

    def _lost_early(self, event: NodeLost, now: float) -> Outcome[PoolState]:
        if event.node_id not in self.candidates:
            return self.state, ()
        if not self._wait_for_lost:
            return self._abort(self._lost_fault(event))
        self._nodes.pop(event.node_id, None)  # it must say NodeAvailable again
        self._refusals[event.node_id] = event.detail
        return self._judge(now, changed=True)

    def _timer(self, event: TimerFired, now: float) -> Outcome[PoolState]:
        if event.name == "deadline":
            return self._deadline(event, now)
        ready = PoolReady(tuple(self._nodes[node_id] for node_id in self.candidates))
        fields = {"nodes": [node_hex(n) for n in self.candidates]}
        return S.POOL_READY, (
            *self.cancel_timer("deadline"),
            Emit(EventName.POOL_READY, fields),
            Send(RUN, ready),
        )

    def _deadline(self, event: TimerFired, now: float) -> Outcome[PoolState]:
        waiting = "; ".join(self._waiting()) or "the pool to stay stable"
        detail = f"pool not ready within {self._deadline_after:g} s; waiting for {waiting}"
        return self._abort(Fault(FaultReason.POOL_TIMEOUT, Component.POOL, detail))

    def _abort(self, fault: Fault) -> Outcome[PoolState]:
        timers = (*self.cancel_timer("window"), *self.cancel_timer("deadline"))
        return S.ABORTED, (*timers, Send(RUN, PoolAborted(fault)))

    def _lost_fault(self, event: NodeLost) -> Fault:
        """Of a member that is gone the links end as well: that is no cause, whichever word comes first."""
        member = self._members.get(event.node_id)
        reason = FaultReason.MEMBERSHIP_LOST if event.by_membership else FaultReason.NODE_UNAVAILABLE
        component = Component.MEMBERSHIP if event.by_membership else Component.POOL
        detail = event.detail
        if member is not None and member.state in (MemberState.DEAD, MemberState.LEFT):
            reason, component = FaultReason.MEMBERSHIP_LOST, Component.MEMBERSHIP
            detail = f"{member.name} is {member.state} in membership"
        return Fault(reason, component, detail, node_id=event.node_id)

    def _committed(self, event: PlanCommitted, now: float) -> Outcome[PoolState]:
        return S.COMMITTED, ()

    def _committed_lost(self, event: PlanCommitted, now: float) -> Outcome[PoolState]:
        timers = (*self.cancel_timer("window"), *self.cancel_timer("deadline"))
        fault = Fault(
            FaultReason.MEMBERSHIP_LOST, Component.POOL, "; ".join(self._waiting()) or "pool was converging"
        )
        return S.COMMITTED, (*timers, Send(RUN, PoolAborted(fault)))

    def _member_committed(self, event: MemberChanged, now: float) -> Outcome[PoolState]:
        member = event.member
        if member.node_id not in self.candidates:
            return S.COMMITTED, ()
        node = self._nodes.get(member.node_id)
        restarted = node is not None and node.epoch != member.epoch
        if member.state in (MemberState.ALIVE, MemberState.SUSPECT) and not restarted:
            return S.COMMITTED, ()
        what = "has restarted" if restarted else f"is {member.state} in membership"
        lost = NodeLost(member.node_id, by_membership=True, detail=f"{member.name} {what}")
        return S.COMMITTED, (Send(RUN, lost),)

    def _tell_run(self, event: NodeLost | NodeFaulted, now: float) -> Outcome[PoolState]:
        actions: tuple[Action, ...] = (Send(RUN, event),) if event.node_id in self.candidates else ()
        return S.COMMITTED, actions

    def _close(self, event: Shutdown, now: float) -> Outcome[PoolState]:
        return S.CLOSED, (*self.cancel_timer("window"), *self.cancel_timer("deadline"))
