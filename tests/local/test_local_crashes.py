"""Processes of a run that die or hang: one typed line, within its bound, and nothing left."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import event_checker
import pytest
from local_command import PACED, Command, Run, alive, until

LONG = ("--prompt-ids", "5,6,7", "--max-tokens", "400")
WORKER_DEATH = 2.0
NODE_DEATH = 5.0
STOPPED_NODE = 14.0

Start = Callable[..., Run]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_worker_is_a_worker_crash_of_its_stage(echo: Start, stage: int) -> None:
    started = echo(*LONG, *PACED)
    started.wait_event("token_received", sequence=3)
    worker = started.worker_pid(stage)
    killed = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    assert started.wait(WORKER_DEATH) == 1, started.said()
    assert time.monotonic() - killed < WORKER_DEATH
    result = started.finish(1)
    assert result["outcome"] == "faulted"
    assert result["fault"]["reason"] == "WorkerCrashed"
    assert result["fault"]["stage_index"] == stage
    assert result["fault"]["node_id"] == started.node_id(stage)
    assert result["fault"]["node_name"] == f"node-{stage}"
    event = started.event("run_faulted")
    assert event is not None
    assert event["fault_node_id"] == started.node_id(stage)
    assert event["fault_node_name"] == f"node-{stage}"
    line = started.error_line()
    assert f"on node node-{stage} ({started.node_id(stage)})" in line
    assert f"stage {stage}" in line
    assert "WorkerCrashed" in line
    assert "SIGKILL" in line


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_node_faults_the_run(echo: Start, stage: int) -> None:
    started = echo(*LONG, *PACED)
    started.wait_event("token_received", sequence=3)
    node, node_id = started.node_pid(stage), started.node_id(stage)
    os.kill(node, signal.SIGKILL)
    result = started.finish(1, within=NODE_DEATH, killed_nodes=[node_id])
    assert result["fault"]["reason"] in ("NodeUnavailable", "StreamFault", "WorkerCrashed")
    assert started.error_line()


def test_all_nodes_killed_at_once(echo: Start) -> None:
    started = echo(*LONG, *PACED, "--nodes", "3")
    started.wait_event("token_received", sequence=3)
    ids = [started.node_id(stage) for stage in range(3)]
    for pid in [started.node_pid(stage) for stage in range(3)]:
        os.kill(pid, signal.SIGKILL)
    result = started.finish(1, within=NODE_DEATH, killed_nodes=ids)
    assert result["outcome"] == "faulted"
    started.error_line()


def test_a_stopped_worker_is_an_execution_timeout(echo: Start) -> None:
    started = echo(*LONG, *PACED, "--token-timeout", "1")
    started.wait_event("token_received", sequence=3)
    os.kill(started.worker_pid(1), signal.SIGSTOP)
    result = started.finish(1, within=20)
    assert result["fault"]["reason"] == "ExecutionTimeout"
    assert "1 s" in started.error_line()
    assert "warning: the token was waited for at stage 1 on node" in started.err
    assert "waited_for" in (started.event("run_torn_down") or {})
    assert result["stats"]["unproven"] == []


def test_a_stopped_node_faults_the_run_and_is_ended(echo: Start) -> None:
    started = echo(*LONG, *PACED, "--token-timeout", "2")
    started.wait_event("token_received", sequence=3)
    node_id = started.node_id(0)
    os.kill(started.node_pid(0), signal.SIGSTOP)
    started.finish(1, within=45, killed_nodes=[node_id])
    started.error_line()


def test_a_stopped_node_is_named_with_the_reason_and_not_waited_for(echo: Start) -> None:
    """Membership gives it up after some five seconds; an end in order would be waited for another fifteen."""
    started = echo(*LONG, *PACED)
    started.wait_event("token_received", sequence=3)
    node_id = started.node_id(0)
    os.kill(started.node_pid(0), signal.SIGSTOP)
    result = started.finish(1, within=STOPPED_NODE, killed_nodes=[node_id])
    assert result["fault"]["reason"] == "MembershipLost"
    assert (result["fault"]["node_id"], result["fault"]["stage_index"]) == (node_id, 0)
    said = f"MembershipLost seen by Membership at stage 0 on node node-0 ({node_id}): "
    assert started.error_line() == f"error: {said}node-0 is Dead in membership"
    assert result["stats"]["unproven"] == ["stage 0 went with its node"]


def test_a_killed_command_takes_its_processes_along(echo: Start) -> None:
    started = echo(*LONG, *PACED)
    started.wait_event("token_received", sequence=3)
    pids = [started.node_pid(0), started.node_pid(1), started.worker_pid(0), started.worker_pid(1)]
    assert all(alive(pid) for pid in pids)
    started.process.kill()
    assert started.wait(5) == -signal.SIGKILL
    started.assert_nothing_left(5)
    # a process that ends has no environment to be found by some time before it is gone
    until(lambda: not any(alive(pid) for pid in pids), within=5, what="a process is still there")
    event_checker.check(started.events(), torn_down=False)


def _interrupt(started: Run) -> None:
    started.interrupt()


def _kill_command(started: Run) -> None:
    started.process.kill()


def _kill_worker(started: Run) -> None:
    os.kill(_first(started, "swactor_core.worker"), signal.SIGKILL)


def _kill_node(started: Run) -> None:
    os.kill(_first(started, "swactor_core.node"), signal.SIGKILL)


def _first(started: Run, module: str) -> int:
    def find() -> int:
        return next((pid for pid, line in sorted(started.left().items()) if module in line.split()), 0)

    return until(find, within=20, what=lambda: f"no {module} among {started.left()}")


# When: the first sign of that phase, seen from outside.
PHASES: dict[str, Callable[[Run], object]] = {
    "nodes-ahead": lambda started: _first(started, "swactor_core.node"),
    "nodes-start": lambda started: started.wait_event("node_started"),
    "pool-ready": lambda started: started.wait_event("pool_ready"),
    "weights": lambda started: started.wait_event("weights_downloaded"),
    "barrier": lambda started: started.wait_event("stage_ready"),
}
BLOWS = {
    "interrupt": (_interrupt, 130),
    "kill-command": (_kill_command, -signal.SIGKILL),
    "kill-worker": (_kill_worker, 1),
    "kill-node": (_kill_node, 1),
}


@pytest.mark.parametrize("blow", BLOWS)
@pytest.mark.parametrize("phase", PHASES)
def test_an_end_during_start_up_keeps_every_guarantee(
    run: Start, tiny_model: Callable[[str], str], phase: str, blow: str
) -> None:
    worker = "tinygrad" if phase in ("weights", "barrier") else "echo"
    started = run(tiny_model("llama-gqa"), "--worker", worker, *LONG)
    PHASES[phase](started)
    strike, code = BLOWS[blow]
    strike(started)
    # a node that nobody has spoken to yet is replaced, if there is still time for that, and a worker that no
    # run has yet begins anew
    replaced = {("nodes-ahead", "kill-node"), ("nodes-ahead", "kill-worker"), ("nodes-start", "kill-worker")}
    codes = {0, code} if (phase, blow) in replaced else {code}
    assert started.wait(15) in codes, started.said()
    started.assert_nothing_left()
    assert "Traceback" not in started.err, started.err
    events = started.events()
    planned = next((e for e in events if e["event"] == "run_planned"), None)
    nodes = [] if planned is None else [stage["node_id"] for stage in planned["stages"]]
    ended = any(e["event"] == "run_torn_down" for e in events)
    event_checker.check(events, torn_down=ended, killed_nodes=nodes if blow == "kill-node" else ())
    if blow == "interrupt" and events:
        assert ended
    if started.process.returncode == 1:
        assert ended
        started.error_line()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_worker_killed_while_it_computes_on_tinygrad(run: Start, demo_model: str, stage: int) -> None:
    started = run(demo_model, "--prompt", "hello world", "--raw", "--max-tokens", "200", "--ignore-eos")
    started.wait_event("token_received", sequence=2)
    os.kill(started.worker_pid(stage), signal.SIGKILL)
    result = started.finish(1, within=10)
    assert result["fault"]["reason"] == "WorkerCrashed"
    assert result["fault"]["stage_index"] == stage
    assert len(result["token_ids"]) >= 3


def test_an_operator_stop_of_a_long_prefill_is_quick(run: Start, demo_model: str) -> None:
    prompt = ",".join(str(100 + index) for index in range(1500))
    started = run(demo_model, "--prompt-ids", prompt, "--max-tokens", "5", "--nodes", "2")
    started.wait_event("execute_step_started", stage_index=0, sequence=0)
    started.interrupt()
    result = started.finish(130, within=10)
    assert result["outcome"] == "operator-stopped"


def test_a_fault_is_also_one_line_without_json(
    command: Callable[..., Command], tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    events = tmp_path / "events.jsonl"
    started = command(
        "run", tiny_model("llama-gqa"), "--worker", "echo", *LONG, *PACED, "--events", str(events)
    )
    started.events_path = events
    started.wait_event("token_received", sequence=3)
    os.kill(started.worker_pid(0), signal.SIGKILL)
    assert started.wait(10) == 1
    started.assert_nothing_left()
    lines = started.err.splitlines()
    assert len([line for line in lines if "WorkerCrashed" in line and "stage 0" in line]) == 1
    assert "Traceback" not in started.err
    event_checker.check(started.events())


def test_a_model_file_shortened_while_it_is_mapped_is_named(
    run: Start, demo_model: str, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    shutil.copyfile(demo_model, model)
    whole = model.stat().st_size
    started = run(
        str(model), "--prompt", "hello world", "--raw", "--max-tokens", "400", "--ignore-eos",
        "--worker-option", "weights=mapped",
    )  # fmt: skip
    started.wait_event("token_received", sequence=2)
    os.truncate(model, whole // 8)
    result = started.finish(1, within=10)
    assert result["fault"]["reason"] == "WorkerCrashed"
    assert result["fault"]["cause"] == "ModelContentChanged"
    facts = f"was shortened while it was in use: {whole} bytes when opened, {whole // 8} now"
    assert f"the model file {str(model)!r} {facts}" in started.error_line()
    assert "SIGBUS" in started.error_line()
    assert "hint: put the whole file there again" in started.err


def test_a_worker_that_cannot_read_a_page_of_a_whole_file_names_it(run: Start, demo_model: str) -> None:
    started = run(demo_model, "--prompt", "hello world", "--raw", "--max-tokens", "400", "--ignore-eos")
    started.wait_event("token_received", sequence=2)
    os.kill(started.worker_pid(1), signal.SIGBUS)
    result = started.finish(1, within=10)
    assert result["fault"]["cause"] == "WeightsUnreadable"
    assert result["fault"]["stage_index"] == 1
    size = os.path.getsize(demo_model)
    assert f"the model file {demo_model!r} ({size} bytes) is as when opened" in started.error_line()
    assert "kernel log" in started.err
