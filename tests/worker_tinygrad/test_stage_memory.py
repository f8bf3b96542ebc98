"""What the plug-in says of a model's memory is what its workers hold: copies, scratch, and the process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from stage_support import DATA, Pipeline, manifest_of
from swactor_core.errors import ConfigError
from swactor_core.ids import NodeId, RunId
from swactor_core.machines.provisioning import provision_stage
from swactor_core.memory import F32_BYTES
from swactor_core.plan import GgufSource
from swactor_core.planner import (
    EdgeIdAllocator,
    NodeCapacity,
    RuntimeChoices,
    plan_run,
    positions_of,
    stage_memory,
)
from swactor_testing.resident import Resident, held_by_stage
from swactor_worker_tinygrad.memory import model_memory
from swactor_worker_tinygrad.tensor_types import GRAPH_TYPES, LANES, NATIVE_TYPES, PACKED_TYPES

QUANTS = DATA.parent / "quants"
CHUNK = 32


def said(path: Path, **settings: object) -> Any:
    return model_memory(manifest_of(path), 32, prefill_chunk=8, settings=settings)


def copies(path: Path, **settings: object) -> int:
    """Of one stage that is the whole model."""
    memory = said(path, **settings)
    return sum(memory.layers) + memory.embedding + memory.head - memory.shared


def test_the_tables_are_those_of_the_kernels(backend: Any) -> None:
    from swactor_worker_tinygrad import native

    assert frozenset(native.TYPES) == NATIVE_TYPES
    assert native.QUADS.keys() <= PACKED_TYPES
    assert f"#define LANES {LANES}\n" in native.source("norm")


@pytest.mark.parametrize(
    ("name", "settings", "in_file"),
    [
        ("quants/Q4_1", {"weights": "mapped"}, True),
        ("quants/Q4_1", {"weights": "auto"}, True),
        ("quants/Q4_1", {"weights": "packed"}, False),
        ("quants/Q4_1", {"weights": "packed", "kernels": "graph"}, True),
        ("tiny/llama-gqa", {"weights": "packed"}, True),
        ("quants/Q4_1", {"weights": "auto", "numerics": "fast"}, False),
        ("quants/Q4_1", {"device": "CUDA"}, False),
    ],
)
def test_weights_are_the_file_s_unless_some_are_laid_out_anew(
    name: str, settings: dict[str, str], in_file: bool
) -> None:
    assert said(DATA.parent / f"{name}.gguf", **settings).in_file is in_file


@pytest.mark.parametrize("settings", [{}, {"kernels": "graph"}, {"device": "CUDA"}, {"numerics": "fast"}])
@pytest.mark.parametrize("name", ["variants/qwen2-mixed", "quants/Q4_K_M", "tiny/qwen3moe", "tiny/llama-gqa"])
def test_auto_has_both_accounts_where_both_can_be(
    name: str, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only one where the plan's word changes nothing: graphs, other devices, fast numerics, and a model
    of which nothing is laid out anew."""
    monkeypatch.setattr("swactor_worker_tinygrad.memory.WORTH_PACKING", 0)
    path = DATA.parent / f"{name}.gguf"
    auto, packed = (said(path, **settings, weights=weights) for weights in ("auto", "packed"))
    if "numerics" in settings:
        assert auto == packed
        return
    mapped = said(path, **settings, weights="mapped")
    assert mapped.in_memory is None
    assert packed.in_memory is None
    assert auto == replace(mapped, in_memory=None if packed == mapped else packed)
    quantised = name in ("variants/qwen2-mixed", "quants/Q4_K_M")
    assert (auto.in_memory is not None) == (quantised and not settings)


def test_packing_fills_rows_up_and_copies_nothing_for_long() -> None:
    assert copies(DATA.parent / "variants" / "gemma3-q8.gguf", weights="packed") == 0
    path = DATA.parent / "variants" / "phi3-q8.gguf"
    odd = [
        (ref.nbytes // ref.dims[1]) * (-ref.dims[1] % LANES)
        for ref in manifest_of(path).tensors
        if len(ref.dims) > 1 and ref.ggml_type in PACKED_TYPES and "token_embd" not in ref.name
    ]
    assert copies(path, weights="packed") == sum(odd)
    assert copies(path) == copies(path, weights="packed", kernels="graph") == 0


def test_a_type_without_a_kernel_is_counted_as_f32_where_it_is_unpacked() -> None:
    path = QUANTS / "Q2_K.gguf"
    unpacked = {
        ref.name: F32_BYTES * int(np.prod(ref.dims))
        for ref in manifest_of(path).tensors
        if ref.ggml_type not in GRAPH_TYPES
    }
    of_layers = sum(size for name, size in unpacked.items() if name.startswith("blk."))
    assert of_layers > 0
    assert copies(path, kernels="native") == 0
    graph = said(path, kernels="graph")
    assert sum(graph.layers) == of_layers
    assert graph.embedding == 0  # a graph takes its rows from the file
    assert graph.head == unpacked.get("output.weight", 0)


def test_a_graph_s_process_is_larger_and_a_wrong_setting_is_refused() -> None:
    plain = {said(QUANTS / f"{name}.gguf").process for name in ("F16", "Q6_K")}
    graphs = {said(QUANTS / f"{name}.gguf", kernels="graph").process for name in ("F16", "Q4_1", "Q6_K")}
    assert len(plain) == len(graphs) == 1
    assert plain.pop() < graphs.pop()
    with pytest.raises(ConfigError, match="weights"):
        said(QUANTS / "Q8_0.gguf", weights="folded")


def test_scratch_has_what_kinds_of_blocks_need_each() -> None:
    """Layers with a window have tables and a graph of their own; graphs keep scores and shares of a chunk."""
    manifest = manifest_of(DATA.parent / "variants" / "gemma3-q8.gguf")
    heads = manifest.metadata["gemma3.attention.head_count"]
    dims = manifest.metadata["gemma3.attention.key_length"]
    for positions in (64, 128):
        made = {
            kernels: model_memory(manifest, positions, prefill_chunk=8, settings={"kernels": kernels}).scratch
            for kernels in ("native", "graph")
        }
        assert made["native"] == F32_BYTES * (positions + 8) * dims
        assert made["graph"] - made["native"] == 2 * 2 * F32_BYTES * heads * 8 * (positions + 8)


def test_a_device_with_a_memory_of_its_own_holds_no_process() -> None:
    assert said(QUANTS / "F16.gguf", device="CUDA").process == 0


# what real workers hold


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Python's bytecode and the device's own programs on disk: making them takes memory that stays."""
    from swactor_core.messages import WorkerReady
    from swactor_testing.worker_kit import WorkerProcess

    made = {
        "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode")),
        "PYTHONDONTWRITEBYTECODE": "",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }
    with WorkerProcess("tinygrad", environment=made) as first:
        first.initialize()
        first.expect(WorkerReady)
    # tinygrad's too, which graphs alone import; of its many generated bindings those that the CPU has
    library = str(Path(str(find_spec("tinygrad").origin)).parent)  # type: ignore[union-attr]
    compiling = [sys.executable, "-m", "compileall", "-q", "-x", "autogen/(?!libc|mesa)", library]
    subprocess.run(compiling, env={**os.environ, **made}, check=True, timeout=100)
    return made


def planned_and_held(
    path: str,
    environment: dict[str, str],
    *,
    nodes: int = 1,
    prompt: int,
    tokens: int = 2,
    twice: bool = False,
    free: int | None = None,
    **settings: object,
) -> list[tuple[int, Resident]]:
    """For each stage, what `swactor-cli plan` has for it where `free` bytes are, and what its worker held, of
    the second start with `twice`."""
    from swactor_loader_gguf.loader import GgufLoader

    settings = {"threads": 1, **settings}
    model = GgufLoader().open(path)
    try:
        facts, held = model.facts, []
        choices = RuntimeChoices(prompt=(0,) * prompt, max_tokens=tokens, prefill_chunk=CHUNK)
        worker = model_memory(
            model.manifest(0, facts.num_layers),
            positions_of(facts, choices),
            prefill_chunk=CHUNK,
            settings=settings,
        )
        plan = plan_run(
            [NodeCapacity(NodeId(index + 1), None, worker, free_bytes=free) for index in range(nodes)],
            facts,
            source=GgufSource(path, model.digest()),
            choices=choices,
            run_id=RunId(1),
            orchestrator=NodeId(0),
            edge_ids=EdgeIdAllocator(),
        )
        needs = stage_memory(plan, facts, prefill_chunk=CHUNK, workers=[worker] * nodes)
        for stage, need in zip(plan.stages, needs, strict=True):
            provision = provision_stage(plan, stage, prefill_chunk=CHUNK)
            manifest = model.manifest(stage.layer_start, stage.layer_end_exclusive)
            for _ in range(2 if twice else 1):
                _, resident = held_by_stage(
                    provision,
                    manifest,
                    settings,
                    worker="tinygrad",
                    prompt=prompt,
                    tokens=tokens,
                    environment=environment,
                )
            held.append((need.total, resident))
    finally:
        model.close()
    return held


# Python 3.15 with the libraries of Debian 14 takes so much more than what the plan's process was
# measured with: 3.11 on Debian 12.
NEWER_PROCESS = 6 << 20


def within_a_tenth(planned: int, held: Resident) -> None:
    assert abs(planned - held.total) <= held.total / 10, f"planned {planned >> 20} MiB, held {held}"


def written(
    path: Path,
    architecture: str,
    *,
    hidden: int,
    wide: int,
    vocabulary: int,
    layers: int,
    experts: int = 0,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> str:
    """A model of zeros of one type with one head's width of 64 and a head tied to the embedding."""
    heads, key = hidden // 64, 64
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_key_length(key)
    writer.add_value_length(key)
    writer.add_rope_dimension_count(key)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("no_vocab")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(wide)

    def matrix(name: str, *shape: int) -> None:
        values, block_bytes = GGML_QUANT_SIZES[kind]
        stored = np.zeros((*shape[:-1], shape[-1] // values * block_bytes), np.uint8)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)

    def vector(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    matrix("token_embd", vocabulary, hidden)
    vector("output_norm", hidden)
    for layer in range(layers):
        block = f"blk.{layer}."
        for name, width in (("attn_norm", hidden), ("ffn_norm", hidden)):
            vector(block + name, width)
        if experts:
            vector(block + "attn_q_norm", key)
            vector(block + "attn_k_norm", key)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(block + name, hidden, hidden)
        if experts:
            writer.add_tensor(f"{block}ffn_gate_inp.weight", np.zeros((experts, hidden), np.float32))
            for name in ("gate", "up", "down"):
                matrix(
                    f"{block}ffn_{name}_exps",
                    experts,
                    *((hidden, wide) if name == "down" else (wide, hidden)),
                )
        else:
            matrix(block + "ffn_gate", wide, hidden)
            matrix(block + "ffn_up", wide, hidden)
            matrix(block + "ffn_down", hidden, wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize(
    ("weights", "free", "packed"),
    [("mapped", None, False), ("packed", None, True), ("auto", 1 << 40, True), ("auto", 1 << 20, False)],
)
def test_a_tied_table_of_many_words_is_held_once(
    weights: str,
    free: int | None,
    packed: bool,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most of the model is the table, which is looked up in and projected with: 70 MiB."""
    monkeypatch.setattr("swactor_worker_tinygrad.memory.WORTH_PACKING", 64 << 20)
    path = written(tmp_path / "words.gguf", "llama", hidden=256, wide=512, vocabulary=262144, layers=2)
    ((planned, held),) = planned_and_held(path, environment, prompt=200, tokens=8, free=free, weights=weights)
    within_a_tenth(planned, held)
    table = 262144 * 256 // 32 * 34
    if packed:
        assert held.file < table / 10
        assert held.anonymous > table
    else:
        assert held.file > table


@pytest.mark.parametrize("weights", ["mapped", "packed"])
def test_a_mixture_of_experts_holds_what_is_planned(
    weights: str, environment: dict[str, str], tmp_path: Path
) -> None:
    path = written(
        tmp_path / "experts.gguf", "qwen3moe", hidden=512, wide=256, vocabulary=512, layers=2, experts=32
    )
    ((planned, held),) = planned_and_held(path, environment, prompt=64, weights=weights)
    within_a_tenth(planned, held)


@pytest.mark.parametrize(("name", "weights"), [("IQ3_S", "mapped"), ("IQ2_S", "packed"), ("MXFP4", "packed")])
def test_types_that_are_not_laid_out_anew_are_held_as_the_file_has_them(
    name: str, weights: str, environment: dict[str, str], tmp_path: Path
) -> None:
    kind = GGMLQuantizationType[name]
    path = written(
        tmp_path / "m.gguf", "llama", hidden=512, wide=1024, vocabulary=1 << 17, layers=2, kind=kind
    )
    ((planned, held),) = planned_and_held(path, environment, prompt=64, weights=weights)
    within_a_tenth(planned, held)
    assert abs(planned - held.peak) <= held.peak / 10, f"planned {planned >> 20} MiB, held {held}"
    values, block_bytes = GGML_QUANT_SIZES[kind]
    assert held.file > (1 << 17) * 512 // values * block_bytes
    assert copies(Path(path), weights=weights) == 0


def test_a_model_that_is_unpacked_holds_what_is_planned(environment: dict[str, str], tmp_path: Path) -> None:
    """What is unpacked is beside the file's pages."""
    kind = GGMLQuantizationType.F64
    path = written(tmp_path / "m.gguf", "llama", hidden=512, wide=512, vocabulary=8192, layers=2, kind=kind)
    ((planned, held),) = planned_and_held(path, environment, prompt=64, weights="packed")
    within_a_tenth(planned, held)
    off = abs(planned - held.peak)
    assert off <= held.peak / 10 + NEWER_PROCESS, f"planned {planned >> 20} MiB, held {held}"
    assert held.anonymous > 8192 * 512 * F32_BYTES


def test_stages_of_a_long_prompt_hold_its_rows_as_objects(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """1600 rows of 2048 values come to the second stage and leave it: 12.5 MiB each, beside 30 of weights."""
    path = written(tmp_path / "wide.gguf", "llama", hidden=2048, wide=64, vocabulary=64, layers=3)
    stages = planned_and_held(path, environment, nodes=3, prompt=1600)
    for planned, held in stages:
        # the prompt's input is given back when its step is done
        assert abs(planned - held.peak) <= held.peak / 10, f"planned {planned >> 20} MiB, held {held}"
    assert stages[1][1].peak - stages[0][1].peak > 11 << 20


@pytest.mark.long
@pytest.mark.parametrize("name", ["F16", "Q4_1", "Q6_K"])
def test_a_graph_s_first_start_holds_what_is_planned(
    name: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Another process captures, and unpacking k-quants takes the most."""
    fresh = {**environment, "XDG_CACHE_HOME": str(tmp_path)}
    path = str(QUANTS / f"{name}.gguf")
    ((planned, held),) = planned_and_held(path, fresh, prompt=40, kernels="graph")
    within_a_tenth(planned, held)


@pytest.mark.long
@pytest.mark.parametrize("weights", ["mapped", "packed"])
def test_a_real_model_holds_what_is_planned(weights: str, environment: dict[str, str]) -> None:
    """SmolLM2-135M, all of it in one stage."""
    from swactor_loader_gguf.loader import GgufLoader

    path = GgufLoader().resolve("demo")
    ((planned, held),) = planned_and_held(path, environment, prompt=384, weights=weights)
    within_a_tenth(planned, held)


def test_roles_that_are_closed_leave_nothing_mapped_however_many_there_were(backend: Any) -> None:
    """A worker serves run after run: what each leaves, its kernels' code and its cache, would add up."""
    mapped = []
    for context in range(64, 72):
        pipeline = Pipeline(backend, DATA / "llama-gqa.gguf", 1, max_context=context)
        assert pipeline.generate((5, 6, 7), 2)
        pipeline.close()
        del pipeline
        mapped.append(len(Path("/proc/self/maps").read_text().splitlines()))
    grown = mapped[-1] - mapped[2]
    assert grown < 5, f"{grown} mappings more after five more roles: {mapped}"
