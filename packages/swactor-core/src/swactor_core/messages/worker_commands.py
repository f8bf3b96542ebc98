"""Node to worker process (spec sections 28 and 29)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from swactor_core.faults import UninstallReason
from swactor_core.ids import (
    DeviceObjectHandle,
    EdgeId,
    ObjectId,
    PortId,
    RingId,
    RoleId,
    Sequence,
    StepId,
    WorkerGeneration,
)
from swactor_core.specs import ObjectSpec, RingDirection, RingLayout
from swactor_core.values import frozen, value


@frozen
class StartWorker:
    pass


@frozen
class InitializeWorker:
    worker_generation: WorkerGeneration
    arena_ceiling: int
    required_ring_helper_abi: int
    backend: dict[str, Any]


@frozen
class ConfigureRole:
    role_id: RoleId
    config: dict[str, Any]


@frozen
class InstallRing:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    direction: RingDirection
    layout: RingLayout
    object_spec: ObjectSpec


@frozen
class UninstallRing:
    ring_id: RingId
    reason: UninstallReason


@value
class RingReadable:
    ring_id: RingId


@value
class RingWritable:
    ring_id: RingId


@value
class InputBinding:
    port_id: PortId
    object_id: ObjectId
    sequence: Sequence
    device_handle: DeviceObjectHandle


@value
class OutputBinding:
    port_id: PortId
    ring_id: RingId
    object_id: ObjectId
    sequence: Sequence
    extent: int
    flags: int = 0


@value
class StepRuntime:
    """`position` of the input's first row in the context (0 for prefill)."""

    position: int


@value
class ExecuteStep:
    role_id: RoleId
    step_id: StepId
    inputs: tuple[InputBinding, ...]
    outputs: tuple[OutputBinding, ...]
    runtime: StepRuntime
    release_inputs_after: bool


@frozen
class ReleaseDeviceObject:
    device_handle: DeviceObjectHandle


@frozen
class ResetRole:
    """Drops the role's weights and state after a run (spec section 38: "according to local policy")."""

    role_id: RoleId


class ShutdownMode(StrEnum):
    GRACEFUL = "Graceful"
    ABORT_IN_FLIGHT = "AbortInFlight"


@frozen
class ShutdownWorker:
    mode: ShutdownMode


WORKER_COMMANDS = (
    InitializeWorker,
    ConfigureRole,
    InstallRing,
    UninstallRing,
    RingReadable,
    RingWritable,
    ExecuteStep,
    ReleaseDeviceObject,
    ResetRole,
    ShutdownWorker,
)
