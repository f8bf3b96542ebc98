"""A transport over a real network that does not notice when its peer answers no more."""

from __future__ import annotations

from typing import Any

import pytest
from swactor_testing.conformance import TransportCapabilities, TransportContract
from wrong_kit import caught_by

FOR_EVER = {"loss_after": 100, "keepalive_interval": 100, "idle_timeout": 300}


class NeverAsks(TransportContract):
    capabilities = TransportCapabilities(provider="quic", settings=FOR_EVER, silence_within=1.0)

    @pytest.fixture
    def plugin(self) -> Any:
        from swactor_transport_quic.transport import QuicPlugin

        return QuicPlugin()


@caught_by("test_a_silent_peer_is_lost_to_its_reader", "waited 1 s in vain for on_peer_lost")
class TestASilentWriterIsWaitedFor(NeverAsks):
    pass


@caught_by("test_a_silent_peer_is_lost_to_its_writer", "waited 1 s in vain for on_peer_lost")
class TestASilentReaderIsWaitedFor(NeverAsks):
    pass
