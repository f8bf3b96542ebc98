"""Stages in `fast` numerics: near exact ones, the same bits for every split and chunk, and they say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stage_support import DATA, Pipeline, config_of, manifest_of
from swactor_core.faults import StepFailure
from swactor_core.plan import TokenOutputPolicy
from swactor_core.spi.worker import StepError, StepInput

CHUNK = 4
PROMPT = [7, 95, 33, 8, 91, 12, 14, 3, 77]
OPTIONS: dict[str, Any] = {"max_context": 12, "chunk": CHUNK, "policy": TokenOutputPolicy.LOGITS}
MODELS = [
    "quants/Q4_0",
    "quants/Q4_1",
    "quants/Q4_K_M",
    "quants/Q5_0",
    "quants/Q6_K",
    "quants/Q8_0",
    "quants/Q2_K",
    "variants/gemma3-q8",
    "variants/phi3-q8",
    "variants/qwen3moe-q8",
]


def path_of(model: str) -> Path:
    return DATA.parent / f"{model}.gguf"


def logits(payload: bytes) -> np.ndarray:
    return np.frombuffer(payload, "<f4")


@pytest.mark.parametrize("model", MODELS)
def test_fast_is_near_exact_and_not_the_same(backend: Any, fast_backend: Any, model: str) -> None:
    rows = []
    for each in (backend, fast_backend):
        pipeline = Pipeline(each, path_of(model), 1, **OPTIONS)
        rows.append(logits(pipeline.step(PROMPT, 0)))
        facts = pipeline.roles[0].facts
        pipeline.close()
    exact, fast = rows
    assert facts["numerics"] == "fast"
    off = np.abs(fast - exact).max() / np.std(exact)
    assert 0 < off < 0.1, f"the greatest difference is {off} of the logits' spread"


@pytest.mark.parametrize("model", MODELS)
def test_chunks_have_the_bits_of_single_tokens(fast_backend: Any, model: str) -> None:
    pipeline = Pipeline(fast_backend, path_of(model), 1, **OPTIONS)
    together = pipeline.step(PROMPT, 0)
    for position, token in enumerate(PROMPT):
        single = pipeline.step([token], position)
    assert together == single
    pipeline.close()


@pytest.mark.parametrize("model", ["quants/Q4_1", "quants/Q4_K_M", "variants/gemma3-q8"])
def test_a_split_has_the_bits_of_the_whole(fast_backend: Any, model: str) -> None:
    made = set()
    layers = manifest_of(path_of(model)).num_layers
    for stages in range(1, layers + 1):
        pipeline = Pipeline(fast_backend, path_of(model), stages, **OPTIONS)
        made.add(pipeline.step(PROMPT, 0) + pipeline.step([9], len(PROMPT)))
        pipeline.close()
    assert layers > 1
    assert len(made) == 1


@pytest.mark.parametrize("model", ["quants/Q4_1", "variants/qwen3moe-q8", "variants/gemma3-q8"])
def test_threads_do_not_change_the_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from swactor_worker_tinygrad import create
    from swactor_worker_tinygrad.native_engine import NativeEngine

    monkeypatch.setattr(NativeEngine, "least_shared", 0)
    monkeypatch.setattr(NativeEngine, "products_per_part", 16)
    made = set()
    for threads in (1, 2, 5):
        backend = create({"numerics": "fast", "threads": threads})
        pipeline = Pipeline(backend, path_of(model), 1, **OPTIONS)
        made.add(pipeline.step(PROMPT, 0) + pipeline.step([9], len(PROMPT)))
        pipeline.close()
        backend.close()
    assert len(made) == 1


@pytest.mark.parametrize("model", ["quants/F16", "quants/BF16", "tiny/llama-gqa"])
def test_types_without_a_product_of_bytes_are_exact_and_say_so(
    backend: Any, fast_backend: Any, model: str
) -> None:
    """A model all of whose matrices are such: the same bits as exact numerics over packed weights."""
    pipeline = Pipeline(fast_backend, path_of(model), 1, **OPTIONS)
    facts = pipeline.roles[0].facts
    fast = logits(pipeline.step(PROMPT, 0))
    pipeline.close()
    count, _, every = facts["fast_matrices"].partition(" of ")
    assert (facts["numerics"], count) == ("exact", "0"), facts
    assert int(every) > 7
    pipeline = Pipeline(backend, path_of(model), 1, **OPTIONS)
    np.testing.assert_allclose(fast, logits(pipeline.step(PROMPT, 0)), atol=1e-4)
    pipeline.close()


@pytest.mark.parametrize("model", ["variants/qwen3moe-q8", "quants/IQ4_NL"])
def test_a_mixture_of_both_is_counted(fast_backend: Any, model: str) -> None:
    """Experts, and a file whose head alone has such a type."""
    pipeline = Pipeline(fast_backend, path_of(model), 1, **OPTIONS)
    facts = pipeline.roles[0].facts
    fast, every = map(int, facts["fast_matrices"].split(" of "))
    pipeline.close()
    assert facts["numerics"] == "fast"
    assert 0 < fast < every


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_no_numbers_fail_the_step(fast_backend: Any, bad: float) -> None:
    manifest = manifest_of(path_of("quants/Q4_1"), 1)
    config = config_of(manifest, max_context=16, chunk=4)
    role = fast_backend.configure(config, progress=lambda _: None, should_abort=lambda: False)
    rows = np.full((6, manifest.hidden_dim), 0.5, "<f4")
    rows[5, 3] = bad
    bridge, payload = fast_backend.bridge, rows.tobytes()
    allocation = bridge.alloc_device(config.input_spec, len(payload))
    bridge.host_to_device(memoryview(payload), allocation, 0)
    with pytest.raises(StepError, match="logits hold nan") as caught:
        role.execute(StepInput(allocation, len(payload), 0, 0), lambda: False)
    assert caught.value.reason is StepFailure.TINYGRAD_ERROR
    # what it left in the cache does not reach the next run
    rows[5, 3] = 0.5
    bridge.host_to_device(memoryview(rows.tobytes()), allocation, 0)
    _, extent = role.execute(StepInput(allocation, len(payload), 0, 0), lambda: False)
    assert extent == 4
    bridge.free_device(allocation)
    role.close()
