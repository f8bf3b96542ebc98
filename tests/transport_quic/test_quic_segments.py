"""Many datagrams in one system call: a kernel that will not, a way too narrow for them, other refusals."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from swactor_transport_quic.udp import Receiver, open_udp, run_length, send_run

KIB = 1024
SO_NO_CHECK = 11
"""asm-generic/socket.h. Without checksums Linux refuses UDP_SEGMENT (udp_send_skb), as a device without
checksum offload does."""
NARROW = 1_500


class Refusing:
    """A real socket in front of which `refuse(segment sizes)` may raise an errno. Keeps what passed."""

    def __init__(self, real: socket.socket, refuse: Callable[[list[int], bool], int]) -> None:
        self._real = real
        self._refuse = refuse
        self.runs = 0
        self.singles = 0
        self.refused = 0

    def _judge(self, sizes: list[int], run: bool) -> None:
        number = self._refuse(sizes, run)
        if number:
            self.refused += 1
            raise OSError(number, os.strerror(number))

    def sendto(self, data: bytes, address: Any) -> int:
        self._judge([len(data)], False)
        self.singles += 1
        return self._real.sendto(data, address)

    def sendmsg(self, buffers: Sequence[bytes], *rest: Any) -> int:
        self._judge([len(data) for data in buffers], True)
        self.runs += 1
        return self._real.sendmsg(buffers, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def refusing(node: Any, refuse: Callable[[list[int], bool], int]) -> Refusing:
    endpoint = node.transport._endpoint
    endpoint._socket = Refusing(endpoint._socket, refuse)
    return endpoint._socket


async def bulk(pair: Any, flow: Any, data: bytes, edge_id: int = 1) -> None:
    """`data` from left to right, byte for byte."""
    left, right = pair
    sender, reader = await left.edge_to(right, edge_id)
    received, _ = await asyncio.gather(
        flow.read_exactly(reader, len(data), granted=256 * KIB), flow.send_all(sender, data)
    )
    assert received == data


async def narrow_pair(make_node: Any) -> tuple[Any, Any]:
    """Datagrams of one small size, so that every flush of bulk is a run."""
    left = await make_node("left", datagram_size=1200)
    right = await make_node("right", datagram_size=1200)
    left.transport.set_peer(right.peer())
    right.transport.set_peer(left.peer())
    return left, right


# --- a kernel that does not split runs ---


async def test_a_kernel_that_refuses_to_split_gets_datagrams_one_by_one(make_node, flow, pattern, caplog):
    pair = await narrow_pair(make_node)
    endpoint = pair[0].transport._endpoint
    endpoint._socket.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
    caplog.set_level("INFO")
    await bulk(pair, flow, pattern(1, 200 * KIB))
    assert not endpoint.segmentation
    assert endpoint.send_errors == 0
    assert [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()] == [
        "datagrams are sent one by one from here on: Invalid argument"
    ]
    assert pair[1].transport._endpoint.segmentation, "the other end has its own socket"


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOPROTOOPT])
async def test_every_known_refusal_is_met_once(make_node, flow, pattern, number):
    pair = await narrow_pair(make_node)
    udp = refusing(pair[0], lambda sizes, run: number if run else 0)
    await bulk(pair, flow, pattern(2, 100 * KIB))
    assert udp.refused == 1
    assert not pair[0].transport._endpoint.segmentation


# --- refusals that are not the kernel's last word on runs ---


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENETUNREACH, errno.ENOMEM])
async def test_a_refusal_for_another_reason_does_not_end_segmentation(make_node, flow, pattern, number):
    pair = await narrow_pair(make_node)
    left = 3

    def refuse(sizes: list[int], run: bool) -> int:
        nonlocal left
        left -= run
        return number if run and left >= 0 else 0

    udp = refusing(pair[0], refuse)
    await bulk(pair, flow, pattern(3, 200 * KIB))
    assert udp.refused == 3
    assert pair[0].transport._endpoint.segmentation
    assert udp.runs > 0


async def test_while_nothing_can_be_sent_segmentation_is_not_judged(make_node, flow, pattern):
    """A firewall or a route in between: single datagrams fail in the same way."""
    pair = await narrow_pair(make_node)
    await bulk(pair, flow, pattern(4, 10 * KIB))
    left = 8

    def refuse(sizes: list[int], run: bool) -> int:
        nonlocal left
        left -= 1
        return errno.EINVAL if left >= 0 else 0

    udp = refusing(pair[0], refuse)
    await bulk(pair, flow, pattern(5, 200 * KIB), edge_id=2)
    assert udp.refused == 8
    endpoint = pair[0].transport._endpoint
    assert endpoint.send_errors > 0
    assert endpoint.segmentation
    assert udp.runs > 0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EMSGSIZE])
async def test_a_way_too_narrow_for_a_run_is_a_matter_of_size_alone(pair, flow, pattern, number):
    """Linux says EINVAL of a run and EMSGSIZE of a datagram; EMSGSIZE may also be of an earlier one."""
    udps = [
        refusing(node, lambda sizes, run: (number if run else errno.EMSGSIZE) * (max(sizes) > NARROW))
        for node in pair
    ]
    await bulk(pair, flow, pattern(6, 300 * KIB))
    for node in pair:
        (link,) = node.transport._endpoint.links
        assert link.quic._max_datagram_size <= NARROW
        assert node.transport._endpoint.segmentation
        assert node.transport._endpoint.send_errors == 0
    assert udps[0].runs > 0
    assert udps[0].refused > 0


async def test_a_way_that_narrows_under_a_run_loses_nothing(pair, flow, pattern):
    left, _ = pair
    carries = [16_200]
    udp = refusing(
        left, lambda sizes, run: (errno.EINVAL if run else errno.EMSGSIZE) * (max(sizes) > carries[0])
    )
    await bulk(pair, flow, pattern(7, 300 * KIB))
    (link,) = left.transport._endpoint.links
    async with asyncio.timeout(5):
        while link.quic._max_datagram_size < 16_200:
            await link.activity.wait(0.05)
    carries[0] = NARROW
    await bulk(pair, flow, pattern(8, 300 * KIB), edge_id=2)
    assert link.quic._max_datagram_size <= NARROW
    assert left.transport._endpoint.segmentation
    assert udp.refused > 0


# --- on the socket itself ---


def sockets(host: str) -> tuple[socket.socket, socket.socket]:
    return open_udp(host, 0, buffer=KIB * KIB), open_udp(host, 0, buffer=KIB * KIB)


async def test_a_datagram_too_big_for_any_socket_is_reported_by_its_size(make_node):
    node = await make_node("left")
    endpoint = node.transport._endpoint
    sink = open_udp("127.0.0.1", 0, buffer=KIB * KIB)
    with sink:
        address = sink.getsockname()
        assert endpoint.send(bytes(65_508), address) == 65_508  # the kernel's own EMSGSIZE
        assert endpoint.send(bytes(65_507), address) == 0
        assert (
            endpoint.send_all([(bytes(9), address), (bytes(65_600), address), (bytes(9), address)]) == 65_600
        )
        sizes = [len(sink.recv(70_000)) for _ in range(3)]
        assert sizes == [65_507, 9, 9]
    assert endpoint.send_errors == 0
    assert endpoint.segmentation


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_run_arrives_as_the_datagrams_it_was_made_of(host):
    left, right = sockets(host)
    with left, right:
        address = right.getsockname()
        run = [(bytes([n]) * 1200, address) for n in range(7)] + [(b"last", address)]
        assert run_length(run, 0) == 8
        send_run(left, run)
        receiver, got = Receiver(right), []
        while len(got) < 8:
            datagrams, source = receiver.read(right)
            assert source[1] == left.getsockname()[1]
            got += datagrams
        assert got == [data for data, _ in run]


def test_a_kernel_without_joining_is_served_one_by_one():
    left, right = sockets("127.0.0.1")

    class NoJoining:
        def setsockopt(self, *arguments: object) -> None:
            raise OSError(errno.ENOPROTOOPT, "no UDP_GRO")

        def recvfrom(self, count: int) -> tuple[bytes, Any]:
            return right.recvfrom(count)

    with left, right:
        address = right.getsockname()
        receiver: Any = Receiver(NoJoining())  # type: ignore[arg-type]
        assert not receiver.joined
        send_run(left, [(b"a" * 100, address), (b"b" * 100, address)])
        assert [receiver.read(NoJoining())[0] for _ in range(2)] == [(b"a" * 100,), (b"b" * 100,)]
