"""Readers that pause: a command goes on, says everything once it is read, and hears Ctrl-C meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swactor_cli.backlog import Backlog

TINY = Path(__file__).parent.parent / "data" / "tiny" / "llama-gqa.gguf"
LONGEST = 60.0
IN_PROCESS = (
    "--arena", "heap", "--transport", "memory", "--membership", "static", "--worker", "echo"
)  # fmt: skip
PIPE_BYTES = 4096


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Reader and writer of a pipe that holds PIPE_BYTES."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def test_what_is_not_read_holds_nobody_up_and_keeps_its_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    backlog, lines = Backlog(writer), [b"%d\n" % number * 500 for number in range(20)]
    for line in lines:
        backlog.write(line)
    assert backlog.pending
    read = b""
    while len(read) < sum(map(len, lines)):
        read += os.read(reader, PIPE_BYTES)
    backlog.drain()
    assert (read, backlog.pending) == (b"".join(lines), False)


def test_a_reader_that_goes_instead_of_reading_is_an_error_of_the_next_write(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    backlog = Backlog(writer)
    backlog.write(bytes(3 * PIPE_BYTES))
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        backlog.drain()
    with pytest.raises(BrokenPipeError):
        backlog.write(b"more")


def test_without_a_thread_a_write_waits(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pipe

    def no_thread(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", no_thread)
    backlog = Backlog(writer)
    os.set_blocking(writer, False)  # so that this test need not wait as well
    with pytest.raises(BlockingIOError):
        backlog.write(bytes(3 * PIPE_BYTES))
    assert not backlog.pending
    assert os.read(reader, PIPE_BYTES)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_ends_in_time_whoever_reads_it(home: Path, pipe: tuple[int, int], interrupted: bool) -> None:
    """Its nodes would else miss their orchestrator and end the run, and Ctrl-C would not be heard."""
    reader, writer = pipe
    events = home / "events"
    command = ["run", str(TINY), "--prompt-ids", "1,2", "--ignore-eos", "--max-tokens", "200", *IN_PROCESS]
    process = subprocess.Popen(
        [sys.executable, "-m", "swactor_cli", *command, "--json", "--events", str(events)],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    with process:
        until(lambda: events.exists() and b"run_torn_down" in events.read_bytes())
        if interrupted:
            until(lambda: process.poll() is not None or process.send_signal(signal.SIGINT))
            assert process.returncode == 130
            return
        said = b""
        while part := os.read(reader, PIPE_BYTES):
            said += part
        assert process.wait(LONGEST) == 0, process.stderr
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["type"] for line in lines] == ["token"] * 200 + ["result"]
    assert lines[-1]["outcome"] == "completed"


def test_who_waits_for_a_reader_may_give_it_up(pipe: tuple[int, int]) -> None:
    """As a node does at its end: a stop in order is not held up for ever by who reads its events."""
    backlog = Backlog(pipe[1])
    backlog.write(bytes(3 * PIPE_BYTES))
    backlog.drain(0.01)
    assert backlog.pending
