"""The key file of a node: made once, whole from its first moment, whoever starts at the same time."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from swactor_core.errors import ConfigError
from swactor_core.node import identity
from swactor_core.node.identity import SEED_BYTES, load_or_create_seed

PROCESSES, KEYS, LONGEST = 6, 40, 60.0
MAKE = f"""
import sys
from pathlib import Path
from swactor_core.node.identity import load_or_create_seed
print("here", flush=True)
sys.stdin.readline()
for number in range({KEYS}):
    print(load_or_create_seed(Path(sys.argv[1]) / f"{{number}}.key").hex())
"""


def test_processes_that_start_at_once_have_the_same_keys(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKE, str(tmp_path / "keys")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    makers = [subprocess.Popen(command, text=True, **pipes) for _ in range(PROCESSES)]
    try:
        assert [maker.stdout.readline() for maker in makers] == ["here\n"] * PROCESSES
        for maker in makers:
            maker.stdin.write("go\n")
            maker.stdin.flush()
        said = [maker.communicate(timeout=LONGEST) for maker in makers]
    finally:
        for maker in makers:
            maker.kill()
            maker.wait(LONGEST)
    assert [err for _, err in said] == [""] * PROCESSES
    keys = {out for out, _ in said}
    assert len(keys) == 1
    assert len(set(keys.pop().split())) == KEYS
    assert len(list((tmp_path / "keys").iterdir())) == KEYS


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Does something at the moment when a fresh key's bytes are drawn."""

    def arrange(act: Callable[[], object]) -> None:
        draw = secrets.token_bytes

        def drawn(count: int) -> bytes:
            monkeypatch.setattr(secrets, "token_bytes", draw)
            act()
            return draw(count)

        monkeypatch.setattr(secrets, "token_bytes", drawn)

    return arrange


def test_who_comes_while_a_key_is_written_makes_it_for_both(
    tmp_path: Path, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    path, rivals = tmp_path / "a.key", []
    meanwhile(lambda: rivals.append(load_or_create_seed(path)))
    assert [load_or_create_seed(path)] == rivals
    assert load_or_create_seed(path) == rivals[0]
    assert os.listdir(tmp_path) == ["a.key"]


def test_a_key_that_could_not_be_written_leaves_nothing(
    tmp_path: Path, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    meanwhile(full)
    with pytest.raises(ConfigError, match="No space left") as caught:
        load_or_create_seed(tmp_path / "a.key")
    assert caught.value.hint
    assert os.listdir(tmp_path) == []


def test_a_fresh_key_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "below" / "a.key"
    before = os.umask(0)
    try:
        seed = load_or_create_seed(path)
    finally:
        os.umask(before)
    assert len(seed) == SEED_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.stat().st_nlink == 1


def test_a_key_file_that_is_not_whole_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    path.touch(0o600)
    with pytest.raises(ConfigError, match="holds 0 bytes, not 32") as caught:
        load_or_create_seed(path)
    assert "remove it" in caught.value.hint
    assert path.read_bytes() == b""


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_key_file_that_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """Neither waited for nor read without an end, and nobody is told to change a device's mode."""
    path = {"pipe": tmp_path / "key", "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="is not a regular file") as caught:
        load_or_create_seed(path)
    assert "--key-file" in caught.value.hint


def test_an_epoch_is_later_than_all_before_it_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "orchestrator.key"
    seed = identity.load_or_create_seed(key)
    before = time.time_ns()
    first = identity.later_epoch(key)
    assert before <= first <= time.time_ns()
    an_hour_ago = time.time_ns() - 3600 * 10**9
    monkeypatch.setattr(identity, "fresh_epoch", lambda: an_hour_ago)
    epochs = [first, *(identity.later_epoch(key) for _ in range(3))]
    assert epochs == sorted(set(epochs))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert identity.later_epoch(key) > epochs[-1]
    assert identity.load_or_create_seed(key) == seed
