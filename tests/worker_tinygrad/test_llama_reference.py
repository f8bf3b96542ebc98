"""Token ids and logits of the tiny models equal llama.cpp's, however the model is split and computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stage_support import DATA, Pipeline, reference
from swactor_core.plan import TokenOutputPolicy

MODELS = ("llama-gqa", "llama-tied", "llama-widehead", "llama-ropefreqs")


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_ids_equal_the_reference(backend: Any, model: str, stages: int) -> None:
    expected = reference(model)
    pipeline = Pipeline(backend, DATA / f"{model}.gguf", stages)
    assert pipeline.generate(expected["prompt"], len(expected["greedy"])) == expected["greedy"]
    pipeline.close()


@pytest.mark.parametrize("model", MODELS)
def test_first_logits_are_close_to_the_reference(either: Any, model: str) -> None:
    expected = reference(model)
    pipeline = Pipeline(either, DATA / f"{model}.gguf", 2, policy=TokenOutputPolicy.LOGITS)
    logits = np.frombuffer(pipeline.step(expected["prompt"], 0), "<f4")
    assert logits.shape == (160,)
    np.testing.assert_allclose(logits, expected["first_logits"], atol=1e-3)
    pipeline.close()
