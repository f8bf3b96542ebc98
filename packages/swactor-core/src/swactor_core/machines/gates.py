"""Tx and Rx edge actors (spec section 27): the role's view of an edge's life, in coarse events only.

A gate passes what concerns the role on to its owner (StageController or token endpoint) and tells the
EdgeEstablisher to stop. It never sees bytes, pointers, ranges or credits.
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.faults import OBJECT_FAULTS, Component, Fault, FaultReason
from swactor_core.fsm import Machine, Outcome, Row, Send
from swactor_core.ids import EdgeId
from swactor_core.messages import (
    Address,
    EdgeFailed,
    EdgeReady,
    EdgeStopped,
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
    StopEdge,
)
from swactor_core.values import value


class TxState(StrEnum):
    PROVISIONING = "Provisioning"
    READY = "Ready"
    PRODUCING = "Producing"
    FAULTED = "Faulted"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


class RxState(StrEnum):
    PROVISIONING = "Provisioning"
    READY = "Ready"
    LOADING_OBJECT = "LoadingObject"
    OBJECT_READY = "ObjectReady"
    FAULTED = "Faulted"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


@value
class ProduceObject:
    """Owner: a step that writes to this edge has been issued."""

    edge_id: EdgeId


@value
class ObjectConsumed:
    """Owner: the loaded object is done with; the next one may load."""

    edge_id: EdgeId


class _Gate:
    """What both gates do alike: pass on, stop, fail."""

    edge_id: EdgeId
    _owner: Address

    def _send_owner(self, event: object) -> Send:
        return Send(self._owner, event)

    def _send_stop(self) -> Send:
        return Send(Address(Component.EDGE_ESTABLISHER), StopEdge(self.edge_id))

    def _object_fault(self, event: ObjectFailed, component: Component) -> EdgeFailed:
        fault = Fault(
            OBJECT_FAULTS[event.reason],
            component,
            event.detail,
            str(event.reason),
            edge_id=self.edge_id,
            ring_id=event.ring_id,
        )
        return EdgeFailed(self.edge_id, fault)


T = TxState


class TxEdge(_Gate, Machine[TxState]):
    NAME = "TxEdge"
    INITIAL = T.PROVISIONING
    TABLE = (
        Row(T.PROVISIONING, EdgeReady, "_ready", (T.READY,)),
        Row(T.READY, ProduceObject, None, (T.PRODUCING,)),
        Row(T.PRODUCING, ObjectProduced, "_produced", (T.READY,)),
        *(Row(state, ObjectProduced, "_unasked", (T.FAULTED,)) for state in (T.PROVISIONING, T.READY)),
        *(Row(state, EdgeFailed, "_fail", (T.FAULTED,)) for state in (T.PROVISIONING, T.READY, T.PRODUCING)),
        *(
            Row(state, StopEdge, "_stop", (T.STOPPING,))
            for state in (T.PROVISIONING, T.READY, T.PRODUCING, T.FAULTED)
        ),
        # Without a StopEdge from here it was the establisher's own end: the owner judges that.
        *(
            Row(state, EdgeStopped, "_stopped", (T.STOPPED,))
            for state in (T.PROVISIONING, T.READY, T.PRODUCING, T.STOPPING, T.FAULTED)
        ),
        *(
            Row(state, late, None, (state,))
            for state in (T.FAULTED, T.STOPPING)
            for late in (EdgeReady, EdgeFailed, ProduceObject)
        ),
        Row(T.FAULTED, ObjectProduced, None, (T.FAULTED,)),
        Row(T.STOPPING, ObjectProduced, "_produced_late", (T.STOPPING,)),
        Row(T.STOPPING, StopEdge, None, (T.STOPPING,)),
        Row(T.STOPPED, EdgeStopped, "_stopped", (T.STOPPED,)),  # proved after its time
        *(
            Row(T.STOPPED, late, None, (T.STOPPED,))
            for late in (EdgeReady, EdgeFailed, ObjectProduced, ProduceObject, StopEdge)
        ),
    )

    def __init__(self, edge_id: EdgeId, owner: Address) -> None:
        super().__init__()
        self.edge_id = edge_id
        self._owner = owner

    def _ready(self, event: EdgeReady, now: float) -> Outcome[TxState]:
        return T.READY, (self._send_owner(event),)

    def _produced(self, event: ObjectProduced, now: float) -> Outcome[TxState]:
        return T.READY, (self._send_owner(event),)

    def _produced_late(self, event: ObjectProduced, now: float) -> Outcome[TxState]:
        """Bytes leave the ring before their worker says that the object is whole."""
        return T.STOPPING, (self._send_owner(event),)

    def _unasked(self, event: ObjectProduced, now: float) -> Outcome[TxState]:
        """A worker that writes what no step of this edge's owner asked for (spec section 39, sequence)."""
        detail = f"object of sequence {event.sequence} was produced while {self.state}, no step asked for it"
        reason = FaultReason.SEQUENCE_VIOLATION
        fault = Fault(reason, Component.TX_EDGE, detail, edge_id=self.edge_id, ring_id=event.ring_id)
        return T.FAULTED, (self._send_owner(EdgeFailed(self.edge_id, fault)),)

    def _fail(self, event: EdgeFailed, now: float) -> Outcome[TxState]:
        return T.FAULTED, (self._send_owner(event),)

    def _stop(self, event: StopEdge, now: float) -> Outcome[TxState]:
        return T.STOPPING, (self._send_stop(),)

    def _stopped(self, event: EdgeStopped, now: float) -> Outcome[TxState]:
        return T.STOPPED, (self._send_owner(event),)


R = RxState
_RX_LIVE = (R.READY, R.LOADING_OBJECT, R.OBJECT_READY)


class RxEdge(_Gate, Machine[RxState]):
    NAME = "RxEdge"
    INITIAL = R.PROVISIONING
    TABLE = (
        Row(R.PROVISIONING, EdgeReady, "_ready", (R.READY, R.OBJECT_READY)),
        # The upstream's first bytes can arrive, and load, before this side has heard of its own readiness.
        Row(R.PROVISIONING, ObjectLoaded, "_loaded_early", (R.PROVISIONING,)),
        Row(R.READY, ObjectLoaded, "_loaded", (R.OBJECT_READY,)),
        Row(R.LOADING_OBJECT, ObjectLoaded, "_loaded", (R.OBJECT_READY,)),
        # A second object before the first is consumed: the owner judges the sequence.
        Row(R.OBJECT_READY, ObjectLoaded, "_loaded", (R.OBJECT_READY,)),
        Row(R.OBJECT_READY, ObjectConsumed, "_consumed", (R.LOADING_OBJECT, R.OBJECT_READY)),
        *(Row(state, ObjectFailed, "_object_failed", (R.FAULTED,)) for state in (R.PROVISIONING, *_RX_LIVE)),
        *(Row(state, EdgeFailed, "_fail", (R.FAULTED,)) for state in (R.PROVISIONING, *_RX_LIVE)),
        *(Row(state, StopEdge, "_stop", (R.STOPPING,)) for state in (R.PROVISIONING, *_RX_LIVE, R.FAULTED)),
        *(
            Row(state, EdgeStopped, "_stopped", (R.STOPPED,))
            for state in (R.PROVISIONING, *_RX_LIVE, R.STOPPING, R.FAULTED)
        ),
        *(
            Row(state, late, None, (state,))
            for state in (R.FAULTED, R.STOPPING)
            for late in (EdgeReady, EdgeFailed, ObjectLoaded, ObjectFailed, ObjectConsumed)
        ),
        Row(R.STOPPING, StopEdge, None, (R.STOPPING,)),
        Row(R.STOPPED, EdgeStopped, "_stopped", (R.STOPPED,)),  # proved after its time
        *(
            Row(R.STOPPED, late, None, (R.STOPPED,))
            for late in (
                EdgeReady,
                EdgeFailed,
                ObjectLoaded,
                ObjectFailed,
                ObjectConsumed,
                StopEdge,
            )
        ),
    )

    def __init__(self, edge_id: EdgeId, owner: Address) -> None:
        super().__init__()
        self.edge_id = edge_id
        self._owner = owner
        self._early: tuple[ObjectLoaded, ...] = ()
        self._unconsumed = 0

    def _ready(self, event: EdgeReady, now: float) -> Outcome[RxState]:
        early, self._early = self._early, ()
        self._unconsumed = len(early)
        target = R.OBJECT_READY if early else R.READY
        return target, (self._send_owner(event), *(self._send_owner(loaded) for loaded in early))

    def _loaded_early(self, event: ObjectLoaded, now: float) -> Outcome[RxState]:
        self._early += (event,)
        return R.PROVISIONING, ()

    def _loaded(self, event: ObjectLoaded, now: float) -> Outcome[RxState]:
        self._unconsumed += 1
        return R.OBJECT_READY, (self._send_owner(event),)

    def _consumed(self, event: ObjectConsumed, now: float) -> Outcome[RxState]:
        self._unconsumed -= 1
        return (R.OBJECT_READY if self._unconsumed else R.LOADING_OBJECT), ()

    def _object_failed(self, event: ObjectFailed, now: float) -> Outcome[RxState]:
        return R.FAULTED, (self._send_owner(self._object_fault(event, Component.WORKER)),)

    def _fail(self, event: EdgeFailed, now: float) -> Outcome[RxState]:
        return R.FAULTED, (self._send_owner(event),)

    def _stop(self, event: StopEdge, now: float) -> Outcome[RxState]:
        return R.STOPPING, (self._send_stop(),)

    def _stopped(self, event: EdgeStopped, now: float) -> Outcome[RxState]:
        return R.STOPPED, (self._send_owner(event),)
