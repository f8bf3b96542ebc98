"""Packages whose names are found when they are first asked for, so that a process imports what it uses.

Knows Python's way for that (PEP 562) and nothing of this project.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from importlib import import_module


def found_in(package: str, names: Collection[str], modules: tuple[str, ...]) -> Callable[[str], object]:
    """A `__getattr__` for `package`: it looks for `names` in the package's `modules`, in that order, and
    imports no further ones than it needs. What all processes use stands first."""

    def find(name: str) -> object:
        if name in names:
            for each in modules:
                found = vars(import_module(f"{package}.{each}"))
                if name in found:
                    setattr(sys.modules[package], name, found[name])
                    return found[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
