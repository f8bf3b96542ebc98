"""Whether servers may be asked, and the error of those that cannot be reached.

Knows the switch and the words. Must not know networks, nor the cache.
"""

from __future__ import annotations

from swactor_core.config import offline
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure


class Unreachable(ModelError):
    """Nobody answered, or only that another try may help: what is here already is as good as it was. `why` is
    what went wrong, in short. Refusals (401, 403, 404, 410) and contents that changed are no such error."""

    def __init__(self, message: str, *, hint: str, why: str) -> None:
        super().__init__(message, hint=hint, cause=ModelFailure.SOURCE_UNREACHABLE)
        self.why = why

    def lacking(self, nbytes: int) -> Unreachable:
        """The same, with how many bytes of what is needed are not on this machine."""
        size = f"{nbytes / 2**20:.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"
        message = f"{self.message}; {size} of what is needed are not in the cache"
        return Unreachable(message, hint=self.hint, why=self.why)


def refuse_when_offline(what: str) -> None:
    """Raises Unreachable where the environment forbids to ask any server."""
    if variable := offline():
        raise Unreachable(
            f"{what} is not asked for: {variable} is set",
            hint=f"unset {variable} and run once with a network, or give the path of a .gguf file",
            why=f"{variable} is set",
        )
