"""The fault of an actor whose handling of a message raised: a defect, unless the machine has run out of
something, which no code can help. Knows faults and errors."""

from __future__ import annotations

from swactor_core.errors import remedy_of_lack
from swactor_core.faults import Component, Fault, FaultReason, InternalCause
from swactor_core.ids import NodeId


def fault_of(component: Component, error: Exception, *, node_id: NodeId | None = None) -> Fault:
    """Says what was raised; with the remedy in its detail where the machine lacks something."""
    detail = f"{component}: {type(error).__name__}: {error}"
    remedy = remedy_of_lack(error)
    if not remedy:
        return Fault(FaultReason.INTERNAL, component, detail, node_id=node_id)
    cause = str(InternalCause.MACHINE_LACKS)
    return Fault(FaultReason.INTERNAL, component, f"{detail} ({remedy})", cause, node_id=node_id)
