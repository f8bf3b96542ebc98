"""Files that mix types, as those of few bits do: all of it native, and splits give the bits of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from kernel_support import stored_weights
from stage_support import Pipeline
from swactor_core.plan import TokenOutputPolicy
from swactor_loader_gguf.loader import GgufLoader

WIDTH, VOCAB, LAYERS = 256, 64, 2
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
# llama.cpp's IQ3_M and IQ2_M are of such types; others in the second layer, so that stages differ
KINDS = {
    "token_embd": "IQ3_S",
    "output": "Q6_K",
    **{f"blk.0.{name}": "IQ3_S" for name in MATRICES},
    "blk.0.attn_v": "Q4_K",
    **{f"blk.1.{name}": "IQ2_XS" for name in MATRICES},
    "blk.1.attn_output": "IQ1_M",
    "blk.1.ffn_gate": "MXFP4",
    "blk.1.ffn_down": "Q2_K",
}
OPTIONS: dict[str, Any] = {"max_context": 16, "chunk": 4, "policy": TokenOutputPolicy.LOGITS}
PROMPT = [3, 60, 7, 7, 21, 44]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model as `mixed`, and with the same values as f32 as `plain`."""
    folder = tmp_path_factory.mktemp("mixed")
    paths = {label: folder / f"{label}.gguf" for label in ("mixed", "plain")}
    for label, path in paths.items():
        writer = GGUFWriter(str(path), "llama")
        writer.add_block_count(LAYERS)
        writer.add_context_length(64)
        writer.add_embedding_length(WIDTH)
        writer.add_feed_forward_length(WIDTH)
        writer.add_head_count(4)
        writer.add_layer_norm_rms_eps(1e-5)
        for index, (name, kind) in enumerate(KINDS.items()):
            rows = WIDTH if name.startswith("blk") else VOCAB
            number, stored, values = stored_weights(kind, rows, WIDTH, seed=index)
            raw = GGMLQuantizationType(number)
            if label == "mixed":
                writer.add_tensor(f"{name}.weight", stored, raw_dtype=raw)
            else:
                writer.add_tensor(f"{name}.weight", values)
        norms = [f"blk.{layer}.{norm}" for layer in range(LAYERS) for norm in ("attn_norm", "ffn_norm")]
        for name in ("output_norm", *norms):
            writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def facts_and_rows(pipeline: Pipeline) -> tuple[list[dict[str, str]], list[bytes]]:
    rows = [pipeline.step(PROMPT, 0), pipeline.step([9], len(PROMPT))]
    facts = [role.facts for role in pipeline.roles]
    assert {fact["kernels"] for fact in facts} == {"native"}
    pipeline.close()
    return facts, rows


@pytest.mark.parametrize("kind", ["backend", "packed_backend", "fast_backend"])
def test_a_split_gives_the_bits_of_the_whole(
    kind: str, models: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(kind)
    opened = GgufLoader().open(str(models["mixed"]))
    parts = [opened.manifest(0, 1), opened.manifest(1, 2)]
    whole = opened.manifest(0, 2)
    opened.close()
    _, single = facts_and_rows(Pipeline(made, models["mixed"], 1, manifests=[whole], **OPTIONS))
    _, split = facts_and_rows(Pipeline(made, models["mixed"], 2, manifests=parts, **OPTIONS))
    assert single == split


@pytest.mark.parametrize("kind", ["backend", "packed_backend"])
def test_it_computes_what_its_values_as_f32_compute(
    kind: str, models: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(kind)
    _, mixed = facts_and_rows(Pipeline(made, models["mixed"], 1, **OPTIONS))
    _, plain = facts_and_rows(Pipeline(made, models["plain"], 1, **OPTIONS))
    for one, other in zip(mixed, plain, strict=True):
        expected = np.frombuffer(other, "<f4")
        np.testing.assert_allclose(
            np.frombuffer(one, "<f4"), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max()
        )


def test_fast_numerics_round_for_the_types_that_have_such_a_product(
    fast_backend: Any, models: dict[str, Path]
) -> None:
    (facts,), fast = facts_and_rows(Pipeline(fast_backend, models["mixed"], 1, **OPTIONS))
    assert (facts["numerics"], facts["fast_matrices"]) == (
        "fast",
        "3 of 15",
    )  # Q4_K, Q2_K, and the head's Q6_K
    _, exact = facts_and_rows(Pipeline(fast_backend, models["plain"], 1, **OPTIONS))
    one, other = (np.frombuffer(rows[0], "<f4") for rows in (fast, exact))
    assert 0 < np.abs(one - other).max() < 0.05 * np.abs(other).max()
