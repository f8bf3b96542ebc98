"""The transports of this repository keep the transport contract."""

from __future__ import annotations

import pytest
from swactor_core.spi.transport import TransportPlugin
from swactor_testing.conformance import TransportCapabilities, TransportContract
from swactor_testing.conformance.transport_rig import Endpoint
from swactor_testing.memory.hub import HUB
from swactor_testing.memory.transport import MemoryPlugin


class TestMemory(TransportContract):
    capabilities = TransportCapabilities(provider="memory", crosses_processes=False)

    @pytest.fixture
    def plugin(self) -> TransportPlugin:
        return MemoryPlugin()

    def vanish(self, endpoint: Endpoint) -> None:
        HUB.vanish(endpoint.node_id)

    def silence(self, endpoint: Endpoint) -> None:
        HUB.hold(sender=endpoint.node_id)

    def resume(self, endpoint: Endpoint) -> None:
        HUB.release()


class TestMemoryWithLatency(TestMemory):
    capabilities = TransportCapabilities(
        provider="memory",
        crosses_processes=False,
        settings={"latency": 0.002},
        large_payload=1 << 20,
        edges=16,
    )


class TestQuic(TransportContract):
    capabilities = TransportCapabilities(provider="quic")

    @pytest.fixture
    def plugin(self) -> TransportPlugin:
        from swactor_transport_quic.transport import QuicPlugin

        return QuicPlugin()
