"""The files that a run writes beside its answer: lifecycle events and rows of logits.

A file that cannot be opened is refused before the run. One that cannot be written on: events are advice, so
the run goes on and the operator is told; logits were asked for, so the run is stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from swactor_core.errors import ResourceError, UsageError
from swactor_core.observe.bus import JsonLinesSink, Sink


class SideFiles:
    """Opens what is named; None is not written. `stop` is called once when the logits cannot be."""

    def __init__(self, events: str | None, logits: str | None) -> None:
        if events is not None and logits is not None and _same_file(events, logits):
            raise UsageError(f"--events and --logits both name {logits!r}", hint="name two files")
        self.stop: Callable[[], None] = lambda: None
        self.logits_error: ResourceError | None = None
        self._logits_path = logits
        self._logits: BinaryIO | None = None
        self._events = JsonLinesSink(events) if events is not None else None
        self._events_path = events
        if logits is not None:
            try:
                self._logits = Path(logits).open("wb")  # noqa: SIM115 - closed by close()
            except OSError as error:
                raise UsageError(
                    f"--logits {logits!r}: {error.strerror}", hint="name a file that can be written"
                ) from None

    @property
    def objects(self) -> bool:
        """Whether per-object events are of use to anybody."""
        return self._events is not None

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return () if self._events is None else (self._events,)

    @property
    def events_error(self) -> str:
        """What became of the events file, when not all events are in it."""
        error = self._events.error if self._events is not None else None
        if error is None:
            return ""
        return f"--events {self._events_path!r} is not complete: {error.strerror}"

    def write_logits(self, sequence: int, row: bytes) -> None:
        """One row of f32 logits, after those of the sequences before it."""
        if self._logits is None or self.logits_error is not None:
            return
        try:
            self._logits.write(row)
        except OSError as error:
            self._logits_failed(error)
            self.stop()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._logits is not None:
            try:
                self._logits.close()
            except OSError as error:
                if self.logits_error is None:
                    self._logits_failed(error)

    def _logits_failed(self, error: OSError) -> None:
        self.logits_error = ResourceError(f"--logits {self._logits_path!r}: {error.strerror}")


def _same_file(one: str, other: str) -> bool:
    """Devices may be named twice: nothing is overwritten there."""
    path = Path(one).resolve()
    return path == Path(other).resolve() and (path.is_file() or not path.exists())
