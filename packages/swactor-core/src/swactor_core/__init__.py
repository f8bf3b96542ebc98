"""Core of swactor: vocabulary, machines, plug-in interfaces, actor runtime and process assembly.

Third parties import `swactor_core.spi`, `swactor_core.hookimpl` and `swactor_core.errors`; everything
else may move between releases.
"""

from swactor_core.errors import SwactorError
from swactor_core.hookspecs import hookimpl

__version__ = "0.1.0"

__all__ = ["SwactorError", "__version__", "hookimpl"]
