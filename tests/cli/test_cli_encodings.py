"""Names that are not UTF-8, and a standard output that is not: said or written, no traceback and no hang."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parent.parent / "data" / "tiny" / "llama-tied.gguf"
RUN = ["--worker", "echo", "--prompt-ids", "1,2,3", "--max-tokens", "2"]
BAD = os.fsdecode(b"\xff\xfe.gguf")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A model whose name is not UTF-8."""
    return Path(shutil.copy(MODEL, tmp_path / BAD))


@pytest.mark.parametrize("command", [["run", *RUN], ["plan"], ["tune"]], ids=lambda command: command[0])
def test_a_model_whose_name_is_not_utf8_is_refused(call: Any, odd: Path, command: list[str]) -> None:
    said = call(command[0], str(odd), *command[1:])
    assert (said.code, said.out) == (2, "")
    assert "is not valid UTF-8" in said.err
    assert "hint: rename it" in said.err


def test_a_link_to_one_has_a_name_that_can_be_said(call: Any, odd: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(odd)
    said = call("run", link, *RUN)
    assert said.code == 0, said.err


def test_so_is_a_cache(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / BAD))
    for command in (["plan", "demo"], ["cache", "list"]):
        said = call(*command)
        assert (said.code, said.out) == (2, "")
        assert "the name of the cache" in said.err
        assert "hint: set SWACTOR_CACHE_DIR" in said.err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_lacks_a_character_gets_a_question_mark(
    spawn: Any, tmp_path: Path, encoding: str
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(MODEL.read_bytes().replace(b"llama-tied", "漢字漢x".encode()))  # its name
    said = spawn("plan", model, PYTHONIOENCODING=encoding)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("???x: llama, 4 layers")
    said = spawn("plan", model, "--json", PYTHONIOENCODING=encoding)
    assert json.loads(said.out)["model"]["id"] == "漢字漢x"
    assert said.out.isascii()


def test_what_is_said_gives_no_orders_to_a_terminal(call: Any, tmp_path: Path) -> None:
    model = tmp_path / "a\x1b[31m\x9b.gguf"
    model.write_bytes(MODEL.read_bytes()[:5000])
    said = call("plan", model)
    assert said.code == 2
    assert "a\\x1b[31m\\x9b.gguf" in said.err
    assert not set(said.err) & {"\x1b", "\x9b"}
