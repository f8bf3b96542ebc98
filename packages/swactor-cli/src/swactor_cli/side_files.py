"""The files that a run writes beside its answer: lifecycle events and rows of logits.

Events are written in place, for those who follow them; logits come to their name whole, when the run has
ended. A file that cannot be opened is refused before the run. One that cannot be written on: events are
advice, so the run goes on and the operator is told; logits were asked for, so the run is stopped.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from swactor_core.errors import ResourceError, UsageError
from swactor_core.observe.bus import JsonLinesSink, Sink
from swactor_core.whole_files import WholeFile


def check_place(option: str, path: str | None) -> None:
    """Refuses a place that cannot be written, before a model is fetched; what can only be known by opening
    the file is for `SideFiles`. Raises UsageError."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    wrong = ""
    if os.path.isdir(path):
        wrong = os.strerror(errno.EISDIR)
    elif not os.path.isdir(folder):
        wrong = os.strerror(errno.ENOENT if not os.path.lexists(folder) else errno.ENOTDIR)
    elif not os.access(place := path if os.path.exists(path) else folder, os.W_OK):
        unwritable = os.statvfs(place).f_flag & os.ST_RDONLY
        wrong = os.strerror(errno.EROFS if unwritable else errno.EACCES)
    if wrong:
        raise UsageError(f"{option} {path!r}: {wrong}", hint="name a file that can be written")


class SideFiles:
    """Opens what is named; None is not written. `inputs` are files of the run that must stay, by what they
    are. `stop` is called once when the logits cannot be written."""

    def __init__(self, events: str | None, logits: str | None, *, inputs: Mapping[str, str | None]) -> None:
        if events is not None and logits is not None and _same_file(events, logits):
            raise UsageError(f"--events and --logits both name {logits!r}", hint="name two files")
        for option, path in {"--events": events, "--logits": logits}.items():
            for what, source in inputs.items():
                if path is not None and source is not None and _is_source(path, source):
                    raise UsageError(f"{option} {path!r} is {what}", hint="name another file to write")
        self.stop: Callable[[], None] = lambda: None
        self.logits_error: ResourceError | None = None
        self._logits_path = logits
        self._logits: WholeFile | None = None
        if logits is not None:
            try:
                self._logits = WholeFile(logits)
            except OSError as error:
                raise UsageError(
                    f"--logits {logits!r}: {error.strerror}", hint="name a file that can be written"
                ) from None
        self._events_path = events
        self._events: JsonLinesSink | None = None
        try:
            self._events = JsonLinesSink(events) if events is not None else None
        except UsageError:
            self.close()
            raise

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

    def finish(self) -> None:
        """The run has ended, whichever way: each row that is there is whole."""
        if self._logits is not None and self.logits_error is None:
            try:
                self._logits.commit()
            except OSError as error:
                self._logits_failed(error)
        self.close()

    def close(self) -> None:
        """Without `finish` before it, a file of logits that was there stays as it was. Idempotent."""
        if self._events is not None:
            self._events.close()
        if self._logits is not None:
            self._logits.close()

    def _logits_failed(self, error: OSError) -> None:
        self.logits_error = ResourceError(
            f"--logits {self._logits_path!r}: {error.strerror}",
            hint="make room, or name a file on another disk; what was in that file before is still there",
        )


def _same_file(one: str, other: str) -> bool:
    """Devices may be named twice: nothing is overwritten there."""
    path = Path(one).resolve()
    return path == Path(other).resolve() and (path.is_file() or not path.exists())


def _is_source(path: str, source: str) -> bool:
    try:
        return os.path.isfile(source) and os.path.samefile(path, source)
    except OSError:
        return False
