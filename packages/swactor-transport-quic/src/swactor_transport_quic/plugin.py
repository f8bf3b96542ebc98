"""Hook implementations of this plug-in. Imports aioquic only inside the factory."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from swactor_core.checks import CheckResult, CheckStatus, DoctorCheck
from swactor_core.hookspecs import hookimpl
from swactor_core.spi.provider import Kind, Provider

if TYPE_CHECKING:
    from swactor_transport_quic.transport import QuicPlugin

_WANTED_BUFFER = 4 * 1024 * 1024


def create_plugin() -> QuicPlugin:
    """The factory of provider `quic`."""
    from swactor_transport_quic.deferred import load_when_used

    load_when_used("service_identity")
    from swactor_transport_quic.transport import QuicPlugin

    return QuicPlugin()


@hookimpl
def swactor_register_transports() -> list[Provider]:
    return [
        Provider(
            kind=Kind.TRANSPORT,
            name="quic",
            summary="QUIC on aioquic: one UDP port, mutual TLS with pinned node keys, one stream per edge",
            factory=create_plugin,
            capabilities={
                "ordered": True,
                "backpressure": "exact",
                "peer_identity": "native",
                "encrypted": True,
                "udp": True,
                "max_edges_per_connection": 1024,
            },
        )
    ]


def check_udp() -> CheckResult:
    """Sends itself one datagram over loopback and reads the receive buffer that the kernel grants."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(1.0)
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WANTED_BUFFER)
            udp.bind(("127.0.0.1", 0))
            udp.sendto(b"swactor", udp.getsockname())
            udp.recv(16)
            granted = udp.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
    except OSError as error:
        return CheckResult(
            CheckStatus.FAIL, f"UDP on loopback does not work: {error}", "allow UDP sockets on 127.0.0.1"
        )
    if granted < _WANTED_BUFFER:
        return CheckResult(
            CheckStatus.WARN,
            f"UDP receive buffer is {granted} bytes, {_WANTED_BUFFER} wanted; edges run slower",
            f"sysctl -w net.core.rmem_max={_WANTED_BUFFER} net.core.wmem_max={_WANTED_BUFFER}",
        )
    return CheckResult(CheckStatus.OK, f"UDP on loopback works, receive buffer {granted} bytes")


@hookimpl
def swactor_doctor_checks() -> list[DoctorCheck]:
    return [DoctorCheck("quic-udp", "UDP sockets and their buffers", check_udp)]
