"""Graphs are captured in a process of its own, which a worker starts, hears and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stage_support import DATA, config_of, manifest_of
from swactor_core.spi.worker import LoadProgress, RoleError
from swactor_worker_tinygrad import capturing, environment
from swactor_worker_tinygrad.settings import read_settings

MODEL = DATA / "llama-gqa.gguf"
GRAPH = read_settings({"kernels": "graph", "search": "off"})

FIRST_START = """
import sys
sys.path.insert(0, sys.argv[1])
from stage_support import DATA, Pipeline, reference
from swactor_worker_tinygrad import capturing, create
if "alone" in sys.argv:
    capturing.capture_apart = lambda *given, **named: None
made = create({"kernels": "graph", "search": "off"})
from swactor_worker_tinygrad import internals
captured, init = [], internals.Graph.__init__
def counted(self, *given, **named):
    init(self, *given, **named)
    captured.append(self.captured)
internals.Graph.__init__ = counted
pipeline = Pipeline(made, DATA / "llama-gqa.gguf", 1)
expected = reference("llama-gqa")
assert pipeline.generate(expected["prompt"], 3) == expected["greedy"][:3]
made.close()
print(len(captured), sum(captured))
"""


def graphs_and_captures(cache: Path, *arguments: str) -> tuple[int, int]:
    """How many graphs a process with this cache had for the stage, and how many it captured itself."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_START, str(Path(__file__).parent), *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made, captured = map(int, done.stdout.split())
    return made, captured


def test_a_worker_captures_nothing_itself(tmp_path: Path) -> None:
    made, captured = graphs_and_captures(tmp_path)
    assert made >= 3
    assert captured == 0


def test_what_no_other_process_has_kept_is_captured_here(tmp_path: Path) -> None:
    made, captured = graphs_and_captures(tmp_path, "alone")
    assert made == captured >= 3
    assert graphs_and_captures(tmp_path, "alone") == (made, 0)


def test_where_nothing_is_kept_no_process_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CACHEDB", str(tmp_path / "kernels.db"))
    assert not capturing.keeps_graphs()
    monkeypatch.setenv("CACHEDB", str(environment.cache_root() / "tinygrad" / "x" / "kernels.db"))
    assert capturing.keeps_graphs()


def test_an_aborted_capture_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []

    def noted(*given: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*given, **named))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", noted)
    heard: list[LoadProgress] = []
    with pytest.raises(RoleError, match="stopped while compiling"):
        capturing.capture_apart(
            GRAPH, config_of(manifest_of(MODEL)), progress=heard.append, should_abort=lambda: bool(heard)
        )
    (child,) = started
    assert child.returncode is not None
    assert heard[0].phase == "compile"
    assert 1 == heard[0].done <= heard[0].total


def test_a_stage_that_cannot_be_captured_is_the_caller_s_to_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone.gguf"
    gone.write_bytes(MODEL.read_bytes())
    missing = config_of(manifest_of(gone))
    gone.unlink()
    heard: list[LoadProgress] = []
    capturing.capture_apart(GRAPH, missing, progress=heard.append, should_abort=lambda: False)
    assert heard == []
    assert "could not be captured in a process of their own: status 1" in caplog.text


def test_where_no_process_can_be_started_the_caller_captures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", os.devnull)
    config = config_of(manifest_of(MODEL))
    capturing.capture_apart(GRAPH, config, progress=lambda _: None, should_abort=lambda: False)
    assert "could not be captured in a process of their own: [Errno 13]" in caplog.text
