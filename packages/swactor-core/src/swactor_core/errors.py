"""Errors that reach people or plug-in authors. Each says what is wrong, with the value, and the remedy.

Knows no component. A peer's or worker's misbehaviour is never one of these: it becomes a fault with a
reason enum (`faults.py`).
"""

from __future__ import annotations

from swactor_core.faults import ModelFailure, RingFaultReason


class SwactorError(Exception):
    """Root of all errors raised on purpose. `hint` is the remedy, one line, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def line(self) -> str:
        """Message and remedy in one line, for a fault's detail."""
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(SwactorError):
    """The command or call asks for something that cannot be: exit code 2."""


class ConfigError(UsageError):
    """A configuration file, variable or option is malformed; the message names it."""


class ModelError(UsageError):
    """A model cannot be found, read, or is not supported; the message names file and field. `cause` goes into
    a fault."""

    def __init__(self, message: str, *, hint: str = "", cause: ModelFailure = ModelFailure.REFUSED) -> None:
        super().__init__(message, hint=hint)
        self.cause = cause


class PluginError(SwactorError):
    """A selected plug-in is missing, broken, incompatible or registered twice."""


class ResourceError(SwactorError):
    """The machine lacks something: memory, a tool, a device, a descriptor."""


class TransportError(SwactorError):
    """A connection or edge cannot be made or has broken."""


class EdgeBroken(TransportError):
    """The peer, or the connection, ended this edge before its end of stream."""


class EdgeClosed(TransportError):
    """This side has closed the edge; the call came after it."""


class RingError(SwactorError):
    """A ring header is not what its layout says; nothing was read or written. `reason` goes into a fault."""

    def __init__(
        self, message: str, *, hint: str = "", reason: RingFaultReason = RingFaultReason.RING_STATE_INVALID
    ) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class UndecidableLogits(SwactorError):
    """A logit is not a number, or no token is left to choose from."""
