"""Makes aioquic connections: configuration by role, ALPN and peer class. Knows no link, peer or socket."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from aioquic.quic.configuration import QuicConfiguration
from aioquic.tls import CipherSuite
from swactor_core.wire import PREAMBLE_BYTES

from swactor_transport_quic.admission import SUPPORTED_VERSIONS, Admitted
from swactor_transport_quic.compat import MAX_DATA, Connection, StreamLimits
from swactor_transport_quic.congestion import congestion_name
from swactor_transport_quic.identity import Claim, make_certificate, private_key
from swactor_transport_quic.link import Alpn
from swactor_transport_quic.settings import SMALLEST_DATAGRAM, QuicSettings

_FIRST_LOOPBACK_WINDOW = 512 * 1024  # bytes
_FIRST_NETWORK_WINDOW = 10  # datagrams, RFC 9002 section 7.2
_NETWORK_CEILING = 8 * 1024 * 1024
_LOOPBACK_SHARE = 4
"""A flight takes at most this fraction of the receive buffer: the kernel charges large datagrams twice their
size, and several connections share the buffer."""
_LOOPBACK_RTT = 0.01
"""First guess in seconds: a lost first datagram on this machine is repeated after twice this."""

Judge = Callable[[Claim], str]
"""Says why a peer is refused, or an empty string."""


class ConnectionMaker:
    """One per endpoint. `receive_buffer` is what the kernel granted (bytes); set it before the first use."""

    def __init__(self, *, seed: bytes, epoch: int, settings: QuicSettings) -> None:
        self._key = private_key(seed)
        self._certificate = make_certificate(self._key, epoch)
        self._settings = settings
        self.receive_buffer = settings.socket_buffer
        self._configurations: dict[tuple[str | None, bool], QuicConfiguration] = {}

    def _configuration(self, alpn: str | None, local: bool) -> QuicConfiguration:
        """`alpn` None is the accepting role, which takes them all."""
        made = self._configurations.get((alpn, local))
        if made is None:
            made = self._configurations[alpn, local] = self._make_configuration(alpn, local)
        return made

    def _make_configuration(self, alpn: str | None, local: bool) -> QuicConfiguration:
        settings = self._settings
        size = settings.datagram_size or SMALLEST_DATAGRAM
        if local:
            ceiling = self.receive_buffer // _LOOPBACK_SHARE
            congestion = congestion_name(min(_FIRST_LOOPBACK_WINDOW, ceiling), ceiling)
        else:
            congestion = congestion_name(_FIRST_NETWORK_WINDOW * size, _NETWORK_CEILING)
        return QuicConfiguration(
            is_client=alpn is not None,
            alpn_protocols=[alpn] if alpn is not None else list(Alpn),
            certificate=self._certificate,
            private_key=self._key,
            # Chains, dates and names mean nothing here: the key is pinned, and TLS proves its possession.
            verify_mode=ssl.CERT_NONE,
            cipher_suites=[
                CipherSuite.AES_128_GCM_SHA256,
                CipherSuite.AES_256_GCM_SHA384,
                CipherSuite.CHACHA20_POLY1305_SHA256,
            ],
            congestion_control_algorithm=congestion,
            idle_timeout=settings.idle_timeout,
            initial_rtt=_LOOPBACK_RTT if local else 0.1,
            max_data=MAX_DATA,
            max_datagram_size=size,
            supported_versions=list(SUPPORTED_VERSIONS),
        )

    def _limits(self, alpn: str) -> StreamLimits:
        if alpn == Alpn.CONTROL:
            return StreamLimits(
                uni_streams=0,
                uni_credit=0,
                bidi_streams=self._settings.max_channels,
                bidi_credit=self._settings.control_window,
            )
        return StreamLimits(
            uni_streams=self._settings.max_edges, uni_credit=PREAMBLE_BYTES, bidi_streams=0, bidi_credit=0
        )

    def _largest(self, *, local: bool) -> int:
        settings = self._settings
        if settings.datagram_size is not None:
            return settings.datagram_size
        return settings.loopback_datagram_size if local else settings.network_datagram_size

    def dialling(self, alpn: str, judge: Judge, *, local: bool) -> Connection:
        return Connection(
            configuration=self._configuration(alpn, local),
            limits=self._limits,
            judge=judge,
            burst=self._settings.burst if local else None,
            largest=self._largest(local=local),
        )

    def accepting(self, admitted: Admitted, judge: Judge, *, local: bool) -> Connection:
        return Connection(
            configuration=self._configuration(None, local),
            limits=self._limits,
            judge=judge,
            burst=self._settings.burst if local else None,
            largest=self._largest(local=local),
            original_destination_connection_id=admitted.original_id,
            retry_source_connection_id=admitted.retry_id,
        )
