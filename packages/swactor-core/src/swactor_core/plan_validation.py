"""What every RunPlan must satisfy (spec section 11), stated once.

Used where a plan is built and where one is received. Knows no placement policy: any plan that keeps the
guarantees passes, however it was balanced. The first violation is a ConfigError that names it.
"""

from __future__ import annotations

from itertools import pairwise
from math import isfinite

from swactor_core.errors import ConfigError
from swactor_core.ids import EDGE_IDS, RUN_IDS, node_hex
from swactor_core.plan import (
    EdgeEndpoint,
    EdgeKind,
    EdgePlan,
    GgufModelPlan,
    RunPlan,
    SamplingPolicy,
    TokenOutputPolicy,
)
from swactor_core.specs import CACHE_LINE, DTypeFamily, ObjectKind, ObjectSpec, activation_max_extent

_U64 = 1 << 64
_U32 = 1 << 32
_WIDTHS = {DTypeFamily.FLOAT: (2, 4), DTypeFamily.BFLOAT: (2,)}


def validate_plan(plan: RunPlan) -> None:
    """Raises ConfigError naming the first guarantee of spec section 11 that `plan` breaks."""
    _require(plan.run_id in RUN_IDS, f"run id {plan.run_id} is not of 64 bits")
    _check_model(plan.model)
    _check_runtime(plan)
    _check_stages(plan)
    _check_edges(plan)


def _require(condition: bool, violation: str, *, hint: str = "this plan is damaged; plan again") -> None:
    if not condition:
        raise ConfigError(f"run plan: {violation}", hint=hint)


def _check_model(model: GgufModelPlan) -> None:
    for name in ("num_layers", "hidden_dim", "vocab_size", "max_seq_len"):
        value = getattr(model, name)
        _require(1 <= value < _U32, f"{name} is {value}")
    widths = _WIDTHS.get(model.dtype_family, ())
    _require(
        model.dtype_width_bytes in widths,
        f"activations of {model.dtype_family} with {model.dtype_width_bytes} bytes do not exist",
    )
    for token in model.end_of_generation:
        _require(0 <= token < model.vocab_size, f"end-of-generation id {token} is outside the vocabulary")


def _check_runtime(plan: RunPlan) -> None:
    prompt, model = plan.runtime.prompt, plan.model
    _require(len(prompt) >= 1, "the prompt has no token")
    for token in prompt:
        _require(
            0 <= token < model.vocab_size,
            f"prompt id {token} is outside the vocabulary of {model.vocab_size}",
        )
    _require(plan.max_tokens >= 1, f"max_tokens is {plan.max_tokens}")
    _require(
        len(prompt) + plan.max_tokens - 1 <= model.max_seq_len,
        f"{len(prompt)} prompt and {plan.max_tokens} further tokens exceed max_seq_len {model.max_seq_len}",
    )
    _check_sampling(plan.runtime.sampling, model.vocab_size)


def _check_sampling(policy: SamplingPolicy, vocab_size: int) -> None:
    biased = [token for token, _ in policy.logit_bias]
    outside = [token for token in (*biased, *policy.history) if not 0 <= token < vocab_size]
    for holds, violation in (
        (isfinite(policy.temperature) and policy.temperature >= 0, f"temperature is {policy.temperature}"),
        (0 <= policy.seed < _U64, f"seed {policy.seed} is not of 64 bits"),
        (policy.top_k >= 0, f"top_k is {policy.top_k}"),
        (0 < policy.top_p <= 1, f"top_p is {policy.top_p}, not above 0 and at most 1"),
        (0 <= policy.min_p <= 1, f"min_p is {policy.min_p}, not in 0 to 1"),
        (
            isfinite(policy.repeat_penalty) and policy.repeat_penalty > 0,
            f"repeat_penalty is {policy.repeat_penalty}, not above 0",
        ),
        (isfinite(policy.frequency_penalty), f"frequency_penalty is {policy.frequency_penalty}"),
        (isfinite(policy.presence_penalty), f"presence_penalty is {policy.presence_penalty}"),
        (policy.repeat_last_n >= -1, f"repeat_last_n is {policy.repeat_last_n}, not -1 or more"),
        (all(isfinite(bias) for _, bias in policy.logit_bias), "a logit bias is not a number"),
        (len(set(biased)) == len(biased), "logit_bias names a token twice"),
        (not outside, f"the sampling policy has ids outside the vocabulary of {vocab_size}: {outside[:3]}"),
    ):
        _require(holds, violation, hint="change the sampling options")


def _check_stages(plan: RunPlan) -> None:
    stages = plan.stages
    _require(len(stages) >= 1, "there is no stage")
    for position, stage in enumerate(stages):
        name = f"stage {position}"
        _require(stage.stage_index == position, f"{name} has the index {stage.stage_index}")
        _require(
            stage.stage_count == len(stages), f"{name} counts {stage.stage_count} of {len(stages)} stages"
        )
        _require(stage.run_id == plan.run_id, f"{name} belongs to run {stage.run_id}, not {plan.run_id}")
        _require(stage.gguf_source == plan.model.gguf_source, f"{name} has another model source")
        _require(
            stage.layer_start < stage.layer_end_exclusive,
            f"{name} has no layer: [{stage.layer_start}, {stage.layer_end_exclusive})",
        )
    first, last = stages[0].layer_start, stages[-1].layer_end_exclusive
    _require(first == 0, f"stage 0 begins at layer {first}, not 0")
    for before, after in pairwise(stages):
        end, start = before.layer_end_exclusive, after.layer_start
        between = f"layers of stages {before.stage_index} and {after.stage_index}"
        _require(end <= start, f"{between} overlap: one ends at {end}, the next begins at {start}")
        _require(end >= start, f"{between} leave a gap: one ends at {end}, the next begins at {start}")
    _require(last == plan.model.num_layers, f"stages end at layer {last} of {plan.model.num_layers}")
    nodes = [stage.node_id for stage in stages]
    twice = next((node for node in nodes if nodes.count(node) > 1), None)
    _require(twice is None, f"node {node_hex(twice) if twice is not None else ''} has two stages")


def _check_edges(plan: RunPlan) -> None:
    stages, edges = plan.stages, plan.edges
    ids = [edge.edge_id for edge in edges]
    _require(len(set(ids)) == len(ids), "an edge id occurs twice")
    _require(len(edges) == len(stages) + 1, f"{len(edges)} edges for {len(stages)} stages")
    by_id = {edge.edge_id: edge for edge in edges}
    for edge in edges:
        _require(edge.edge_id in EDGE_IDS, f"edge id {edge.edge_id} is not of 64 bits, or 0")
        _require(edge.run_id == plan.run_id, f"edge {edge.edge_id} belongs to run {edge.run_id}")
        _require(
            edge.ring_capacity > 0 and edge.ring_capacity % CACHE_LINE == 0,
            f"ring capacity {edge.ring_capacity} of edge {edge.edge_id} is not a multiple of {CACHE_LINE}",
        )
    for stage in stages:
        for edge_id in (stage.inbound_edge, stage.outbound_edge):
            _require(edge_id in by_id, f"edge {edge_id} of stage {stage.stage_index} is not in the plan")
    homes = set()
    ends: list[EdgeEndpoint | None] = [
        None,
        *(EdgeEndpoint(stage.node_id, stage.stage_index) for stage in stages),
        None,
    ]
    for position, (producer, consumer) in enumerate(pairwise(ends)):
        edge = by_id[stages[position].inbound_edge if position < len(stages) else stages[-1].outbound_edge]
        _check_edge(plan, edge, producer, consumer)
        if position < len(stages) and position > 0:
            _require(
                stages[position - 1].outbound_edge == edge.edge_id,
                f"stage {position - 1} does not write to the edge {edge.edge_id} that stage {position} reads",
            )
        homes |= {end.node_id for end in (edge.producer, edge.consumer) if end.stage_index is None}
    _require(len(homes) == 1, "token-in and token-out end at different orchestrators")


def _check_edge(
    plan: RunPlan, edge: EdgePlan, producer: EdgeEndpoint | None, consumer: EdgeEndpoint | None
) -> None:
    """One edge between two ends; None is the orchestrator's."""
    kind = (
        EdgeKind.TOKEN_IN
        if producer is None
        else EdgeKind.TOKEN_OUT
        if consumer is None
        else EdgeKind.ACTIVATION
    )
    _require(edge.kind is kind, f"edge {edge.edge_id} is {edge.kind}, not {kind}")
    for role, held, wanted in (("producer", edge.producer, producer), ("consumer", edge.consumer, consumer)):
        if wanted is None:
            _require(
                held.stage_index is None, f"the {role} of {kind} edge {edge.edge_id} is not the orchestrator"
            )
        else:
            _require(
                held == wanted, f"the {role} of {kind} edge {edge.edge_id} is not stage {wanted.stage_index}"
            )
    _check_spec(plan, edge, kind)


def _check_spec(plan: RunPlan, edge: EdgePlan, kind: EdgeKind) -> None:
    model, spec = plan.model, edge.object_spec
    if kind is EdgeKind.TOKEN_IN:
        wanted = (ObjectKind.TOKENS, DTypeFamily.UNSIGNED, 4, 1, model.max_seq_len * 4)
    elif kind is EdgeKind.ACTIVATION:
        extent = activation_max_extent(model.max_seq_len, model.hidden_dim, model.dtype_width_bytes)
        wanted = (
            ObjectKind.ACTIVATION,
            model.dtype_family,
            model.dtype_width_bytes,
            model.hidden_dim,
            extent,
        )
    elif plan.runtime.token_output_policy is TokenOutputPolicy.LOGITS:
        wanted = (ObjectKind.LOGITS, DTypeFamily.FLOAT, 4, model.vocab_size, model.vocab_size * 4)
    else:
        wanted = (ObjectKind.TOKENS, DTypeFamily.UNSIGNED, 4, 1, 4)
    held = (spec.kind, spec.dtype_family, spec.dtype_width_bytes, spec.row_width, spec.max_extent)
    for name, has, want in zip(_SPEC_FIELDS, held, wanted, strict=True):
        _require(has == want, f"the object spec of {kind} edge {edge.edge_id} has {name} {has}, not {want}")
    _check_alignment(spec, edge)


_SPEC_FIELDS = ("kind", "dtype_family", "dtype_width_bytes", "row_width", "max_extent")


def _check_alignment(spec: ObjectSpec, edge: EdgePlan) -> None:
    """One row must be an acceptable object: `wire.check_object_header` asks for multiples of both."""
    _require(
        spec.alignment >= 1 and spec.row_bytes % spec.alignment == 0,
        f"rows of {spec.row_bytes} bytes on edge {edge.edge_id} are not aligned to {spec.alignment}",
    )
