"""Runs on the mocks alone: one process, no file, no socket; and a guard that nothing of them is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from swactor_core.plugins import Plugins, load_plugins
from swactor_testing.memory.hub import HUB
from swactor_testing.static import CLUSTERS

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "local"))  # event_checker judges these streams too


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """The process-wide registries are empty after every test, whatever it did."""
    yield
    endpoints, clusters = dict(HUB.endpoints), dict(CLUSTERS)
    HUB.endpoints.clear()
    HUB.clear()
    CLUSTERS.clear()
    assert not endpoints
    assert not clusters
