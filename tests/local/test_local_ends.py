"""How a run ends by its operator: in order, at once, by Ctrl-C in a terminal, a signal, or a lost reader."""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import subprocess
import termios
import time
from collections.abc import Callable

import pytest
from local_command import CLI, PACED, Command, Run, until
from swactor_testing.echo import reference_tokens

PROMPT = (5, 6, 7)
LONG = ("--prompt-ids", "5,6,7", "--max-tokens", "400")
ECHO = reference_tokens(PROMPT, 400, num_layers=4, vocab_size=160)
AT_ONCE = 2.0

Start = Callable[..., Run]


def test_a_completed_run_leaves_nothing(echo: Start) -> None:
    started = echo(*LONG[:2], "--max-tokens", "20", "--nodes", "3")
    started.wait_event("pool_ready")
    assert len(started.sockets) >= 8, "3 nodes and the orchestrator have two UDP sockets each"
    result = started.finish(0)
    assert result["outcome"] == "completed"
    assert result["token_ids"] == ECHO[:20]
    assert result["stats"]["unproven"] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_the_run_in_order(echo: Start, number: signal.Signals) -> None:
    started = echo(*LONG, *PACED)
    started.wait_event("token_received", sequence=3)
    if number is signal.SIGINT:
        started.interrupt()
    else:
        started.process.send_signal(number)
    result = started.finish(130, within=20)
    assert result["outcome"] == "operator-stopped"
    tokens = result["token_ids"]
    assert 4 <= len(tokens) < 400
    assert tokens == ECHO[: len(tokens)]
    assert [e["event"] for e in started.events()].count("run_stopped") == 1


def test_a_second_interrupt_ends_everything_at_once(echo: Start) -> None:
    started = echo(*LONG, *PACED)
    started.wait_event("token_received", sequence=3)
    # A stopped worker takes no part in an orderly teardown: the first interrupt has to wait for its bounds.
    os.kill(started.worker_pid(0), signal.SIGSTOP)
    started.interrupt()
    started.wait_event("run_stopped")
    started.interrupt()
    before = time.monotonic()
    assert started.wait(AT_ONCE) == 130
    assert time.monotonic() - before < AT_ONCE
    started.assert_nothing_left(AT_ONCE)
    tokens = started.tokens()
    assert tokens == ECHO[: len(tokens)]
    assert "Traceback" not in started.err


class Terminal:
    """A command in the foreground of its own pseudo-terminal."""

    def __init__(self, command: Callable[..., Command], *arguments: str) -> None:
        self.fd, child = os.openpty()
        termios.tcsetwinsize(child, (24, 100))

        def take_terminal() -> None:
            fcntl.ioctl(child, termios.TIOCSCTTY, 0)

        self.command = command(
            *arguments,
            environment={"TERM": "xterm-256color"},
            stdin=child,
            stdout=child,
            stderr=child,
            preexec_fn=take_terminal,
        )
        os.close(child)
        os.set_blocking(self.fd, False)
        self.seen = b""

    def read(self) -> bytes:
        try:
            while chunk := os.read(self.fd, 65536):
                self.seen += chunk
        except BlockingIOError:
            pass
        except OSError:  # EIO: the last process has closed its end
            pass
        return self.seen

    def text(self) -> str:
        return self.read().decode(errors="replace")

    def press(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def close(self) -> None:
        os.close(self.fd)


def test_ctrl_c_in_a_terminal_keeps_the_text_and_restores_the_cursor(
    command: Callable[..., Command], tiny_model: Callable[[str], str]
) -> None:
    terminal = Terminal(command, "run", tiny_model("llama-gqa"), "--worker", "echo", *LONG, *PACED)
    shown = " ".join(map(str, ECHO[:4]))
    until(lambda: shown in terminal.text(), within=30, what=terminal.text)
    terminal.press(b"\x03")
    assert terminal.command.wait() == 130, terminal.text()
    terminal.command.assert_nothing_left()
    text = terminal.text()
    terminal.close()
    assert "stopped by the operator" in text
    assert "Traceback" not in text
    assert text.rfind("\x1b[?25h") >= text.rfind("\x1b[?25l"), "the cursor stays hidden"
    line = next(line for line in text.splitlines() if shown in line)
    numbers = line[line.index(shown) :].replace("^C", " ").split()
    assert [int(n) for n in numbers if n.isdigit()][:4] == ECHO[:4]


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_while_nodes_start_restores_the_terminal(
    command: Callable[..., Command], tiny_model: Callable[[str], str], presses: int
) -> None:
    terminal = Terminal(command, "run", tiny_model("llama-gqa"), "--worker", "echo", *LONG, *PACED)
    until(lambda: "nodes" in terminal.text(), within=30, what=terminal.text)
    for _ in range(presses):
        terminal.press(b"\x03")
    assert terminal.command.wait() == 130, terminal.text()
    terminal.command.assert_nothing_left()
    text = terminal.text()
    terminal.close()
    assert "Traceback" not in text
    assert text.rfind("\x1b[?25h") >= text.rfind("\x1b[?25l"), "the cursor stays hidden"


@pytest.mark.parametrize("options", [("--json",), ()], ids=["json", "text"])
def test_a_reader_that_goes_away_stops_the_run(
    command: Callable[..., Command], tiny_model: Callable[[str], str], options: tuple[str, ...]
) -> None:
    """As `swactor-cli run … | head -1` does."""
    reader, writer = os.pipe()
    arguments = ("run", tiny_model("llama-gqa"), "--worker", "echo", *LONG, *PACED, *options)
    started = command(*arguments, stdout=writer)
    os.close(writer)
    first = b""
    while len(first) < 4:
        first += os.read(reader, 4 - len(first))
    os.close(reader)
    assert started.wait() == 141, started.err
    started.assert_nothing_left()
    assert "Traceback" not in started.err
    assert "error" not in started.err


def test_a_full_disk_behind_stdout_is_one_error_line(
    command: Callable[..., Command], tiny_model: Callable[[str], str]
) -> None:
    with open("/dev/full", "wb") as full:
        started = command("run", tiny_model("llama-gqa"), "--worker", "echo", *LONG, *PACED, stdout=full)
    assert started.wait() == 1, started.err
    started.assert_nothing_left()
    assert "Traceback" not in started.err
    assert [line for line in started.err.splitlines() if line.startswith("error: ")] == [
        "error: cannot write to standard output: No space left on device"
    ]


@pytest.mark.parametrize("option", ["--events", "--logits"])
def test_a_full_disk_behind_a_side_file_is_told(
    command: Callable[..., Command], tiny_model: Callable[[str], str], option: str
) -> None:
    arguments = [*LONG[:2], "--max-tokens", "20", "--sample-on", "orchestrator", option, "/dev/full"]
    started = command("run", tiny_model("llama-gqa"), "--worker", "echo", *arguments)
    code = started.wait()
    started.assert_nothing_left()
    assert "Traceback" not in started.err
    assert "No space left on device" in started.err
    # Tokens are the product and were printed; the logits were asked for and are not there; events are advice.
    assert code == (0 if option == "--events" else 1), started.err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_no_harm(
    command: Callable[..., Command], tiny_model: Callable[[str], str], closed: str
) -> None:
    arguments = [*CLI, "run", tiny_model("llama-gqa"), "--worker", "echo", *LONG[:2], "--max-tokens", "5"]
    started = command("-c", f'exec "$@" {closed}', "sh", *arguments, program=("sh",))
    assert started.wait() == 0, started.err
    started.assert_nothing_left()
    assert "Traceback" not in started.err
    if ">&-" not in closed.replace("2>&-", ""):
        assert started.out.split() == [str(token) for token in ECHO[:5]]


def test_a_run_goes_on_after_a_pause_of_all_its_processes(echo: Start) -> None:
    """As Ctrl-Z and `fg` do it: nobody accuses anybody of a silence that was everybody's."""
    started = echo(*LONG[:2], "--max-tokens", "60")
    started.wait_event("token_received", sequence=3)
    os.killpg(started.process.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    # Longer than links (2.3 s) and membership (3 s) take to give a silent peer up.
    until(lambda: time.monotonic() > stopped + 5, within=10, what="the pause")
    os.killpg(started.process.pid, signal.SIGCONT)
    assert started.finish(0)["token_ids"] == ECHO[:60]


def test_two_runs_at_once_do_not_disturb_each_other(echo: Start) -> None:
    first = echo(*LONG[:2], "--max-tokens", "120")
    second = echo(*LONG[:2], "--max-tokens", "30", "--nodes", "3")
    first.wait_event("prompt_injected")
    second.wait_event("prompt_injected")
    assert second.finish(0)["token_ids"] == ECHO[:30]
    assert first.finish(0)["token_ids"] == ECHO[:120]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_the_shell_had_ignored_stays_ignored(echo: Start, number: signal.Signals) -> None:
    """As `nohup` does with SIGHUP, and a shell without job control with SIGINT of a background command."""
    ignore = functools.partial(signal.signal, number, signal.SIG_IGN)
    started = echo(*LONG[:2], "--max-tokens", "60", preexec_fn=ignore)
    started.wait_event("token_received", sequence=1)
    os.killpg(started.process.pid, number)
    assert started.finish(0)["token_ids"] == ECHO[:60]


def test_help_does_not_wait_for_plug_ins(command: Callable[..., Command]) -> None:
    started = command("run", "--help", stderr=subprocess.DEVNULL)
    assert started.wait() == 0
    assert "--prompt" in started.out
    started.assert_nothing_left()
