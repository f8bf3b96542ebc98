"""Tables at the width of any terminal: no word cut, no cell left out, and lines where nobody looks."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console
from swactor_cli.tables import readable

MODEL = Path(__file__).parent.parent / "data" / "tiny" / "llama-tied.gguf"
COLUMNS = ["stage", "node", "layers", "weights", "from"]
ROWS = [[str(i), f"node-{i}", f"{i * 15} to {i * 15 + 14}", f"{i}.5 MiB", "orchestrator"] for i in range(7)]


def shown(width: int, columns: list[str] = COLUMNS, rows: list[list[str]] = ROWS) -> list[str]:
    console = Console(width=1000, color_system=None)
    with console.capture() as captured:
        for table in readable("title", columns, rows, width=width):
            console.width = width if table.show_header else 1000
            console.print(table)
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [*range(1, 60), 200])
def test_every_word_of_every_cell_is_there_at_any_width(width: int) -> None:
    said = " ".join(shown(width)).split()
    for word in " ".join([*COLUMNS, *(cell for row in ROWS for cell in row)]).split():
        assert word in said, (width, word)


def test_a_table_that_fits_has_a_line_a_row() -> None:
    lines = shown(60)
    assert lines[1].split() == COLUMNS
    assert len(lines) == 2 + len(ROWS)


def test_a_table_is_folded_between_words_before_it_is_turned() -> None:
    lines = shown(44)
    assert lines[1].split() == COLUMNS
    assert all(len(line) <= 44 for line in lines)


def test_a_turned_table_has_as_many_rows_side_by_side_as_fit() -> None:
    lines = shown(37)
    assert lines[1].split() == ["stage", "0", "1"]
    assert all(len(line) <= 37 for line in lines)
    assert sum(line.startswith("stage") for line in lines) == 4, "of seven rows, two at a time"


def test_a_row_too_wide_for_anything_is_shown_whole() -> None:
    path = "/" + "long/" * 40
    assert f"where  {path}" in [line.rstrip() for line in shown(20, ["what", "where"], [["kernels", path]])]


@pytest.mark.parametrize("width", [3, 80])
def test_a_table_without_rows_is_no_error(width: int) -> None:
    assert len(shown(width, ["file", "size"], [])) == (2 if width == 80 else 0)


def on_terminal(columns: int, *arguments: object, term: str = "xterm") -> str:
    """What a terminal of that width shows of stdout and stderr."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "swactor_cli", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": term, "NO_COLOR": "1"},
    ) as process:
        os.close(theirs)
        got = bytearray()
        while True:
            try:
                got += os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
        assert process.wait(60) == 0, got
    os.close(ours)
    return got.decode()


def test_a_plan_on_a_small_terminal_can_be_read(home: Path) -> None:
    said = on_terminal(40, "plan", MODEL, "--nodes", 2)
    for value in ("313.0 KiB", "0 to 1", "orchestrator", "Activation", "process"):
        assert value in said


def test_a_terminal_that_moves_no_cursor_gets_no_bars(home: Path) -> None:
    mocks = ("--transport", "memory", "--membership", "static", "--worker", "echo", "--arena", "heap")
    said = on_terminal(
        80, "run", MODEL, *mocks, "--prompt-ids", "1,2", "--max-tokens", 2, term="dumb"
    )  # fmt: skip
    assert "\x1b" not in said
    assert not said.startswith("\r\n")
