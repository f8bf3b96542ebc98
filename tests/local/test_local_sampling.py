"""Sampling and stop texts in whole runs: the same ids wherever sampling happens, answers that end in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from local_command import Run

Start = Callable[..., Run]
SAMPLED = (
    "--prompt-ids", "5,6,7", "--max-tokens", "24", "--temperature", "1.2", "--top-k", "40", "--top-p", "0.95",
    "--min-p", "0.02", "--repeat-penalty", "1.3", "--frequency-penalty", "0.2", "--presence-penalty", "0.1",
    "--repeat-last-n", "16", "--logit-bias", "9=-inf", "--logit-bias", "20=2",
)  # fmt: skip


def test_a_seed_gives_the_same_ids_on_the_last_stage_and_at_the_orchestrator(
    run: Start, tiny_model: Callable[[str], str]
) -> None:
    model = tiny_model("llama-tied")

    def ids(*options: str) -> list[int]:
        result: dict[str, Any] = run(model, *SAMPLED, *options).finish(0)
        assert result["finish_reason"] == "length"
        return list(result["token_ids"])

    there = ids("--seed", "11", "--nodes", "2")
    assert ids("--seed", "11", "--nodes", "1", "--sample-on", "orchestrator") == there
    assert 9 not in there
    assert ids("--seed", "12", "--nodes", "1") != there


def test_a_stop_text_across_token_borders_ends_the_answer_before_it(run: Start, demo_model: str) -> None:
    options = (demo_model, "--prompt", "hello world", "--raw", "--nodes", "1", "--max-tokens", "24")
    whole = run(*options)
    text = whole.finish(0)["text"]
    pieces = [record["text"] for record in whole.records() if record["type"] == "token"]
    at = next(i for i in range(4, 20) if len(pieces[i]) > 1 and len(pieces[i + 1]) > 1)
    stop = pieces[at][-1] + pieces[at + 1][:2]
    stopped = run(*options, "--stop", stop)
    result = stopped.finish(0)
    assert result["finish_reason"] == "stop"
    assert result["text"] == text[: text.index(stop)]
    shown = "".join(record["text"] for record in stopped.records() if record["type"] == "token")
    assert shown == result["text"]
