"""`--prompt-file`: the prompt out of a file or standard input, to the byte, and what cannot be one."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from swactor_cli import prompts
from swactor_cli.prompts import read_prompt
from swactor_core.errors import UsageError

TINY = Path(__file__).parent.parent / "data" / "tiny"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("hello", "hello"),
        ("two\nlines\n", "two\nlines"),
        ("from a text editor elsewhere\r\n", "from a text editor elsewhere"),
        ("one of two line ends\n\n", "one of two line ends\n"),
        (" spaces stay \t", " spaces stay \t"),
        ("Zürich, 東京 🙂", "Zürich, 東京 🙂"),
        ("", ""),
    ],
)
def test_the_text_is_what_the_file_holds(tmp_path: Path, written: str, text: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(written.encode())
    assert read_prompt(str(path)) == text


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("früh\n".encode())))
    assert read_prompt("-") == "früh"


def test_a_prompt_longer_than_an_argument_can_be(call: Any, tmp_path: Path) -> None:
    """What reaches the model's tokenizer is all of it: the refusal counts its tokens."""
    path = tmp_path / "prompt.txt"
    path.write_text("hello world " * 30_000)
    said = call("run", "demo", "--prompt-file", path, "--raw")
    assert (said.code, said.out) == (2, "")
    assert "the prompt has 60001 tokens" in said.err


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"abc\xff"), "is not valid UTF-8 behind 3 bytes"),
        (lambda path: path.write_bytes(b"x" * 11), "has more than 0 MiB"),
    ],
)
def test_what_is_no_prompt_is_named(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, words: str
) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPT_BYTES", 10)
    path = tmp_path / "prompt.txt"
    make(path)
    said = call("run", TINY / "llama-tied.gguf", "--prompt-file", path)
    assert (said.code, said.out) == (2, "")
    assert "prompt.txt" in said.err
    assert words in said.err
    assert "hint: " in said.err
    assert "Traceback" not in said.err


def test_a_closed_standard_input_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(b""))
    monkeypatch.setattr(sys, "stdin", stream)
    stream.buffer.close()
    with pytest.raises(UsageError, match="standard input cannot be read"):
        read_prompt("-")


@pytest.mark.parametrize(("option", "value"), [("--device", "TPU"), ("--worker-option", "nothing=1")])
def test_wrong_settings_of_a_worker_are_refused_before_anything_starts(
    call: Any, option: str, value: str
) -> None:
    said = call("run", TINY / "llama-tied.gguf", "--prompt-ids", "1", option, value)
    assert (said.code, said.out) == (2, "")
    assert "worker tinygrad" in said.err
    assert "hint: use" in said.err or "hint: its settings are" in said.err
