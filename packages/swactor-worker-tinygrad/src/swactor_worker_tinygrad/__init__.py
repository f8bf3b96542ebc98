"""swactor plug-in: device bridge and stage role code on tinygrad.

`create(settings)` is the worker provider's factory; importing this package imports no tinygrad.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swactor_worker_tinygrad.backend import TinygradBackend

__all__ = ["create"]


def create(settings: Mapping[str, object]) -> TinygradBackend:
    """A worker backend; see `backend.create`."""
    from swactor_worker_tinygrad.backend import create as build

    return build(settings)
