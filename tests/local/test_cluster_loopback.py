"""Cluster mode with real processes on loopback: nodes outlive runs and their orchestrators."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import event_checker
import pytest
from local_command import Command, Places, Run, until
from split_models import split
from swactor_core.node.identity import load_or_create_seed
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind
from swactor_testing.echo import reference_tokens
from web_servers import Misbehaving, Nginx

PROMPT = ("--prompt-ids", "5,6,7")
ECHO = reference_tokens((5, 6, 7), 400, num_layers=4, vocab_size=160)
NAMES = ("a", "b")
# Of a model of four layers on two nodes: stage 0 needs parts 1 and 2, stage 1 parts 1 and 3.
SHARES = (("token_embd", "output"), ("blk.0.", "blk.1."), ("blk.2.", "blk.3."))
AN_HOUR_AGO = """
import runpy, time, types
from swactor_core.node import identity
identity.time = types.SimpleNamespace(time_ns=lambda: time.time_ns() - 3600 * 10**9)
runpy.run_module("swactor_cli", run_name="__main__", alter_sys=True)
"""


def public_key(file: Path) -> str:
    """The public key of a key file, which is made if it is not there, as `swactor-cli key` does."""
    transport = load_plugins().select(Kind.TRANSPORT, "quic").factory()
    return str(transport.public_key(load_or_create_seed(file)).hex())


class Cluster:
    """A cluster file, its nodes as `swactor-cli node` processes, and runs on them."""

    def __init__(self, command: Callable[..., Command], root: Path, model: str) -> None:
        self.command = command
        self.root = root
        self.model = model
        self.file = root / "cluster.toml"
        self.orchestrator, self.colleague = Places(root / "orchestrator"), Places(root / "colleague")
        self.places = {name: Places(root / name) for name in NAMES}
        self.nodes: dict[str, Command] = {}
        self.ports = _free_ports(2)
        keys = {name: public_key(self.places[name].state / "nodes" / f"{name}.key") for name in NAMES}
        nodes = "".join(f'[[cluster.nodes]]\nname = "{n}"\npublic_key = "{k}"\n' for n, k in keys.items())
        masters = (self.orchestrator, self.colleague)
        orchestrators = str([public_key(places.state / "orchestrator.key") for places in masters])
        self.file.write_text(
            f'[cluster]\nid = "loopback"\ngossip_key = "{"5c" * 32}"\n'
            f"orchestrators = {orchestrators}\n"
            f'seeds = ["127.0.0.1:{self.ports[0]}"]\n{nodes}'
            '[plugins]\nworker = "echo"\n'
            '[node]\nbind_host = "127.0.0.1"\nworker = { copy_polls = 4 }\n'  # as PACED
            '[node.membership]\nprofile = "local"\n'
            '[orchestrator]\nbind_host = "127.0.0.1"\n[orchestrator.membership]\nprofile = "local"\n'
        )

    def start(
        self, name: str, *, file: Path | None = None, cwd: Path | None = None, **options: Any
    ) -> Command:
        port = self.ports[NAMES.index(name)]
        self.nodes[name] = self.command(
            "node", "--cluster", str(file or self.file), "--name", name, "--json",
            "--membership-port", str(port), places=self.places[name], cwd=cwd, **options,
        )  # fmt: skip
        return self.nodes[name]

    def node_event(self, name: str, event: str, count: int = 1) -> list[dict[str, Any]]:
        """The node's own events of that name, once it has said at least `count`."""

        def said() -> list[dict[str, Any]]:
            found = [e for e in self.nodes[name].records() if e.get("event") == event]
            return found if len(found) >= count else []

        return until(said, within=60, what=lambda: f"{count} {event} of {name}: {self.nodes[name].said()}")

    def run(self, *arguments: str, places: Places | None = None, **options: Any) -> Run:
        started = self.command(
            self.model, *PROMPT, "--cluster", str(self.file), *arguments,
            kind=Run, places=places or self.orchestrator, **options,
        )  # fmt: skip
        assert isinstance(started, Run)
        started.veterans = True
        return started

    def assert_all_given_back(self) -> None:
        """No node holds a lease: every ring it leased, over all runs, it has released."""

        def balanced() -> bool:
            for name in NAMES:
                events = self.nodes[name].records()
                leased = {e["ring_id"] for e in events if e.get("event") == "ring_leased"}
                released = {e["ring_id"] for e in events if e.get("event") == "ring_released"}
                if leased != released:
                    return False
            return True

        until(balanced, within=15, what=lambda: "\n".join(self.nodes[name].said() for name in NAMES))

    def stop(self) -> None:
        for node in self.nodes.values():
            node.process.send_signal(signal.SIGTERM)
        for node in self.nodes.values():
            assert node.wait(20) == 0, node.said()
            node.assert_nothing_left()
            assert "Traceback" not in node.err, node.err


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: a seed has to be known before its node starts."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def cluster(
    command: Callable[..., Command], tmp_path: Path, tiny_model: Callable[[str], str]
) -> Iterator[Cluster]:
    made = Cluster(command, tmp_path, tiny_model("llama-gqa"))
    for name in NAMES:
        made.start(name)
    yield made
    made.stop()


def test_nodes_serve_run_after_run_whatever_became_of_the_one_before(cluster: Cluster) -> None:
    """Completed twice, stopped, its orchestrator killed, its worker killed; after each one more run."""
    for _ in range(2):
        assert cluster.run("--max-tokens", "12").finish(0)["token_ids"] == ECHO[:12]
        cluster.assert_all_given_back()

    stopped = cluster.run("--max-tokens", "400")
    stopped.wait_event("token_received", sequence=3)
    stopped.interrupt()
    tokens = stopped.finish(130)["token_ids"]
    assert tokens == ECHO[: len(tokens)]
    cluster.assert_all_given_back()
    assert cluster.run("--max-tokens", "12").finish(0)["token_ids"] == ECHO[:12]

    killed = cluster.run("--max-tokens", "400")
    killed.wait_event("token_received", sequence=3)
    killed.process.kill()
    killed.process.wait(5)
    killed.assert_nothing_left()
    event_checker.check(killed.events(), torn_down=False, veterans=True)
    assert cluster.run("--max-tokens", "12").finish(0)["token_ids"] == ECHO[:12]
    cluster.assert_all_given_back()

    crashed = cluster.run("--max-tokens", "400")
    crashed.wait_event("token_received", sequence=3)
    os.kill(crashed.worker_pid(1), signal.SIGKILL)
    result = crashed.finish(1)
    assert result["fault"]["reason"] == "WorkerCrashed"
    assert result["fault"]["stage_index"] == 1
    # The node must not call itself available before its new worker is there.
    last = cluster.run("--max-tokens", "12")
    assert last.finish(0)["token_ids"] == ECHO[:12]
    cluster.assert_all_given_back()
    generations = [e["worker_generation"] for e in cluster.node_event("b", "worker_started", 2)]
    assert generations == [1, 2]
    assert len(cluster.node_event("a", "worker_started")) == 1, "the worker of a served every run"


def test_a_second_orchestrator_waits_for_the_first(cluster: Cluster) -> None:
    first = cluster.run("--max-tokens", "120")
    first.wait_event("token_received", sequence=1)
    second = cluster.run("--max-tokens", "12", places=cluster.colleague)
    assert first.finish(0)["token_ids"] == ECHO[:120]
    assert second.finish(0)["token_ids"] == ECHO[:12]
    cluster.assert_all_given_back()


def test_a_second_orchestrator_that_waits_too_long_is_told_why(cluster: Cluster) -> None:
    first = cluster.run("--max-tokens", "120")
    first.wait_event("token_received", sequence=1)
    os.kill(first.worker_pid(0), signal.SIGSTOP)  # it takes as long as this test wants
    second = cluster.run("--max-tokens", "12", "--pool-timeout", "3", places=cluster.colleague)
    result = second.finish(1, within=20)
    assert result["fault"]["reason"] == "PoolTimeout"
    line = second.error_line()
    assert any(f"{name}: busy with another orchestrator" in line for name in NAMES), line
    refusals = [cluster.nodes[name].err.count("refused the orchestrator") for name in NAMES]
    assert sorted(refusals) in ([0, 1], [1, 1]), "it asked for three seconds"
    os.kill(first.worker_pid(0), signal.SIGCONT)
    assert first.finish(0)["token_ids"] == ECHO[:120]


def test_one_key_serves_one_process_at_a_time(cluster: Cluster) -> None:
    first = cluster.run("--max-tokens", "120")
    first.wait_event("token_received", sequence=1)
    os.kill(first.worker_pid(0), signal.SIGSTOP)  # it takes as long as this test wants
    second = cluster.run("--max-tokens", "12")
    assert second.wait(20) == 1, second.said()
    assert "another process of this machine uses the key" in second.error_line()
    twin = cluster.command("node", "--cluster", str(cluster.file), "--name", "a", places=cluster.places["a"])
    assert twin.wait(20) == 1, twin.err
    assert "another process of this machine uses the key" in twin.err
    os.kill(first.worker_pid(0), signal.SIGCONT)
    assert first.finish(0)["token_ids"] == ECHO[:120]


def test_an_orchestrator_that_is_not_authorised_is_told_so(cluster: Cluster, tmp_path: Path) -> None:
    stranger = Places(tmp_path / "stranger")
    key = public_key(stranger.state / "orchestrator.key")

    # Its own file does not name it: found before anything is sent.
    refused = cluster.run("--max-tokens", "5", places=stranger)
    assert refused.wait() == 2, refused.said()
    assert key in refused.err
    assert "not an authorised orchestrator" in refused.error_line()
    assert refused.events() == []

    # Its own file names it, the nodes' file does not: the nodes say it.
    forged = tmp_path / "forged.toml"
    text = cluster.file.read_text()
    start = text.index("orchestrators")
    forged.write_text(text[:start] + f'orchestrators = ["{key}"]' + text[text.index("\n", start) :])
    file, cluster.file = cluster.file, forged
    refused = cluster.run("--max-tokens", "5", places=stranger)
    cluster.file = file
    result = refused.finish(1, within=20)
    assert result["fault"]["reason"] == "ProvisioningRejected"
    line = refused.error_line()
    assert key in line
    assert "orchestrators" in line
    # And the cluster is none the worse for it.
    assert cluster.run("--max-tokens", "5").finish(0)["token_ids"] == ECHO[:5]


def test_a_model_that_is_another_file_on_one_node_is_a_typed_fault(
    command: Callable[..., Command], tmp_path: Path, tiny_model: Callable[[str], str]
) -> None:
    cluster = Cluster(command, tmp_path, "model.gguf")
    for name, model in zip(NAMES, ("llama-gqa", "llama-tied"), strict=True):
        shutil.copy(tiny_model(model), tmp_path / name / "model.gguf")
        cluster.start(name, cwd=tmp_path / name)
    shutil.copy(tiny_model("llama-gqa"), tmp_path / "orchestrator" / "model.gguf")
    started = cluster.run("--max-tokens", "5", cwd=tmp_path / "orchestrator")
    result = started.finish(1)
    assert result["fault"]["reason"] == "WeightLoadFailed"
    assert result["fault"]["stage_index"] == 1
    line = started.error_line()
    assert result["fault"]["cause"] == "ModelDifferentFile"
    assert "another file" in line
    assert f"on node {NAMES[1]} ({started.node_id(1)})" in line
    assert f"on node {NAMES[1]} ({started.node_id(1)}) is another file" in line
    assert result["fault"]["node_name"] == NAMES[1]
    for name in ("llama-gqa", "llama-tied"):
        assert digest(tiny_model(name)) in line
    assert "put the same file on every node" in line
    cluster.assert_all_given_back()
    cluster.stop()


def digest(path: str) -> str:
    model = load_plugins().select(Kind.LOADER, "gguf").factory().open(path)
    try:
        return str(model.digest())
    finally:
        model.close()


def test_nodes_of_a_cluster_fetch_their_own_stages(
    command: Callable[..., Command], tmp_path: Path, tiny_model: Callable[[str], str], nginx: Nginx
) -> None:
    """Every node has a cache of its own, as on machines of their own."""
    shutil.copy(tiny_model("llama-gqa"), tmp_path / "served" / "m.gguf")
    cluster = Cluster(command, tmp_path, f"{nginx.url}/m.gguf")
    caches = {name: str(tmp_path / name / "cache") for name in NAMES}
    for name in NAMES:
        cluster.start(name, environment={"SWACTOR_CACHE_DIR": caches[name]})
    mine = {"SWACTOR_CACHE_DIR": str(tmp_path / "orchestrator" / "cache")}
    started = cluster.run("--max-tokens", "12", environment=mine)
    assert started.finish(0)["token_ids"] == ECHO[:12]
    cluster.stop()
    nginx.stop()
    size = os.stat(tiny_model("llama-gqa")).st_size
    fetched = [sum(r.body for r in nginx.sent())]
    assert size <= fetched[0] + 3 * (64 << 10), "the orchestrator alone does not fetch what nodes need"
    for name in NAMES:
        (held,) = Path(caches[name]).glob("remote/*/m.gguf")
        assert held.stat().st_size == size


def test_nodes_that_have_only_their_parts_of_a_split_model(
    command: Callable[..., Command],
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    reference: Callable[[str], dict[str, Any]],
) -> None:
    """And one of them, later, another file in the place of a part that it needs."""
    known = reference("tiny/llama-gqa")
    expected, ids = known["greedy"], ",".join(map(str, known["prompt"]))
    whole = tmp_path / "whole"
    whole.mkdir()
    parts = split(tiny_model("llama-gqa"), whole, SHARES)
    cluster = Cluster(command, tmp_path, parts[1].name)
    text = cluster.file.read_text()
    text = text.replace('worker = "echo"', 'worker = "tinygrad"').replace(
        "worker = { copy_polls = 4 }", "worker = {}"
    )
    cluster.file.write_text(text)
    for name, held in zip(NAMES, ((0, 1), (0, 2)), strict=True):
        for number in held:
            shutil.copy(parts[number], tmp_path / name)
        cluster.start(name, cwd=tmp_path / name)

    def start() -> Run:
        started = command(
            parts[1].name, "--prompt-ids", ids, "--max-tokens", str(len(expected)), "--ignore-eos",
            "--cluster", str(cluster.file),
            kind=Run, places=cluster.orchestrator, cwd=whole,
        )  # fmt: skip
        assert isinstance(started, Run)
        started.veterans = True
        return started

    assert start().finish(0)["token_ids"] == expected
    cluster.assert_all_given_back()
    mine = tmp_path / "b" / parts[2].name
    mine.write_bytes(parts[2].read_bytes() + bytes(32))
    started = start()
    result = started.finish(1)
    assert result["fault"]["cause"] == "ModelDifferentFile"
    assert result["fault"]["stage_index"] == 1
    assert f"part 3 of 3, {mine}, is another file" in started.error_line()
    cluster.stop()


def test_nodes_that_reach_what_their_orchestrator_could_not_refuse_it(
    command: Callable[..., Command], tmp_path: Path, tiny_model: Callable[[str], str]
) -> None:
    """Same header, other weights: the orchestrator goes by its cache, the nodes reach the new content."""
    content = Path(tiny_model("llama-gqa")).read_bytes()
    server = Misbehaving(content)
    try:
        url = f"{server.url}/m.gguf"
        cluster = Cluster(command, tmp_path, url)
        for name in NAMES:
            cluster.start(name, environment={"SWACTOR_CACHE_DIR": str(tmp_path / name / "cache")})
        mine = {"SWACTOR_CACHE_DIR": str(tmp_path / "orchestrator" / "cache")}
        assert command("plan", url, environment=mine).wait() == 0
        server.behaviour.content, server.behaviour.etag = content[:-1] + bytes([content[-1] ^ 1]), '"two"'
        server.behaviour.answers = [503, 503]  # to the orchestrator, which asks first
        started = cluster.run("--max-tokens", "5", environment=mine)
        result = started.finish(1)
        assert started.err.count("its server cannot be reached (status 503)") == 1
        fault = result["fault"]
        assert (fault["reason"], fault["cause"]) == ("WeightLoadFailed", "ModelDifferentFile")
        line = started.error_line()
        assert f"{url} is another file than the one that the plan was made for" in line
        assert "run again" in line
        cluster.assert_all_given_back()
        assert cluster.run("--max-tokens", "5", environment=mine).finish(0)["token_ids"] == ECHO[:5]
        cluster.stop()
    finally:
        server.stop()


def test_a_node_that_never_comes_is_named(
    command: Callable[..., Command], tmp_path: Path, tiny_model: Callable[[str], str]
) -> None:
    cluster = Cluster(command, tmp_path, tiny_model("llama-gqa"))
    cluster.start("a")
    started = cluster.run("--max-tokens", "5", "--pool-timeout", "4")
    result = started.finish(1, within=20)
    assert result["fault"]["reason"] == "PoolTimeout"
    assert "b: not in membership" in started.error_line()
    cluster.stop()


def test_nodes_with_workers_of_different_kinds_are_named(
    command: Callable[..., Command], tmp_path: Path, tiny_model: Callable[[str], str]
) -> None:
    """Each would take what the other makes of a prompt for activations, and tokens would come of it."""
    cluster = Cluster(command, tmp_path, tiny_model("llama-gqa"))
    other = tmp_path / "other.toml"
    text = cluster.file.read_text().replace('worker = "echo"', 'worker = "tinygrad"')
    other.write_text(text.replace("worker = { copy_polls = 4 }", ""))
    cluster.start("a")
    cluster.start("b", file=other)
    started = cluster.run("--max-tokens", "4")
    result = started.finish(1)
    assert result["fault"]["reason"] == "PlanInvalid"
    assert result["token_ids"] == []
    line = started.error_line()
    assert re.search(r"workers of different kinds: echo on a \([0-9a-f]{16}\); tinygrad on b \(", line), line
    cluster.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_leaves_faults_the_run_and_serves_again_when_it_is_back(
    cluster: Cluster, number: signal.Signals
) -> None:
    started = cluster.run("--max-tokens", "400")
    started.wait_event("token_received", sequence=3)
    lost = started.node_id(1)
    cluster.nodes["b"].process.send_signal(number)
    assert cluster.nodes["b"].wait(15) == (0 if number is signal.SIGTERM else -number)
    result = started.finish(1, within=15, killed_nodes=[lost])
    assert result["outcome"] == "faulted"
    assert " b (" in started.error_line(), "the one that left is named, whoever saw it first"
    if number is signal.SIGTERM:  # that its worker ended with it is no cause
        assert result["fault"]["reason"] in ("NodeUnavailable", "MembershipLost")
        assert result["fault"]["node_name"] == "b"
    cluster.nodes["b"].assert_nothing_left()
    cluster.start("b")
    assert cluster.run("--max-tokens", "12").finish(0)["token_ids"] == ECHO[:12]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_node_whose_clock_was_set_back_serves_again(cluster: Cluster, end: signal.Signals) -> None:
    assert cluster.run("--max-tokens", "3").finish(0)["token_ids"] == ECHO[:3]
    cluster.nodes["b"].process.send_signal(end)
    cluster.nodes["b"].wait(20)
    back = cluster.start("b", program=(sys.executable, "-c", AN_HOUR_AGO))
    cluster.node_event("b", "node_available", count=2)
    assert cluster.run("--max-tokens", "3").finish(0)["token_ids"] == ECHO[:3]
    assert "clock was set back" in back.err
