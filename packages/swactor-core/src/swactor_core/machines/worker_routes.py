"""To whom each event of the worker goes (spec section 28): graph-facing events to the edges and the stage.

Pure. Knows the hearers, not the worker: what concerns the worker's own life (ready, fatal, stopped) has no
hearer here, GpuWorkerCtl judges it.
"""

from __future__ import annotations

from typing import Any

from swactor_core.faults import Component
from swactor_core.messages import (
    Address,
    DeviceObjectReleased,
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
    ReleaseFailed,
    RingFault,
    RingInstalled,
    RingQuiesced,
    RingReadable,
    RingWritable,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    RoleReset,
    StepCompleted,
    StepFailed,
)

STAGE = Address(Component.STAGE_CONTROLLER)
ESTABLISHER = Address(Component.EDGE_ESTABLISHER)
DRIVER = Address(Component.DRIVER)
OF_RINGS = (
    RingReadable,
    RingWritable,
    RingInstalled,
    RingFault,
    RingQuiesced,
    ObjectLoaded,
    ObjectFailed,
    ObjectProduced,
)
_HEARERS: dict[type[Any], Address] = {
    RingReadable: DRIVER,
    RingWritable: DRIVER,
    RingInstalled: ESTABLISHER,
    RingFault: ESTABLISHER,
    RingQuiesced: ESTABLISHER,
    RoleProgress: STAGE,
    RoleConfigured: STAGE,
    RoleFailed: STAGE,
    RoleReset: STAGE,
    StepCompleted: STAGE,
    StepFailed: STAGE,
    DeviceObjectReleased: STAGE,
    ReleaseFailed: STAGE,
}


_OF_EDGES: dict[type[Any], Component] = {
    ObjectLoaded: Component.RX_EDGE,
    ObjectFailed: Component.RX_EDGE,
    ObjectProduced: Component.TX_EDGE,
}


def hearer(event: Any) -> Address | None:
    """The one component that `event` is for; None for what is not routed."""
    kind = type(event)
    gate = _OF_EDGES.get(kind)
    return _HEARERS.get(kind) if gate is None else Address(gate, event.edge_id)
