"""What strangers may cost: which first datagrams are answered, and how many handshakes may be open.

Pure but for the keys of retry tokens: bytes and time in, a decision out. Knows links only as identities to
count, and no socket.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections import Counter

from aioquic._buffer import Buffer, BufferReadError
from aioquic.quic.packet import (
    QuicPacketType,
    QuicProtocolVersion,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler
from swactor_core.values import frozen

from swactor_transport_quic.settings import SMALLEST_DATAGRAM, QuicSettings

SUPPORTED_VERSIONS = (QuicProtocolVersion.VERSION_1,)
_ID_BYTES = 8


@frozen
class Admitted:
    """A dialler may begin its handshake. `retry_id` is set when its address is proven by a token."""

    destination_id: bytes
    original_id: bytes
    retry_id: bytes | None


@frozen
class Reply:
    """One datagram to send back, without keeping anything."""

    datagram: bytes


class Admission:
    """Counts unfinished handshakes that others began, in all and by source address."""

    def __init__(self, settings: QuicSettings) -> None:
        self._settings = settings
        self._sources: dict[object, str] = {}
        self._by_source: Counter[str] = Counter()
        self._tokens = QuicRetryTokenHandler()
        self._allowance = float(settings.half_open_total)
        self._allowance_at = 0.0

    @property
    def half_open(self) -> int:
        return len(self._sources)

    def started(self, link: object, address: tuple[str, int] | tuple[str, int, int, int]) -> None:
        source = self._sources[link] = _source(address[0])
        self._by_source[source] += 1

    def finished(self, link: object) -> None:
        """The handshake is over or failed. Idempotent, and nothing for a link that was never counted."""
        source = self._sources.pop(link, None)
        if source is not None:
            self._by_source[source] -= 1
            if not self._by_source[source]:
                del self._by_source[source]

    def consider(
        self, data: bytes, address: tuple[str, int] | tuple[str, int, int, int], now: float, *, loopback: bool
    ) -> Admitted | Reply | None:
        """None: ignore it. Never raises, whatever the bytes are."""
        if len(data) < SMALLEST_DATAGRAM:
            return None  # RFC 9000 section 14.1; also keeps every answer smaller than its question
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=_ID_BYTES)
        except (ValueError, BufferReadError):
            return None
        if header.packet_type is QuicPacketType.VERSION_NEGOTIATION or header.version is None:
            return None
        if header.version not in SUPPORTED_VERSIONS:
            return Reply(
                encode_quic_version_negotiation(
                    source_cid=header.destination_cid,
                    destination_cid=header.source_cid,
                    supported_versions=list(SUPPORTED_VERSIONS),
                )
            )
        if header.packet_type is not QuicPacketType.INITIAL or len(header.destination_cid) < _ID_BYTES:
            return None
        settings = self._settings
        if self.half_open >= settings.half_open_total:
            return None
        if not loopback and self._by_source[_source(address[0])] >= settings.half_open_per_source:
            return None
        if header.token:
            try:
                original = self._tokens.validate_token(
                    address=address, destination_cid=header.destination_cid, token=header.token, now=now
                )
            except ValueError:
                return None
            return self._admit(Admitted(header.destination_cid, original, header.destination_cid), now)
        if loopback and self.half_open < settings.retry_above:
            return self._admit(Admitted(header.destination_cid, header.destination_cid, None), now)
        source_id = secrets.token_bytes(_ID_BYTES)
        token = self._tokens.create_token(
            address=address,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=source_id,
            now=now,
        )
        return Reply(
            encode_quic_retry(
                version=header.version,
                source_cid=source_id,
                destination_cid=header.source_cid,
                original_destination_cid=header.destination_cid,
                retry_token=token,
            )
        )

    def _admit(self, admitted: Admitted, now: float) -> Admitted | None:
        """None when others have begun as many handshakes as the rate allows; a dialler repeats itself."""
        settings = self._settings
        earned = (now - self._allowance_at) * settings.handshakes_per_second
        self._allowance = min(float(settings.half_open_total), self._allowance + max(earned, 0.0))
        self._allowance_at = now
        if self._allowance < 1:
            return None
        self._allowance -= 1
        return admitted


def _source(host: str) -> str:
    """Whom an address counts for: with IPv6 its network of 64 bits, because whoever has one address of it has
    them all."""
    if ":" not in host:
        return host
    literal = ipaddress.IPv6Address(host)
    if literal.ipv4_mapped is not None:
        return str(literal.ipv4_mapped)
    return literal.packed[:8].hex()
