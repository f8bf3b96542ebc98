"""Every tiny model gives llama.cpp's token ids and logits, and a split model the bits of the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stage_support import DATA, Pipeline, manifest_of, reference
from swactor_core.plan import TokenOutputPolicy

FAMILIES = ("qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3")
LLAMAS = ("llama-gqa", "llama-tied", "llama-widehead", "llama-ropefreqs")
QUANTS = DATA.parent / "quants"
VARIANTS = DATA.parent / "variants"
VARIANT_NAMES = sorted(path.stem for path in VARIANTS.glob("*.gguf"))
QUICK_GRAPHS = [
    "gemma3-scaled",
    "gemma3-steep",
    "llama-fused",
    "mistral3-hot",
    "phi3-long",
    "qwen3-yarn",
    "smollm3",
]
NATIVE_QUANTS = sorted(path.stem for path in QUANTS.glob("*.gguf"))


def logits_of(backend: Any, path: Path, stages: int, expected: dict[str, Any], chunk: int) -> np.ndarray:
    """Logits of the prompt's last position and of every generated one but the last: (steps, vocab)."""
    prompt, greedy = expected["prompt"], expected["greedy"]
    options = {"max_context": len(prompt) + len(greedy), "chunk": chunk, "policy": TokenOutputPolicy.LOGITS}
    pipeline = Pipeline(backend, path, stages, **options)
    rows = [pipeline.step(prompt, 0)]
    rows += [pipeline.step([token], len(prompt) + index) for index, token in enumerate(greedy[:-1])]
    pipeline.close()
    return np.array([np.frombuffer(row, "<f4") for row in rows])


def check(backend: Any, path: Path, *, splits: tuple[int, ...] = (2, 4), chunk: int = 16) -> None:
    expected = reference(path)
    whole = logits_of(backend, path, 1, expected, chunk)
    first = np.array(expected["first_logits"])
    assert np.abs(whole[0] - first).max() < 1e-3 * np.abs(first).max()
    assert whole.argmax(-1).tolist() == expected["greedy"]
    for stages in splits:
        if stages > manifest_of(path).num_layers:
            continue
        assert whole.tobytes() == logits_of(backend, path, stages, expected, chunk).tobytes(), stages


@pytest.mark.parametrize("model", LLAMAS + FAMILIES)
def test_by_default(backend: Any, model: str) -> None:
    check(backend, DATA / f"{model}.gguf")


@pytest.mark.parametrize("model", ["llama-gqa", *FAMILIES])
def test_as_a_graph(graph_backend: Any, model: str) -> None:
    check(graph_backend, DATA / f"{model}.gguf", splits=(2,) if model == "gemma3" else ())


@pytest.mark.parametrize("model", VARIANT_NAMES)
def test_variants(backend: Any, model: str) -> None:
    check(backend, VARIANTS / f"{model}.gguf", chunk=7)


@pytest.mark.parametrize("model", QUICK_GRAPHS)
def test_variants_as_graphs(graph_backend: Any, model: str) -> None:
    check(graph_backend, VARIANTS / f"{model}.gguf", splits=(2,) if model == "smollm3" else ())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", [name for name in VARIANT_NAMES if name not in QUICK_GRAPHS])
def test_the_other_variants_as_graphs(graph_backend: Any, model: str) -> None:
    check(graph_backend, VARIANTS / f"{model}.gguf", splits=())


@pytest.mark.parametrize("kind", NATIVE_QUANTS)
def test_stored_types(backend: Any, kind: str) -> None:
    check(backend, QUANTS / f"{kind}.gguf", splits=(2,))


@pytest.mark.parametrize("kind", ["Q8_0"])
def test_stored_types_as_a_graph(graph_backend: Any, kind: str) -> None:
    check(graph_backend, QUANTS / f"{kind}.gguf", splits=())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [kind for kind in NATIVE_QUANTS if kind != "Q8_0"])
def test_the_other_stored_types_as_a_graph(graph_backend: Any, kind: str) -> None:
    check(graph_backend, QUANTS / f"{kind}.gguf", splits=())


def test_every_model_is_run() -> None:
    assert (len(NATIVE_QUANTS), len(VARIANT_NAMES)) == (11, 31)
