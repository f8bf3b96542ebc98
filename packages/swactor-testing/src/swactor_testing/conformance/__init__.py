"""Contracts that a plug-in's author inherits: the guarantees of `swactor_core.spi` as tests, by kind.

Needs pytest and pytest-asyncio: install `swactor-testing[conformance]`. Importing this package imports them;
importing a mock does not.
"""

from __future__ import annotations

import pytest

_CHAPTERS = ("bounds", "control", "edges", "transport", "transport_rig")
# The contracts' assert statements explain themselves like those of a test module.
pytest.register_assert_rewrite(*(f"{__name__}.{chapter}" for chapter in _CHAPTERS))

from swactor_testing.conformance.capabilities import (  # noqa: E402 - after the line above, which must be first
    TransportCapabilities,
)
from swactor_testing.conformance.transport import TransportContract  # noqa: E402

__all__ = [
    "TransportCapabilities",
    "TransportContract",
]
