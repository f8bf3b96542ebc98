"""Readers that pause: a command goes on, says everything once it is read, and hears Ctrl-C meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest
from swactor_cli import backlog as backlogs
from swactor_cli.backlog import Backlog, Unhurried

TINY = Path(__file__).parent.parent / "data" / "tiny" / "llama-gqa.gguf"
LONGEST = 60.0
IN_PROCESS = (
    "--arena", "heap", "--transport", "memory", "--membership", "static", "--worker", "echo"
)  # fmt: skip
PIPE_BYTES = 4096


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


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both sides of a terminal: what shows it, and what is written to."""
    shows, written = os.openpty()
    tty.setraw(written)
    yield shows, written
    os.close(shows)
    os.close(written)


@pytest.mark.parametrize("size", [7, 300, 5000])
def test_a_terminal_that_shows_nothing_holds_nobody_up(terminal: tuple[int, int], size: int) -> None:
    """As behind a connection that is gone: it can be written, it says, and takes less than it is given."""
    shows, written = terminal
    backlog, said = Backlog(written), []

    def say() -> None:
        while not backlog.pending:
            said.append(b"%d " % len(said) * size)
            backlog.write(said[-1])
        backlog.write(b"end")

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(LONGEST)
    assert not saying.is_alive()
    shown = b""
    while not shown.endswith(b"end"):
        shown += os.read(shows, PIPE_BYTES)
    backlog.drain()
    assert shown == b"".join(said) + b"end"


def test_who_ends_at_once_does_not_wait_for_a_terminal(terminal: tuple[int, int]) -> None:
    """The second Ctrl-C shows the cursor again where it can."""
    _, written = terminal
    os.set_blocking(written, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(written, bytes(PIPE_BYTES))
    os.set_blocking(written, True)
    code = "from swactor_cli.terminal import show_cursor; show_cursor()"
    assert subprocess.run([sys.executable, "-c", code], stderr=written, timeout=LONGEST).returncode == 0


def test_data_and_talk_for_one_reader_keep_their_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with open(writer, "w", closefd=False) as stdout, open(os.dup(writer), "w") as stderr:
        data = Unhurried(stdout)
        talk = Unhurried(stderr, data)
        for _ in range(3):
            data.write("d" * PIPE_BYTES)
            talk.write("t" * PIPE_BYTES)
        said = b""
        while len(said) < 6 * PIPE_BYTES:
            said += os.read(reader, PIPE_BYTES)
        talk.drain()
    assert said == (b"d" * PIPE_BYTES + b"t" * PIPE_BYTES) * 3


def test_text_is_encoded_as_one(tmp_path: Path) -> None:
    """Some encodings begin with a mark."""
    with open(tmp_path / "said", "w", encoding="utf-16") as stdout:
        data = Unhurried(stdout)
        data.write("one")
        data.write(" two")
    assert (tmp_path / "said").read_text(encoding="utf-16") == "one two"


def test_what_nobody_ever_reads_is_not_kept_without_an_end(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's events, behind a log collector that hangs for days."""
    monkeypatch.setattr(backlogs, "MOST_UNREAD", 3 * PIPE_BYTES)
    reader, writer = pipe
    backlog = Backlog(writer)
    for _ in range(4):  # the first lies in the pipe
        backlog.write(bytes(PIPE_BYTES))
    with pytest.raises(OSError, match="nobody has read") as caught:
        backlog.write(b"x")
    assert caught.value.errno == errno.ENOBUFS
    read = 0
    while read < 4 * PIPE_BYTES:
        read += len(os.read(reader, PIPE_BYTES))
    backlog.drain()
    backlog.write(b"again")
    assert os.read(reader, PIPE_BYTES) == b"again"


def test_a_pipe_that_another_process_made_not_to_block_is_waited_for(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.set_blocking(writer, False)
    backlog = Backlog(writer)
    backlog.write(bytes(3 * PIPE_BYTES))
    read = 0
    while read < 3 * PIPE_BYTES:
        read += len(os.read(reader, PIPE_BYTES))
    backlog.drain()


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
    os.mkfifo(events)
    command = ["run", str(TINY), "--prompt-ids", "1,2", "--ignore-eos", "--max-tokens", "200", *IN_PROCESS]
    process = subprocess.Popen(
        [sys.executable, "-m", "swactor_cli", *command, "--json", "--events", str(events)],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    with process, events.open() as told:
        assert any("run_torn_down" in line for line in told)
        if interrupted:
            # the first may still be one that asks the run for its end; two of a kind could become one
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONGEST) == 130
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
