"""Provisioning messages (spec section 12): from the run plan to the node, and from the node to its edges.

Pure functions between the vocabulary's data: what the orchestrator tells each stage's node, what either side
tells its EdgeEstablisher, and what makes an assignment one that no node can take. Knows no machine.
"""

from __future__ import annotations

from dataclasses import replace

from swactor_core.agreement import agreement, shared_of
from swactor_core.ids import EDGE_IDS, INPUT_PORT, OUTPUT_PORT, RUN_IDS, RoleId
from swactor_core.messages import (
    InboundEdgeProvision,
    OutboundEdgeProvision,
    ProvisionRx,
    ProvisionStage,
    ProvisionTx,
    StageModelFacts,
    StageRuntimeFacts,
)
from swactor_core.plan import EdgeKind, RunPlan, SamplingPolicy, StagePlan
from swactor_core.specs import RingDirection
from swactor_core.spi.loader import StageManifest
from swactor_core.spi.worker import StageConfig


def stage_config(provision: ProvisionStage, manifest: StageManifest) -> StageConfig:
    """What the worker of this stage is configured with; `manifest` is that of its layers."""
    return StageConfig(
        manifest=manifest,
        max_context=provision.model.max_seq_len,
        prefill_chunk=provision.runtime.prefill_chunk,
        input_spec=provision.inbound.object_spec,
        output_spec=provision.outbound.object_spec,
        sampling=provision.runtime.sampling or SamplingPolicy(),
        token_output_policy=provision.runtime.token_output_policy,
        weights_in_memory=provision.runtime.weights_in_memory,
    )


def provision_stage(plan: RunPlan, stage: StagePlan, *, prefill_chunk: int) -> ProvisionStage:
    """What the orchestrator tells the node of this stage; `prefill_chunk` in rows."""
    edges = {edge.edge_id: edge for edge in plan.edges}
    inbound, outbound = edges[stage.inbound_edge], edges[stage.outbound_edge]
    model = plan.model
    last = stage.stage_index == stage.stage_count - 1
    provision = ProvisionStage(
        run_id=plan.run_id,
        stage_index=stage.stage_index,
        stage_count=stage.stage_count,
        gguf_source=stage.gguf_source,
        layer_start=stage.layer_start,
        layer_end_exclusive=stage.layer_end_exclusive,
        inbound=InboundEdgeProvision(
            inbound.edge_id,
            inbound.kind,
            inbound.producer.node_id,
            inbound.object_spec,
            inbound.ring_spec(RingDirection.INGRESS),
        ),
        outbound=OutboundEdgeProvision(
            outbound.edge_id,
            outbound.kind,
            outbound.consumer.node_id,
            outbound.object_spec,
            outbound.ring_spec(RingDirection.EGRESS),
        ),
        model=StageModelFacts(
            model.model_id,
            model.num_layers,
            model.hidden_dim,
            model.dtype_family,
            model.dtype_width_bytes,
            model.max_seq_len,
        ),
        runtime=StageRuntimeFacts(
            RoleId(plan.run_id),  # a late word of an earlier run's role is told apart by it
            INPUT_PORT,
            OUTPUT_PORT,
            plan.runtime.sampling if last else None,
            plan.runtime.token_output_policy,
            prefill_chunk,
            plan.runtime.weights_in_memory,
        ),
        layer_bounds=(*(each.layer_start for each in plan.stages), model.num_layers),
    )
    return replace(provision, agreement=agreement(stage.gguf_source.digest, shared_of(provision)))


def impossible(provision: ProvisionStage) -> str:
    """Why no node can take this assignment, whatever its model holds; empty when one can."""
    index, count = provision.stage_index, provision.stage_count
    start, end, layers = provision.layer_start, provision.layer_end_exclusive, provision.model.num_layers
    inbound, outbound = provision.inbound, provision.outbound
    if provision.run_id not in RUN_IDS:
        return f"run {provision.run_id}, not of 64 bits"
    if not 0 <= index < count:
        return f"stage {index} of {count}"
    if not 0 <= start < end <= layers:
        return f"layers {start}..{end} of {layers}"
    first = EdgeKind.TOKEN_IN if index == 0 else EdgeKind.ACTIVATION
    last = EdgeKind.TOKEN_OUT if index == count - 1 else EdgeKind.ACTIVATION
    if (inbound.kind, outbound.kind) != (first, last):
        kinds = f"{inbound.kind} in and {outbound.kind} out"
        return f"stage {index} of {count} with {kinds}, not {first} and {last}"
    for edge_id in (inbound.edge_id, outbound.edge_id):
        if edge_id not in EDGE_IDS:
            return f"edge id {edge_id}, not of {EDGE_IDS.start}..{EDGE_IDS.stop - 1}"
    if inbound.edge_id == outbound.edge_id:
        return f"edge {inbound.edge_id} both in and out"
    for edge in (inbound, outbound):
        spec = edge.object_spec
        if spec.row_bytes < 1 or spec.alignment < 1 or spec.max_extent < spec.row_bytes:
            rows = f"rows of {spec.row_bytes} bytes, aligned to {spec.alignment}"
            return f"objects of at most {spec.max_extent} bytes in {rows} on edge {edge.edge_id}"
    rings = (inbound.ring_spec.direction, outbound.ring_spec.direction)
    if rings != (RingDirection.INGRESS, RingDirection.EGRESS):
        return f"rings for {rings[0]} in and {rings[1]} out"
    return ""


def token_edges(plan: RunPlan) -> tuple[ProvisionTx, ProvisionRx]:
    """The orchestrator's own ends: producer of token-in, consumer of token-out."""
    token_in = next(edge for edge in plan.edges if edge.kind is EdgeKind.TOKEN_IN)
    token_out = next(edge for edge in plan.edges if edge.kind is EdgeKind.TOKEN_OUT)
    return (
        ProvisionTx(
            token_in.edge_id,
            OUTPUT_PORT,
            token_in.consumer.node_id,
            token_in.object_spec,
            token_in.ring_spec(RingDirection.EGRESS),
        ),
        ProvisionRx(
            token_out.edge_id,
            INPUT_PORT,
            token_out.producer.node_id,
            token_out.object_spec,
            token_out.ring_spec(RingDirection.INGRESS),
        ),
    )


def stage_edges(provision: ProvisionStage) -> tuple[ProvisionRx, ProvisionTx]:
    """A stage's ends: receives inbound, sends outbound."""
    inbound, outbound, runtime = provision.inbound, provision.outbound, provision.runtime
    return (
        ProvisionRx(
            inbound.edge_id,
            runtime.input_port,
            inbound.producer_node_id,
            inbound.object_spec,
            inbound.ring_spec,
        ),
        ProvisionTx(
            outbound.edge_id,
            runtime.output_port,
            outbound.consumer_node_id,
            outbound.object_spec,
            outbound.ring_spec,
        ),
    )
