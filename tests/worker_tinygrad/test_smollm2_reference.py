"""SmolLM2-135M-Instruct Q4_1: 48 greedy ids of each prompt equal llama.cpp's, whole and split.

The model (98 MB) is the loader's `demo`, which is fetched once; so these tests are among the long ones.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from stage_support import Pipeline

REFERENCES = sorted((Path(__file__).parent.parent / "data" / "smollm2").glob("*.json"))

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@cache
def model() -> Path:
    from swactor_loader_gguf.loader import GgufLoader

    return Path(GgufLoader().resolve("demo"))


def check(backend: Any, stages: int, references: list[Path]) -> None:
    pipeline = Pipeline(backend, model(), stages, max_context=128, chunk=32)
    for path in references:
        expected = json.loads(path.read_text())
        made = pipeline.generate(expected["prompt"], len(expected["greedy"]))
        assert made == expected["greedy"], path.name
    pipeline.close()


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_greedy_ids_equal_the_reference(backend: Any, stages: int) -> None:
    assert len(REFERENCES) == 4
    check(backend, stages, REFERENCES)


def test_the_graph_engine_gives_the_same_ids(graph_backend: Any) -> None:
    check(graph_backend, 2, REFERENCES[:1])
