"""Text for a terminal: what could give it orders is shown and not obeyed.

What models generate and what files, servers and peers say may hold escape sequences. Each control character
of ISO 6429, C0 and C1, and DEL is shown as `\\x1b` and its like; line ends and tabs stay. That is decided by
the character alone, so a sequence that comes in two parts is as harmless as one that comes whole.
"""

from __future__ import annotations

import logging
import os
import sys

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_LAYOUT = (ord("\t"), ord("\n"))
_SHOWN = {code: f"\\x{code:02x}" for code in _CONTROLS if code not in _LAYOUT}
_IN_JSON = {code: f"\\u{code:04x}" for code in _CONTROLS if code >= 0x7F}
SHOW_CURSOR = b"\x1b[?25h"


def harmless(text: str) -> str:
    """The text with its control characters made visible."""
    return text.translate(_SHOWN)


def harmless_line(text: str) -> str:
    """The same for what must stay in its line."""
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")


def harmless_json(text: str) -> str:
    """The same JSON value, with the controls that JSON need not escape escaped."""
    return text.translate(_IN_JSON)


def show_cursor() -> None:
    """Undoes what live bars do to a terminal, in an end that has no time for more."""
    try:
        if os.isatty(2):
            terminal = unwaiting(2)
            os.write(2 if terminal is None else terminal, SHOW_CURSOR)
    except OSError:  # it is gone, or takes nothing
        pass


def unwaiting(descriptor: int) -> int | None:
    """Another descriptor of the same terminal, on which a write that would wait raises BlockingIOError: one
    that nobody reads may say that it can be written and take less. None for what is no terminal, or may not
    be opened, as after `su`."""
    if not os.isatty(descriptor):
        return None
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None


class HarmlessFormatter(logging.Formatter):
    """What libraries log, and what child processes say there, is no more trusted than an answer."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def set_up_logging(verbose: int, *, quiet: bool) -> None:
    """Log lines go to stderr. Raises ConfigError for a SWACTOR_LOG that names no level."""
    from swactor_core.errors import ConfigError

    chosen = os.environ.get("SWACTOR_LOG", "").strip().upper() or ("ERROR" if quiet else "WARNING")
    level = {0: chosen, 1: "INFO"}.get(verbose, "DEBUG")
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ConfigError(
            f"SWACTOR_LOG is {level[:40]!r}", hint="set it to DEBUG, INFO, WARNING, ERROR or CRITICAL"
        )
    os.environ["SWACTOR_LOG"] = level  # node processes talk as much
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HarmlessFormatter("%(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
