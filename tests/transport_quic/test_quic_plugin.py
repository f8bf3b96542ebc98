"""Registration, the doctor check, and what the plug-in does not import early."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from swactor_core.checks import CheckStatus
from swactor_core.errors import ConfigError, TransportError
from swactor_core.ids import NodeId
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind
from swactor_core.spi.transport import TransportContext
from swactor_transport_quic import plugin


def context(**changes) -> TransportContext:
    values = {
        "seed": b"s" * 32,
        "node_id": NodeId(1),
        "epoch": 0,
        "bind_host": "127.0.0.1",
        "bind_port": 0,
        "authorise": lambda key: False,
        "on_peer_lost": lambda node_id, why: None,
    }
    return TransportContext(**{**values, **changes})


def test_the_provider_is_found_by_its_name():
    plugins = load_plugins(only=["quic"])
    provider = plugins.select(Kind.TRANSPORT, "quic")
    assert provider.capabilities["backpressure"] == "exact"
    assert provider.capabilities["max_edges_per_connection"] == 1024
    made = provider.factory()
    assert len(made.public_key(b"s" * 32)) == 32


def test_loading_the_plugin_imports_no_heavy_package():
    code = (
        "import sys; from swactor_core.plugins import load_plugins; load_plugins(only=['quic']);"
        "print([m for m in sys.modules if m.split('.')[0] in ('aioquic', 'cryptography')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_bad_input_is_refused_before_anything_is_bound():
    made = plugin.create_plugin()
    with pytest.raises(ConfigError, match="seed"):
        made.create(context(seed=b"short"))
    with pytest.raises(ConfigError, match="epoch"):
        made.create(context(epoch=-1))
    with pytest.raises(ConfigError, match="nonsense") as caught:
        made.create(context(settings={"nonsense": 1}))
    assert caught.value.hint.startswith("known settings: datagram_size"), (
        "settings, and nothing of pydantic's"
    )


async def test_a_transport_that_is_not_started_says_so():
    transport = plugin.create_plugin().create(context())
    with pytest.raises(TransportError, match="not started"):
        transport.port  # noqa: B018 - the property raises
    with pytest.raises(TransportError, match="not started"):
        await transport.accept_edge()
    with pytest.raises(TransportError, match="not started"):
        await transport.connect(NodeId(2), deadline=1)
    await transport.close()


def test_the_doctor_check_reads_the_buffer():
    (check,) = plugin.swactor_doctor_checks()
    result = check.run()
    assert result.status in (CheckStatus.OK, CheckStatus.WARN)
    assert "bytes" in result.detail


class Refusing(socket.socket):
    def bind(self, address):
        raise PermissionError(1, "Operation not permitted")


class Small(socket.socket):
    def getsockopt(self, *arguments):
        return 2 * 212_992


@pytest.mark.parametrize(("kind", "status"), [(Refusing, CheckStatus.FAIL), (Small, CheckStatus.WARN)])
def test_the_doctor_check_names_a_remedy(monkeypatch, kind, status):
    monkeypatch.setattr(plugin.socket, "socket", kind)
    result = plugin.check_udp()
    assert result.status is status
    assert result.remedy
