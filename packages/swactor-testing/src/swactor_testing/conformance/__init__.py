"""Contracts that a plug-in's author inherits: the guarantees of `swactor_core.spi` as tests, by kind.

Needs pytest and pytest-asyncio: install `swactor-testing[conformance]`. Importing this package imports them;
importing a mock does not.
"""

from __future__ import annotations

try:
    import pytest
    import pytest_asyncio  # noqa: F401 - the chapters need it: better told here than by the first of them
except ModuleNotFoundError as error:
    needed = f"{__name__} needs {error.name}: pip install 'swactor-testing[conformance]'"
    raise ModuleNotFoundError(needed, name=error.name) from None

_CHAPTERS = (
    "arena",
    "bounds",
    "companions",
    "connections",
    "control",
    "device",
    "edges",
    "fetching",
    "judging",
    "keeping",
    "loader",
    "losses",
    "membership",
    "offers",
    "rings",
    "setting",
    "stages",
    "tokenizer",
    "transport",
    "transport_rig",
    "unacknowledged",
    "worker",
    "worker_rig",
)
# The contracts' assert statements explain themselves like those of a test module.
pytest.register_assert_rewrite(*(f"{__name__}.{chapter}" for chapter in _CHAPTERS))

from swactor_testing.conformance.arena import ArenaContract  # noqa: E402 - the line above must be first
from swactor_testing.conformance.capabilities import (  # noqa: E402
    ArenaCapabilities,
    LoaderCapabilities,
    MembershipCapabilities,
    StorageCapabilities,
    TransportCapabilities,
    WorkerCapabilities,
)
from swactor_testing.conformance.keeping import Kept, StorageContract  # noqa: E402
from swactor_testing.conformance.loader import LoaderContract  # noqa: E402
from swactor_testing.conformance.membership import MembershipContract  # noqa: E402
from swactor_testing.conformance.transport import TransportContract  # noqa: E402
from swactor_testing.conformance.worker import WorkerContract  # noqa: E402

__all__ = [
    "ArenaCapabilities",
    "ArenaContract",
    "Kept",
    "LoaderCapabilities",
    "LoaderContract",
    "MembershipCapabilities",
    "MembershipContract",
    "StorageCapabilities",
    "StorageContract",
    "TransportCapabilities",
    "TransportContract",
    "WorkerCapabilities",
    "WorkerContract",
]
