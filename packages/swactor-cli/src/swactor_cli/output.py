"""What people and programs see: data on stdout, talk on stderr, colour and bars only on a terminal.

`--json` prints one object a line and nothing else on stdout. Knows nothing of runs. Rich is for terminals and
tables only and takes a tenth of a second to import: who has neither does not wait for it.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO, cast

from swactor_core.errors import SwactorError

from swactor_cli.backlog import Unhurried
from swactor_cli.terminal import harmless, harmless_json, harmless_line, show_cursor

if TYPE_CHECKING:
    from rich.console import Console

UNWRAPPED = 10_000
LINGER_SECONDS = 2.0


class OutputLost(SwactorError):
    """Standard output cannot be written any more. `reader_gone` when its reader closed the pipe, as `head`
    does: then nobody is left to be told."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror}")
        self.reader_gone = isinstance(error, BrokenPipeError)


class StandardOutput:
    """Standard output, whoever writes to it: what it does not take is an OutputLost, then and whenever it is
    written to later."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def wait_for_nobody(self) -> Unhurried | None:
        """From here on a reader that pauses holds nobody up; `drain` waits for it."""
        with contextlib.suppress(OSError, ValueError):  # it has no descriptor
            unhurried = Unhurried(self._stream)
            self._stream = cast(TextIO, unhurried)
            return unhurried
        return None

    @property
    def pending(self) -> bool:
        return isinstance(self._stream, Unhurried) and self._stream.pending

    def drain(self, seconds: float | None = None) -> None:
        """Waits until everything is read, or lies in the pipe, so long at most. Raises OutputLost."""
        with self._guarded():
            if isinstance(self._stream, Unhurried):
                self._stream.drain(seconds)

    def write(self, text: str) -> int:
        with self._guarded():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._guarded():
            self._stream.flush()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if self._error is not None:
            raise OutputLost(self._error)
        try:
            yield
        except OSError as error:
            self._error = error
            _forget(self._stream)
            raise OutputLost(error) from None


def wait_for_nobody() -> None:
    """For a command that runs an event loop: neither a reader of stdout nor one of stderr holds it up."""
    data = sys.stdout.wait_for_nobody() if isinstance(sys.stdout, StandardOutput) else None
    with contextlib.suppress(OSError, ValueError):
        talk, sys.stderr = sys.stderr, cast(TextIO, Unhurried(sys.stderr, data))
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is talk:
                handler.setStream(sys.stderr)


def pending() -> bool:
    """Whether something was written that its reader has not taken."""
    return any(getattr(stream, "pending", False) for stream in (sys.stdout, sys.stderr))


def settle_talk() -> None:
    """What stderr has not taken is talk that nobody hears: it is no error of the command. Nor are a node's
    events that nobody reads, and neither holds up an end for longer than LINGER_SECONDS."""
    try:
        if isinstance(sys.stdout, StandardOutput):
            with contextlib.suppress(OutputLost):
                sys.stdout.drain(LINGER_SECONDS)
        if isinstance(sys.stderr, Unhurried):
            sys.stderr.drain(LINGER_SECONDS)
        sys.stderr.flush()
    except OSError:
        _forget(sys.stderr)


def _forget(stream: TextIO) -> None:
    """What is still buffered would fail again when the interpreter ends: it goes nowhere instead."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_standard_streams() -> None:
    """Gives a command that was started without stdin, stdout or stderr the null device in their place, so
    that no file or socket of its own gets their numbers. What the encoding of stdout lacks becomes a `?`."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout = cast(TextIO, StandardOutput(sys.stdout))


def _is_utf8(stream: TextIO) -> bool:
    try:
        return codecs.lookup(stream.encoding).name == "utf-8"
    except (LookupError, TypeError):
        return False


class Output:
    """One per command. `json_lines` is the machine mode; `quiet` drops talk that is not an error."""

    def __init__(self, *, json_lines: bool = False, quiet: bool = False) -> None:
        self.json_lines = json_lines
        self.quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._shown = sys.stdout.isatty()

    @cached_property
    def talk(self) -> Console:
        """Standard error as a terminal: for bars and colours."""
        from rich.console import Console

        class Talk(Console):
            """Talk that nobody reads is dropped; it never ends the command."""

            def on_broken_pipe(self) -> None:
                self.quiet = True

        return Talk(stderr=True, highlight=False, soft_wrap=True)

    @property
    def interactive(self) -> bool:
        """Whether bars and live lines make sense: not where the cursor cannot be moved."""
        return self._terminal and not self.quiet and os.environ.get("TERM", "") not in ("dumb", "unknown")

    def text(self, text: str) -> None:
        """Streams text to stdout at once: as it is, and on a terminal harmless to it. Raises OutputLost."""
        self._write(harmless(text) if self._shown else text)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def record(self, record: dict[str, Any]) -> None:
        """One JSON object on one line of stdout, flushed. Raises OutputLost."""
        plain = _is_utf8(sys.stdout)
        line = json.dumps(record, ensure_ascii=not plain, separators=(",", ":"))
        self._write((harmless_json(line) if self._shown else line) + "\n")

    def drain(self) -> None:
        """Waits until stdout's reader has taken everything. Raises OutputLost."""
        if isinstance(sys.stdout, StandardOutput):
            sys.stdout.drain()

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """On stdout, in the terminal's width. In a pipe a row stays a line for grep and cut."""
        from rich.console import Console

        from swactor_cli.tables import readable

        plain = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        width = plain.width if plain.is_terminal else UNWRAPPED
        harmless_rows = [[*map(harmless_line, row)] for row in rows]
        with plain.capture() as captured:
            for index, table in enumerate(readable(title, columns, harmless_rows, width=width)):
                plain.width = width if table.show_header else UNWRAPPED
                plain.print(*[""][:index], table, sep="\n")
        self._write(captured.get())

    def note(self, text: str) -> None:
        if not self.quiet:
            self._say(text, "dim")

    def warning(self, text: str) -> None:
        self._say(f"warning: {text}", "yellow")

    def error(self, message: str, hint: str = "") -> None:
        self._say(f"error: {message}", "red")
        if hint:
            self._say(f"hint: {hint}", "")

    def say(self, text: str) -> None:
        """Talk that is neither a warning nor an error nor to be left out."""
        self._say(text, "")

    def _say(self, text: str, style: str) -> None:
        text = harmless(text)
        with contextlib.suppress(OSError):  # a full disk behind stderr: there is no place left to say so
            if self._terminal or os.environ.get("FORCE_COLOR"):
                self.talk.print(text, style=style, markup=False, emoji=False)
            else:
                sys.stderr.write(text + "\n")
                sys.stderr.flush()

    def restore_terminal(self) -> None:
        """For an end that gives live bars no time to do it."""
        if self._terminal:
            show_cursor()
