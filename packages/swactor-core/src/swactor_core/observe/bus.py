"""Event bus: stamps lifecycle events and hands them to sinks. A sink's failure is counted and said once.

Must not know what an event means, nor who asked for it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from swactor_core.errors import UsageError
from swactor_core.events import OBJECT_EVENTS, Event, EventName
from swactor_core.ids import NodeId

log = logging.getLogger(__name__)

Sink = Callable[[dict[str, Any]], None]


class EventBus:
    """One per process. Per-object events are stamped only with `objects`: they are on the token path."""

    def __init__(self, node_id: NodeId, *, objects: bool = False) -> None:
        self.node_id = node_id
        self.objects = objects
        self.sink_failures = 0
        self._sinks: list[Sink] = []
        self._number = 0

    def add_sink(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def drop_sinks(self) -> None:
        """Nothing is written from here on: the stream has had its last event."""
        self._sinks.clear()

    def wants(self, name: EventName) -> bool:
        """Whether `emit` would do anything with an event of this name."""
        return self.objects or name not in OBJECT_EVENTS

    def emit(self, name: EventName, fields: dict[str, Any]) -> None:
        if not self.wants(name):
            return
        self._number += 1
        if self._sinks:
            self.forward(Event(name, self.node_id, time.time_ns(), self._number, fields).to_json())

    def forward(self, event: dict[str, Any]) -> None:
        """Passes on an event that another process has stamped."""
        for sink in self._sinks:
            try:
                sink(event)
            except Exception as error:  # a sink may raise anything; events must not end the run they report
                self.sink_failures += 1
                if self.sink_failures == 1:
                    log.warning(
                        "an event sink fails, its events are lost: %s: %s", type(error).__name__, error
                    )


class JsonLinesSink:
    """Writes one JSON object a line, each at once: whoever follows the file, or finds it after a kill, sees
    every event up to then. Raises UsageError when the file cannot be opened. `error` is the first failure to
    write; after it nothing more is written."""

    def __init__(self, path: str) -> None:
        self.error: OSError | None = None
        try:
            self._file: IO[str] = Path(path).open("w", buffering=1, encoding="utf-8")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise UsageError(
                f"events file {path!r}: {error.strerror}", hint="name a file that can be written"
            ) from None

    def __call__(self, event: dict[str, Any]) -> None:
        if self.error is not None:
            return
        try:
            self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
        except OSError as error:
            self.error = error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error
