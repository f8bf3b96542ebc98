"""Modules that are loaded when something in them is first asked for, and not with who imports them.

aioquic imports `service_identity`, with which it compares a certificate to a host's name. Nodes are known by
their pinned keys and have no such names, so that is never asked, and was a fifth of what a node imports.
(`importlib.util.LazyLoader` does not do: the import itself asks its module for `__spec__`, which loads it.)
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's own questions
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        loaded = importlib.import_module(self.__name__)
        vars(self).update(vars(loaded))
        return getattr(loaded, name)


def load_when_used(name: str) -> None:
    """Puts a module in the place of the top-level module `name` that becomes it once it is used, unless it is
    there already; one that is not installed is left to whoever imports it."""
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Deferred
    sys.modules[name] = module
