"""Token ids and logits of whole runs against llama.cpp's, whatever the split over node processes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_command import Run
from swactor_cli.prompts import prompt_ids_of
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind

TINY = ("llama-gqa", "llama-tied", "llama-widehead", "llama-ropefreqs")
LOGIT_TOLERANCE = 1e-3

Start = Callable[..., Run]
Reference = Callable[[str], dict[str, Any]]


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize(("weights", "held"), [("auto", "mapped"), ("packed", "packed")])
def test_the_demo_model_gives_the_reference_ids(
    run: Start, reference: Reference, nodes: int, weights: str, held: str
) -> None:
    expected = reference("smollm2/smol-1")
    started = run(
        "demo", "--prompt", "hello world", "--raw", "--temperature", "0", "--max-tokens", "48",
        "--nodes", str(nodes), "--worker-option", f"weights={weights}",
    )  # fmt: skip
    result = started.finish(0)
    assert result["stats"]["weights"] == held
    assert result["token_ids"] == expected["greedy"]
    assert result["stats"]["prompt_tokens"] == len(expected["prompt"])
    assert [stage["steps"] for stage in result["stats"]["stages"]] == [48] * nodes
    assert result["text"] == "".join(r["text"] for r in started.records() if r["type"] == "token")


@pytest.mark.parametrize("name", ["smol-5", "smol-6"])
def test_raw_text_prompts_give_the_reference_ids(
    run: Start, reference: Reference, demo_model: str, name: str
) -> None:
    expected = reference(f"smollm2/{name}")
    started = run(demo_model, "--prompt", expected["text"], "--raw", "--max-tokens", "48", "--ignore-eos")
    assert started.finish(0)["token_ids"] == expected["greedy"]


def test_a_chat_prompt_becomes_the_reference_ids(reference: Reference, demo_model: str) -> None:
    expected = reference("smollm2/smol-3")
    model = load_plugins().select(Kind.LOADER, "gguf").factory().open(demo_model)
    try:
        prompt = prompt_ids_of(
            expected["user"], None, raw=False, facts=model.facts, tokenizer=model.tokenizer()
        )
    finally:
        model.close()
    assert list(prompt) == expected["prompt"]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_chat_prompt_ends_with_the_first_end_of_generation_id(
    run: Start, reference: Reference, demo_model: str, ignore_eos: bool
) -> None:
    expected = reference("smollm2/smol-3")
    end_of_generation = 2
    options = ["--ignore-eos"] if ignore_eos else []
    started = run(demo_model, "--prompt", expected["user"], "--max-tokens", "48", *options)
    result = started.finish(0)
    greedy = expected["greedy"]
    wanted = greedy if ignore_eos else greedy[: greedy.index(end_of_generation) + 1]
    assert result["token_ids"] == wanted
    injected = started.event("prompt_injected")
    assert injected is not None
    assert injected["tokens"] == len(expected["prompt"])


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_give_the_reference_ids_and_logits(
    run: Start, reference: Reference, tiny_model: Callable[[str], str], tmp_path: Path, name: str, nodes: int
) -> None:
    expected = reference(f"tiny/{name}")
    logits = tmp_path / "logits.f32"
    started = run(
        tiny_model(name), "--prompt-ids", ",".join(map(str, expected["prompt"])), "--max-tokens", "16",
        "--nodes", str(nodes), "--sample-on", "orchestrator", "--logits", str(logits),
    )  # fmt: skip
    assert started.finish(0)["token_ids"] == expected["greedy"]
    width = len(expected["first_logits"])
    rows = logits.read_bytes()
    assert len(rows) == 16 * width * 4
    first = struct.unpack_from(f"<{width}f", rows)
    worst = max(abs(a - b) for a, b in zip(first, expected["first_logits"], strict=True))
    assert worst < LOGIT_TOLERANCE
    assert all(math.isfinite(value) for value in struct.unpack(f"<{16 * width}f", rows))


def test_a_tiny_model_gives_the_reference_ids_when_the_last_stage_samples(
    run: Start, reference: Reference, tiny_model: Callable[[str], str]
) -> None:
    expected = reference("tiny/llama-gqa")
    ids = ",".join(map(str, expected["prompt"]))
    started = run(tiny_model("llama-gqa"), "--prompt-ids", ids, "--max-tokens", "16", "--nodes", "2")
    assert started.finish(0)["token_ids"] == expected["greedy"]


def test_a_long_prompt_over_two_nodes_is_what_one_node_makes_of_it(run: Start, demo_model: str) -> None:
    # 240 tokens: several prefill chunks, the last one short.
    prompt = ",".join(str(100 + (index * 7919) % 40000) for index in range(240))
    results = []
    for nodes in ("1", "2"):
        started = run(
            demo_model, "--prompt-ids", prompt, "--max-tokens", "12", "--nodes", nodes, "--ignore-eos"
        )
        results.append(started.finish(0)["token_ids"])
    assert results[0] == results[1]
    assert len(results[0]) == 12
