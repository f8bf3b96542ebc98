"""Placement (spec sections 10 and 11): inventory and model facts to the one RunPlan of a run.

Pure: no clock, no randomness, no I/O; the same arguments give the same plan. Knows byte counts and memory,
not tensors or devices. One stage a node, in the order of the inventory. `plan_validation.py` states what any
plan must satisfy, whoever made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace
from itertools import accumulate, pairwise
from math import lcm
from typing import NoReturn

from swactor_core.errors import UsageError
from swactor_core.faults import named_node
from swactor_core.ids import EdgeId, NodeId, RunId, StageIndex
from swactor_core.memory import StageMemory, object_bytes, scratch_bytes, spare_rows
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
from swactor_core.specs import (
    CACHE_LINE,
    OBJECT_HEADER_BYTES,
    DTypeFamily,
    ObjectKind,
    ObjectSpec,
    activation_max_extent,
)
from swactor_core.spi.loader import ModelFacts
from swactor_core.spi.provider import WorkerMemory
from swactor_core.values import frozen

__all__ = [
    "EdgeIdAllocator",
    "NodeCapacity",
    "RuntimeChoices",
    "partition",
    "plan_run",
    "positions_of",
    "stage_memory",
    "validate_plan",
]

TOKEN_BYTES = 4
LOGIT_BYTES = 4
MIN_RING = 64 << 10
MAX_RING = 1 << 20


@frozen
class NodeCapacity:
    """One node of the inventory (spec section 4). `memory_bytes` is what it declares for a stage's worker,
    all in all; None says nothing is declared: it is given an average share and anything fits. `worker` is
    what its worker takes of this run's model beside what the facts tell; None says that nobody knows.
    `worker_name` is of the provider that computes there, empty where that is not known; `name` is for
    people. `free_bytes` are free on its `machine` before the run, None where nobody knows; nodes that name
    the same machine share them."""

    node_id: NodeId
    memory_bytes: int | None = None
    worker: WorkerMemory | None = None
    name: str = ""
    worker_name: str = ""
    free_bytes: int | None = None
    machine: str = ""

    @property
    def shown(self) -> str:
        return named_node(self.node_id, {self.node_id: self.name})


def _check_workers(inventory: Sequence[NodeCapacity]) -> None:
    """What one kind of worker makes of a model means nothing to another: the echo worker's activations would
    become tokens like any others."""
    of_worker: dict[str, list[str]] = {}
    for node in inventory:
        if node.worker_name:
            of_worker.setdefault(node.worker_name, []).append(node.shown)
    if len(of_worker) > 1:
        held = "; ".join(f"{name} on {', '.join(nodes)}" for name, nodes in sorted(of_worker.items()))
        raise UsageError(
            f"the nodes have workers of different kinds: {held}",
            hint="start all nodes of a run with the same worker",
        )


@frozen
class RuntimeChoices:
    """What the operator chose for one run. `prompt` and `end_of_generation` are token ids;
    `dtype_family` and `dtype_width_bytes` are of activations on the wire; `ring_capacity` in bytes, of
    every edge, None for a default by object size; `prefill_chunk` in rows of one step, None to leave a
    stage's scratch out of its memory."""

    prompt: tuple[int, ...]
    max_tokens: int
    end_of_generation: tuple[int, ...] = ()
    sampling: SamplingPolicy = field(default_factory=SamplingPolicy)
    token_output_policy: TokenOutputPolicy = TokenOutputPolicy.TOKEN_IDS
    dtype_family: DTypeFamily = DTypeFamily.FLOAT
    dtype_width_bytes: int = 4
    ring_capacity: int | None = None
    prefill_chunk: int | None = None


class EdgeIdAllocator:
    """Edge ids of one orchestrator: each is given once, over all its runs (spec section 6)."""

    def __init__(self, start: int = 1) -> None:
        if not 0 <= start < 1 << 63:
            raise ValueError(f"edge ids cannot start at {start}")
        self._next = start

    def take(self) -> EdgeId:
        edge_id, self._next = EdgeId(self._next), self._next + 1
        return edge_id


def plan_run(
    inventory: Sequence[NodeCapacity],
    facts: ModelFacts,
    *,
    source: GgufSource,
    choices: RuntimeChoices,
    run_id: RunId,
    orchestrator: NodeId,
    edge_ids: EdgeIdAllocator,
) -> RunPlan:
    """The plan of one run, valid by `validate_plan`.

    Raises UsageError for what cannot run: no node, more nodes than layers, nodes whose workers are of
    different kinds, a prompt longer than the context, a stage that no declared memory holds. `max_tokens` of
    the plan is what the context has room for.
    """
    prompt = len(choices.prompt)
    _check_choices(facts, choices)
    _check_workers(inventory)
    max_seq_len = positions_of(facts, choices)
    # The last token is never fed back, so it needs no place in the context.
    max_tokens = min(choices.max_tokens, max_seq_len - prompt + 1)
    starts = partition(
        inventory, facts, max_seq_len=max_seq_len, prefill_chunk=choices.prefill_chunk, prompt_rows=prompt
    )
    in_memory = _weights_in_memory(inventory, facts, choices, max_seq_len, starts)
    edges = _edges(inventory, facts, choices, max_seq_len, run_id, orchestrator, edge_ids)
    stages = tuple(
        StagePlan(
            run_id=run_id,
            stage_index=StageIndex(index),
            stage_count=len(inventory),
            node_id=node.node_id,
            gguf_source=source,
            layer_start=start,
            layer_end_exclusive=end,
            inbound_edge=edges[index].edge_id,
            outbound_edge=edges[index + 1].edge_id,
        )
        for index, (node, (start, end)) in enumerate(zip(inventory, pairwise(starts), strict=True))
    )
    model = GgufModelPlan(
        model_id=facts.model_id,
        gguf_source=source,
        num_layers=facts.num_layers,
        hidden_dim=facts.hidden_dim,
        vocab_size=facts.vocab_size,
        dtype_family=choices.dtype_family,
        dtype_width_bytes=choices.dtype_width_bytes,
        max_seq_len=max_seq_len,
        end_of_generation=tuple(sorted(set(choices.end_of_generation))),
    )
    sampling = choices.sampling.after(choices.prompt)
    runtime = RuntimePlan(choices.prompt, sampling, choices.token_output_policy, in_memory)
    plan = RunPlan(run_id, model, runtime, stages, edges, max_tokens)
    validate_plan(plan)
    return plan


def check_prompt_length(facts: ModelFacts, tokens: int) -> None:
    """Raises UsageError with both numbers for a prompt that is longer than the model's context."""
    if tokens > facts.context_length:
        raise UsageError(
            f"the prompt has {tokens} tokens and {facts.model_id!r} a context of {facts.context_length}",
            hint="shorten the prompt",
        )


def positions_of(facts: ModelFacts, choices: RuntimeChoices) -> int:
    """The places of the context that a run takes at most."""
    return min(len(choices.prompt) + choices.max_tokens, facts.context_length)


def _check_choices(facts: ModelFacts, choices: RuntimeChoices) -> None:
    if not choices.prompt:
        raise UsageError("the prompt has no token", hint="give a prompt that is not empty")
    if choices.max_tokens < 1:
        raise UsageError(f"max_tokens is {choices.max_tokens}", hint="ask for at least one token")
    check_prompt_length(facts, len(choices.prompt))
    for name, ids in (("the prompt", choices.prompt), ("end_of_generation", choices.end_of_generation)):
        outside = next((token for token in ids if not 0 <= token < facts.vocab_size), None)
        if outside is not None:
            raise UsageError(
                f"{name} has the id {outside} and {facts.model_id!r} a vocabulary of {facts.vocab_size}",
                hint="encode it with this model's tokenizer",
            )
    ring = choices.ring_capacity
    if ring is not None and (ring < CACHE_LINE or ring % CACHE_LINE):
        raise UsageError(f"ring_capacity is {ring}", hint=f"give a multiple of {CACHE_LINE} bytes")


# placement


class _Costs:
    """Bytes of stages. `stored(s, a, b)` is of stage s with layers [a, b): its blocks, the embedding on the
    first stage, the head on the last; a tied table that one stage uses for both lies there once."""

    def __init__(
        self,
        inventory: Sequence[NodeCapacity],
        facts: ModelFacts,
        max_seq_len: int,
        prefill_chunk: int | None,
        prompt_rows: int,
    ) -> None:
        self.memory = [node.memory_bytes for node in inventory]
        self._workers = [node.worker for node in inventory]
        self._copied = [
            [0, *accumulate(worker.layers)] if worker is not None else None for worker in self._workers
        ]
        self._last = len(inventory) - 1
        self._facts = facts
        self._layers = [0, *accumulate(facts.layer_bytes)]
        self._kv = [0, *accumulate(per_token * max_seq_len for per_token in facts.kv_bytes_per_token)]
        self._max_seq_len, self._prefill_chunk = max_seq_len, prefill_chunk
        self._prompt_rows = prompt_rows
        self._scratch = [
            0
            if prefill_chunk is None
            else scratch_bytes(facts, max_seq_len=max_seq_len, prefill_chunk=prefill_chunk, last=last)
            for last in (False, True)
        ]
        declared = [memory for memory in self.memory if memory is not None]
        average = max(sum(declared) // len(declared), 1) if declared else 1
        shares = [average if memory is None else memory for memory in self.memory]
        # Integers in the ratio of one over the share: loads compare exactly, without rounding.
        whole = lcm(*shares)
        self._weight = [whole // share for share in shares]

    def stored(self, stage: int, start: int, end: int) -> int:
        total = self._layers[end] - self._layers[start]
        if stage == 0:
            total += self._facts.embedding_bytes
        if stage == self._last:
            total += self._facts.head_bytes
            if stage == 0 and self._facts.tied_head:
                total -= self._facts.embedding_bytes
        return total

    def load(self, stage: int, start: int, end: int) -> int:
        """Stored bytes over the node's share of the memory, scaled to an integer."""
        return self.stored(stage, start, end) * self._weight[stage]

    def need(self, stage: int, start: int, end: int) -> int:
        """What must lie in the node's memory: weights, the KV cache of the whole run, scratch, and what the
        worker adds."""
        return self.memory_of(stage, start, end).total

    def memory_of(self, stage: int, start: int, end: int) -> StageMemory:
        kv, scratch = self._kv[end] - self._kv[start], 0
        first, last = stage == 0, stage == self._last
        if (chunk := self._prefill_chunk) is not None:
            places = self._max_seq_len
            scratch = kv * spare_rows(places, chunk) // places + self._scratch[last]
            scratch += object_bytes(self._facts, rows=self._prompt_rows, first=first, last=last)
        stored, worker, copied = self.stored(stage, start, end), self._workers[stage], self._copied[stage]
        if worker is None or copied is None:
            return StageMemory(stored, kv, scratch)
        copies = copied[end] - copied[start] + first * worker.embedding + last * worker.head
        copies -= (first and last) * worker.shared
        return StageMemory(stored, kv, scratch + worker.scratch, copies, worker.process, worker.in_file)

    def fits(self, stage: int, start: int, end: int) -> bool:
        memory = self.memory[stage]
        return memory is None or self.need(stage, start, end) <= memory


def partition(
    inventory: Sequence[NodeCapacity],
    facts: ModelFacts,
    *,
    max_seq_len: int,
    prefill_chunk: int | None = None,
    prompt_rows: int = 1,
) -> tuple[int, ...]:
    """The bounds 0 = b0 < b1 < … < bn = num_layers of the stages' layer ranges, stage i on node i.

    Of all partitions that fit the declared memories, one with the least greatest load (stored bytes over
    share of memory), and of those the one with the least sum of squared loads. Raises UsageError, naming
    stage, need and have, when none fits, and ValueError for a worker's facts of another model.
    """
    stages, layers = len(inventory), facts.num_layers
    if stages == 0:
        raise UsageError("there is no node to run on", hint="start at least one node")
    if stages > layers:
        raise UsageError(
            f"{stages} nodes for a model of {layers} layers",
            hint=f"use at most {layers} nodes for this model",
        )
    if len({node.node_id for node in inventory}) < stages:
        raise UsageError("a node is in the inventory twice", hint="list each node once")
    for node in inventory:
        if node.memory_bytes is not None and node.memory_bytes < 1:
            raise UsageError(
                f"node {node.shown} declares {node.memory_bytes} bytes of memory",
                hint="declare what it has, or nothing",
            )
    for node in inventory:
        if node.worker is not None and len(node.worker.layers) != layers:
            raise ValueError(f"a worker speaks of {len(node.worker.layers)} layers, the model has {layers}")
    costs = _Costs(inventory, facts, max_seq_len, prefill_chunk, prompt_rows)
    best = _best_bounds(costs, stages, layers, fit=True)
    if best is None:
        _refuse(costs, inventory, _best_bounds(costs, stages, layers, fit=False))
    return best


def stage_memory(
    plan: RunPlan,
    facts: ModelFacts,
    *,
    prefill_chunk: int | None = None,
    workers: Sequence[WorkerMemory | None] = (),
) -> tuple[StageMemory, ...]:
    """What each stage of `plan` holds in its node's memory, as `partition` counts it; `workers` are those of
    the stages' nodes, none or one for each."""
    in_memory = plan.runtime.weights_in_memory
    told = [worker and worker.planned(weights_in_memory=in_memory) for worker in workers]
    inventory = [
        NodeCapacity(stage.node_id, None, told[index] if told else None)
        for index, stage in enumerate(plan.stages)
    ]
    costs = _Costs(inventory, facts, plan.model.max_seq_len, prefill_chunk, len(plan.runtime.prompt))
    return tuple(costs.memory_of(s.stage_index, s.layer_start, s.layer_end_exclusive) for s in plan.stages)


def _weights_in_memory(
    inventory: Sequence[NodeCapacity],
    facts: ModelFacts,
    choices: RuntimeChoices,
    max_seq_len: int,
    starts: Sequence[int],
) -> bool:
    """The plan's `weights_in_memory`: that leaves plenty everywhere, and some worker waits for this word.

    Of what is free on a machine, by the node there that says least, all its stages together take at most
    half; declared memory holds them; and no stage would leave its weights in the file, as the others then
    would be the ones that differ.
    """
    workers = [node.worker and node.worker.planned(weights_in_memory=True) for node in inventory]
    if not any(node.worker is not None and node.worker.in_memory is not None for node in inventory):
        return False
    told = [replace(node, worker=worker) for node, worker in zip(inventory, workers, strict=True)]
    costs = _Costs(told, facts, max_seq_len, choices.prefill_chunk, len(choices.prompt))
    taken, free = Counter[str](), dict[str, int]()
    for stage, (node, (start, end)) in enumerate(zip(told, pairwise(starts), strict=True)):
        worker = node.worker
        if worker is None or worker.in_file or not worker.process or node.free_bytes is None:
            return False
        if not costs.fits(stage, start, end):
            return False
        taken[node.machine] += costs.need(stage, start, end)
        free[node.machine] = min(node.free_bytes, free.get(node.machine, node.free_bytes))
    return all(taken[machine] <= free[machine] // 2 for machine in free)


def _best_bounds(costs: _Costs, stages: int, layers: int, *, fit: bool) -> tuple[int, ...] | None:
    """The dynamic programme twice: for the least greatest load, then for the least squares under it."""
    greatest = _programme(costs, stages, layers, fit=fit, ceiling=None)
    if greatest is None:
        return None
    return (_programme(costs, stages, layers, fit=fit, ceiling=greatest[0]) or greatest)[1]


def _programme(
    costs: _Costs, stages: int, layers: int, *, fit: bool, ceiling: int | None
) -> tuple[int, tuple[int, ...]] | None:
    """(value, bounds) of the best partition of all layers over all stages, or None.

    best[end] is the least value of layers [0, end) on the stages so far: the greatest load without a ceiling,
    the sum of squared loads, each under the ceiling, with one. Every stage has a layer.
    """
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for stage in range(stages):
        following = dict[int, tuple[int, tuple[int, ...]]]()
        remaining = stages - stage - 1
        for end in [layers] if remaining == 0 else range(stage + 1, layers - remaining + 1):
            chosen: tuple[int, tuple[int, ...]] | None = None
            for start in range(end - 1, stage - 1, -1):
                load = costs.load(stage, start, end)
                # Going down, the stage only grows: what is too much stays too much.
                if (fit and not costs.fits(stage, start, end)) or (ceiling is not None and load > ceiling):
                    break
                if chosen is not None and (load if ceiling is None else load * load) >= chosen[0]:
                    break
                before = best.get(start)
                if before is None:
                    continue
                value = max(before[0], load) if ceiling is None else before[0] + load * load
                if chosen is None or value < chosen[0]:
                    chosen = (value, (*before[1], end))
            if chosen is not None:
                following[end] = chosen
        best = following
    return best.get(layers)


def _refuse(costs: _Costs, inventory: Sequence[NodeCapacity], bounds: tuple[int, ...] | None) -> NoReturn:
    """Names the stage that lacks most in the partition that would be the best if memory did not matter."""
    assert bounds is not None
    lacking = []
    for stage, (start, end) in enumerate(pairwise(bounds)):
        memory = costs.memory[stage]
        if memory is not None and (need := costs.need(stage, start, end)) > memory:
            lacking.append((need - memory, stage, start, end, need, memory))
    _, stage, start, end, need, memory = max(lacking)
    held = costs.memory_of(stage, start, end)
    named = {
        "weights": held.weights,
        "KV cache": held.kv,
        "scratch": held.scratch,
        "copies of weights": held.copies,
        "the worker's process": held.process,
    }
    parts = ", ".join(f"{name} {nbytes}" for name, nbytes in named.items() if nbytes)
    hint = "add nodes, take a smaller quantisation, or ask for fewer tokens"
    if held.copies >= need - memory:
        hint = "leave out the worker options that copy weights, such as weights=packed; or " + hint
    raise UsageError(
        f"the model does not fit: stage {stage} on node {inventory[stage].shown} with layers "
        f"[{start}, {end}) needs {need} bytes ({parts}) and has {memory}",
        hint=hint,
    )


# edges


def _edges(
    inventory: Sequence[NodeCapacity],
    facts: ModelFacts,
    choices: RuntimeChoices,
    max_seq_len: int,
    run_id: RunId,
    orchestrator: NodeId,
    edge_ids: EdgeIdAllocator,
) -> tuple[EdgePlan, ...]:
    """Token-in, the activation edges in stage order, token-out: edge i ends at stage i."""
    home = EdgeEndpoint(orchestrator)
    ends = [home, *(EdgeEndpoint(node.node_id, StageIndex(i)) for i, node in enumerate(inventory)), home]
    tokens = ObjectSpec(ObjectKind.TOKENS, max_seq_len * TOKEN_BYTES, DTypeFamily.UNSIGNED, TOKEN_BYTES, 1)
    activation = ObjectSpec(
        ObjectKind.ACTIVATION,
        activation_max_extent(max_seq_len, facts.hidden_dim, choices.dtype_width_bytes),
        choices.dtype_family,
        choices.dtype_width_bytes,
        facts.hidden_dim,
        alignment=choices.dtype_width_bytes,
    )
    result = ObjectSpec(ObjectKind.TOKENS, TOKEN_BYTES, DTypeFamily.UNSIGNED, TOKEN_BYTES, 1)
    if choices.token_output_policy is TokenOutputPolicy.LOGITS:
        row = facts.vocab_size * LOGIT_BYTES
        result = ObjectSpec(ObjectKind.LOGITS, row, DTypeFamily.FLOAT, LOGIT_BYTES, facts.vocab_size)
    between = len(inventory) - 1
    kinds = [EdgeKind.TOKEN_IN, *[EdgeKind.ACTIVATION] * between, EdgeKind.TOKEN_OUT]
    specs = [tokens, *[activation] * between, result]
    return tuple(
        EdgePlan(
            run_id=run_id,
            edge_id=edge_ids.take(),
            kind=kind,
            producer=producer,
            consumer=consumer,
            object_spec=spec,
            ring_capacity=default_ring_capacity(spec)
            if choices.ring_capacity is None
            else choices.ring_capacity,
        )
        for kind, spec, (producer, consumer) in zip(kinds, specs, pairwise(ends), strict=True)
    )


def default_ring_capacity(spec: ObjectSpec) -> int:
    """A power of two between 64 KiB and 1 MiB that holds the largest record, as far as 1 MiB does."""
    record = OBJECT_HEADER_BYTES + spec.max_extent
    return min(max(1 << (record - 1).bit_length(), MIN_RING), MAX_RING)
