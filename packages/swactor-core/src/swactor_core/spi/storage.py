"""What a plug-in keeps on this machine's disk besides models, so that an operator can see it and let it go.

A provider of any kind may have a `storage()`. What lies there can be lost at any time: it is made again where
it is needed, at the price that its kind says.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from swactor_core.values import frozen


class StoredKind(StrEnum):
    TEMPORARY = "temporary"
    """Left by what was cut before its end; nobody will use it."""
    KERNELS = "kernels"
    """Compiled for this machine; compiled again by the next run that needs them."""


@frozen
class Stored:
    """One folder or file. `nbytes` is what it takes on the disk; `used` is when it was last read or written,
    in seconds since 1970; `user` says who needs it now, in words, or is empty."""

    kind: StoredKind
    path: str
    nbytes: int
    used: float
    user: str


class Storage(Protocol):
    """What one provider keeps."""

    def stored(self) -> list[Stored]:
        """Writes nothing. Raises ResourceError where it cannot be read."""

    def remove(self, stored: Stored) -> bool:
        """Deletes it, False when somebody needs it now. Raises ResourceError."""
