"""Errors that reach people or plug-in authors. Each says what is wrong, with the value, and the remedy.

Knows no component. A peer's or worker's misbehaviour is never one of these: it becomes a fault with a
reason enum (`faults.py`).
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable

from swactor_core.faults import ModelFailure, RingFaultReason


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` for the name of `known` that `given` is a slip of, empty where there is none."""
    from difflib import get_close_matches  # every process starts with this module, and few make a slip

    near = get_close_matches(given, list(known), n=1, cutoff=0.7)
    return f"did you mean {str(near[0])!r}? " if near else ""  # an enum is named by its value


_NO_MORE_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_REMEDIES = {
    errno.EMFILE: "allow this user more open files: `ulimit -n 1024`",
    errno.ENFILE: "this machine has too many files open: end some programs",
    errno.ENOMEM: "free some memory, or raise this user's bounds: `ulimit -v`, `ulimit -d`, a cgroup's limit",
    errno.EAGAIN: "allow this user more processes and threads: `ulimit -u`, a cgroup's pids.max",
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some space: this user's quota of that disk is used up",
}


def remedy_of_lack(error: BaseException) -> str:
    """The remedy where `error` says that the machine or its bounds on this user have run out; else empty."""
    if isinstance(error, OSError):
        return _REMEDIES.get(error.errno or 0, "")
    said = str(error)
    if isinstance(error, ImportError) and ("failed to map segment" in said or "annot allocate" in said):
        return _REMEDIES[errno.ENOMEM]  # of the dynamic linker, which gives no number
    if isinstance(error, RuntimeError) and "can't start new thread" in said:
        return f"{_REMEDIES[errno.EAGAIN]}; or more memory: `ulimit -v`"  # Python does not say which it was
    return _REMEDIES[errno.ENOMEM] if isinstance(error, MemoryError) else ""


def remedy_of_encoding(text: str, otherwise: str) -> str:
    """The remedy for `text` of the system's that has come with lone surrogates (PEP 383): its bytes may be
    UTF-8, and this process not know it; `otherwise` where they are not."""
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return otherwise
    return "this process takes text for ASCII: set LC_ALL to C.UTF-8, and PYTHONUTF8 not to 0"


class SwactorError(Exception):
    """Root of all errors raised on purpose. `hint` is the remedy, one line, or empty. Where it is made of an
    OSError for want of open files, that remedy takes its place: no other file would fare better."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        cause = sys.exception()
        lacks_files = isinstance(cause, OSError) and cause.errno in _NO_MORE_FILES
        self.hint = remedy_of_lack(cause) if cause is not None and lacks_files else hint

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


class PluginError(UsageError):
    """A selected plug-in is missing, broken, incompatible or registered twice; the message names it."""


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
