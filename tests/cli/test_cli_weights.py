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

MODEL = Path(__file__).parent.parent / "data" / "quants" / "Q8_0.gguf"
NODES_HERE = ("--transport", "memory", "--membership", "static")
PLENTY = 1 << 40


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
