"""The loader part (spec section 15): a model's name to what can be opened, and that to a Model.

Knows nothing but its two halves, `sources` and `model`.
"""

from __future__ import annotations

from swactor_core.spi.loader import Model

from swactor_loader_gguf.cache import Progress, silent
from swactor_loader_gguf.model import GgufModel
from swactor_loader_gguf.sources import open_files, resolve


class GgufLoader:
    """Implements `swactor_core.spi.loader.Loader`."""

    def resolve(self, name: str, progress: Progress | None = None) -> str:
        return resolve(name, progress=progress)

    def open(self, name: str, progress: Progress | None = None, *, outline: str = "") -> Model:
        return GgufModel(name, open_files(name, progress or silent, outline=outline))
