"""swactor: one linear GGUF inference pipeline over a pool of nodes. Re-exports the small public API."""

from swactor_core import SwactorError, __version__, hookimpl

__all__ = ["SwactorError", "__version__", "hookimpl"]
