"""What strangers may cost, and what they cannot reach: floods, other protocols, drips, refused handshakes."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import sys
import tracemalloc

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from swactor_core.errors import EdgeBroken
from swactor_core.wire import encode_preamble
from swactor_transport_quic.compat import Connection
from swactor_transport_quic.link import Alpn, LinkState

KIB = 1024


def first_datagram(node) -> bytes:
    """A well-formed first datagram of a stranger who says nothing more."""
    quic: Connection = node.transport._maker.dialling(Alpn.EDGE, lambda claim: "", local=False)
    quic.connect((node.transport.host, node.transport.port), 0.0)
    return quic.datagrams_to_send(0.0)[0][0]


async def exchange(flow, sender, reader, round_: int) -> None:
    """The established edge still moves."""
    reader.grant((round_ + 1) * 100)
    await asyncio.wait_for(flow.send_all(sender, bytes([round_ % 256]) * 100), 5)
    assert await asyncio.wait_for(flow.read_exactly(reader, 100), 5) == bytes([round_ % 256]) * 100


async def test_other_protocols_on_the_port_are_not_answered(make_node, flow):
    left, right = await make_node("left"), await make_node("right")
    left.transport.set_peer(right.peer())
    sender, reader = await left.edge_to(right)
    where = (right.transport.host, right.transport.port)
    links = len(right.transport._endpoint.links)
    dns = bytes.fromhex("123401000001000000000000") + b"\x07example\x03com\x00\x00\x01\x00\x01"
    tls_hello = bytes.fromhex("16030100c8010000c40303") + random.Random(1).randbytes(190)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        for number, data in enumerate(
            (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 60, b"GET / HTTP/1.0\r\n\r\n", dns, tls_hello, b"\n", b"")
        ):
            udp.sendto(data, where)
            await exchange(flow, sender, reader, number)
        with pytest.raises(BlockingIOError):
            udp.recv(2048)
    assert len(right.transport._endpoint.links) == links


async def test_a_flood_of_strangers_takes_bounded_memory_and_stops_nobody(make_node, flow):
    """What 3000 strangers leave behind is what the caps allow, whatever their number."""
    left = await make_node("left")
    right = await make_node("right", half_open_total=16, retry_above=4, handshake_timeout=0.3)
    left.transport.set_peer(right.peer())
    sender, reader = await left.edge_to(right)
    where = (right.transport.host, right.transport.port)
    initials = [first_datagram(right) for _ in range(30)]
    draw = random.Random(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)

        async def flood(rounds: int) -> None:
            for _ in range(rounds):
                for initial in initials:
                    fresh = bytearray(initial)
                    fresh[6:14] = draw.randbytes(8)  # another connection each time
                    udp.sendto(fresh, where)
                    udp.sendto(draw.randbytes(1200), where)
                await exchange(flow, sender, reader, next(count))
                assert len(right.transport._endpoint.links) <= 1 + 4
                while True:
                    try:
                        answer = udp.recv(2048)
                    except BlockingIOError:
                        break
                    assert len(answer) <= 1200  # nobody is made to send more than it got

        async def only_the_peer_is_left() -> None:
            """Half-open connections, of which a few may live, end in time."""
            async with asyncio.timeout(5):
                while len(right.transport._endpoint.links) > 1:
                    await right.transport._changed.wait(0.1)
            gc.collect()

        count = iter(range(10_000))
        await flood(10)
        await only_the_peer_is_left()
        tracemalloc.start()
        await flood(20)
        await only_the_peer_is_left()
        after_twenty = tracemalloc.get_traced_memory()[0]
        await flood(30)
        await only_the_peer_is_left()
        after_fifty = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert after_fifty - after_twenty < 256 * KIB
    assert right.transport._endpoint._admission.half_open == 0
    assert not right.transport._endpoint._admission._by_source


async def test_a_handshake_that_drips_ends_at_its_deadline(make_node):
    right = await make_node("right", handshake_timeout=0.4)
    loop = asyncio.get_running_loop()
    initial = first_datagram(right)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        began = loop.time()
        async with asyncio.timeout(5):
            while True:
                if loop.time() - began < 2:
                    udp.sendto(initial, (right.transport.host, right.transport.port))
                await right.transport._changed.wait(0.05)
                links = right.transport._endpoint.links
                if not links and loop.time() - began > 0.2:
                    break
                assert all(link.state is LinkState.HANDSHAKE for link in links)
        assert 0.3 < loop.time() - began < 2


async def test_a_preamble_that_drips_is_stopped_at_its_deadline(make_node):
    left, right = await make_node("left"), await make_node("right", preamble_timeout=0.3)
    left.transport.set_peer(right.peer())
    await left.transport.connect(right.node_id, deadline=5)
    (link,) = left.transport._endpoint.links
    preamble = encode_preamble(5)
    half = link.quic.open_stream(preamble[:1], is_unidirectional=True)
    link.flush()
    sent = 1
    async with asyncio.timeout(5):
        while not half.reset:
            await link.activity.wait(0.1)
            if sent < 7 and not half.reset:
                link.quic.send_stream_data(half.stream_id, preamble[sent : sent + 1])
                link.flush()
                sent += 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(right.transport.accept_edge(), 0.01)
    await left.edge_to(right, 6)  # the connection lives


async def test_a_control_frame_that_drips_keeps_nobody_waiting(pair, flow):
    left, right = pair
    mine, theirs = await left.control_to(right)
    other, others = await left.control_to(right)
    link, stream_id = mine._link, mine._stream_id
    frame = (5).to_bytes(4, "little") + b"hello"
    for number, byte in enumerate(frame):
        link.quic.send_stream_data(stream_id, bytes([byte]))
        link.flush()
        await other.send(bytes([number]) * 10)
        assert await asyncio.wait_for(others.receive(), 5) == bytes([number]) * 10
    assert await asyncio.wait_for(theirs.receive(), 5) == b"hello"


async def test_a_stranger_that_never_offers_a_certificate_holds_nothing(make_node):
    """A plain aioquic client: its handshake ends refused, nothing of it is left, and it is told."""
    right = await make_node("right")
    import ssl

    configuration = QuicConfiguration(is_client=True, alpn_protocols=[Alpn.EDGE], verify_mode=ssl.CERT_NONE)
    client = QuicConnection(configuration=configuration)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        where = (right.transport.host, right.transport.port)
        client.connect(where, loop.time())
        async with asyncio.timeout(5):
            while client._close_event is None:
                for data, _ in client.datagrams_to_send(loop.time()):
                    udp.sendto(data, where)
                data, _ = await loop.sock_recvfrom(udp, 20_000)
                client.receive_datagram(data, where, loop.time())
    assert client._close_event.error_code in (7, 0x12A, 0x174)
    assert right.transport._endpoint.links == ()
    assert right.lost.empty()


async def test_what_an_unsolicited_packet_costs_is_bounded(make_node):
    """No object of a stranger's packet outlives it: the same count of blocks after 500 as after 100."""
    right = await make_node("right", retry_above=0)
    where = (right.transport.host, right.transport.port)
    draw = random.Random(3)
    initial = first_datagram(right)
    endpoint = right.transport._endpoint

    def feed(count: int) -> int:
        for _ in range(count):
            fresh = bytearray(initial)
            fresh[6:14] = draw.randbytes(8)
            endpoint._route(bytes(fresh), where, 1.0)
            endpoint._route(draw.randbytes(40), where, 1.0)
        gc.collect()
        return sys.getallocatedblocks()

    feed(100)
    first = feed(100)
    assert feed(500) - first < 200
    assert endpoint.links == ()


async def test_a_stopped_stream_cannot_be_used_to_hold_the_peer(pair, flow):
    """Streams that are refused again and again close the connection; another one may be made."""
    left, right = pair
    await left.transport.connect(right.node_id, deadline=5)
    (link,) = left.transport._endpoint.links
    async with asyncio.timeout(10):
        while link.state is LinkState.READY:
            half = link.quic.open_stream(b"xx", is_unidirectional=True)
            if half is not None:
                link.quic.send_stream_data(half.stream_id, b"", end_stream=True)
                link.flush()
            await link.activity.wait(0.05)
    sender, reader = await left.edge_to(right)
    await exchange(flow, sender, reader, 0)
    await sender.abort()
    with pytest.raises(EdgeBroken):
        await reader.read_into(memoryview(bytearray(1)))
