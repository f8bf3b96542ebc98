"""Worker process to node (spec section 30), and what the node's own parts say of the process."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any

from swactor_core.faults import (
    ObjectFailure,
    ReleaseFailure,
    RingFaultReason,
    RoleFailure,
    StepFailure,
    WorkerFatalReason,
    WorkerStoppedReason,
)
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
from swactor_core.messages.worker_commands import RingReadable, RingWritable
from swactor_core.values import frozen, value


@frozen
class WorkerReady:
    pid: int
    worker_generation: WorkerGeneration
    ring_helper_abi: int
    backend: dict[str, Any]


@frozen
class WorkerFatal:
    reason: WorkerFatalReason
    detail: str = ""


@frozen
class WorkerStopped:
    reason: WorkerStoppedReason


class LoadPhase(StrEnum):
    """What a stage is prepared by, in this order; a phase that has nothing to do is left out. The first is
    its node's, counted in bytes, the others its worker's."""

    DOWNLOAD = "download"
    WEIGHTS = "weights"
    """Bytes bound."""
    SEARCH = "search"
    """Kernels timed."""
    COMPILE = "compile"
    """Kernels warmed up."""
    READY = "ready"


@frozen
class RoleProgress:
    role_id: RoleId
    phase: LoadPhase
    done: int
    total: int


@frozen
class RoleConfigured:
    """`facts` say how the role computes, as in `StageRole.facts`."""

    role_id: RoleId
    facts: dict[str, str] = field(default_factory=dict)


@frozen
class RoleFailed:
    role_id: RoleId
    reason: RoleFailure
    detail: str = ""


@frozen
class RoleReset:
    role_id: RoleId


@frozen
class RingInstalled:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId


@frozen
class RingFault:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    reason: RingFaultReason
    detail: str = ""


@frozen
class RingQuiesced:
    """`process_reaped` is set when GpuWorkerCtl says it for a worker that is gone."""

    ring_id: RingId
    process_reaped: bool = False


@value
class ObjectLoaded:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    object_id: ObjectId
    sequence: Sequence
    extent: int
    device_handle: DeviceObjectHandle


@value
class ObjectProduced:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    object_id: ObjectId
    sequence: Sequence
    extent: int


@frozen
class ObjectFailed:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    object_id: ObjectId | None
    sequence: Sequence | None
    reason: ObjectFailure
    detail: str = ""


@value
class StepCompleted:
    """`compute_seconds` is the role code's own time, without waiting for ring space."""

    role_id: RoleId
    step_id: StepId
    compute_seconds: float = 0.0


@frozen
class StepFailed:
    role_id: RoleId
    step_id: StepId
    reason: StepFailure
    detail: str = ""


@frozen
class DeviceObjectReleased:
    device_handle: DeviceObjectHandle


@frozen
class ReleaseFailed:
    device_handle: DeviceObjectHandle
    reason: ReleaseFailure


@frozen
class WorkerCrashed:
    """Synthesised by GpuWorkerCtl after process exit, process error or a broken control stream, and after a
    WorkerFatal, whose reason is `fatal`. `cause` as in a Fault, where the process adapter knows one."""

    worker_generation: WorkerGeneration
    detail: str
    fatal: WorkerFatalReason | None = None
    cause: str = ""


@frozen
class WorkerRunning:
    """GpuWorkerCtl to the node: the worker of this generation is ready."""

    worker_generation: WorkerGeneration
    backend: dict[str, Any]


@frozen
class WorkerGone:
    """GpuWorkerCtl to the node: no worker process is left (stopped in order, or failed). `fatal` is what it
    said itself while it started."""

    reason: str
    fatal: WorkerFatalReason | None = None


class ProcessNotificationKind(StrEnum):
    STARTED = "Started"
    EXITED = "Exited"
    ERROR = "Error"


@frozen
class ProcessNotification:
    """From the process adapter, for the process of `generation` only. `detail` is exit status or error and
    the end of stderr, `cause` as in a Fault, where one is known."""

    worker_generation: WorkerGeneration
    kind: ProcessNotificationKind
    pid: int = 0
    detail: str = ""
    cause: str = ""


WORKER_EVENTS = (
    WorkerReady,
    WorkerFatal,
    WorkerStopped,
    RoleProgress,
    RoleConfigured,
    RoleFailed,
    RoleReset,
    RingInstalled,
    RingFault,
    RingQuiesced,
    RingReadable,
    RingWritable,
    ObjectLoaded,
    ObjectProduced,
    ObjectFailed,
    StepCompleted,
    StepFailed,
    DeviceObjectReleased,
    ReleaseFailed,
)
