"""Where an answer ends by what it says: stop texts in a stream of text, wherever its pieces are cut.

Knows text only. What might be the beginning of a stop text is held back, so that nothing is shown and then
taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

from swactor_core.errors import UsageError


class StopText:
    """`stopped` once one of `stops` has appeared: neither it nor what follows is given out. The one that is
    complete first counts, and of those the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise UsageError("a stop text is empty", hint="give at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of everything so far that is certain now and was not given out before."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and began no stop text after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
