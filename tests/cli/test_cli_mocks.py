"""The command line on mocks: a whole pipeline in this process, and combinations that cannot be."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

MOCKS = (
    "--transport", "memory", "--membership", "static", "--worker", "echo", "--loader", "synthetic",
    "--arena", "heap",
)  # fmt: skip


def test_a_pipeline_of_mocks_answers_within_a_second(call: Any) -> None:
    """The best of three, and of its computing, since others may use the machine. What it waits for is the
    pool's convergence window, 0.3 s, and nothing else: `tests/mock` shows that in virtual time."""
    took = []
    for _ in range(3):
        began = time.process_time()
        said = call("run", "demo", "--nodes", "3", *MOCKS, "--prompt", "hello", "--json", "--max-tokens", "9")
        took.append(time.process_time() - began)
    assert min(took) < 0.6
    assert (said.code, said.err) == (0, "")
    result = json.loads(said.out.splitlines()[-1])
    assert result["outcome"] == "completed"
    assert len(result["token_ids"]) == 9


def test_the_answer_does_not_depend_on_the_split(call: Any) -> None:
    answers = set()
    for nodes in (1, 2, 5):
        said = call(
            "run", "demo", "--nodes", nodes, *MOCKS, "--prompt", "hello", "--max-tokens", "6", "--json"
        )
        answers.add(tuple(json.loads(said.out.splitlines()[-1])["token_ids"]))
    assert len(answers) == 1


def test_logits_may_travel(call: Any, tmp_path: Path) -> None:
    said = call(
        "run", "demo", *MOCKS, "--prompt", "x", "--max-tokens", "4", "--sample-on", "orchestrator",
        "--logits", tmp_path / "rows", "--events", tmp_path / "events",
    )  # fmt: skip
    assert said.code == 0
    assert (tmp_path / "rows").stat().st_size == 4 * 258 * 4
    assert "run_torn_down" in (tmp_path / "events").read_text().splitlines()[-1]


def test_a_synthetic_model_can_be_planned(call: Any) -> None:
    said = call("plan", "anything", "--loader", "synthetic", "--nodes", "3", "--json")
    assert said.code == 0
    assert len(json.loads(said.out)["stages"]) == 3


def test_a_heap_arena_with_a_worker_of_its_own_process(call: Any) -> None:
    said = call("run", "demo", "--loader", "synthetic", "--arena", "heap", "--prompt", "x")
    assert said.code == 2
    assert "the arena 'heap' does not leave the node's process, and the worker 'tinygrad'" in said.err
    assert "echo" in said.err


@pytest.fixture
def cluster(call: Any, home: Path) -> Path:
    path = home / "cluster.toml"
    assert call("cluster", "new", "--nodes", "a", "--seed", "127.0.0.1:7946", "--out", path).code == 0
    return path


@pytest.mark.parametrize("part", ["transport", "membership"])
def test_a_cluster_has_other_processes(call: Any, cluster: Path, part: str) -> None:
    name = {"transport": "memory", "membership": "static"}[part]
    for command in (
        ("run", "demo", "--cluster", cluster, "--loader", "synthetic", "--prompt", "x"),
        ("node", "--cluster", cluster, "--name", "a", "--worker", "echo"),
    ):
        said = call(*command, f"--{part}", name)
        assert said.code == 2, said
        assert f"the {part} '{name}' does not leave its process" in said.err
        assert f"take another {part}" in said.err
