"""Whether stages may hold their weights in memory: one word of the plan, for the run as a whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core import free_memory
from swactor_core.codec import MessageCodec
from swactor_core.errors import UsageError
from swactor_core.fitting import check_free_memory
from swactor_core.ids import NodeId, RunId
from swactor_core.machines.provisioning import provision_stage, stage_config
from swactor_core.messages import CONTROL_MESSAGES, NodeAvailable, ProvisionStage
from swactor_core.node.node import _with_memory
from swactor_core.plan import GgufSource, RunPlan
from swactor_core.planner import EdgeIdAllocator, NodeCapacity, RuntimeChoices, plan_run, stage_memory
from swactor_core.schemas import Form
from swactor_core.spi.loader import ModelFacts, StageManifest
from swactor_core.spi.provider import WorkerMemory
from swactor_core.spi.worker import StageConfig

LAYERS, LAYER_BYTES, PROCESS, FILLED = 4, 1000, 100, 50
PACKED = WorkerMemory(layers=(FILLED,) * LAYERS, process=PROCESS)
MAPPED = WorkerMemory(layers=(0,) * LAYERS, process=PROCESS, in_file=True)
AUTO = replace(MAPPED, in_memory=PACKED)
NEED = LAYERS * (LAYER_BYTES + FILLED)  # of all stages together, without their processes
MODEL = ModelFacts(
    model_id="model",
    architecture="llama",
    num_layers=LAYERS,
    hidden_dim=64,
    vocab_size=160,
    context_length=512,
    layer_bytes=(LAYER_BYTES,) * LAYERS,
    embedding_bytes=0,
    head_bytes=0,
    tied_head=False,
    kv_bytes_per_token=(0,) * LAYERS,
    type_names=("Q8_0",),
    has_vocabulary=True,
    file_bytes=1 << 20,
)


def node(
    worker: WorkerMemory | None = AUTO, free: int | None = 1 << 40, machine: str = "", have: int | None = None
) -> NodeCapacity:
    return NodeCapacity(NodeId(0), have, worker, free_bytes=free, machine=machine)


def plan_of(*nodes: NodeCapacity) -> RunPlan:
    return plan_run(
        [replace(each, node_id=NodeId(index + 1)) for index, each in enumerate(nodes)],
        MODEL,
        source=GgufSource("model.gguf", "d" * 64),
        choices=RuntimeChoices((1, 2), 8),
        run_id=RunId(7),
        orchestrator=NodeId(99),
        edge_ids=EdgeIdAllocator(),
    )


def of(nodes: int) -> int:
    """What that many stages need together."""
    return NEED + nodes * PROCESS


@pytest.mark.parametrize(
    ("nodes", "in_memory"),
    [
        # half of what is free, and a byte less
        ([node(free=2 * of(1))], True),
        ([node(free=2 * of(1) - 1)], False),
        # nodes of one machine share it, whatever each of them said
        ([node(free=2 * of(2))] * 2, True),
        ([node(free=2 * of(2)), node(free=2 * of(2) - 1)], False),
        ([node(free=2 * of(2) - 1), node()], False),
        ([node(free=of(2))] * 2, False),
        # two machines have each their own
        ([node(free=of(2), machine="a"), node(free=of(2), machine="b")], True),
        ([node(free=of(2), machine="a"), node(free=of(2) - 1, machine="b")], False),
        ([node(machine="a"), node(free=of(2) - 1, machine="b"), node(machine="a")], True),
        ([node(machine="a"), node(free=(of(4) // 2) - 1, machine="b"), node(machine="a"), node()], False),
        # what is declared holds it as well
        ([node(have=of(1))], True),
        ([node(have=of(1) - 1)], False),
        # nobody knows
        ([node(free=None)], False),
        ([node(), node(free=None)], False),
        ([node(), node(None)], False),
        ([node(None)], False),
        # workers that do the same whatever the plan says, and those beside them that follow it
        ([node(MAPPED)], False),
        ([node(PACKED)], False),
        ([node(), node(MAPPED)], False),
        ([node(), node(PACKED)], True),
        ([node(replace(AUTO, in_memory=replace(PACKED, in_file=True)))], False),
        # a device with a memory of its own
        ([node(), node(replace(PACKED, process=0))], False),
        ([node(replace(AUTO, in_memory=replace(PACKED, process=0)))], False),
    ],
)
def test_weights_are_in_memory_where_that_leaves_plenty_everywhere(
    nodes: list[NodeCapacity], in_memory: bool
) -> None:
    plan = plan_of(*nodes)
    assert plan.runtime.weights_in_memory is in_memory
    held = stage_memory(plan, MODEL, workers=[each.worker for each in nodes])
    for stage, memory, each in zip(plan.stages, held, nodes, strict=True):
        worker = each.worker
        if worker is not None:
            said = worker.in_memory if in_memory and worker.in_memory is not None else worker
            assert (memory.in_file, memory.process) == (said.in_file, said.process)
            assert memory.copies == sum(said.layers[stage.layer_start : stage.layer_end_exclusive])


@given(st.integers(0, 4 * of(4)), st.integers(1, LAYERS), st.integers(0, PROCESS))
def test_who_leaves_it_to_the_plan_is_never_refused_where_the_file_would_do(
    free: int, nodes: int, node_process: int
) -> None:
    """`node_process` is what a node takes beside its worker; it is less than the worker takes."""
    refused = {}
    for name, worker in (("auto", AUTO), ("mapped", MAPPED)):
        plan = plan_of(*[node(worker, free)] * nodes)
        try:
            said = check_free_memory(
                plan, MODEL,
                prefill_chunk=32, worker=worker, free=free, swap=0, where="here", node_process=node_process,
            )  # fmt: skip
        except UsageError:
            refused[name] = True
        else:
            refused[name] = False
            assert not (plan.runtime.weights_in_memory and said), "what is plenty needs no word"
    assert refused["auto"] == refused["mapped"]


def test_an_explicit_choice_keeps_its_account() -> None:
    """A plan whose other stages follow it changes nothing for one that does not."""
    assert MAPPED.planned(weights_in_memory=True) is MAPPED
    assert PACKED.planned(weights_in_memory=True) is PACKED
    assert AUTO.planned(weights_in_memory=False) is AUTO
    assert AUTO.planned(weights_in_memory=True) is PACKED


@pytest.mark.parametrize("free", [1, 1 << 40])
def test_every_stage_s_worker_is_told_the_plan_s_word(free: int) -> None:
    plan = plan_of(*[node(free=free)] * 2)
    manifest = StageManifest("llama", {}, LAYERS, 0, LAYERS, 64, 160, 160, False, ())
    for stage in plan.stages:
        provision = provision_stage(plan, stage, prefill_chunk=32)
        assert stage_config(provision, manifest).weights_in_memory is (free > 1)


def test_a_message_of_before_says_that_weights_stay_in_the_file() -> None:
    plan = plan_of(node())
    provision = provision_stage(plan, plan.stages[0], prefill_chunk=32)
    codec = MessageCodec(CONTROL_MESSAGES)
    assert codec.decode(codec.encode(provision)) == provision
    assert provision.runtime.weights_in_memory is True
    older = json.loads(codec.encode(provision))
    del older["runtime"]["weights_in_memory"]
    decoded: ProvisionStage = codec.decode(json.dumps(older).encode())
    assert decoded.runtime == replace(provision.runtime, weights_in_memory=False)

    form = Form(StageConfig, closed=False)
    manifest = StageManifest("llama", {}, LAYERS, 0, LAYERS, 64, 160, 160, False, ())
    config = form.serializer.to_python(stage_config(provision, manifest), mode="json")
    assert config.pop("weights_in_memory") is True
    assert form.validator.validate_python(config).weights_in_memory is False


@pytest.mark.parametrize(
    ("said", "now", "announced"),
    [({"free_bytes": 5}, 3, {"free_bytes": 3}), ({"free_bytes": 5}, None, {"free_bytes": 5}), ({}, 3, {})],
)
def test_a_node_says_what_is_free_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], now: int | None, announced: dict[str, Any]
) -> None:
    """Its worker measured when it started, which may be long ago; a device's own memory is not the node's."""
    monkeypatch.setattr(free_memory, "available_memory", lambda: now)
    available = NodeAvailable(NodeId(1), 1, "n", None, {"worker": "w", **said})
    assert _with_memory(available).worker == {"worker": "w", **announced}
