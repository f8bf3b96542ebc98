"""A prompt computed in chunks equals one computed token by token, at every length around the chunk size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from stage_support import DATA, Pipeline
from swactor_core.plan import TokenOutputPolicy

CHUNK = 4
LENGTHS = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1]
PROMPT = [7, 95, 33, 8, 91, 12, 14, 3, 77]


@pytest.fixture(scope="module", params=["backend", "graph_backend"])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    options: dict[str, Any] = {"max_context": 12, "chunk": CHUNK, "policy": TokenOutputPolicy.LOGITS}
    made = Pipeline(request.getfixturevalue(request.param), DATA / "llama-gqa.gguf", 2, **options)
    yield made
    made.close()


def logits(payload: bytes) -> np.ndarray:
    return np.frombuffer(payload, "<f4")


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_equal_single_tokens(pipeline: Pipeline, length: int) -> None:
    together = logits(pipeline.step(PROMPT[:length], 0))
    for position in range(length):
        single = logits(pipeline.step([PROMPT[position]], position))
    np.testing.assert_allclose(together, single, atol=1e-5)
    after_single = logits(pipeline.step([5], length))
    pipeline.step(PROMPT[:length], 0)
    np.testing.assert_allclose(logits(pipeline.step([5], length)), after_single, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("model", ["tiny/llama-tied", "variants/gemma3-pattern", "variants/qwen3moe-many"])
def test_native_chunks_have_the_bits_of_single_tokens(backend: Any, model: str, length: int) -> None:
    options: dict[str, Any] = {"max_context": 12, "chunk": CHUNK, "policy": TokenOutputPolicy.LOGITS}
    pipeline = Pipeline(backend, DATA.parent / f"{model}.gguf", 1, **options)
    together = pipeline.step(PROMPT[:length], 0)
    for position in range(length):
        single = pipeline.step([PROMPT[position]], position)
    assert together == single
    pipeline.close()


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_split_model_gives_the_bits_of_the_whole(backend: Any, stages: int) -> None:
    options: dict[str, Any] = {"max_context": 12, "chunk": CHUNK, "policy": TokenOutputPolicy.LOGITS}
    whole = Pipeline(backend, DATA / "llama-ropefreqs.gguf", 1, **options)
    split = Pipeline(backend, DATA / "llama-ropefreqs.gguf", stages, **options)
    assert whole.step(PROMPT, 0) == split.step(PROMPT, 0)
    assert whole.step([9], len(PROMPT)) == split.step([9], len(PROMPT))
    whole.close()
    split.close()


@pytest.mark.parametrize("name", ["backend", "graph_backend"])
def test_windows_hold_across_chunks_and_reused_context(name: str, request: pytest.FixtureRequest) -> None:
    """A window of 5 over chunks of 4: prompt, answer, and an answer again from a point in between."""
    options: dict[str, Any] = {"max_context": 16, "chunk": CHUNK, "policy": TokenOutputPolicy.LOGITS}
    model = DATA.parent / "variants" / "gemma3-pattern.gguf"
    pipeline = Pipeline(request.getfixturevalue(name), model, 2, **options)
    pipeline.step(PROMPT, 0)
    after = [logits(pipeline.step([token], len(PROMPT) + index)) for index, token in enumerate((5, 6, 90))]
    again = [logits(pipeline.step([token], len(PROMPT) + index)) for index, token in enumerate((5, 6, 90))]
    np.testing.assert_array_equal(after, again)
    for position, token in enumerate((*PROMPT, 5, 6, 90)):
        single = logits(pipeline.step([token], position))
    np.testing.assert_allclose(after[-1], single, atol=1e-5)
    pipeline.step(PROMPT[:3], 0)
    other = [*PROMPT[3:], 5, 6, 90]
    np.testing.assert_allclose(logits(pipeline.step(other, 3)), single, atol=1e-5)
    pipeline.close()


def test_a_second_prompt_finds_a_clean_context(pipeline: Pipeline) -> None:
    first = logits(pipeline.step(PROMPT[:3], 0)).copy()
    pipeline.step(PROMPT, 0)
    np.testing.assert_array_equal(logits(pipeline.step(PROMPT[:3], 0)), first)


def test_the_whole_context_can_be_filled(pipeline: Pipeline) -> None:
    pipeline.step(PROMPT, 0)
    for position in range(len(PROMPT), 12):
        assert np.isfinite(logits(pipeline.step([1], position))).all()


def test_a_context_and_chunk_of_one(backend: Any) -> None:
    pipeline = Pipeline(backend, DATA / "llama-gqa.gguf", 2, max_context=1, chunk=32)
    assert 0 <= int.from_bytes(pipeline.step([3], 0), "little") < 160
    pipeline.close()
