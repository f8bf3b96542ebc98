"""Every message that crosses an actor, process or node border, with the spec's names.

Data only: frozen dataclasses, no payload bytes, no pointers. Grouped by the border they cross. Results of
effects (an arena was mapped, a process exited) are messages too: machines learn of the world only here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from swactor_core.faults import (
    Component,
    Fault,
    LeaseRejection,
    ObjectFailure,
    ReleaseFailure,
    RingFaultReason,
    RoleFailure,
    StepFailure,
    StreamFaultReason,
    UninstallReason,
    WorkerFatalReason,
    WorkerStoppedReason,
)
from swactor_core.ids import (
    DeviceObjectHandle,
    EdgeId,
    LeaseRequestId,
    NodeId,
    ObjectId,
    PortId,
    RingId,
    RoleId,
    RunId,
    Sequence,
    StageIndex,
    StepId,
    WorkerGeneration,
)
from swactor_core.plan import EdgeKind, GgufSource, SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectSpec, RingDirection, RingLayout, RingSpec


@dataclass(frozen=True, slots=True)
class Address:
    """Whom a message is for: a component of this process, or (NODE, node_id) for a remote node's control.
    `key` is the edge id, node id or the like where a component has many actors."""

    component: Component
    key: int = 0


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A named timer; one of an older generation is dropped and counted."""

    name: str
    generation: int


# --- orchestrator and nodes (spec sections 8, 12 to 14, 38) ---


@dataclass(frozen=True, slots=True)
class InboundEdgeProvision:
    """`producer_node_id` lets the node refuse a stream from any other peer (spec section 4)."""

    edge_id: EdgeId
    kind: EdgeKind
    producer_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@dataclass(frozen=True, slots=True)
class OutboundEdgeProvision:
    edge_id: EdgeId
    kind: EdgeKind
    consumer_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@dataclass(frozen=True, slots=True)
class StageModelFacts:
    model_id: str
    num_layers: int
    hidden_dim: int
    dtype_family: DTypeFamily
    dtype_width_bytes: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class StageRuntimeFacts:
    role_id: RoleId
    input_port: PortId
    output_port: PortId
    sampling: SamplingPolicy | None
    token_output_policy: TokenOutputPolicy
    prefill_chunk: int


@dataclass(frozen=True, slots=True)
class ProvisionStage:
    run_id: RunId
    stage_index: StageIndex
    stage_count: int
    gguf_source: GgufSource
    layer_start: int
    layer_end_exclusive: int
    inbound: InboundEdgeProvision
    outbound: OutboundEdgeProvision
    model: StageModelFacts
    runtime: StageRuntimeFacts


@dataclass(frozen=True, slots=True)
class NodeAvailable:
    """The node can accept run provisioning (spec section 8)."""

    node_id: NodeId
    epoch: int
    name: str
    memory_bytes: int | None
    worker: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeFaulted:
    node_id: NodeId
    fault: Fault


@dataclass(frozen=True, slots=True)
class StageReady:
    run_id: RunId
    stage_index: StageIndex


@dataclass(frozen=True, slots=True)
class StageFault:
    run_id: RunId
    stage_index: StageIndex
    fault: Fault


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a stage's preparation is: `phase` is a word for people, counts are bytes or steps."""

    run_id: RunId
    stage_index: StageIndex
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StopRun:
    run_id: RunId


@dataclass(frozen=True, slots=True)
class StageStats:
    """Seconds of worker compute, split by prefill (sequence 0) and decode, over `steps` steps."""

    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StageStopped:
    """`unproven` names what teardown could not prove quiescent; empty when every range was released."""

    run_id: RunId
    stage_index: StageIndex
    stats: StageStats = StageStats()
    unproven: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Watch:
    """An authorised orchestrator asks a node for its reports; `objects` asks for per-object events too."""

    objects: bool


@dataclass(frozen=True, slots=True)
class EventReport:
    """Lifecycle events of a node, in its order; `dropped` counts those lost before these."""

    events: tuple[dict[str, Any], ...]
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class ShutdownNode:
    """From the orchestrator that started this node: stop the worker and exit."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """Evidence that a node is gone: a dead process, a broken link, or membership's verdict."""

    node_id: NodeId
    by_membership: bool
    detail: str


@dataclass(frozen=True, slots=True)
class OperatorStop:
    """The operator asks for the run's orderly end."""


@dataclass(frozen=True, slots=True)
class InjectTokens:
    """Run to token endpoint: write these ids as the token-in object of `sequence`."""

    sequence: Sequence
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenReceived:
    """Token endpoint to run: the token-out object of `sequence` said this id."""

    sequence: Sequence
    token_id: int


@dataclass(frozen=True, slots=True)
class EndpointsReady:
    """Both local token edges are ready."""


@dataclass(frozen=True, slots=True)
class EndpointsFailed:
    fault: Fault


@dataclass(frozen=True, slots=True)
class StopEndpoints:
    pass


@dataclass(frozen=True, slots=True)
class EndpointsStopped:
    unproven: tuple[str, ...] = ()


# --- arena (spec section 19) ---


@dataclass(frozen=True, slots=True)
class ConstructArena:
    ceiling: int


@dataclass(frozen=True, slots=True)
class ArenaConstructed:
    pass


@dataclass(frozen=True, slots=True)
class ArenaConstructionFailed:
    detail: str


@dataclass(frozen=True, slots=True)
class LeaseRing:
    request_id: LeaseRequestId
    requester: Address
    edge_id: EdgeId
    direction: RingDirection
    ring_spec: RingSpec


@dataclass(frozen=True, slots=True)
class CancelLease:
    request_id: LeaseRequestId


@dataclass(frozen=True, slots=True)
class RingLeased:
    request_id: LeaseRequestId
    edge_id: EdgeId
    layout: RingLayout


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class QuiescenceProof:
    """Without one, no arena range is reused (spec sections 38 and 39)."""

    pump: PumpProof
    ring: RingProof


@dataclass(frozen=True, slots=True)
class ReleaseRing:
    ring_id: RingId
    proof: QuiescenceProof


@dataclass(frozen=True, slots=True)
class RingReleased:
    ring_id: RingId


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Ordered end of a component."""


# --- edges (spec sections 24, 26, 27) ---


@dataclass(frozen=True, slots=True)
class ProvisionTx:
    edge_id: EdgeId
    port_id: PortId
    rx_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@dataclass(frozen=True, slots=True)
class ProvisionRx:
    edge_id: EdgeId
    port_id: PortId
    tx_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@dataclass(frozen=True, slots=True)
class EstablishSend:
    edge_id: EdgeId
    rx_node_id: NodeId
    ring_id: RingId
    ring_layout: RingLayout
    tx_addr: Address


@dataclass(frozen=True, slots=True)
class EstablishRecv:
    edge_id: EdgeId
    tx_node_id: NodeId
    ring_id: RingId
    ring_layout: RingLayout
    rx_addr: Address


@dataclass(frozen=True, slots=True)
class StreamArrived:
    """`stream` is the driver's number for the transport stream, which never leaves the driver."""

    edge_id: EdgeId
    peer: NodeId
    stream: int


@dataclass(frozen=True, slots=True)
class StopEdge:
    edge_id: EdgeId


@dataclass(frozen=True, slots=True)
class DriverEdgeReady:
    edge_id: EdgeId


@dataclass(frozen=True, slots=True)
class StreamClosed:
    edge_id: EdgeId


@dataclass(frozen=True, slots=True)
class StreamFault:
    edge_id: EdgeId
    reason: StreamFaultReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PumpStopped:
    edge_id: EdgeId
    ring_id: RingId


@dataclass(frozen=True, slots=True)
class EdgeReady:
    edge_id: EdgeId
    ring_id: RingId


@dataclass(frozen=True, slots=True)
class EdgeStopped:
    """`unproven` is set when the range could not be released with a proof."""

    edge_id: EdgeId
    unproven: str = ""


@dataclass(frozen=True, slots=True)
class EdgeFailed:
    edge_id: EdgeId
    fault: Fault


# --- worker commands (spec sections 28 and 29) ---


@dataclass(frozen=True, slots=True)
class StartWorker:
    pass


@dataclass(frozen=True, slots=True)
class InitializeWorker:
    worker_generation: WorkerGeneration
    arena_ceiling: int
    required_ring_helper_abi: int
    backend: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigureRole:
    role_id: RoleId
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InstallRing:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    direction: RingDirection
    layout: RingLayout
    object_spec: ObjectSpec


@dataclass(frozen=True, slots=True)
class UninstallRing:
    ring_id: RingId
    reason: UninstallReason


@dataclass(frozen=True, slots=True)
class RingReadable:
    ring_id: RingId


@dataclass(frozen=True, slots=True)
class RingWritable:
    ring_id: RingId


@dataclass(frozen=True, slots=True)
class InputBinding:
    port_id: PortId
    object_id: ObjectId
    sequence: Sequence
    device_handle: DeviceObjectHandle


@dataclass(frozen=True, slots=True)
class OutputBinding:
    port_id: PortId
    ring_id: RingId
    object_id: ObjectId
    sequence: Sequence
    extent: int
    flags: int = 0


@dataclass(frozen=True, slots=True)
class StepRuntime:
    """`position` of the input's first row in the context (0 for prefill)."""

    position: int


@dataclass(frozen=True, slots=True)
class ExecuteStep:
    role_id: RoleId
    step_id: StepId
    inputs: tuple[InputBinding, ...]
    outputs: tuple[OutputBinding, ...]
    runtime: StepRuntime
    release_inputs_after: bool


@dataclass(frozen=True, slots=True)
class ReleaseDeviceObject:
    device_handle: DeviceObjectHandle


@dataclass(frozen=True, slots=True)
class ResetRole:
    """Drops the role's weights and state after a run (spec section 38: "according to local policy")."""

    role_id: RoleId


class ShutdownMode(StrEnum):
    GRACEFUL = "Graceful"
    ABORT_IN_FLIGHT = "AbortInFlight"


@dataclass(frozen=True, slots=True)
class ShutdownWorker:
    mode: ShutdownMode


# --- worker events (spec section 30) ---


@dataclass(frozen=True, slots=True)
class WorkerReady:
    pid: int
    worker_generation: WorkerGeneration
    ring_helper_abi: int
    backend: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerFatal:
    reason: WorkerFatalReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WorkerStopped:
    reason: WorkerStoppedReason


@dataclass(frozen=True, slots=True)
class RoleProgress:
    role_id: RoleId
    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class RoleConfigured:
    role_id: RoleId


@dataclass(frozen=True, slots=True)
class RoleFailed:
    role_id: RoleId
    reason: RoleFailure
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RoleReset:
    role_id: RoleId


@dataclass(frozen=True, slots=True)
class RingInstalled:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId


@dataclass(frozen=True, slots=True)
class RingFault:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    reason: RingFaultReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RingQuiesced:
    """`process_reaped` is set when GpuWorkerCtl says it for a worker that is gone."""

    ring_id: RingId
    process_reaped: bool = False


@dataclass(frozen=True, slots=True)
class ObjectLoaded:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    object_id: ObjectId
    sequence: Sequence
    extent: int
    device_handle: DeviceObjectHandle


@dataclass(frozen=True, slots=True)
class ObjectProduced:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    object_id: ObjectId
    sequence: Sequence
    extent: int


@dataclass(frozen=True, slots=True)
class ObjectFailed:
    ring_id: RingId
    edge_id: EdgeId
    port_id: PortId
    object_id: ObjectId | None
    sequence: Sequence | None
    reason: ObjectFailure
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """`compute_seconds` is the role code's own time, without waiting for ring space."""

    role_id: RoleId
    step_id: StepId
    compute_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepFailed:
    role_id: RoleId
    step_id: StepId
    reason: StepFailure
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DeviceObjectReleased:
    device_handle: DeviceObjectHandle


@dataclass(frozen=True, slots=True)
class ReleaseFailed:
    device_handle: DeviceObjectHandle
    reason: ReleaseFailure


@dataclass(frozen=True, slots=True)
class WorkerCrashed:
    """Synthesised by GpuWorkerCtl after process exit, process error or a broken control stream."""

    worker_generation: WorkerGeneration
    detail: str


@dataclass(frozen=True, slots=True)
class WorkerRunning:
    """GpuWorkerCtl to the node: the worker of this generation is ready."""

    worker_generation: WorkerGeneration
    backend: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """GpuWorkerCtl to the node: no worker process is left (stopped in order, or failed)."""

    reason: str


class ProcessNotificationKind(StrEnum):
    STARTED = "Started"
    EXITED = "Exited"
    ERROR = "Error"


@dataclass(frozen=True, slots=True)
class ProcessNotification:
    """From the process adapter, for the process of `generation` only. `detail` is exit status or error and
    the end of stderr."""

    worker_generation: WorkerGeneration
    kind: ProcessNotificationKind
    pid: int = 0
    detail: str = ""


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

CONTROL_MESSAGES = (
    Watch,
    NodeAvailable,
    NodeFaulted,
    ProvisionStage,
    StageReady,
    StageFault,
    StageProgress,
    StopRun,
    StageStopped,
    EventReport,
    ShutdownNode,
)
