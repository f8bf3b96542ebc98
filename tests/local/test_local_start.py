"""How a local run starts: what its processes import, and node processes that are started ahead."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from local_command import Run
from swactor_core.orchestrator.local_pool import NodesAhead

REPORT_IMPORTS = """
import atexit, os, sys
def report():
    path = os.path.join(os.environ["REPORTS"], str(os.getpid()))
    with open(path, "w") as file:
        print(*sys.orig_argv, file=file)
        print(*sorted({name.partition(".")[0] for name in sys.modules}), file=file)
if "REPORTS" in os.environ:
    atexit.register(report)
"""
HEAVY = {"numpy", "gguf", "yaml", "tinygrad", "rich", "jinja2", "pydantic", "asyncio"}


def test_only_the_worker_imports_what_computes(
    run: Callable[..., Run], tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    hook, reports = tmp_path / "hook", tmp_path / "reports"
    hook.mkdir()
    reports.mkdir()
    (hook / "sitecustomize.py").write_text(REPORT_IMPORTS)
    started = run(
        tiny_model("llama-gqa"), "--prompt-ids", "5,6,7", "--max-tokens", "2",
        environment={"PYTHONPATH": str(hook), "REPORTS": str(reports)},
    )  # fmt: skip
    assert started.wait() == 0, started.err
    found: dict[str, set[str]] = {}
    for report in reports.iterdir():
        command, modules = report.read_text().splitlines()
        part = next(
            (part for part in ("swactor_core.node", "swactor_core.worker") if part in command), "command"
        )
        found[part] = found.get(part, set()) | HEAVY & set(modules.split())
    assert found["command"] == found["swactor_core.node"] == {"pydantic", "asyncio"}
    assert found["swactor_core.worker"] == {"numpy"}  # kernels are built in a process of their own


def _alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def test_nodes_ahead_that_nobody_takes_are_ended() -> None:
    ahead = NodesAhead()
    await ahead.start(1)
    (process,) = ahead._waiting
    assert _alive(process.pid)
    await ahead.close()
    assert process.returncode is not None
    assert ahead.take() is None


async def test_a_node_ahead_that_has_died_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    ahead = NodesAhead()
    await ahead.start(2)
    dead, alive = ahead._waiting
    dead.kill()
    await dead.wait()
    taken = ahead.take()
    assert taken is alive
    assert taken.stdin is not None
    taken.stdin.close()  # as when the parent goes before it says anything
    assert await asyncio.wait_for(taken.wait(), 60) == 0
    assert taken.stderr is not None
    assert await taken.stderr.read() == b""
    await ahead.close()


async def test_no_more_nodes_are_started_ahead_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    ahead = NodesAhead()
    try:
        await ahead.start(500)
        assert len(ahead._waiting) == 1
    finally:
        await ahead.close()


def test_a_refusal_after_the_nodes_were_started_leaves_none(
    run: Callable[..., Run], tiny_model: Callable[[str], str]
) -> None:
    started = run(tiny_model("llama-gqa"), "--prompt-ids", "5,999999,7")
    assert started.wait() == 2, started.err
    started.assert_nothing_left()
    assert started.err.count("error: ") == 1
    assert "999999" in started.err
