"""`node` as a process: its key and the cluster file, its life, and a run over a cluster of two."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parent.parent / "data" / "tiny" / "llama-tied.gguf"
LONGEST = 60.0


def new_cluster(call: Any, home: Path, seed: str, nodes: str = "a,b") -> Path:
    file = home / "cluster.toml"
    assert call("cluster", "new", "--nodes", nodes, "--seed", seed, "--out", file).code == 0
    file.write_text(file.read_text().replace("[plugins]\n", '[plugins]\nworker = "echo"\n'))
    return file


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    """The first line of talk with `word`; a process that says nothing for long is killed."""
    assert process.stderr is not None
    seen = []
    bound = threading.Timer(LONGEST, process.kill)
    bound.start()
    try:
        for line in process.stderr:
            seen.append(line)
            if word in line:
                return line
    finally:
        bound.cancel()
    raise AssertionError(f"{word!r} was never said: {''.join(seen)}")


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LONGEST)
    return process.returncode, out, err


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_node_that_the_file_lacks_is_shown_its_lines(call: Any, home: Path) -> None:
    file = new_cluster(call, home, "127.0.0.1:1", nodes="a")
    said = call("node", "--cluster", file, "--name", "b")
    key = call("key", "--name", "b").out.strip()
    assert said.code == 2
    assert "has no node 'b'" in said.err
    assert "its nodes: a; or add these lines:" in said.err
    assert f'public_key = "{key}"' in said.err.splitlines()


def test_a_key_that_the_file_does_not_have_is_shown_its_line(call: Any, home: Path) -> None:
    file = new_cluster(call, home, "127.0.0.1:1", nodes=f"a={'cd' * 32}")
    said = call("node", "--cluster", file, "--name", "a")
    key = call("key", "--name", "a").out.strip()
    assert said.code == 2
    assert "is not the one in cluster file" in said.err
    assert f'public_key = "{key}"' in said.err.splitlines()
    assert "Traceback" not in said.err


def test_a_key_file_can_be_named(call: Any, home: Path) -> None:
    file = new_cluster(call, home, "127.0.0.1:1", nodes=f"a={'cd' * 32}")
    said = call("node", "--cluster", file, "--name", "a", "--key-file", home / "mine.key")
    assert said.code == 2
    assert "mine.key" in said.err
    assert (home / "mine.key").exists()


def test_a_node_that_nobody_could_reach_is_refused(call: Any, home: Path) -> None:
    file = new_cluster(call, home, "127.0.0.1:1")
    file.write_text(file.read_text().replace('seeds = ["127.0.0.1:1"]', "seeds = []"))
    said = call("node", "--cluster", file, "--name", "a")
    assert said.code == 2
    assert "--advertise" in said.err


def test_options_come_before_the_file_and_the_file_before_defaults(call: Any, home: Path) -> None:
    from swactor_cli.commands.node import node_settings
    from swactor_core.config import load_cluster_file

    file = new_cluster(call, home, "127.0.0.1:1")
    text = file.read_text().replace("bind_port = 0", "bind_port = 4000", 1)
    file.write_text(text.replace('# device = "CPU"', 'device = "CPU"\nbeam = 2', 1))
    loaded = load_cluster_file(str(file))
    given = {"name": "a", "key": "ab" * 32, "bind_port": None, "membership_port": 5000, "memory_bytes": 1}
    settings = node_settings(loaded, given, worker={"device": "CUDA"})
    assert (settings.bind_port, settings.membership_port) == (4000, 5000)
    assert settings.worker == {"device": "CUDA", "beam": 2}
    assert settings.advertise_host == "127.0.0.1"  # this machine's address towards the seed
    assert settings.bind_host == "0.0.0.0"
    assert not settings.managed


def test_a_port_in_use_is_one_typed_line_and_exit_1(call: Any, start: Any, home: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        file = new_cluster(call, home, f"127.0.0.1:{port}")
        node = start("node", "--cluster", file, "--name", "a", "--bind", "127.0.0.1")
        code, out, err = ended(node)
    assert code == 1
    assert out == ""
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, err
    assert str(port) in errors[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_node_in_order(call: Any, start: Any, home: Path, number: signal.Signals) -> None:
    file = new_cluster(call, home, "127.0.0.1:1")
    node = start("node", "--cluster", file, "--name", "a", "--membership-port", 0)
    assert call("key", "--name", "a").out.strip() in wait_for(node, "public key")
    wait_for(node, "available: data 127.0.0.1:")
    node.send_signal(number)
    code, out, err = ended(node)
    assert (code, out) == (0, "")
    assert "has stopped" in err


def test_two_nodes_serve_run_after_run_and_one_may_return(
    call: Any, start: Any, spawn: Any, home: Path
) -> None:
    file = new_cluster(call, home, f"127.0.0.1:{free_port()}")
    first = start("node", "--cluster", file, "--name", "a")
    second = start("node", "--cluster", file, "--name", "b", "--membership-port", 0, "--json", "-q")
    wait_for(first, "available")
    answers = []
    for _ in range(2):
        said = spawn("run", MODEL, "--cluster", file, "--prompt-ids", "1,2,3", "--max-tokens", 4, "--json")
        assert said.code == 0, said.err
        *tokens, result = [json.loads(line) for line in said.out.splitlines()]
        assert [token["type"] for token in tokens] == ["token"] * 4
        assert result["type"] == "result"
        assert result["outcome"] == "completed"
        assert result["token_ids"] == [token["id"] for token in tokens]
        answers.append(result["token_ids"])
    assert answers[0] == answers[1]

    second.send_signal(signal.SIGTERM)
    code, out, err = ended(second)
    assert (code, err) == (0, "")
    events = [json.loads(line) for line in out.splitlines()]
    assert {event["type"] for event in events} == {"event"}
    names = [event["event"] for event in events]
    assert names[0] == "node_started"
    assert names.count("node_available") == 1
    assert names.count("stage_ready") == names.count("stage_stopped") == 2

    # The same name with a later epoch is a new life, and is let in at once.
    third = start("node", "--cluster", file, "--name", "b", "--membership-port", 0)
    wait_for(third, "available")
    said = spawn("run", MODEL, "--cluster", file, "--prompt-ids", "1,2,3", "--max-tokens", 4, "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out.splitlines()[-1])["token_ids"] == answers[0]
    for node in (first, third):
        node.send_signal(signal.SIGINT)
    assert [ended(node)[0] for node in (first, third)] == [0, 0]


def test_a_machine_that_is_no_orchestrator_is_shown_the_line(call: Any, home: Path) -> None:
    file = new_cluster(call, home, "127.0.0.1:1")
    (home / "state" / "orchestrator.key").unlink()
    said = call("run", MODEL, "--cluster", file, "--prompt-ids", "1")
    assert said.code == 2
    assert call("key", "--orchestrator").out.strip() in said.err
    assert "orchestrators" in said.err


def test_a_second_signal_ends_a_node_at_once(call: Any, start: Any, home: Path) -> None:
    file = new_cluster(call, home, "127.0.0.1:1")
    node = start("node", "--cluster", file, "--name", "a", "--membership-port", 0)
    wait_for(node, "available")
    os.kill(node.pid, signal.SIGSTOP)  # both signals are there when it goes on
    os.kill(node.pid, signal.SIGINT)
    os.kill(node.pid, signal.SIGTERM)
    os.kill(node.pid, signal.SIGCONT)
    code, _, err = ended(node)
    assert code == 130
    assert "Traceback" not in err
