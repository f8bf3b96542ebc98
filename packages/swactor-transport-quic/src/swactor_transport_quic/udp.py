"""A UDP socket as Linux gives it at its best: many datagrams per system call, errors of the path reported.

Sending, UDP_SEGMENT (linux/udp.h) lets one call carry a run of equal datagrams; receiving, UDP_GRO hands over
what arrived as such a run. Both are optional: a kernel or device that refuses is noticed and served one
datagram at a time. Knows no connection and no event loop.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from swactor_core.errors import ResourceError

logger = logging.getLogger(__name__)

Address = tuple[str, int] | tuple[str, int, int, int]

_SOL_UDP = 17
_UDP_SEGMENT = 103
_UDP_GRO = 104
_IP_RECVERR = 11  # linux/in.h
_IPV6_RECVERR = 25  # linux/in6.h
_IP_MTU_DISCOVER = 10
_IPV6_MTU_DISCOVER = 23
_PMTUDISC_PROBE = 3  # never fragment, and let us find out ourselves what passes
_MOST_SEGMENTS = 64  # UDP_MAX_SEGMENTS of every kernel that has it
_MOST_BYTES = 65_000
_ANCILLARY_BYTES = 64
_SEGMENT_SIZE = struct.Struct("=H")


def open_udp(host: str, port: int, *, buffer: int) -> socket.socket:
    """A bound non-blocking socket. `host` is an address literal. Raises ResourceError naming the address."""
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        raise ResourceError(
            f"cannot bind UDP {host!r}: not an IP address", hint="give the address of a local interface"
        ) from None
    family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
    udp: socket.socket | None = None
    try:
        udp = socket.socket(family, socket.SOCK_DGRAM)
        udp.setblocking(False)
        if family == socket.AF_INET6:
            udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            udp.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
            udp.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
        # With this a closed port at the other end is reported, which tells a killed process at once.
        udp.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        udp.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            udp.setsockopt(socket.SOL_SOCKET, option, buffer)
        udp.bind((host, port))
    except (OSError, OverflowError) as error:
        if udp is not None:
            udp.close()
        raise ResourceError(
            f"cannot bind UDP {host}:{port}: {error}", hint="choose another address or port 0"
        ) from error
    return udp


class Receiver:
    """Reads runs of datagrams. One per socket: the buffer is used again for every read."""

    def __init__(self, udp: socket.socket) -> None:
        self._buffer = bytearray(65_536)
        self._view = memoryview(self._buffer)
        self._buffers = (self._buffer,)
        try:
            udp.setsockopt(_SOL_UDP, _UDP_GRO, 1)
            self.joined = True
        except OSError as error:
            self.joined = False
            logger.info("this kernel joins no arriving datagrams: %s", error)

    def read(self, udp: Any) -> tuple[Sequence[bytes], Address]:
        """The datagrams of one system call and their sender. Raises BlockingIOError and other OSErrors."""
        if not self.joined:
            data, address = udp.recvfrom(len(self._buffer))
            return (data,), address
        count, ancillary, _, address = udp.recvmsg_into(self._buffers, _ANCILLARY_BYTES)
        size = count
        for level, kind, value in ancillary:
            if level == _SOL_UDP and kind == _UDP_GRO:
                size = int.from_bytes(value[:4], sys.byteorder)
        view = self._view
        if count <= size or not size:
            return (bytes(view[:count]),), address
        return [bytes(view[at : min(at + size, count)]) for at in range(0, count, size)], address


def run_length(datagrams: Sequence[tuple[bytes, Address]], start: int) -> int:
    """How many datagrams from `start` on can go in one call: one address, one size, a shorter one last."""
    first, address = datagrams[start]
    size = len(first)
    most = min(_MOST_SEGMENTS, _MOST_BYTES // size, len(datagrams) - start)
    for index in range(1, most):
        data, other = datagrams[start + index]
        if len(data) != size or other != address:
            return index + 1 if other == address and len(data) < size else index
    return max(most, 1)


def send_run(udp: Any, run: Sequence[tuple[bytes, Address]]) -> None:
    """Sends a run that `run_length` found. Raises OSError, and then nothing of it was sent."""
    first, address = run[0]
    segment = (_SOL_UDP, _UDP_SEGMENT, _SEGMENT_SIZE.pack(len(first)))
    udp.sendmsg([data for data, _ in run], (segment,), 0, address)
