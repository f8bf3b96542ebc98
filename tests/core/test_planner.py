"""planner.py: the placement policy and the plan it gives (spec sections 10 and 11)."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from swactor_core.errors import ConfigError, UsageError
from swactor_core.ids import NodeId, RunId
from swactor_core.plan import EdgeKind, GgufSource, RunPlan, SamplingPolicy, TokenOutputPolicy
from swactor_core.planner import (
    EdgeIdAllocator,
    NodeCapacity,
    RuntimeChoices,
    partition,
    plan_run,
    stage_memory,
    validate_plan,
)
from swactor_core.specs import DTypeFamily, ObjectKind
from swactor_core.spi.loader import ModelFacts
from swactor_core.spi.provider import WorkerMemory

SOURCE = GgufSource("model.gguf", "d" * 64)
ORCHESTRATOR = NodeId(1 << 63)


def facts_of(layers, *, embedding=0, head=0, kv=None, tied=False, context=512, vocab=160, hidden=64):
    return ModelFacts(
        model_id="model",
        architecture="llama",
        num_layers=len(layers),
        hidden_dim=hidden,
        vocab_size=vocab,
        context_length=context,
        layer_bytes=tuple(layers),
        embedding_bytes=embedding,
        head_bytes=head,
        tied_head=tied,
        kv_bytes_per_token=tuple(kv if kv is not None else [0] * len(layers)),
        type_names=("F32",),
        has_vocabulary=True,
        file_bytes=1 << 20,
    )


def nodes_of(memories):
    return [NodeCapacity(NodeId(i + 1), memory) for i, memory in enumerate(memories)]


def test_workers_of_different_kinds_are_refused_by_node() -> None:
    def plan(*workers):
        inventory = [NodeCapacity(NodeId(i + 1), None, None, f"n{i}", w) for i, w in enumerate(workers)]
        return plan_run(
            inventory,
            facts_of([10] * 4),
            source=SOURCE,
            choices=RuntimeChoices((1,), 8),
            run_id=RunId(7),
            orchestrator=ORCHESTRATOR,
            edge_ids=EdgeIdAllocator(),
        )

    assert len(plan("tinygrad", "tinygrad").stages) == 2
    assert len(plan("tinygrad", "").stages) == 2
    with pytest.raises(
        UsageError, match=r"workers of different kinds: echo on n1.*; tinygrad on n0.*, n2"
    ) as refused:
        plan("tinygrad", "echo", "tinygrad")
    assert "same worker" in refused.value.hint


def plan_of(facts, memories, *, prompt=(1, 2, 3), max_tokens=8, edge_ids=None, **choices) -> RunPlan:
    return plan_run(
        nodes_of(memories),
        facts,
        source=SOURCE,
        choices=RuntimeChoices(tuple(prompt), max_tokens, **choices),
        run_id=RunId(7),
        orchestrator=ORCHESTRATOR,
        edge_ids=edge_ids or EdgeIdAllocator(100),
    )


def ranges(plan):
    return [(stage.layer_start, stage.layer_end_exclusive) for stage in plan.stages]


# the brute-force answer, written from the definition


def stored(facts, bounds, stage):
    start, end = bounds[stage], bounds[stage + 1]
    first, last = stage == 0, stage == len(bounds) - 2
    total = sum(facts.layer_bytes[start:end]) + first * facts.embedding_bytes + last * facts.head_bytes
    return total - (first and last and facts.tied_head) * facts.embedding_bytes


def brute_force(facts, memories, max_seq_len):
    """(greatest load, squares) of the best partition that fits, or None."""
    declared = [memory for memory in memories if memory is not None]
    average = max(sum(declared) // len(declared), 1) if declared else 1
    best = None
    for inner in combinations(range(1, facts.num_layers), len(memories) - 1):
        bounds = (0, *inner, facts.num_layers)
        loads = []
        for stage, memory in enumerate(memories):
            held = stored(facts, bounds, stage)
            kv = sum(facts.kv_bytes_per_token[bounds[stage] : bounds[stage + 1]]) * max_seq_len
            if memory is not None and held + kv > memory:
                break
            loads.append(Fraction(held, average if memory is None else memory))
        else:
            value = (max(loads), sum(load * load for load in loads))
            best = value if best is None else min(best, value)
    return best


def value_of(facts, memories, bounds):
    declared = [memory for memory in memories if memory is not None]
    average = max(sum(declared) // len(declared), 1) if declared else 1
    loads = [
        Fraction(stored(facts, bounds, stage), average if memory is None else memory)
        for stage, memory in enumerate(memories)
    ]
    return max(loads), sum(load * load for load in loads)


sizes = st.integers(0, 200)


@st.composite
def cases(draw):
    layers = draw(st.lists(st.integers(1, 100), min_size=1, max_size=8))
    count = draw(st.integers(1, len(layers)))
    embedding = draw(sizes)
    tied = draw(st.booleans())
    head = draw(sizes) + (embedding if tied else 0)
    kv = draw(st.lists(st.integers(0, 3), min_size=len(layers), max_size=len(layers)))
    memories = draw(st.lists(st.none() | st.integers(50, 900), min_size=count, max_size=count))
    return (
        facts_of(layers, embedding=embedding, head=head, kv=kv, tied=tied),
        memories,
        draw(st.integers(1, 40)),
    )


@settings(max_examples=300)
@given(cases())
def test_partition_is_the_brute_force_optimum(case):
    facts, memories, max_seq_len = case
    expected = brute_force(facts, memories, max_seq_len)
    if expected is None:
        with pytest.raises(
            UsageError, match=r"does not fit: stage \d+ on node [0-9a-f]{16} .* needs \d+ bytes .* has \d+"
        ):
            partition(nodes_of(memories), facts, max_seq_len=max_seq_len)
        return
    bounds = partition(nodes_of(memories), facts, max_seq_len=max_seq_len)
    assert bounds[0] == 0
    assert bounds[-1] == facts.num_layers
    assert all(start < end for start, end in pairwise(bounds))
    assert value_of(facts, memories, bounds) == expected


@given(
    cases(),
    st.integers(1, 30),
    st.sampled_from(TokenOutputPolicy),
    st.sampled_from([(DTypeFamily.FLOAT, 4), (DTypeFamily.FLOAT, 2), (DTypeFamily.BFLOAT, 2)]),
)
def test_every_plan_is_valid_and_stays_within_its_context(case, max_tokens, policy, dtype):
    facts, memories, prompt_length = case
    assume(brute_force(facts, memories, min(prompt_length + max_tokens, facts.context_length)) is not None)
    plan = plan_of(
        facts,
        memories,
        prompt=[5] * prompt_length,
        max_tokens=max_tokens,
        token_output_policy=policy,
        dtype_family=dtype[0],
        dtype_width_bytes=dtype[1],
    )
    validate_plan(plan)
    assert [stage.node_id for stage in plan.stages] == [NodeId(i + 1) for i in range(len(memories))]
    assert [layer for start, end in ranges(plan) for layer in range(start, end)] == list(
        range(facts.num_layers)
    )
    for edge in plan.edges:
        record = 40 + edge.object_spec.max_extent
        assert edge.ring_capacity & (edge.ring_capacity - 1) == 0
        assert 1 << 16 <= edge.ring_capacity <= 1 << 20
        assert edge.ring_capacity >= min(record, 1 << 20)


def test_equal_layers_on_equal_nodes_are_shared_equally():
    assert ranges(plan_of(facts_of([10] * 12), [None] * 4)) == [(0, 3), (3, 6), (6, 9), (9, 12)]


def test_embedding_and_head_count_on_the_ends():
    plan = plan_of(facts_of([10] * 12, embedding=20, head=20), [None] * 4)
    assert ranges(plan) == [(0, 2), (2, 6), (6, 10), (10, 12)]


def test_the_middle_is_balanced_although_an_end_sets_the_greatest_load():
    plan = plan_of(facts_of([2] * 30, embedding=100, head=100), [None] * 6)
    assert ranges(plan) == [(0, 1), (1, 8), (8, 15), (15, 22), (22, 29), (29, 30)]


def test_shares_follow_the_declared_memory():
    assert ranges(plan_of(facts_of([10] * 12), [3000, 1000, 2000])) == [(0, 6), (6, 8), (8, 12)]


def test_a_node_that_declares_nothing_gets_an_average_share():
    assert ranges(plan_of(facts_of([10] * 12), [3000, None, 1000])) == [(0, 6), (6, 10), (10, 12)]


def test_a_tied_table_on_one_stage_is_counted_once():
    facts = facts_of([10, 10], embedding=100, head=101, tied=True)
    assert ranges(plan_of(facts, [121])) == [(0, 2)]
    with pytest.raises(UsageError, match=r"stage 0 on node 0000000000000001 .* needs 121 bytes .* has 120"):
        plan_of(facts, [120])


def test_a_node_that_lacks_memory_is_said_by_its_name():
    inventory = [NodeCapacity(NodeId(1), 120, name="attic")]
    with pytest.raises(UsageError, match=r"stage 0 on node attic \(0000000000000001\) with layers"):
        partition(inventory, facts_of([100, 100]), max_seq_len=1)
    with pytest.raises(UsageError, match=r"node attic \(0000000000000001\) declares 0 bytes"):
        partition([NodeCapacity(NodeId(1), 0, name="attic")], facts_of([1]), max_seq_len=1)


def test_the_kv_cache_of_the_whole_run_counts_for_fitting():
    facts = facts_of([10, 10], kv=[1, 1])
    plan_of(facts, [42], prompt=(1,) * 5, max_tokens=6)
    with pytest.raises(UsageError, match=r"needs 42 bytes \(weights 20, KV cache 22\) and has 41"):
        plan_of(facts, [41], prompt=(1,) * 5, max_tokens=6)


def test_a_small_node_gets_what_it_can_hold_even_when_the_balance_suffers():
    facts = facts_of([10, 10, 30, 10], kv=[0, 5, 0, 0])
    assert ranges(plan_of(facts, [40, None], prompt=(1,), max_tokens=9)) == [(0, 1), (1, 4)]


def test_a_stage_holds_the_prompt_s_objects_of_its_own_edges():
    facts = facts_of([10, 10, 10])
    plan = plan_of(facts, [None] * 3, prompt=(1,) * 7)
    held = [memory.scratch for memory in stage_memory(plan, facts, prefill_chunk=1)]
    object_bytes = 4 * 7 * facts.hidden_dim
    assert held[1] - held[0] == object_bytes  # rows in and out, the first stage only out
    assert held[2] - held[0] == 4 * facts.vocab_size  # rows in, and the logits


def test_what_workers_take_counts_and_is_named():
    facts = facts_of([10, 10, 10, 10], embedding=6, head=6)
    copying = WorkerMemory((5, 5, 5, 5), embedding=3, head=2, shared=1, scratch=4, process=100)
    plain = WorkerMemory((0,) * 4, process=100)
    needs = [memory.total for memory in stage_memory(plan_of(facts, [None]), facts, workers=[copying])]
    assert needs == [stored(facts, (0, 4), 0) + 20 + 3 + 2 - 1 + 4 + 100]

    def nodes(first, second):
        return [NodeCapacity(NodeId(1), first, copying), NodeCapacity(NodeId(2), second, plain)]

    assert partition(nodes(1000, 1000), facts, max_seq_len=1)[1] == 2
    # the first node has room for the weights of two layers, but not for their copies
    assert partition(nodes(100 + 4 + 6 + 3 + 29, 1000), facts, max_seq_len=1)[1] == 1
    named = r"weights 26, scratch 4, copies of weights 13, the worker's process 100\) and has 104"
    with pytest.raises(UsageError, match=named) as told:
        partition(nodes(104, 104), facts, max_seq_len=1)
    assert "add nodes" in str(told.value.hint)
    with pytest.raises(ValueError, match="speaks of 4 layers, the model has 2"):
        partition(nodes(1000, 1000), facts_of([1, 1]), max_seq_len=1)


def test_options_that_copy_weights_are_the_remedy_where_they_are_the_cause():
    facts = facts_of([10, 10])
    inventory = [NodeCapacity(NodeId(1), 50, WorkerMemory((40, 40)))]
    with pytest.raises(UsageError, match="copies of weights 80") as told:
        partition(inventory, facts, max_seq_len=1)
    assert told.value.hint.startswith("leave out the worker options that copy weights")


def test_more_nodes_than_layers_names_both():
    with pytest.raises(UsageError, match="3 nodes for a model of 2 layers"):
        plan_of(facts_of([1, 1]), [None] * 3)


@pytest.mark.parametrize(
    ("memories", "match"),
    [([], "no node"), ([0], "declares 0 bytes"), ([-5], "declares -5 bytes")],
)
def test_inventories_that_cannot_be_planned(memories, match):
    with pytest.raises(UsageError, match=match):
        plan_of(facts_of([1, 1]), memories)


def test_a_node_listed_twice():
    with pytest.raises(UsageError, match="twice"):
        partition([NodeCapacity(NodeId(1)), NodeCapacity(NodeId(1))], facts_of([1, 1]), max_seq_len=1)


def test_the_last_token_needs_no_place_in_the_context():
    plan = plan_of(facts_of([1], context=10), [None], prompt=[1] * 7, max_tokens=100)
    assert plan.model.max_seq_len == 10
    assert plan.max_tokens == 4
    full = plan_of(facts_of([1], context=10), [None], prompt=[1] * 10, max_tokens=100)
    assert (full.model.max_seq_len, full.max_tokens) == (10, 1)


def test_max_seq_len_is_what_the_run_needs_not_the_context():
    plan = plan_of(facts_of([1], context=8192), [None], prompt=[1] * 3, max_tokens=5)
    assert (plan.model.max_seq_len, plan.max_tokens) == (8, 5)


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ({"prompt": [1] * 11}, "prompt has 11 tokens .* context of 10"),
        ({"prompt": []}, "prompt has no token"),
        ({"prompt": [160]}, "the prompt has the id 160 .* vocabulary of 160"),
        ({"prompt": [-1]}, "the prompt has the id -1"),
        ({"end_of_generation": (999,)}, "end_of_generation has the id 999"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"ring_capacity": 100}, "ring_capacity is 100"),
        ({"ring_capacity": 0}, "ring_capacity is 0"),
        ({"sampling": SamplingPolicy(temperature=float("nan"))}, "temperature is nan"),
        ({"sampling": SamplingPolicy(top_p=0.0)}, "top_p is 0.0"),
        ({"sampling": SamplingPolicy(min_p=2.0)}, "min_p is 2.0"),
        ({"sampling": SamplingPolicy(top_k=-1)}, "top_k is -1"),
        ({"sampling": SamplingPolicy(seed=-1)}, "seed -1"),
        ({"dtype_width_bytes": 8}, "Float with 8 bytes"),
    ],
)
def test_choices_that_cannot_run(choices, match):
    with pytest.raises(UsageError, match=match) as caught:
        plan_of(facts_of([1], context=10), [None], **choices)
    assert caught.value.hint


def test_edges_are_a_chain_from_the_orchestrator_and_back():
    plan = plan_of(facts_of([1] * 3), [None] * 3, edge_ids=EdgeIdAllocator(100))
    assert [(edge.kind, edge.edge_id) for edge in plan.edges] == [
        (EdgeKind.TOKEN_IN, 100),
        (EdgeKind.ACTIVATION, 101),
        (EdgeKind.ACTIVATION, 102),
        (EdgeKind.TOKEN_OUT, 103),
    ]
    assert [(edge.producer.stage_index, edge.consumer.stage_index) for edge in plan.edges] == [
        (None, 0),
        (0, 1),
        (1, 2),
        (2, None),
    ]
    assert plan.edges[0].producer.node_id == plan.edges[-1].consumer.node_id == ORCHESTRATOR


def test_object_specs_of_a_token_run():
    plan = plan_of(facts_of([1] * 2), [None] * 2, prompt=[1] * 4, max_tokens=6, dtype_width_bytes=2)
    into, between, out = (edge.object_spec for edge in plan.edges)
    assert (into.kind, into.max_extent, into.row_bytes) == (ObjectKind.TOKENS, 40, 4)
    assert (between.kind, between.max_extent, between.row_bytes) == (ObjectKind.ACTIVATION, 10 * 64 * 2, 128)
    assert (out.kind, out.max_extent, out.row_bytes) == (ObjectKind.TOKENS, 4, 4)


def test_object_spec_of_logits():
    plan = plan_of(facts_of([1]), [None], token_output_policy=TokenOutputPolicy.LOGITS)
    out = plan.edges[-1].object_spec
    assert (out.kind, out.max_extent, out.row_width) == (ObjectKind.LOGITS, 640, 160)


def test_a_chosen_ring_capacity_is_of_every_edge():
    plan = plan_of(facts_of([1] * 2), [None] * 2, ring_capacity=256)
    assert {edge.ring_capacity for edge in plan.edges} == {256}


def test_edge_ids_are_never_given_twice():
    edge_ids = EdgeIdAllocator(5)
    plans = [plan_of(facts_of([1] * 3), [None] * 3, edge_ids=edge_ids) for _ in range(4)]
    ids = [edge.edge_id for plan in plans for edge in plan.edges]
    assert ids == list(range(5, 5 + len(ids)))
    with pytest.raises(ValueError, match="-1"):
        EdgeIdAllocator(-1)


def test_the_same_arguments_give_the_same_plan():
    facts = facts_of([3, 1, 4, 1, 5, 9, 2, 6], embedding=5, head=3)
    assert plan_of(facts, [100, 120, None]) == plan_of(facts, [100, 120, None])


def test_a_large_model_on_many_nodes_is_planned_in_time():
    facts = facts_of([10 + i % 7 for i in range(512)], embedding=300, head=400)
    memories = [4000 + 13 * (i % 5) for i in range(48)]
    bounds = partition(nodes_of(memories), facts, max_seq_len=1)
    assert len(bounds) == 49


def test_plan_errors_are_usage_errors():
    assert issubclass(ConfigError, UsageError)
