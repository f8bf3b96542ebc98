"""The native kernels and tinygrad's graph compute the same model where it has everything optional in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from stage_support import Pipeline
from swactor_core.plan import TokenOutputPolicy
from swactor_worker_tinygrad.settings import WeightsChoice

HIDDEN, WIDE, HEADS, KV_HEADS, KEY, VOCAB = 96, 160, 4, 2, 40, 77
LAYERS = 2
SHAPES = {
    "attn_q": (HEADS * KEY, HIDDEN),
    "attn_k": (KV_HEADS * KEY, HIDDEN),
    "attn_v": (KV_HEADS * KEY, HIDDEN),
    "attn_output": (HIDDEN, HEADS * KEY),
    "ffn_gate": (WIDE, HIDDEN),
    "ffn_up": (WIDE, HIDDEN),
    "ffn_down": (HIDDEN, WIDE),
}
KINDS = ["Q8_0", "Q4_0", "Q5_1", "F16", "Q4_1", "BF16", "Q5_0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases everywhere, wide heads of an odd width, scaled rope, frequency factors, mixed types."""
    path = tmp_path_factory.mktemp("model") / "everything.gguf"
    generator = np.random.default_rng(11)
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(KEY)
    writer.add_value_length(KEY)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_string("llama.rope.scaling.type", "linear")
    writer.add_float32("llama.rope.scaling.factor", 2.0)

    def add(name: str, shape: tuple[int, ...], kind: str = "F32", scale: float = 0.2) -> None:
        values = (generator.standard_normal(shape) * scale).astype(np.float32)
        if "norm" in name or "freqs" in name:
            values = 1.0 + np.abs(values)
        if kind in ("F32", "F16"):
            writer.add_tensor(name, values.astype({"F32": np.float32, "F16": np.float16}[kind]))
        else:
            number = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(values, number), raw_dtype=number)

    add("token_embd.weight", (VOCAB, HIDDEN), "Q8_0", 1.0)
    add("output_norm.weight", (HIDDEN,))
    add("output.weight", (VOCAB, HIDDEN), "F16")
    add("rope_freqs.weight", (KEY // 2,), scale=2.0)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", (HIDDEN,), "F16" if layer == 1 else "F32")
        add(f"blk.{layer}.ffn_norm.weight", (HIDDEN,))
        for index, (name, shape) in enumerate(SHAPES.items()):
            add(f"blk.{layer}.{name}.weight", shape, KINDS[(index + layer) % len(KINDS)])
            add(f"blk.{layer}.{name}.bias", shape[:1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("weights", ["mapped", "packed"])
def test_logits_agree(
    backend: Any, graph_backend: Any, model: Path, stages: int, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "settings", replace(backend.settings, weights=WeightsChoice(weights)))
    prompt = [int(i) for i in np.random.default_rng(12).integers(0, VOCAB, 13)]
    options: dict[str, Any] = {"max_context": 32, "chunk": 5, "policy": TokenOutputPolicy.LOGITS}
    made = []
    for each, count in ((backend, stages), (graph_backend, 1)):
        pipeline = Pipeline(each, model, count, **options)
        packed = bool(pipeline.roles[0].engine.packed_names)
        assert packed == (each is backend and weights == "packed")
        rows = [pipeline.step(prompt, 0)]
        rows += [pipeline.step([token], len(prompt) + index) for index, token in enumerate((5, 70, 33))]
        made.append(np.array([np.frombuffer(row, "<f4") for row in rows]))
        pipeline.close()
    assert made[0].std() > 0.5, "logits that say nothing would agree too"
    np.testing.assert_allclose(made[0], made[1], rtol=1e-4, atol=1e-4)


def test_the_engines_are_the_ones_asked_for(backend: Any, graph_backend: Any, model: Path) -> None:
    from swactor_worker_tinygrad.graph_engine import GraphEngine
    from swactor_worker_tinygrad.native_engine import NativeEngine

    for each, kind in ((backend, NativeEngine), (graph_backend, GraphEngine)):
        pipeline = Pipeline(each, model, 1)
        assert isinstance(pipeline.roles[0].engine, kind)
        pipeline.close()


@pytest.mark.parametrize(
    ("weights", "allowed", "held"),
    [
        ("mapped", False, "mapped"),
        ("mapped", True, "mapped"),
        ("packed", False, "packed"),
        ("packed", True, "packed"),
        ("auto", False, "mapped"),
        ("auto", True, "packed"),
    ],
)
def test_auto_packs_by_the_plan_s_word_and_by_nothing_else(
    backend: Any, model: Path, monkeypatch: pytest.MonkeyPatch, weights: str, allowed: bool, held: str
) -> None:
    """Whatever is free here: stages of one run may find different rests."""
    from swactor_worker_tinygrad import backend as module

    monkeypatch.setattr(backend, "settings", replace(backend.settings, weights=WeightsChoice(weights)))
    for free in (1 << 40, 1 << 20):
        monkeypatch.setattr(module, "available_memory", lambda value=free: value)
        pipeline = Pipeline(backend, model, 1, weights_in_memory=allowed)
        assert bool(pipeline.roles[0].engine.packed_names) == (held == "packed")
        assert pipeline.roles[0].facts["weights"] == held
        pipeline.close()


def test_a_graph_has_no_weights_of_its_own(
    graph_backend: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        graph_backend, "settings", replace(graph_backend.settings, weights=WeightsChoice.AUTO)
    )
    pipeline = Pipeline(graph_backend, model, 1, weights_in_memory=True)
    assert pipeline.roles[0].facts["weights"] == "mapped"
    pipeline.close()


@pytest.mark.parametrize("weights", ["mapped", "packed"])
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_team_of_threads_gives_the_bits_of_one(
    backend: Any, model: Path, threads: int, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swactor_worker_tinygrad.native_engine import NativeEngine

    options: dict[str, Any] = {"max_context": 32, "chunk": 5, "policy": TokenOutputPolicy.LOGITS}
    monkeypatch.setattr(backend, "settings", replace(backend.settings, weights=WeightsChoice(weights)))
    pipeline = Pipeline(backend, model, 1, **options)
    rows = [pipeline.step([1, 2, 3, 4, 5, 6, 7], 0), pipeline.step([8], 7)]
    pipeline.close()
    monkeypatch.setattr(backend, "settings", replace(backend.settings, threads=threads))
    monkeypatch.setattr(NativeEngine, "least_shared", 0)
    monkeypatch.setattr(NativeEngine, "products_per_part", 16)
    team = Pipeline(backend, model, 1, **options)
    assert team.roles[0].engine.threads == threads
    assert [team.step([1, 2, 3, 4, 5, 6, 7], 0), team.step([8], 7)] == rows
    team.close()
