# ruff: noqa: E501 - the table of broken guarantees reads best a line each
"""plan_validation.py: each guarantee of spec section 11, broken one at a time."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from swactor_core.errors import ConfigError
from swactor_core.ids import EdgeId, NodeId, RunId, StageIndex
from swactor_core.plan import (
    EdgeEndpoint,
    EdgeKind,
    EdgePlan,
    GgufModelPlan,
    GgufSource,
    RunPlan,
    RuntimePlan,
    SamplingPolicy,
    StagePlan,
    TokenOutputPolicy,
)
from swactor_core.plan_validation import validate_plan
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec

SOURCE = GgufSource("m.gguf", "ab")
HOME = EdgeEndpoint(NodeId(99))


def three_stages() -> RunPlan:
    """A valid plan written by hand, so that the planner's mistakes cannot hide in it."""
    tokens = ObjectSpec(ObjectKind.TOKENS, 40, DTypeFamily.UNSIGNED, 4, 1)
    activation = ObjectSpec(ObjectKind.ACTIVATION, 10 * 64 * 4, DTypeFamily.FLOAT, 4, 64)
    out = ObjectSpec(ObjectKind.TOKENS, 4, DTypeFamily.UNSIGNED, 4, 1)
    ends = [HOME, *(EdgeEndpoint(NodeId(i + 1), StageIndex(i)) for i in range(3)), HOME]
    kinds = [EdgeKind.TOKEN_IN, EdgeKind.ACTIVATION, EdgeKind.ACTIVATION, EdgeKind.TOKEN_OUT]
    specs = [tokens, activation, activation, out]
    return RunPlan(
        run_id=RunId(7),
        model=GgufModelPlan("m", SOURCE, 6, 64, 160, DTypeFamily.FLOAT, 4, 10, (2,)),
        runtime=RuntimePlan((1, 2, 3), SamplingPolicy(), TokenOutputPolicy.TOKEN_IDS),
        stages=tuple(
            StagePlan(
                RunId(7),
                StageIndex(i),
                3,
                NodeId(i + 1),
                SOURCE,
                2 * i,
                2 * i + 2,
                EdgeId(i + 1),
                EdgeId(i + 2),
            )
            for i in range(3)
        ),
        edges=tuple(
            EdgePlan(RunId(7), EdgeId(i + 1), kinds[i], ends[i], ends[i + 1], specs[i], 1 << 16)
            for i in range(4)
        ),
        max_tokens=8,
    )


def with_stage(plan, index, **changes):
    stages = list(plan.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(plan, stages=tuple(stages))


def with_edge(plan, index, **changes):
    edges = list(plan.edges)
    edges[index] = replace(edges[index], **changes)
    return replace(plan, edges=tuple(edges))


def with_spec(plan, index, **changes):
    return with_edge(plan, index, object_spec=replace(plan.edges[index].object_spec, **changes))


def with_model(plan, **changes):
    return replace(plan, model=replace(plan.model, **changes))


def with_runtime(plan, **changes):
    return replace(plan, runtime=replace(plan.runtime, **changes))


BROKEN = {
    "run id": (lambda p: replace(p, run_id=RunId(-1)), "run id -1"),
    "no stage": (lambda p: replace(p, stages=()), "no stage"),
    "empty layer range": (lambda p: with_stage(p, 1, layer_end_exclusive=2), "stage 1 has no layer"),
    "gap": (lambda p: with_stage(p, 1, layer_start=3), "stages 0 and 1 leave a gap"),
    "overlap": (lambda p: with_stage(p, 1, layer_start=1), "stages 0 and 1 overlap"),
    "does not begin": (lambda p: with_stage(p, 0, layer_start=1), "begins at layer 1"),
    "negative layer": (lambda p: with_stage(p, 0, layer_start=-1), "begins at layer -1"),
    "does not end": (lambda p: with_stage(p, 2, layer_end_exclusive=5), "end at layer 5 of 6"),
    "beyond the file": (lambda p: with_stage(p, 2, layer_end_exclusive=7), "end at layer 7 of 6"),
    "stage order": (lambda p: replace(p, stages=p.stages[::-1]), "stage 0 has the index 2"),
    "stage count": (lambda p: with_stage(p, 1, stage_count=2), "counts 2 of 3"),
    "stage of another run": (lambda p: with_stage(p, 1, run_id=RunId(8)), "belongs to run 8"),
    "another file": (lambda p: with_stage(p, 1, gguf_source=GgufSource("m.gguf", "cd")), "another model source"),
    "node twice": (lambda p: with_stage(p, 1, node_id=NodeId(1)), "node 0000000000000001 has two stages"),
    "edge id twice": (lambda p: with_edge(p, 1, edge_id=EdgeId(1)), "an edge id occurs twice"),
    "edge missing": (lambda p: replace(p, edges=p.edges[:-1]), "3 edges for 3 stages"),
    "edge too many": (lambda p: replace(p, edges=(*p.edges, replace(p.edges[0], edge_id=EdgeId(9)))), "5 edges"),
    "edge unknown": (lambda p: with_stage(p, 1, inbound_edge=EdgeId(77)), "edge 77 of stage 1"),
    "edge of another run": (lambda p: with_edge(p, 1, run_id=RunId(8)), "edge 2 belongs to run 8"),
    "edge id too large": (lambda p: with_edge(p, 3, edge_id=EdgeId(1 << 64)), "not of 64 bits"),
    "edge id 0": (lambda p: with_edge(p, 3, edge_id=EdgeId(0)), "or 0"),
    "edges swapped": (lambda p: with_stage(p, 0, outbound_edge=EdgeId(3)), "stage 0 does not write to the edge 2"),
    "token-in kind": (lambda p: with_edge(p, 0, kind=EdgeKind.ACTIVATION), "edge 1 is Activation, not TokenIn"),
    "token-out kind": (lambda p: with_edge(p, 3, kind=EdgeKind.ACTIVATION), "edge 4 is Activation, not TokenOut"),
    "token-in from a stage": (lambda p: with_edge(p, 0, producer=p.edges[2].producer), "producer of TokenIn"),
    "token-in to stage 1": (lambda p: with_edge(p, 0, consumer=p.edges[1].consumer), "consumer of TokenIn edge 1 is not stage 0"),
    "token-out from stage 0": (lambda p: with_edge(p, 3, producer=p.edges[1].producer), "is not stage 2"),
    "token-out to a stage": (lambda p: with_edge(p, 3, consumer=p.edges[0].consumer), "consumer of TokenOut"),
    "activation skips": (lambda p: with_edge(p, 1, consumer=p.edges[2].consumer), "is not stage 1"),
    "wrong node": (lambda p: with_edge(p, 1, producer=EdgeEndpoint(NodeId(3), StageIndex(0))), "is not stage 0"),
    "two orchestrators": (lambda p: with_edge(p, 3, consumer=EdgeEndpoint(NodeId(98))), "different orchestrators"),
    "ring capacity": (lambda p: with_edge(p, 1, ring_capacity=0), "ring capacity 0 of edge 2"),
    "ring alignment": (lambda p: with_edge(p, 1, ring_capacity=100), "ring capacity 100 of edge 2"),
    "token extent": (lambda p: with_spec(p, 0, max_extent=36), "max_extent 36, not 40"),
    "token kind": (lambda p: with_spec(p, 0, kind=ObjectKind.LOGITS), "kind Logits, not Tokens"),
    "activation extent": (lambda p: with_spec(p, 1, max_extent=4), "max_extent 4, not 2560"),
    "activation dtype": (lambda p: with_spec(p, 1, dtype_family=DTypeFamily.BFLOAT), "dtype_family BFloat"),
    "activation width": (lambda p: with_spec(p, 1, row_width=65), "row_width 65, not 64"),
    "alignment": (lambda p: with_spec(p, 1, alignment=512), "not aligned to 512"),
    "alignment zero": (lambda p: with_spec(p, 0, alignment=0), "not aligned to 0"),
    "output policy": (lambda p: with_runtime(p, token_output_policy=TokenOutputPolicy.LOGITS), "not Logits"),
    "layers": (lambda p: with_model(p, num_layers=0), "num_layers is 0"),
    "hidden": (lambda p: with_model(p, hidden_dim=0), "hidden_dim is 0"),
    "vocabulary": (lambda p: with_model(p, vocab_size=-1), "vocab_size is -1"),
    "dtype": (lambda p: with_model(p, dtype_family=DTypeFamily.UNSIGNED), "activations of Unsigned"),
    "bfloat width": (lambda p: with_model(p, dtype_family=DTypeFamily.BFLOAT), "BFloat with 4 bytes"),
    "end of generation": (lambda p: with_model(p, end_of_generation=(160,)), "end-of-generation id 160"),
    "prompt empty": (lambda p: with_runtime(p, prompt=()), "prompt has no token"),
    "prompt id": (lambda p: with_runtime(p, prompt=(160,)), "prompt id 160"),
    "max tokens": (lambda p: replace(p, max_tokens=0), "max_tokens is 0"),
    "too long": (lambda p: replace(p, max_tokens=9), "exceed max_seq_len 10"),
    "temperature": (lambda p: with_runtime(p, sampling=SamplingPolicy(temperature=-1.0)), "temperature is -1.0"),
    "top p": (lambda p: with_runtime(p, sampling=SamplingPolicy(top_p=0.0)), "top_p is 0.0"),
    "repeat": (lambda p: with_runtime(p, sampling=SamplingPolicy(repeat_penalty=0.0)), "repeat_penalty is 0.0"),
    "frequency": (lambda p: with_runtime(p, sampling=SamplingPolicy(frequency_penalty=inf)), "frequency_penalty is inf"),
    "presence": (lambda p: with_runtime(p, sampling=SamplingPolicy(presence_penalty=nan)), "presence_penalty is nan"),
    "window": (lambda p: with_runtime(p, sampling=SamplingPolicy(repeat_last_n=-2)), "repeat_last_n is -2"),
    "bias": (lambda p: with_runtime(p, sampling=SamplingPolicy(logit_bias=((1, -inf),))), "bias is not a number"),
    "bias twice": (lambda p: with_runtime(p, sampling=SamplingPolicy(logit_bias=((1, 1.0), (1, 2.0)))), "a token twice"),
    "bias outside": (lambda p: with_runtime(p, sampling=SamplingPolicy(logit_bias=((160, 1.0),))), "vocabulary of 160"),
    "history": (lambda p: with_runtime(p, sampling=SamplingPolicy(history=(1, 160))), "vocabulary of 160"),
}  # fmt: skip


def test_the_plan_that_is_broken_below_is_valid():
    validate_plan(three_stages())


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_guarantee_is_named(name):
    change, violation = BROKEN[name]
    with pytest.raises(ConfigError, match="run plan: ") as caught:
        validate_plan(change(three_stages()))
    assert violation in caught.value.message
    assert caught.value.hint


def test_edges_may_come_in_any_order():
    plan = three_stages()
    validate_plan(replace(plan, edges=plan.edges[::-1]))
