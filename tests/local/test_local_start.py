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


INTERRUPT_AT_START = """
import os, signal, sys
words = " ".join(sys.orig_argv)
mine = os.environ.get("INTERRUPTED", "-")
if mine in words:
    left = int(os.environ["AT_IMPORT"])
    def interrupt(event, arguments):
        global left
        if event == "import":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGINT)
    sys.addaudithook(interrupt)
"""


@pytest.mark.parametrize("part", ["swactor_core.node", "swactor_core.worker"])
def test_ctrl_c_means_nothing_to_a_child_however_young_it_is(
    echo: Callable[..., Run], tmp_path: Path, part: str
) -> None:
    """A terminal sends it to every process of the group; what becomes of the run is the command's to say."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(INTERRUPT_AT_START)
    for moment in (1, 3, 10, 40):
        environment = {"PYTHONPATH": str(hook), "INTERRUPTED": part, "AT_IMPORT": str(moment)}
        started = echo("--prompt-ids", "5,6,7", "--max-tokens", "4", "-v", environment=environment)
        assert len(started.finish(0)["token_ids"]) == 4, (part, moment)
        assert "KeyboardInterrupt" not in started.err


def test_kernels_that_cannot_be_kept_go_with_the_run(
    run: Callable[..., Run], tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    """Nothing is left in the temporary folder, which `finish` looks at."""
    blocked = tmp_path / "file"
    blocked.touch()
    started = run(
        *(tiny_model("llama-gqa"), "--prompt-ids", "5,6,7", "--max-tokens", "2", "--nodes", "1"),
        environment={"XDG_CACHE_HOME": str(blocked), "SWACTOR_CACHE_DIR": None},
    )
    started.wait_event("readiness_barrier_passed")
    assert [path.name[:17] for path in started.places.temporary.iterdir()] == ["swactor-tinygrad-"]
    assert len(started.finish(0)["token_ids"]) == 2
