"""`weights=auto`: whatever the nodes of a run have free, its stages do the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swactor_core import free_memory
from swactor_core.messages import NodeAvailable
from swactor_core.node import node

DATA = Path(__file__).parent.parent / "data"
MODEL = DATA / "quants" / "Q8_0.gguf"
MIXED = DATA / "variants" / "qwen2-mixed.gguf"
"""Three layers of types that are packed, and of some that are not."""
NODES_HERE = ("--transport", "memory", "--membership", "static")
PLENTY = 1 << 40


@pytest.fixture
def small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swactor_worker_tinygrad.memory.WORTH_PACKING", 0)


def machines(monkeypatch: pytest.MonkeyPatch, free: Sequence[int], names: Sequence[str]) -> None:
    """Of each node, what is free when it says that it is available, and on which machine it is."""
    announced = node._with_memory

    def here(available: NodeAvailable) -> NodeAvailable:
        index = int(available.name.removeprefix("node-"))
        with monkeypatch.context() as patch:
            patch.setattr(free_memory, "available_memory", lambda: free[index])
            said = announced(available)
        return replace(said, worker={**said.worker, "machine": names[index]})

    monkeypatch.setattr(node, "_with_memory", here)


@pytest.mark.usefixtures("small_is_worth_it")
@pytest.mark.parametrize(
    ("free", "names", "options", "weights"),
    [
        ((PLENTY, PLENTY), ("a", "a"), ("weights=auto",), "packed"),
        ((1 << 20, PLENTY), ("a", "a"), ("weights=auto",), "mapped"),
        ((PLENTY, 1 << 20), ("a", "b"), ("weights=auto",), "mapped"),
        # 47.4 MiB a stage: one machine has room for one of them only
        ((150 << 20, 150 << 20), ("a", "b"), ("weights=auto",), "packed"),
        ((150 << 20, 150 << 20), ("a", "a"), ("weights=auto",), "mapped"),
        ((1 << 20, 1 << 20), ("a", "a"), ("weights=packed",), "packed"),
        ((PLENTY, PLENTY), ("a", "a"), ("weights=mapped",), "mapped"),
        ((1 << 20, 1 << 20), ("a", "a"), ("weights=auto", "numerics=fast"), "packed"),
    ],
)
def test_all_stages_of_a_run_do_the_same(
    call: Any,
    monkeypatch: pytest.MonkeyPatch,
    free: Sequence[int],
    names: Sequence[str],
    options: tuple[str, ...],
    weights: str,
) -> None:
    monkeypatch.delenv("SWACTOR_CACHE_DIR")  # compiled kernels are for all tests
    machines(monkeypatch, free, names)
    settings = [word for option in options for word in ("--worker-option", option)]
    said = call("run", MODEL, "--prompt-ids", "1,2", "--max-tokens", "3", *NODES_HERE, *settings, "--json")
    assert said.code == 0, said.err
    stats = json.loads(said.out.splitlines()[-1])["stats"]
    assert [stage["weights"] for stage in stats["stages"]] == [weights, weights]
    assert stats["weights"] == weights


def test_a_small_model_is_read_from_its_file(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model counts, not a stage of it: packing all of it would take just too little."""
    monkeypatch.delenv("SWACTOR_CACHE_DIR")
    for most, weights in ((1 << 30, "mapped"), (0, "packed")):
        monkeypatch.setattr("swactor_worker_tinygrad.memory.WORTH_PACKING", most)
        said = call("run", MODEL, "--prompt-ids", "1,2", "--max-tokens", "2", *NODES_HERE, "--json")
        assert json.loads(said.out.splitlines()[-1])["stats"]["weights"] == weights


@pytest.mark.usefixtures("small_is_worth_it")
def test_every_split_has_the_same_bits_with_weights_left_to_the_plan(
    call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those of packed weights here, which are not those of mapped ones: stages that decided for themselves
    could mix them."""
    monkeypatch.delenv("SWACTOR_CACHE_DIR")
    logits = tmp_path / "logits.f32"

    def rows(weights: str, nodes: int, held: str) -> bytes:
        said = call(
            "run", MIXED, "--prompt-ids", ",".join(map(str, range(1, 40))), "--max-tokens", 8, "--ignore-eos",
            "--worker-option", f"weights={weights}", "--nodes", nodes, *NODES_HERE,
            "--sample-on", "orchestrator", "--logits", logits, "--json",
        )  # fmt: skip
        assert said.code == 0, said.err
        stats = json.loads(said.out.splitlines()[-1])["stats"]
        assert [stage["weights"] for stage in stats["stages"]] == [held] * nodes
        assert stats["weights"] == held
        return logits.read_bytes()

    whole = rows("packed", 1, "packed")
    assert [rows("auto", nodes, "packed") == whole for nodes in (1, 2, 3)] == [True] * 3
    assert rows("mapped", 1, "mapped") != whole
