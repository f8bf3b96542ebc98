"""`run` on a local pool with the echo worker: what goes where, the JSON shapes, the exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parent.parent / "data" / "tiny" / "llama-tied.gguf"
RUN = ["run", MODEL, "--worker", "echo", "--prompt-ids", "1,2,3", "--max-tokens", "4"]


def test_tokens_are_on_stdout_and_talk_on_stderr(spawn: Any) -> None:
    said = spawn(*RUN)
    assert said.code == 0, said.err
    ids = said.out.split()
    assert len(ids) == 4
    assert all(word.isdecimal() for word in ids)
    assert said.out.endswith("\n")
    assert "3 prompt + 4 generated tokens" in said.err
    assert "\x1b" not in said.out + said.err


def test_quiet_says_only_the_tokens(spawn: Any) -> None:
    said = spawn(*RUN, "--quiet")
    assert (said.code, said.err) == (0, "")
    assert len(said.out.split()) == 4


def test_json_lines_have_their_shapes_and_agree_with_the_events(spawn: Any, home: Path) -> None:
    events = home / "events.jsonl"
    said = spawn(*RUN, "--json", "--events", events, "--nodes", "3")
    assert said.code == 0, said.err
    *tokens, result = [json.loads(line) for line in said.out.splitlines()]
    assert [set(token) for token in tokens] == [{"type", "id", "text"}] * 4
    assert set(result) == {"type", "outcome", "finish_reason", "token_ids", "text", "stats"}
    assert result["token_ids"] == [token["id"] for token in tokens]
    stats = result["stats"]
    assert (stats["prompt_tokens"], stats["generated_tokens"]) == (3, 4)
    assert [stage["stage_index"] for stage in stats["stages"]] == [0, 1, 2]
    assert (stats["numerics"], stats["kernels"]) == ("exact", "echo")
    assert {(stage["numerics"], stage["kernels"]) for stage in stats["stages"]} == {("exact", "echo")}
    written = [json.loads(line) for line in events.read_text().splitlines()]
    names = [event["event"] for event in written]
    assert names[-1] == "run_torn_down"
    assert names.count("token_received") == 4


def test_a_worker_that_nobody_provides_is_one_line(call: Any) -> None:
    said = call("run", MODEL, "--worker", "abacus", "--prompt-ids", "1")
    assert said.code == 2
    assert said.out == ""
    assert "no worker plug-in named 'abacus'" in said.err
    assert "Traceback" not in said.err
