"""Orchestrator to nodes and back (spec sections 8, 12 to 14, 38): what crosses the control channel."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from swactor_core.faults import Fault
from swactor_core.ids import EdgeId, NodeId, PortId, RoleId, RunId, StageIndex
from swactor_core.messages.worker_events import LoadPhase
from swactor_core.plan import EdgeKind, GgufSource, SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectSpec, RingSpec
from swactor_core.values import frozen


@frozen
class InboundEdgeProvision:
    """`producer_node_id` lets the node refuse a stream from any other peer (spec section 4)."""

    edge_id: EdgeId
    kind: EdgeKind
    producer_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@frozen
class OutboundEdgeProvision:
    edge_id: EdgeId
    kind: EdgeKind
    consumer_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@frozen
class StageModelFacts:
    model_id: str
    num_layers: int
    hidden_dim: int
    dtype_family: DTypeFamily
    dtype_width_bytes: int
    max_seq_len: int


@frozen
class StageRuntimeFacts:
    """`weights_in_memory` as in `RuntimePlan`."""

    role_id: RoleId
    input_port: PortId
    output_port: PortId
    sampling: SamplingPolicy | None
    token_output_policy: TokenOutputPolicy
    prefill_chunk: int
    weights_in_memory: bool = False


@frozen
class ProvisionStage:
    """`layer_bounds` are all stages' (`agreement.Shared`); `agreement` is the digest of the orchestrator's
    file and plan, which the node makes again of its own file before it loads."""

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
    layer_bounds: tuple[int, ...] = ()
    agreement: str = ""


@frozen
class NodeAvailable:
    """The node can accept run provisioning (spec section 8). `worker` has the facts of its worker's backend,
    under `worker` which provider that is, and under `machine` whose memory it computes in."""

    node_id: NodeId
    epoch: int
    name: str
    memory_bytes: int | None
    worker: dict[str, Any] = field(default_factory=dict)


@frozen
class NodeFaulted:
    node_id: NodeId
    fault: Fault


@frozen
class StageReady:
    run_id: RunId
    stage_index: StageIndex


@frozen
class StageFault:
    run_id: RunId
    stage_index: StageIndex
    fault: Fault


@frozen
class StageProgress:
    """How far a stage's preparation is; counts are bytes or steps, as the phase has them."""

    run_id: RunId
    stage_index: StageIndex
    phase: LoadPhase
    done: int
    total: int


@frozen
class StopRun:
    run_id: RunId


@frozen
class StageStats:
    """Seconds of worker compute, split by prefill (sequence 0) and decode, over `steps` steps; `facts` are
    how the role computed, as in `StageRole.facts`."""

    steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)


@frozen
class StageStopped:
    """`unproven` names what teardown could not prove quiescent; empty when every range was released."""

    run_id: RunId
    stage_index: StageIndex
    stats: StageStats = StageStats()
    unproven: tuple[str, ...] = ()


@frozen
class Watch:
    """An authorised orchestrator asks a node for its reports; `objects` asks for per-object events too."""

    objects: bool


@frozen
class WatchRefused:
    """To an orchestrator that may not command this node, or not now; the channel ends after it. `final` when
    asking again cannot help."""

    node_id: NodeId
    detail: str
    final: bool


@frozen
class EventReport:
    """Lifecycle events of a node, in its order; `dropped` counts those lost before these."""

    events: tuple[dict[str, Any], ...]
    dropped: int = 0


@frozen
class ShutdownNode:
    """From the orchestrator that started this node: stop the worker and exit."""


CONTROL_MESSAGES = (
    Watch,
    WatchRefused,
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
