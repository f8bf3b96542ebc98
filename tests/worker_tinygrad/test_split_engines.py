"""Which engine computes is decided by the whole model: splits of a file of mixed types give the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize
from stage_support import Pipeline, manifest_of
from swactor_core.faults import RoleFailure
from swactor_core.plan import TokenOutputPolicy
from swactor_core.spi.worker import RoleError
from swactor_loader_gguf.loader import GgufLoader

WIDTH, VOCAB, LAYERS = 256, 64, 2
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All in Q8_0, which has a native kernel, but one matrix of the second block in Q1_0, which has none."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    generator = np.random.default_rng(4)
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)

    def add(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
        values = (generator.standard_normal(shape) * 0.1).astype(np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (VOCAB, WIDTH), GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(WIDTH, np.float32))
        for name in MATRICES:
            if (layer, name) != (1, "attn_q"):
                add(f"blk.{layer}.{name}.weight", (WIDTH, WIDTH), GGMLQuantizationType.Q8_0)
    kind = GGMLQuantizationType.Q1_0
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (WIDTH * WIDTH // per_block, block_bytes), dtype=np.uint8)
    blocks[:, :2] = np.full((len(blocks), 1), 0.05, np.float16).view(np.uint8)  # the block's scale
    writer.add_tensor("blk.1.attn_q.weight", blocks.reshape(WIDTH, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


OPTIONS: dict[str, Any] = {"max_context": 16, "chunk": 4, "policy": TokenOutputPolicy.LOGITS}
PROMPT = [3, 60, 7, 7, 21, 44]


def kernels_and_rows(backend: Any, pipeline: Pipeline) -> tuple[set[str], list[bytes]]:
    rows = [pipeline.step(PROMPT, 0), pipeline.step([9], len(PROMPT))]
    kernels = {role.facts["kernels"] for role in pipeline.roles}
    assert {role.facts["numerics"] for role in pipeline.roles} == {"exact"}
    pipeline.close()
    return kernels, rows


def test_a_split_gives_the_bits_of_the_whole(backend: Any, model: Path) -> None:
    opened = GgufLoader().open(str(model))
    parts = [opened.manifest(0, 1), opened.manifest(1, 2)]
    whole = opened.manifest(0, 2)
    opened.close()
    assert {part.matrix_types for part in parts} == {whole.matrix_types}
    single = kernels_and_rows(backend, Pipeline(backend, model, 1, manifests=[whole], **OPTIONS))
    split = kernels_and_rows(backend, Pipeline(backend, model, 2, manifests=parts, **OPTIONS))
    assert single == split
    assert split[0] == {"graph"}


def test_fast_numerics_are_refused_for_a_model_that_is_a_graph(fast_backend: Any, model: Path) -> None:
    with pytest.raises(RoleError, match=r"no native kernels for Q1_0.*numerics = fast") as caught:
        Pipeline(fast_backend, model, 1, **OPTIONS)
    assert caught.value.reason is RoleFailure.CONFIG_INVALID
    assert "leave the worker option numerics out" in caught.value.hint


def test_a_stage_alone_would_choose_otherwise(backend: Any, model: Path) -> None:
    """What the test above guards against: by its own tensors the first stage would be computed natively."""
    parts = [replace(manifest_of(model, *part), matrix_types=()) for part in ((0, 1), (1, 2))]
    kernels, _ = kernels_and_rows(backend, Pipeline(backend, model, 2, manifests=parts, **OPTIONS))
    assert kernels == {"native", "graph"}
