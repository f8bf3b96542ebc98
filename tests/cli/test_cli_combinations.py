"""Options that do not go together, or do nothing alone: exit 2 and the remedy, never silence."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from swactor_cli.app import app
from swactor_cli.combinations import (
    NODE_EXCLUDES,
    PLAN_EXCLUDES,
    RUN_EXCLUDES,
    RUN_NEEDS,
    refuse_exclusive,
    without_effect,
)
from swactor_cli.models import has_tokenizer
from swactor_core.errors import ModelError, UsageError

TINY = Path(__file__).parent.parent / "data" / "tiny"
MODEL = TINY / "llama-tied.gguf"
IDS = ("--prompt-ids", "1")
MOCKS = (
    "--transport", "memory", "--membership", "static", "--worker", "echo", "--loader", "synthetic",
    "--arena", "heap",
)  # fmt: skip
# An option of each rule with a value that is right by itself.
VALUES = {
    "--prompt": ("hello",),
    "--prompt-file": ("prompt.txt",),
    "--prompt-ids": ("1",),
    "--nodes": ("2",),
    "--cluster": ("c.toml",),
    "--device": ("CPU",),
    "--worker-option": ("threads=1",),
    "--memory": ("8GiB",),
    "--quiet": (),
    "--verbose": (),
    "--pool-timeout": ("3",),
    "--top-k": ("5",),
    "--top-p": ("0.5",),
    "--min-p": ("0.1",),
    "--seed": ("7",),
    "--repeat-last-n": ("5",),
}
EXCLUDED = {"run": RUN_EXCLUDES, "plan": PLAN_EXCLUDES, "node": NODE_EXCLUDES}
START = {
    "run": (MODEL, *IDS),
    "plan": (MODEL,),
    "node": ("--name", "a"),
}


def refused(said: Any, *words: str) -> None:
    assert (said.code, said.out) == (2, ""), said
    assert "Traceback" not in said.err
    assert "hint: " in said.err
    for word in words:
        assert word in said.err, (word, said.err)


@pytest.mark.parametrize(
    ("command", "pair"), [(command, pair) for command, pairs in EXCLUDED.items() for pair in pairs]
)
def test_pairs_that_exclude_each_other(call: Any, command: str, pair: tuple[str, str]) -> None:
    given = [text for option in pair for text in (option, *VALUES[option])]
    cluster = ("--cluster", "c.toml") if command == "node" else ()
    said = call(command, *START[command], *cluster, *given)
    refused(said, f"{pair[0]} and {pair[1]} exclude each other", EXCLUDED[command][pair])


@pytest.mark.parametrize("option", RUN_NEEDS)
def test_what_does_nothing_alone(call: Any, option: str) -> None:
    others, remedy = RUN_NEEDS[option]
    said = call("run", "demo", *MOCKS, "--prompt", "hello", "--max-tokens", "1", option, *VALUES[option])
    assert said.code == 0, said
    assert f"warning: {option} has no effect without {' or '.join(others)}: {remedy}\n" in said.err


@pytest.mark.parametrize("option", RUN_NEEDS)
def test_beside_any_of_what_it_needs_it_is_accepted(option: str) -> None:
    for other in RUN_NEEDS[option][0]:
        assert without_effect(frozenset({option, other}), RUN_NEEDS) == []


@pytest.mark.parametrize("command", EXCLUDED)
def test_every_named_option_is_one_of_the_command(command: str) -> None:
    names = {
        name for parameter in typer.main.get_command(app).commands[command].params for name in parameter.opts
    }
    rules: Mapping[str, Any] = RUN_NEEDS if command == "run" else {}
    named = {name for pair in EXCLUDED[command] for name in pair}
    named |= {name for option, (others, _) in rules.items() for name in (option, *others)}
    assert named <= names


def test_an_explicit_zero_says_that_nothing_is_to_be_drawn(call: Any) -> None:
    zero = ("--temperature", "0", "--seed", "7", "--top-k", "5")
    said = call("run", "demo", *MOCKS, "--prompt", "hello", "--max-tokens", "1", *zero)
    assert said.code == 0, said
    assert "warning" not in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--device", "CPU", "--worker-option", "device=CUDA"),
            "'device=CUDA' and --device exclude each other",
        ),
        (
            ("--worker-option", "threads=1", "--worker-option", "threads=2"),
            "'threads=2' and another --worker-option exclude each other",
        ),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan", "tune"])
def test_a_setting_is_given_once(call: Any, command: str, options: tuple[str, ...], words: str) -> None:
    refused(call(command, MODEL, *(IDS if command == "run" else ()), *options), words)


def test_two_side_files_are_two_files(call: Any, tmp_path: Path) -> None:
    one, same = tmp_path / "one", tmp_path / "below" / ".." / "one"
    (tmp_path / "below").mkdir()
    files = ("--events", one, "--logits", same, "--sample-on", "orchestrator")
    refused(call("run", MODEL, *IDS, *files), "--events and --logits both name", "name two files")
    assert not one.exists()
    nowhere = ("--events", "/dev/null", "--logits", "/dev/null", "--sample-on", "orchestrator")
    said = call("run", "demo", *MOCKS, "--prompt", "hello", "--max-tokens", "1", *nowhere)
    assert said.code == 0, said


def test_ids_are_raw_with_and_without_the_option(call: Any) -> None:
    answers = [
        call("run", "demo", *MOCKS, *IDS, "--max-tokens", "3", "--json", *raw).out.splitlines()[:-1]
        for raw in ((), ("--raw",))
    ]
    assert len(answers[0]) == 3
    assert answers[0] == answers[1]


def test_ids_are_not_tokenized_so_no_pre_tokenizer_is_asked_for(call: Any) -> None:
    said = call("run", "demo", *MOCKS, *IDS, "--pre", "gpt-2")
    refused(said, "--pre and --prompt-ids exclude each other", "leave --pre out")


@pytest.mark.parametrize(
    ("error", "usable"), [(None, True), (ModelError("the vocabulary names no pre-tokenizer"), False)]
)
def test_a_vocabulary_that_needs_a_pre_tokenizer_is_known(error: Exception | None, usable: bool) -> None:
    """To show text, ids need the vocabulary too: then --pre stays beside --prompt-ids."""

    def tokenizer(*, pre: str | None) -> object:
        assert pre is None
        if error is not None:
            raise error
        return object()

    model: Any = SimpleNamespace(facts=SimpleNamespace(has_vocabulary=True), tokenizer=tokenizer)
    assert has_tokenizer(model) is usable
    model.facts.has_vocabulary = False
    assert not has_tokenizer(model)


def test_the_option_for_talk_stands_before_the_environment(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[str] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: levels.append(options["level"]))
    monkeypatch.setenv("SWACTOR_LOG", "ERROR")
    for talk in ((), ("-v",), ("-vv",)):
        call("run", MODEL, "--prompt-ids", "nonsense", *talk)
        monkeypatch.setenv("SWACTOR_LOG", "ERROR")
    assert levels == ["ERROR", "INFO", "DEBUG"]


def test_a_plan_for_a_cluster_counts_what_its_nodes_are_set_to(call: Any, home: Path) -> None:
    """`[node.worker]` of the file is what its nodes begin with; an option stands before it."""
    file = home / "c.toml"
    assert call("cluster", "new", "--nodes", "a", "--seed", "127.0.0.1:7946", "--out", file).code == 0

    def needed(*options: str) -> int:
        said = call(
            "plan", TINY.parent / "variants" / "gemma3-q8.gguf", "--cluster", file, "--json", *options
        )
        assert said.code == 0, said
        return sum(stage["need_bytes"] for stage in json.loads(said.out)["stages"])

    native = needed()
    graph = needed("--worker-option", "kernels=graph")
    assert graph > native
    text = file.read_text()
    assert text.count("[node.worker]\n") == 1
    file.write_text(text.replace("[node.worker]\n", '[node.worker]\nkernels = "graph"\n'))
    assert needed() == graph
    assert needed("--worker-option", "kernels=native") == native


def test_a_refusal_names_options_and_remedy() -> None:
    with pytest.raises(UsageError, match="--a and --b exclude each other") as caught:
        refuse_exclusive(frozenset({"--a", "--b", "--c"}), {("--a", "--b"): "leave one out"})
    assert caught.value.hint == "leave one out"
