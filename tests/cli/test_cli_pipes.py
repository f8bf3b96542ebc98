"""Streams that do not take what is written, for want of a reader or of room: quiet, and the code tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parent.parent / "data" / "tiny" / "llama-tied.gguf"
ENTRY = [sys.executable, "-m", "swactor_cli"]
LONGEST = 60.0
COMMANDS = (
    ["--help"],
    ["run", "--help"],
    ["cluster", "new", "--help"],
    ["--version"],
    ["version"],
    ["plugins"],
    ["plugins", "--json"],
    ["doctor"],
    ["plan", str(MODEL)],
    ["cache", "list"],
)


def run(command: list[str], *, unbuffered: str = "", **streams: int) -> subprocess.CompletedProcess[bytes]:
    """`streams` are descriptors; what is not given is captured."""
    return subprocess.run(
        [*ENTRY, *command],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=LONGEST,
        check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )


@pytest.fixture
def gone() -> int:
    """The writing end of a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def full() -> int:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_reader_that_is_gone_ends_a_command_as_sigpipe_would(
    home: Path, gone: int, command: list[str]
) -> None:
    said = run(command, stdout=gone)
    assert (said.returncode, said.stderr) == (141, b"")


@pytest.mark.parametrize("command", [["--help"], ["version"], ["plan", str(MODEL)]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_behind_stdout_is_said(
    home: Path, full: int, command: list[str], unbuffered: str
) -> None:
    said = run(command, stdout=full, unbuffered=unbuffered)
    assert said.returncode == 1
    assert said.stderr == b"error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("stream", ["gone", "full"])
def test_talk_that_nobody_hears_changes_no_exit_code(
    home: Path, stream: str, request: pytest.FixtureRequest
) -> None:
    descriptor = request.getfixturevalue(stream)
    assert run(["plugins"], stderr=descriptor).returncode == 0
    assert run(["run"], stderr=descriptor).returncode == 2
