"""The arenas of this repository keep the arena contract."""

from __future__ import annotations

import pytest
from swactor_core.spi.arena import ArenaPlugin
from swactor_testing.conformance import ArenaCapabilities, ArenaContract
from swactor_testing.heap import HeapArenas


class TestHeap(ArenaContract):
    capabilities = ArenaCapabilities(provider="heap", crosses_processes=False)

    @pytest.fixture
    def plugin(self) -> ArenaPlugin:
        return HeapArenas()


class TestMemfd(ArenaContract):
    capabilities = ArenaCapabilities(provider="memfd")

    @pytest.fixture
    def plugin(self) -> ArenaPlugin:
        from swactor_arena.arena import MemfdArenas

        return MemfdArenas()
