"""`key` and `cluster new`: what a person needs to write a cluster file."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import pytest
from swactor_core.config import load_cluster_file

HEX = re.compile(r"[0-9a-f]{64}\n")


def test_a_key_is_made_once_and_kept_from_others(call: Any, home: Path) -> None:
    first = call("key", "--name", "a")
    assert first.code == 0
    assert HEX.fullmatch(first.out)
    file = home / "state" / "nodes" / "a.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert str(file) in first.err
    assert file.read_text().strip() not in first.out + first.err
    assert call("key", "--name", "a").out == first.out
    assert call("key", "--name", "b").out != first.out


def test_orchestrator_and_nodes_have_different_keys(call: Any) -> None:
    assert call("key", "--orchestrator").out != call("key", "--name", "orchestrator").out


@pytest.mark.parametrize("arguments", [(), ("--name", "a", "--orchestrator")])
def test_exactly_one_key_is_asked_for(call: Any, arguments: tuple[str, ...]) -> None:
    said = call("key", *arguments)
    assert said.code == 2
    assert "exactly one" in said.err


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a b", "x" * 64, "-a"])
def test_a_name_that_is_none_makes_no_file(call: Any, home: Path, name: str) -> None:
    said = call("key", f"--name={name}")
    assert said.code == 2
    assert "cannot be a name" in said.err
    assert not list(home.rglob("*.key"))


def test_a_loose_key_file_is_refused_with_the_remedy(call: Any, home: Path) -> None:
    call("key", "--name", "a")
    file = home / "state" / "nodes" / "a.key"
    file.chmod(0o644)
    said = call("key", "--name", "a")
    assert said.code == 2
    assert f"chmod 600 {file}" in said.err


def test_a_new_cluster_file_is_whole(call: Any, home: Path) -> None:
    key = "cd" * 32
    out = home / "cluster.toml"
    said = call("cluster", "new", "--nodes", f"a, b={key}", "--seed", "10.0.0.1:7000", "--out", out)
    assert said.code == 0
    assert said.out == ""
    file = load_cluster_file(str(out))
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert [node.name for node in file.cluster.nodes] == ["a", "b"]
    assert file.cluster.nodes[0].public_key == call("key", "--name", "a").out.strip()
    assert file.cluster.nodes[1].public_key == key
    assert file.cluster.orchestrators == (call("key", "--orchestrator").out.strip(),)
    assert file.cluster.seeds == ("10.0.0.1:7000",)
    assert file.node.membership_port == 7000
    again = home / "again.toml"
    assert call("cluster", "new", "--nodes", "a", "--out", again).code == 0
    assert load_cluster_file(str(again)).cluster.gossip_key != file.cluster.gossip_key
    assert load_cluster_file(str(again)).cluster.id != file.cluster.id


def test_a_cluster_without_seed_is_warned_about(call: Any, home: Path) -> None:
    said = call("cluster", "new", "--nodes", "a", "--out", home / "c.toml")
    assert said.code == 0
    assert "--seed" in said.err


def test_an_existing_cluster_file_is_kept(call: Any, home: Path) -> None:
    out = home / "c.toml"
    out.write_text("mine")
    said = call("cluster", "new", "--nodes", "a", "--seed", "h:1", "--out", out)
    assert said.code == 2
    assert "--force" in said.err
    assert out.read_text() == "mine"
    assert call("cluster", "new", "--nodes", "a", "--seed", "h:1", "--out", out, "--force").code == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--nodes", " , "], "names no node"),
        (["--nodes", "a=xyz"], "'xyz' is no public key of node 'a'"),
        (["--nodes", "a,a"], "--nodes has 'a' twice"),
        (["--nodes", "a/b"], "cannot be a name"),
        (["--nodes", "a", "--seed", "nowhere"], "host:port"),
        (["--nodes", "a", "--id", "a b"], "cannot be a name"),
    ],
)
def test_a_cluster_that_cannot_be_is_not_written(
    call: Any, home: Path, arguments: list[str], word: str
) -> None:
    out = home / "c.toml"
    said = call("cluster", "new", *arguments, "--out", out)
    assert said.code == 2
    assert word in said.err
    assert "Traceback" not in said.err
    assert not out.exists()
