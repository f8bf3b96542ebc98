"""What the plug-in says of a stage's memory is what its worker holds: second copies, and the process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stage_support import DATA, manifest_of
from swactor_core.errors import ConfigError
from swactor_core.memory import F32_BYTES
from swactor_core.messages import (
    ObjectLoaded,
    RingReadable,
    RingWritable,
    RoleConfigured,
    RoleProgress,
    StepCompleted,
    WorkerReady,
)
from swactor_core.plan import SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import RingDirection
from swactor_core.spi.worker import StageConfig
from swactor_testing.worker_kit import (
    NodeConsumer,
    NodeProducer,
    WorkerProcess,
    configure,
    execute,
    record,
    token_spec,
)
from swactor_worker_tinygrad.memory import LANES, stage_memory
from swactor_worker_tinygrad.tensor_types import GRAPH_TYPES, NATIVE_TYPES, PACKED_TYPES

QUANTS = DATA.parent / "quants"
PROMPT = 384


def said(path: Path, *layers: int, **settings: object) -> Any:
    return stage_memory(manifest_of(path, *layers), 32, prefill_chunk=8, settings=settings)


def test_the_tables_are_those_of_the_kernels(backend: Any) -> None:
    from swactor_worker_tinygrad import native

    assert frozenset(native.TYPES) == NATIVE_TYPES
    assert native.LANE_TYPES == PACKED_TYPES
    assert native.LANES == LANES


def test_packing_copies_a_table_that_is_embedding_and_head() -> None:
    path = DATA.parent / "variants" / "gemma3-q8.gguf"
    manifest = manifest_of(path)
    table = next(ref for ref in manifest.tensors if ref.name == "token_embd.weight")
    assert manifest.tied_head
    assert said(path).copies == 0
    assert said(path, weights="packed").copies >= table.nbytes
    assert said(path, 0, 1, weights="packed").copies < table.nbytes
    assert said(path, weights="packed", kernels="graph").copies == 0


def test_a_type_without_a_kernel_is_counted_as_f32_where_it_is_unpacked() -> None:
    path = QUANTS / "Q2_K.gguf"
    unpacked = sum(
        F32_BYTES * int(np.prod(ref.dims))
        for ref in manifest_of(path).tensors
        if ref.ggml_type not in GRAPH_TYPES
    )
    assert unpacked > 0
    assert said(path, kernels="native").copies == 0
    assert said(path, kernels="graph").copies == unpacked


def test_a_graph_s_process_is_larger_and_a_wrong_setting_is_refused() -> None:
    path = QUANTS / "Q8_0.gguf"
    assert said(path, kernels="graph").process > said(path).process
    with pytest.raises(ConfigError, match="weights"):
        said(path, weights="folded")


def resident(pid: int) -> int:
    found = re.search(r"^Rss:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.long
@pytest.mark.parametrize("weights", ["mapped", "packed"])
def test_a_worker_holds_within_a_tenth_of_what_is_planned(weights: str, tmp_path: Path) -> None:
    """SmolLM2-135M, all of it in one stage, behind a prompt that fills the context. The first start on a
    machine compiles Python and the device's own programs, which takes memory that no later one does."""
    from swactor_core.ids import NodeId, RunId
    from swactor_core.plan import GgufSource
    from swactor_core.planner import EdgeIdAllocator, NodeCapacity, RuntimeChoices, plan_run
    from swactor_core.planner import stage_memory as planned_memory
    from swactor_loader_gguf.loader import GgufLoader

    loader = GgufLoader()
    path = loader.resolve("demo")
    model = loader.open(path)
    try:
        manifest, facts = model.manifest(0, model.facts.num_layers), model.facts
        made = plan_run(
            [NodeCapacity(NodeId(1))],
            facts,
            source=GgufSource(path, model.digest()),
            choices=RuntimeChoices(prompt=(0,) * PROMPT, max_tokens=1, prefill_chunk=32),
            run_id=RunId(1),
            orchestrator=NodeId(0),
            edge_ids=EdgeIdAllocator(),
        )
    finally:
        model.close()
    context, settings = made.model.max_seq_len, {"weights": weights, "threads": 1}
    need = planned_memory(made, facts, prefill_chunk=32)[0].total
    more = stage_memory(manifest, context, prefill_chunk=32, settings=settings)
    config = StageConfig(
        manifest=manifest,
        max_context=context,
        prefill_chunk=32,
        input_spec=token_spec(context),
        output_spec=token_spec(1),
        sampling=SamplingPolicy(),
        token_output_policy=TokenOutputPolicy.TOKEN_IDS,
    )
    environment = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    with WorkerProcess("tinygrad", environment=environment) as first:
        first.initialize(settings)
        while not isinstance(first.next_event(), WorkerReady):
            pass
    with WorkerProcess("tinygrad", environment=environment) as worker:
        worker.initialize(settings)
        while not isinstance(worker.next_event(), WorkerReady):
            pass
        worker.send(configure(config))
        while not isinstance(event := worker.next_event(), RoleConfigured):
            assert isinstance(event, RoleProgress), event
        producer = NodeProducer(
            worker.install(RingDirection.INGRESS, config.input_spec, capacity=1 << 16), worker
        )
        consumer = NodeConsumer(
            worker.install(RingDirection.EGRESS, config.output_spec, capacity=1 << 16), worker
        )
        ids = np.random.default_rng(0).integers(10, manifest.vocab_size - 10, PROMPT).astype("<u4")
        producer.write(record(0, 0, ids.tobytes()))
        while not isinstance(event := worker.next_event(), StepCompleted):
            if isinstance(event, ObjectLoaded):
                worker.send(execute(event, 4, position=0, step=0))
            elif isinstance(event, RingReadable):
                consumer.read()
            elif isinstance(event, RingWritable):
                producer.on_writable(event)
        held = resident(worker.process.pid)
    planned = need + more.copies + more.process
    assert abs(planned - held) <= held / 10, f"planned {planned >> 20} MiB, held {held >> 20} MiB"
