"""The UDP socket of a node: reads in batches, routes datagrams by connection id, admits new connections.

One socket serves both roles and both ALPNs. Knows no peer and no stream: who may connect is decided in the
handshake, how a link behaves is decided by the link.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swactor_transport_quic.admission import Admission, Admitted, Reply
from swactor_transport_quic.link import Alpn, Link, LinkState
from swactor_transport_quic.settings import QuicSettings
from swactor_transport_quic.udp import Address, Receiver, open_udp, run_length, send_run

logger = logging.getLogger(__name__)

CONNECTION_ID_BYTES = 8
_BATCH = 64
"""Datagrams read in one wake-up before links are pumped."""
_LONG_HEADER = 0x80
_OF_AN_EARLIER_ONE = (errno.ECONNREFUSED, errno.EMSGSIZE)
"""Errors that the kernel may report for a datagram sent before: the one at hand was then not tried."""
_NO_SEGMENTATION = (errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOPROTOOPT)
"""How a kernel or device says that it does not split runs (udp_send_skb in net/ipv4/udp.c): believed when the
same datagrams go out one by one, since a run of datagrams too big for their way is EINVAL as well."""
_FAREWELLS_KEPT = 4096
"""Connection ids whose end is still told, up to eight of each connection: a node that was cut off has ended
those to all the others at once."""
_FAREWELL_REPLIES = 3


@dataclass(slots=True)
class _Farewell:
    """What to answer a peer that has not yet heard that its connection is over (RFC 9000 section 10.2.1)."""

    datagram: bytes
    replies_left: int = _FAREWELL_REPLIES


class Endpoint:
    """Bound from `open` to `close`. `accept` makes the link of an admitted dialler."""

    def __init__(self, settings: QuicSettings, accept: Callable[[Admitted, Address], Link]) -> None:
        self._settings = settings
        self._accept = accept
        self._socket: socket.socket | None = None
        self._receiver: Receiver
        self._links_by_id: dict[bytes, Link] = {}
        self._ids_of: dict[Link, set[bytes]] = {}
        self._farewells: dict[bytes, _Farewell] = {}
        self._unsent: deque[tuple[bytes, Address]] = deque()
        self._deferred: dict[Link, None] = {}
        self._admission = Admission(settings)
        self._refused: set[Address] = set()
        self._refused_handle: asyncio.Handle | None = None
        self.blocked = False
        self.segmentation = True
        """Whether runs of datagrams go out in one call; off for good once the kernel refused to do that."""
        self.receive_buffer = 0
        self.send_errors = 0

    def open(self, host: str, port: int) -> None:
        """Binds `host`, an address literal. Raises ResourceError naming address and reason."""
        udp = open_udp(host, port, buffer=self._settings.socket_buffer)
        self._receiver = Receiver(udp)
        self._socket = udp
        # Linux reports twice what it grants, to account for its own overhead.
        self.receive_buffer = udp.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
        if self.receive_buffer < self._settings.socket_buffer:
            logger.info(
                "UDP receive buffer is %d bytes, asked for %d",
                self.receive_buffer,
                self._settings.socket_buffer,
            )
        asyncio.get_running_loop().add_reader(udp, self._on_readable)

    def close(self) -> None:
        """Frees the port. Idempotent; the links must be closed before."""
        udp, self._socket = self._socket, None
        if udp is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(udp)
        loop.remove_writer(udp)
        udp.close()
        if self._refused_handle is not None:
            self._refused_handle.cancel()
        self._farewells.clear()
        self._unsent.clear()
        self._deferred.clear()

    @property
    def address(self) -> tuple[str, int]:
        """Bound host and port."""
        assert self._socket is not None
        name = self._socket.getsockname()
        return name[0], name[1]

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._ids_of)

    # Addresses

    async def resolve(self, host: str, port: int) -> Address:
        """The address in exactly the form in which this socket reports it. Raises OSError."""
        assert self._socket is not None
        family = self._socket.family
        flags = socket.AI_V4MAPPED if family == socket.AF_INET6 else 0
        try:
            found = socket.getaddrinfo(
                host, port, family=family, type=socket.SOCK_DGRAM, flags=flags | socket.AI_NUMERICHOST
            )
        except socket.gaierror:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_DGRAM, flags=flags)
        except UnicodeError:
            raise OSError(f"no host has the name {host!r}") from None
        return found[0][4]  # type: ignore[return-value]  # of a datagram socket of these two families

    def is_local(self, address: Address) -> bool:
        """Whether the path never leaves this machine: a loopback address, or the bound one."""
        return is_loopback(address[0]) or (
            self._socket is not None and address[0] == self._socket.getsockname()[0]
        )

    # Carrier: what links use

    def add_id(self, connection_id: bytes, link: Link) -> None:
        self._links_by_id[connection_id] = link
        self._ids_of.setdefault(link, set()).add(connection_id)

    def remove_id(self, connection_id: bytes) -> None:
        link = self._links_by_id.pop(connection_id, None)
        if link is not None:
            self._ids_of[link].discard(connection_id)

    def forget(self, link: Link, farewell: bytes | None) -> None:
        self._admission.finished(link)
        self._deferred.pop(link, None)
        for connection_id in self._ids_of.pop(link, ()):
            del self._links_by_id[connection_id]
            if farewell is not None:
                self._farewells[connection_id] = _Farewell(farewell)
        while len(self._farewells) > _FAREWELLS_KEPT:
            del self._farewells[next(iter(self._farewells))]

    def ready(self, link: Link) -> None:
        """The link's handshake is over: it counts against no limit for strangers any more."""
        self._admission.finished(link)

    def send_all(self, datagrams: Sequence[tuple[bytes, Address]]) -> int:
        """Sends one flush of a link, many datagrams in one call where that is possible. The size of one that
        the kernel found too big for its way, or 0."""
        at = too_big = 0
        while at < len(datagrams):
            count = run_length(datagrams, at) if self.segmentation else 1
            if count == 1 or self.blocked:
                too_big = self.send(*datagrams[at]) or too_big
                at += 1
            else:
                run = datagrams[at : at + count]
                refusal = self._send_run(run)
                if refusal:
                    too_big = self._send_singly(run, refusal) or too_big
                at += count
        return too_big

    def _send_singly(self, run: Sequence[tuple[bytes, Address]], refusal: int) -> int:
        """Sends a run that the kernel refused as a whole, and learns from it. A size too big for it, or 0."""
        errors = self.send_errors
        too_big = max(self.send(data, address) for data, address in run)
        alone = not too_big and self.send_errors == errors and not self.blocked
        if alone and refusal in _NO_SEGMENTATION:
            logger.info("datagrams are sent one by one from here on: %s", os.strerror(refusal))
            self.segmentation = False
        return too_big

    def _send_run(self, run: Sequence[tuple[bytes, Address]]) -> int:
        """0 when the run is taken care of; else the errno of a refusal that left all of it unsent."""
        if self._socket is None:
            return 0
        try:
            try:
                send_run(self._socket, run)
            except OSError as error:
                if error.errno not in _OF_AN_EARLIER_ONE:
                    raise
                self._read_errors()
                send_run(self._socket, run)
        except (BlockingIOError, InterruptedError):
            self._unsent.extend(run)
            self._block()
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                return error.errno or errno.EIO
            self._unsent.extend(run)
            self._block()
        return 0

    def send(self, data: bytes, address: Address) -> int:
        """Its size when the kernel found it too big for its way, else 0."""
        if self._socket is None:
            return 0
        if self.blocked:
            self._unsent.append((data, address))
            return 0
        try:
            try:
                self._socket.sendto(data, address)
            except OSError as error:
                if error.errno not in _OF_AN_EARLIER_ONE:
                    raise
                self._read_errors()
                self._socket.sendto(data, address)
        except (BlockingIOError, InterruptedError):
            self._unsent.append((data, address))
            self._block()
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                self._unsent.append((data, address))
                self._block()
                return 0
            if error.errno == errno.EMSGSIZE:
                return len(data)
            # The datagram is lost, as any datagram may be; the connection decides what that means.
            self.send_errors += 1
            logger.debug("sendto %s: %s", address, error)
        return 0

    def _block(self) -> None:
        assert self._socket is not None
        self.blocked = True
        asyncio.get_running_loop().add_writer(self._socket, self._on_writable)

    def defer(self, link: Link) -> None:
        """The link is flushed once the socket takes datagrams again."""
        self._deferred[link] = None

    def _on_writable(self) -> None:
        assert self._socket is not None
        self.blocked = False
        asyncio.get_running_loop().remove_writer(self._socket)
        while self._unsent and not self.blocked:
            data, address = self._unsent.popleft()
            self.send(data, address)
        deferred, self._deferred = self._deferred, {}
        for link in deferred:
            link.flush()

    def drain(self) -> None:
        """Reads and processes what has arrived, a few batches at most."""
        for _ in range(16):
            if self._socket is None or not self._read_batch():
                return

    # What arrives

    def _on_readable(self) -> None:
        self._read_batch()

    def _read_batch(self) -> bool:
        """Feeds one batch and pumps the links it touched; whether there may be more.

        A datagram that comes alone is handed on before the socket is asked whether there is another.
        """
        udp = self._socket
        assert udp is not None
        now = asyncio.get_running_loop().time()
        touched: dict[Link, None] = {}
        count = 0
        while count < _BATCH:
            try:
                datagrams, address = self._receiver.read(udp)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._read_errors()
                continue
            for data in datagrams:
                link = self._route(data, address, now)
                if link is not None:
                    touched[link] = None
                    link.receive(data, address, now)
                    if not count and len(datagrams) == 1:
                        link.pump(now)
            count += len(datagrams)
            if self._socket is None:
                return False  # what was handed on has closed the transport
        if not count:
            self._read_errors()  # woken without a datagram: the error queue has something
        elif count > 1:
            # Control first: a turn at full load on edges takes milliseconds.
            for link in sorted(touched, key=_edges_last):
                link.pump(now)
        return count >= _BATCH

    def _read_errors(self) -> None:
        """Empties the error queue, which would wake the loop for ever, and notes refused addresses."""
        udp = self._socket
        assert udp is not None
        for _ in range(_BATCH):
            try:
                _, ancillary, _, address = udp.recvmsg(1, 512, socket.MSG_ERRQUEUE)
            except OSError:
                break
            for _, _, data in ancillary:
                if len(data) >= 4 and int.from_bytes(data[:4], sys.byteorder) == errno.ECONNREFUSED:
                    self._refused.add(address)
        if self._refused and self._refused_handle is None:
            # Not from here: this may be inside some link's flush, and its farewell may still wait to be read.
            self._refused_handle = asyncio.get_running_loop().call_soon(self._report_refused)

    def _report_refused(self) -> None:
        self._refused_handle = None
        refused, self._refused = self._refused, set()
        self.drain()
        for link in self.links:
            for address in refused:
                # Only on this machine is the report beyond doubt; elsewhere it only ends an attempt.
                if link.state is LinkState.HANDSHAKE or self.is_local(address):
                    link.refused(address)

    def _route(self, data: bytes, address: Address, now: float) -> Link | None:
        if len(data) < 1 + CONNECTION_ID_BYTES:
            return None
        start, length = (6, data[5]) if data[0] & _LONG_HEADER else (1, CONNECTION_ID_BYTES)
        connection_id = data[start : start + length]
        link = self._links_by_id.get(connection_id)
        if link is not None:
            return link
        farewell = self._farewells.get(connection_id)
        if farewell is not None:
            farewell.replies_left -= 1
            self.send(farewell.datagram, address)
            if farewell.replies_left <= 0:
                del self._farewells[connection_id]
            return None
        if not data[0] & _LONG_HEADER:
            return None
        match self._admission.consider(data, address, now, loopback=is_loopback(address[0])):
            case Reply(datagram=reply):
                self.send(reply, address)
            case Admitted() as admitted:
                link = self._accept(admitted, address)
                self._admission.started(link, address)
                self.add_id(admitted.destination_id, link)
                self.add_id(link.quic.host_cid, link)
                return link
        return None


def _edges_last(link: Link) -> bool:
    return link.alpn is not Alpn.CONTROL or link.state is LinkState.HANDSHAKE


def is_loopback(host: str) -> bool:
    """Whether an address literal, possibly IPv4 mapped into IPv6 or with a zone, is of this machine."""
    return _literal(host).is_loopback


def is_unspecified(host: str) -> bool:
    """Whether an address literal is a wildcard: 0.0.0.0 or ::."""
    return _literal(host).is_unspecified


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    literal = ipaddress.ip_address(host)
    if isinstance(literal, ipaddress.IPv6Address) and literal.ipv4_mapped is not None:
        return literal.ipv4_mapped
    return literal
