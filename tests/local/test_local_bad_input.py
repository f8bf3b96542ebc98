"""What people get wrong: one clear line, the right exit code, and no process started for it or left by it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from local_command import Command, Run

Start = Callable[..., Run]
IDS = ("--prompt-ids", "5,6,7")


def _refused(started: Command, code: int) -> str:
    """Exits with `code` before a node was started, and says why in one line."""
    assert started.wait() == code, started.err
    started.assert_nothing_left()
    assert "Traceback" not in started.err
    assert "defect of swactor" not in started.err
    assert started.events() == []
    lines = [line for line in started.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, started.err
    return lines[0]


@pytest.fixture
def models(tmp_path: Path, tiny_model: Callable[[str], str]) -> dict[str, str]:
    """Paths that are not usable models."""
    whole = Path(tiny_model("llama-gqa")).read_bytes()
    made = {
        "missing.gguf": None,
        "empty.gguf": b"",
        "text.gguf": b"This is not a model.\n" * 100,
        "header-only.gguf": whole[:1000],
        "truncated.gguf": whole[: len(whole) // 2],
        "last-byte.gguf": whole[:-1],
    }
    for name, data in made.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.gguf").mkdir()
    return {name: str(tmp_path / name) for name in [*made, "folder.gguf"]}


UNUSABLE = ("missing", "empty", "text", "header-only", "truncated", "last-byte", "folder")


@pytest.mark.parametrize("name", [f"{name}.gguf" for name in UNUSABLE])
def test_an_unreadable_model_is_bad_usage(run: Start, models: dict[str, str], name: str) -> None:
    line = _refused(run(models[name], *IDS), 2)
    assert name in line


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"llama", b"mamba", "architecture 'mamba' is not implemented"),
        (b"llama.vocab_size", b"llama.vocab_soup", "llama.vocab_soup = 160"),
        (b"blk.2.ffn_norm", b"blk.2.odd_norm", "lacks tensor 'blk.2.ffn_norm.weight'"),
        (b"output_norm", b"outer__norm", "'output_norm.weight' is missing"),
    ],
)
def test_a_model_that_would_not_be_computed_faithfully_is_bad_usage(
    run: Start, tmp_path: Path, tiny_model: Callable[[str], str], old: bytes, new: bytes, words: str
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(Path(tiny_model("llama-gqa")).read_bytes().replace(old, new))
    assert words in _refused(run(str(path), *IDS, "--nodes", "4"), 2)


def test_more_nodes_than_layers_is_found_before_any_process_starts(echo: Start) -> None:
    line = _refused(echo(*IDS, "--nodes", "5"), 2)
    assert "5 nodes" in line
    assert "4 layers" in line


def test_a_prompt_beyond_the_context_is_bad_usage(echo: Start) -> None:
    line = _refused(echo("--prompt-ids", ",".join(["5"] * 513)), 2)
    assert "513" in line
    assert "512" in line


def test_a_model_without_vocabulary_takes_no_text(echo: Start) -> None:
    assert "vocabulary" in _refused(echo("--prompt", "hello"), 2)


def test_token_ids_outside_the_vocabulary_are_bad_usage(echo: Start) -> None:
    assert "160" in _refused(echo("--prompt-ids", "5,160"), 2)


def test_an_unknown_plug_in_is_said_before_any_process_starts(
    run: Start, tiny_model: Callable[[str], str]
) -> None:
    line = _refused(run(tiny_model("llama-gqa"), *IDS, "--worker", "nope"), 2)
    assert "nope" in line
    assert "echo" in line


def test_max_tokens_beyond_the_context_ends_where_the_context_does(
    command: Callable[..., Command], tiny_model: Callable[[str], str]
) -> None:
    prompt = ",".join(["5"] * 505)
    arguments = ("--prompt-ids", prompt, "--max-tokens", "100", "--worker", "echo")
    started = command("run", tiny_model("llama-gqa"), *arguments)
    assert started.wait() == 0, started.err
    started.assert_nothing_left()
    assert len(started.out.split()) == 8  # the last one is not fed back: 505 + 8 - 1 = 512
    assert "512" in started.err
    assert "8 of the 100" in started.err


def _without_clang(folder: Path) -> dict[str, str | None]:
    """A PATH that has what PATH has, but no compiler."""
    folder.mkdir()
    seen = set()
    for directory in os.environ["PATH"].split(os.pathsep):
        for name in os.listdir(directory) if os.path.isdir(directory) else ():
            if not name.startswith(("clang", "cc", "gcc", "c++", "g++")) and name not in seen:
                seen.add(name)
                (folder / name).symlink_to(Path(directory) / name)
    assert shutil.which("clang", path=str(folder)) is None
    return {"PATH": str(folder), "CC": None}


def test_a_machine_without_a_compiler_is_told_its_remedy_before_anything_is_started(
    run: Start, tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    started = run(tiny_model("llama-gqa"), *IDS, environment=_without_clang(tmp_path / "bin"))
    assert "clang" in _refused(started, 1)
    assert "apt-get install clang" in started.err


def test_a_device_that_cannot_be_had_is_told_before_any_weight_is_loaded(
    run: Start, tiny_model: Callable[[str], str]
) -> None:
    started = run(tiny_model("llama-gqa"), *IDS, "--device", "QCOM")
    result = started.finish(1)
    assert result["outcome"] == "faulted"
    names = {event["event"] for event in started.events()}
    assert "weights_loaded" not in names
    assert "weights_download_started" not in names
    line = started.error_line()
    assert "QCOM" in line
    said = r"error: WorkerFatal \(BackendInitFailed\) seen by GpuWorkerCtl on node "
    assert re.match(said + r"node-[01] \([0-9a-f]{16}\): ", line)
    assert line.count("seen by") == 1, "one typed line, not a line in a line"
    assert result["fault"]["reason"] == "WorkerFatal"
    assert "node_faulted" in names


def test_a_device_that_nobody_knows_is_bad_usage(run: Start, tiny_model: Callable[[str], str]) -> None:
    line = _refused(run(tiny_model("llama-gqa"), *IDS, "--device", "TOASTER"), 2)
    assert "device 'TOASTER' is not known" in line


def test_files_that_cannot_be_written_are_refused_at_once(
    command: Callable[..., Command], tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    for option in ("--events", "--logits"):
        arguments = (
            *IDS,
            "--worker",
            "echo",
            "--sample-on",
            "orchestrator",
            option,
            str(tmp_path / "no" / "file"),
        )
        line = _refused(command("run", tiny_model("llama-gqa"), *arguments), 2)
        assert "No such file or directory" in line


def test_an_unreadable_cluster_file_is_bad_usage(
    command: Callable[..., Command], tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    bad = tmp_path / "cluster.toml"
    bad.write_text("[cluster\n")
    for path, word in ((tmp_path / "none.toml", "No such file"), (bad, "not TOML")):
        line = _refused(command("run", tiny_model("llama-gqa"), *IDS, "--cluster", str(path)), 2)
        assert word in line
        assert str(path) in line
