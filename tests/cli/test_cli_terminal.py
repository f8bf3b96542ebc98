"""A terminal is given no control character but line ends and tabs; a pipe is given the bytes as they are."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tty
from pathlib import Path

import pytest
from swactor_cli.output import Output
from swactor_cli.terminal import HarmlessFormatter, harmless, harmless_json

ENTRY = [sys.executable, "-m", "swactor_cli"]
LONGEST = 60.0
MOCKS = (
    "--transport", "memory", "--membership", "static", "--worker", "echo", "--loader", "synthetic",
    "--arena", "heap",
)  # fmt: skip
ANSWER = ("run", "demo", *MOCKS, "--prompt-ids", "1,2,3", "--max-tokens", "400", "--ignore-eos")


def on_terminal(*arguments: str | Path, stream: str = "stdout", code: int = 0) -> bytes:
    """What a terminal of the given stream gets."""
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    with subprocess.Popen(
        [*ENTRY, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: theirs},
    ) as process:
        os.close(theirs)
        got = bytearray()
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # the last process with the terminal's other end is gone
                break
            if not chunk:
                break
            got += chunk
        assert process.wait(LONGEST) == code, got
    os.close(ours)
    return bytes(got)


def controls(text: str) -> set[str]:
    return {c for c in text if (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0) and c not in "\n\t"}


def test_an_answer_is_exact_in_a_pipe_and_harmless_on_a_terminal(home: Path) -> None:
    piped = subprocess.run(
        [*ENTRY, *ANSWER], capture_output=True, timeout=LONGEST, check=True
    ).stdout.decode()
    assert "\x1b" in piped, "a token a byte: this answer has escapes, and what follows is another token"
    assert len(controls(piped)) > 10
    shown = on_terminal(*ANSWER).decode()
    assert not controls(shown)
    assert shown == harmless(piped)
    assert "\\x1b" in shown


def test_json_on_a_terminal_is_the_same_value_without_controls(home: Path) -> None:
    shown = on_terminal(*ANSWER, "--json").decode()
    assert not controls(shown)
    texts = "".join(json.loads(line).get("text", "") for line in shown.splitlines()[:-1])
    assert len(controls(texts)) > 10


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "\x1b[2J.gguf", "--prompt", "x"),
        ("run", "demo", *MOCKS, "--prompt-ids", "\x9b2J"),
        ("plan", "--\x1b[2J"),
        ("\x1b[2J",),
    ],
)
def test_what_is_said_of_a_mistake_repeats_no_order(home: Path, arguments: tuple[str, ...]) -> None:
    shown = on_terminal(*arguments, stream="stderr", code=2).decode()
    assert "2J" in shown
    assert "\x1b[2J" not in shown
    assert "\x9b" not in shown
    piped = subprocess.run([*ENTRY, *arguments], capture_output=True, timeout=LONGEST, check=False).stderr
    assert not controls(piped.decode())


def test_a_table_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a terminal's orders, nor the markup of the library that draws it, nor lines of their own."""
    Output().table("", ["file"], [["[bold]a[/bold] [/x] :smile: \x1b[2J\nb"]])
    assert capsys.readouterr().out.splitlines()[1].rstrip() == "[bold]a[/bold] [/x] :smile: \\x1b[2J\\nb"


def test_waiting_shows_what_nodes_and_names_say_as_it_is(home: Path) -> None:
    """Names of web models and words of nodes are in live lines, where brackets could be taken for markup."""
    shown = on_terminal(
        *("run", "http://127.0.0.1:1/[/x].gguf", "--prompt", "x"), stream="stderr", code=2
    ).decode()
    assert "Traceback" not in shown
    assert "[/x].gguf" in shown


def test_a_log_line_gives_no_orders() -> None:
    record = logging.LogRecord("worker", logging.WARNING, "", 0, "said %s", ("\x1b]0;title\x07\tok",), None)
    assert HarmlessFormatter("%(message)s").format(record) == "said \\x1b]0;title\\x07\tok"


def test_every_control_is_shown_and_everything_else_is_kept() -> None:
    for code in range(0x250):
        shown = harmless(chr(code))
        if controls(chr(code)):
            assert shown == f"\\x{code:02x}"
        else:
            assert shown == chr(code)
    text = json.dumps("".join(map(chr, range(0x250))), ensure_ascii=False)
    assert json.loads(harmless_json(text)) == json.loads(text)
    assert not controls(harmless_json(text))
