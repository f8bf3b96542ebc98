"""What people and programs see: data on stdout, talk on stderr, colour and bars only on a terminal.

`--json` prints one object a line and nothing else on stdout. Knows nothing of runs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

UNWRAPPED = 10_000


class Output:
    """One per command. `json_lines` is the machine mode; `quiet` drops talk that is not an error."""

    def __init__(self, *, json_lines: bool = False, quiet: bool = False) -> None:
        self.json_lines = json_lines
        self.quiet = quiet
        self.talk = Console(stderr=True, highlight=False, soft_wrap=True)
        self._plain = Console(highlight=False, soft_wrap=True)
        if not self._plain.is_terminal:
            self._plain.width = UNWRAPPED  # a row stays a line for grep and cut

    @property
    def interactive(self) -> bool:
        """Whether bars and live lines make sense."""
        return self.talk.is_terminal and not self.quiet

    def text(self, text: str) -> None:
        """Streams text to stdout at once, as it is."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def record(self, record: dict[str, Any]) -> None:
        """One JSON object on one line of stdout, flushed."""
        sys.stdout.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        sys.stdout.flush()

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._plain.print(table)

    def note(self, text: str) -> None:
        if not self.quiet:
            self.talk.print(text, style="dim", markup=False)

    def warning(self, text: str) -> None:
        self.talk.print(f"warning: {text}", style="yellow", markup=False)

    def error(self, message: str, hint: str = "") -> None:
        self.talk.print(f"error: {message}", style="red", markup=False)
        if hint:
            self.talk.print(f"hint: {hint}", markup=False)
