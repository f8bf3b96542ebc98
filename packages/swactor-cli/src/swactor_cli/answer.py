"""The answer as text while its tokens come: whole characters, and no further than a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from swactor_core.spi.loader import TextStream
from swactor_core.stop_text import StopText


class Answer:
    """`stream` turns ids into text; without one (a model without vocabulary) ids are shown as numbers."""

    def __init__(self, stream: TextStream | None, stops: Sequence[str] = ()) -> None:
        self._stream = stream
        self._stop = StopText(stops)
        self._count = 0

    @property
    def stopped(self) -> bool:
        return self._stop.stopped

    def push(self, token_id: int) -> str:
        """Text that is certain with this token."""
        self._count += 1
        if self._stream is None:
            return f"{' ' if self._count > 1 else ''}{token_id}"
        return self._stop.push(self._stream.push(token_id))

    def finish(self) -> str:
        """What is left when no token follows."""
        if self._stream is None:
            return ""
        return self._stop.push(self._stream.finish()) + self._stop.finish()
