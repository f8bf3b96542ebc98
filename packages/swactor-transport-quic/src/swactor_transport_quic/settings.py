"""Every number of this transport in one place, with its reason; parsed from the host's settings mapping.

Knows no socket and no connection. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from swactor_core.errors import ConfigError
from swactor_core.values import frozen

LARGEST_DATAGRAM = 16_200
"""aioquic encodes frame and packet lengths in 14 bits: from 16 384 on frames are silently corrupt."""

SMALLEST_DATAGRAM = 1_200
"""RFC 9000 section 14: every QUIC path carries this much."""

_Size = Annotated[int, Field(gt=0)]
_Seconds = Annotated[float, Field(gt=0, le=600)]


@frozen
class QuicSettings:
    """Numbers of one endpoint. A key that is not a field here is a ConfigError.

    Failure detection: a ping goes out when nothing was heard for `probe_interval` on a connection with
    streams (`keepalive_interval` without), and the connection is lost when that ping is unanswered for
    `loss_after`. So a killed peer is known within 0.4 + 2.3 = 2.7 s, and one that was only paused for up to
    2.0 s (plus 0.3 s to answer) is never accused. An own pause longer than `stall_grace` restarts the wait.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    datagram_size: Annotated[int, Field(ge=SMALLEST_DATAGRAM, le=LARGEST_DATAGRAM)] | None = None
    """UDP payload for every peer, not to be questioned; None starts at the smallest and probes the path."""
    loopback_datagram_size: Annotated[int, Field(ge=SMALLEST_DATAGRAM, le=LARGEST_DATAGRAM)] = (
        LARGEST_DATAGRAM
    )
    network_datagram_size: Annotated[int, Field(ge=SMALLEST_DATAGRAM, le=LARGEST_DATAGRAM)] = LARGEST_DATAGRAM
    """The largest payload that a path on this machine, or another one, is probed for."""
    socket_buffer: _Size = 4 * 1024 * 1024
    """Asked of the kernel for both directions; default buffers overflow after about ten large datagrams."""
    send_bound: _Size = 1024 * 1024
    """Accepted but unacknowledged bytes per edge, at most."""
    max_edges: Annotated[int, Field(ge=1, le=4096)] = 1024
    """Edges that the peer may have open on one connection."""
    max_channels: Annotated[int, Field(ge=1, le=256)] = 8
    """Control channels that the peer may have open on one connection."""
    control_window: Annotated[int, Field(ge=64)] = 256 * 1024
    """Bytes of unread control frames that a peer may send ahead on one channel."""
    burst: Annotated[int, Field(ge=1)] = 64
    """Datagrams built in one flush on loopback, where no pacer spreads them."""
    idle_timeout: _Seconds = 15.0
    keepalive_interval: _Seconds = 5.0
    probe_interval: _Seconds = 0.4
    loss_after: _Seconds = 2.3
    stall_grace: _Seconds = 0.25
    stuck_after: _Seconds = 10.0
    """Bytes of a stream that are lost time and again, and not acknowledged for so long, end the connection,
    though pings are answered: the path loses what is larger, datagrams of `SMALLEST_DATAGRAM` too."""
    handshake_timeout: _Seconds = 5.0
    preamble_timeout: _Seconds = 3.0
    """From the opening of a stream to the last byte of its preamble."""
    drain_timeout: Annotated[float, Field(ge=0, le=1.8)] = 1.5
    """How long close waits until finished streams are acknowledged; close itself is bounded by 2 s."""
    redial_first: _Seconds = 0.05
    redial_longest: _Seconds = 1.0
    half_open_total: Annotated[int, Field(ge=1)] = 64
    half_open_per_source: Annotated[int, Field(ge=1)] = 8
    """Unfinished handshakes from one address; loopback addresses are exempt."""
    retry_above: Annotated[int, Field(ge=0)] = 16
    """From this many half-open connections on, loopback diallers too must prove their address."""
    handshakes_per_second: Annotated[float, Field(gt=0)] = 100.0
    """Begun by others, after a burst of `half_open_total`: what a stranger's handshake costs, about a
    millisecond, is then a bounded share of the node's one thread, however quickly it is refused."""
    violations_allowed: Annotated[int, Field(ge=0)] = 8
    """Bad preambles on one connection before it is closed."""
    key_update_packets: Annotated[int, Field(ge=256, le=2**23)] = 2**22
    """RFC 9001 section 6.6 forbids more than 2**23 packets under one AES-GCM key."""


_ADAPTER = TypeAdapter(QuicSettings)


def parse_settings(settings: Mapping[str, Any]) -> QuicSettings:
    """Raises ConfigError that names the offending key and its value."""
    try:
        parsed = _ADAPTER.validate_python(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        known = ", ".join(field.name for field in fields(QuicSettings))
        raise ConfigError(
            f"transport quic: {name} = {first['input']!r}: {first['msg']}", hint=f"known settings: {known}"
        ) from None
    if parsed.idle_timeout <= parsed.keepalive_interval + parsed.loss_after:
        raise ConfigError(
            f"transport quic: idle_timeout = {parsed.idle_timeout} must exceed keepalive_interval + "
            f"loss_after"
            f" = {parsed.keepalive_interval + parsed.loss_after}",
            hint="raise idle_timeout or lower keepalive_interval",
        )
    return parsed
