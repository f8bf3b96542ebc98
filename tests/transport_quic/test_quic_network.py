"""What networks do: loss, repetition, reordering, garbage, floods, other address families, a full socket."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from swactor_core.errors import ResourceError, TransportError
from swactor_core.spi.transport import Peer
from swactor_transport_quic.compat import Connection
from swactor_transport_quic.link import Alpn, LinkState

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("datagram_size", "share"), [(1200, 0.05), (16_200, 0.05), (1200, 0.2), (16_200, 0.2)]
)
async def test_bulk_survives_loss_repetition_and_reordering(
    make_node, make_relay, flow, pattern, datagram_size, share
):
    seed = random.randrange(2**32)
    print("seed", seed)
    # A fifth of all pings and answers is lost too: that is no silent peer.
    settings = {"datagram_size": datagram_size, "loss_after": 20.0, "idle_timeout": 60.0}
    left, right = await make_node("left", **settings), await make_node("right", **settings)
    relay = make_relay(right, seed=seed, loss=share, repeat=share, reorder=share)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    mine, theirs = await left.control_to(right)
    data = pattern(seed, MIB if share < 0.1 else 24 * datagram_size)

    async def talk() -> None:
        for number in range(20):
            await mine.send(number.to_bytes(4, "big") * 500)
            assert await theirs.receive() == number.to_bytes(4, "big") * 500

    received, _, _ = await asyncio.gather(
        flow.read_exactly(reader, len(data), granted=128 * 1024), flow.send_all(sender, data), talk()
    )
    assert received == data, f"seed {seed}"
    assert relay.dropped > 0
    await sender.finish()
    assert await reader.read_into(memoryview(bytearray(1))) == 0
    assert left.lost.empty()
    assert right.lost.empty()


async def test_a_dialler_whose_address_changes_keeps_its_edges(make_node, make_relay, flow, pattern):
    """A translator on the way forgets the dialler: the same connection comes from another port."""
    left, right = await make_node("left"), await make_node("right")
    relay = make_relay(right)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    data = pattern(4, 3 * MIB)
    half = len(data) // 2
    received = bytearray()

    async def read(until: int) -> None:
        received.extend(await flow.read_exactly(reader, until - len(received), granted=None))

    reader.grant(len(data))
    sending = asyncio.ensure_future(flow.send_all(sender, data))
    await read(half)
    (accepted,) = right.transport._endpoint.links
    before = accepted.quic.get_peer_address()
    former, relay._back = relay._back, {}
    await asyncio.wait_for(read(len(data)), 20)
    await sending
    assert bytes(received) == data
    assert accepted.quic.get_peer_address() != before
    assert right.transport._endpoint.links == (accepted,)
    relay._back.update({("former", number): back for number, back in enumerate(former.values())})
    mine, theirs = await left.control_to(right)
    await mine.send(b"still here")
    assert await theirs.receive() == b"still here"
    assert left.lost.empty()
    assert right.lost.empty()


async def test_random_bytes_on_the_port_change_nothing(make_node, flow):
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    left, right = await make_node("left"), await make_node("right")
    left.transport.set_peer(right.peer())
    sender, reader = await left.edge_to(right)
    where = (right.transport.host, right.transport.port)
    links = right.transport._endpoint.links
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        for round_ in range(20):
            for _ in range(40):
                garbage = bytearray(draw.randbytes(draw.choice((0, 1, 8, 9, 40, 1199, 1200, 9000, 20000))))
                if garbage and draw.random() < 0.5:
                    garbage[0] &= 0x3F | draw.choice((0x00, 0x40))  # not long: those are tested below
                elif garbage:
                    garbage[0] |= 0x80
                    garbage[1:5] = draw.choice(
                        (b"\0\0\0\0", b"\0\0\0\1", b"\x6b\x33\x43\xcf", b"\xaa\xaa\xaa\xaa")
                    )[: len(garbage) - 1]
                udp.sendto(garbage, where)
            reader.grant((round_ + 1) * 100)
            await asyncio.wait_for(flow.send_all(sender, bytes([round_]) * 100), 5)
            assert await flow.read_exactly(reader, 100) == bytes([round_]) * 100
    accepted = [link for link in right.transport._endpoint.links if link not in links]
    assert all(link.state is LinkState.HANDSHAKE for link in accepted)
    assert left.lost.empty()
    assert right.lost.empty()


async def test_damaged_datagrams_of_a_live_connection_are_ignored(make_node, make_relay, flow, pattern):
    left, right = await make_node("left"), await make_node("right")
    relay = make_relay(right)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    draw = random.Random(5)
    inner = relay._pass

    def damage(via, data, to) -> None:
        if draw.random() < 0.1:
            spoilt = bytearray(data)
            spoilt[draw.randrange(9, len(spoilt))] ^= 1 << draw.randrange(8)
            inner(via, bytes(spoilt), to)
        inner(via, data, to)

    relay._pass = damage
    data = pattern(8, 600_000)
    received, _ = await asyncio.gather(
        flow.read_exactly(reader, len(data), granted=100_000), flow.send_all(sender, data)
    )
    assert received == data


def initial(right) -> tuple[bytes, tuple[str, int]]:
    """A stranger's well-formed first datagram, never followed by another."""
    maker = right.transport._maker
    quic: Connection = maker.dialling(Alpn.EDGE, lambda claim: "", local=False)
    quic.connect((right.transport.host, right.transport.port), 0.0)
    return quic.datagrams_to_send(0.0)[0]


async def test_half_open_connections_are_few_and_end_in_time(make_node, flow):
    right = await make_node("right", half_open_total=12, retry_above=6, handshake_timeout=0.4)
    left = await make_node("left")
    left.transport.set_peer(right.peer())
    answers = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.setblocking(False)
        udp.bind(("127.0.0.1", 0))
        for _ in range(40):
            udp.sendto(*initial(right))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            while answers < 34:  # a retry for each that was not admitted
                data, _ = await loop.sock_recvfrom(udp, 2048)
                answers += data[0] & 0xF0 == 0xF0
        assert len(right.transport._endpoint.links) == 6
        # A real dialler proves its address and gets in all the same.
        sender, reader = await left.edge_to(right)
        reader.grant(2)
        await flow.send_all(sender, b"in")
        assert await flow.read_exactly(reader, 2) == b"in"
        async with asyncio.timeout(5):
            while len(right.transport._endpoint.links) > 1:
                await asyncio.wait({asyncio.ensure_future(right.transport._changed.wait(0.1))})
    assert right.transport._endpoint._admission.half_open == 0
    assert right.lost.empty()


async def test_ipv6(make_node, flow):
    left, right = await make_node("left", host="::1"), await make_node("right", host="::1")
    assert left.transport.host == "::1"
    left.transport.set_peer(right.peer())
    sender, reader = await left.edge_to(right)
    reader.grant(3)
    await flow.send_all(sender, b"six")
    assert await flow.read_exactly(reader, 3) == b"six"


@pytest.mark.parametrize("datagram_size", [1200, 16_200])
async def test_bulk_survives_loss_over_ipv6(make_node, make_relay, flow, pattern, datagram_size):
    seed = random.randrange(2**32)
    print("seed", seed)
    settings = {"host": "::1", "datagram_size": datagram_size, "loss_after": 20.0, "idle_timeout": 60.0}
    left, right = await make_node("left", **settings), await make_node("right", **settings)
    relay = make_relay(right, seed=seed, loss=0.2, repeat=0.05, reorder=0.05)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    data = pattern(seed, 512 * 1024)
    received, _ = await asyncio.gather(
        flow.read_exactly(reader, len(data), granted=128 * 1024), flow.send_all(sender, data)
    )
    assert received == data, f"seed {seed}"
    assert relay.dropped > 0


async def test_an_ipv6_wildcard_serves_ipv4_diallers_and_dials_them(make_node, flow):
    left, right = await make_node("left"), await make_node("right", host="::")
    left.transport.set_peer(Peer(right.node_id, right.key, "127.0.0.1", right.transport.port))
    right.transport.set_peer(left.peer())
    sender, reader = await left.edge_to(right)
    reader.grant(4)
    await flow.send_all(sender, b"four")
    assert await flow.read_exactly(reader, 4) == b"four"
    left.transport.remove_peer(right.node_id)
    await right.transport.connect(left.node_id, deadline=5)


async def test_a_host_name_is_resolved(make_node):
    left, right = await make_node("left"), await make_node("right")
    left.transport.set_peer(Peer(right.node_id, right.key, "localhost", right.transport.port))
    await left.transport.connect(right.node_id, deadline=5)


async def test_a_peer_whose_record_changes_while_its_name_is_looked_up_is_not_dialled_as_it_was(
    make_node, monkeypatch
):
    left, right, other = await make_node("left"), await make_node("right"), await make_node("other")
    asked, go_on = asyncio.Event(), asyncio.Event()
    endpoint, dialled = left.transport._endpoint, []
    look_up, dial = endpoint.resolve, left.transport._dial

    async def slowly(host, port):
        asked.set()
        await go_on.wait()
        return await look_up(host, port)

    def noted(peer, alpn, address):
        dialled.append(peer)
        return dial(peer, alpn, address)

    monkeypatch.setattr(endpoint, "resolve", slowly)
    monkeypatch.setattr(left.transport, "_dial", noted)
    former = right.peer(port=other.transport.port)
    left.transport.set_peer(former)
    attempt = asyncio.ensure_future(left.transport.connect(right.node_id, deadline=5))
    await asyncio.wait_for(asked.wait(), 5)
    left.transport.set_peer(right.peer())
    go_on.set()
    await attempt
    assert dialled == [right.peer()]

    asked.clear()
    go_on.clear()
    left.transport.set_peer(other.peer())
    attempt = asyncio.ensure_future(left.transport.connect(other.node_id, deadline=5))
    await asyncio.wait_for(asked.wait(), 5)
    left.transport.remove_peer(other.node_id)
    go_on.set()
    with pytest.raises(TransportError, match="not known"):
        await attempt
    assert dialled == [right.peer()]


@pytest.mark.parametrize("host", ["::1", "0.0.0.0", "no such host"])
async def test_an_address_that_cannot_be_dialled_is_named(make_node, host):
    left, right = await make_node("left"), await make_node("right")
    left.transport.set_peer(Peer(right.node_id, right.key, host, right.transport.port))
    with pytest.raises(TransportError) as caught:
        await left.transport.connect(right.node_id, deadline=5)
    assert host in str(caught.value)
    assert caught.value.hint


async def test_an_address_in_use_is_named(make_node):
    left = await make_node("left")
    with pytest.raises(ResourceError, match=f"127.0.0.1:{left.transport.port}"):
        await make_node("right", port=left.transport.port)


async def test_a_name_cannot_be_bound(make_node):
    with pytest.raises(ResourceError, match="not an IP address"):
        await make_node("left", host="localhost")


class FullSocket:
    """A socket whose first sends report a full buffer."""

    def __init__(self, real: socket.socket, refusals: int) -> None:
        self._real = real
        self.refusals = refusals

    def sendto(self, data, address):
        if self.refusals > 0:
            self.refusals -= 1
            raise BlockingIOError
        return self._real.sendto(data, address)

    def __getattr__(self, name):
        return getattr(self._real, name)


async def test_a_full_socket_pauses_sending_and_loses_nothing(pair, flow, pattern):
    left, right = pair
    sender, reader = await left.edge_to(right)
    endpoint = left.transport._endpoint
    full = endpoint._socket = FullSocket(endpoint._socket, 3)
    data = pattern(1, 2 * MIB)
    received, _ = await asyncio.gather(
        flow.read_exactly(reader, len(data), granted=MIB), flow.send_all(sender, data)
    )
    assert received == data
    assert full.refusals == 0
    assert not endpoint.blocked
    assert not endpoint._unsent


async def test_nothing_is_built_while_the_socket_is_full(pair):
    left, right = pair
    sender, reader = await left.edge_to(right)
    reader.grant(MIB)
    (link,) = left.transport._endpoint.links
    left.transport._endpoint.blocked = True
    while not link.quic.send_half(2 if link.dialled else 3).credit > 0:
        assert await link.activity.wait(5)
    await sender.write(memoryview(bytes(100)))
    await sender.write(memoryview(bytes(100)))
    assert list(left.transport._endpoint._deferred) == [link]
    assert not left.transport._endpoint._unsent
    left.transport._endpoint._on_writable()
    received = memoryview(bytearray(200))
    taken = 0
    while taken < 200:
        taken += await asyncio.wait_for(reader.read_into(received), 5)


async def test_random_traffic_keeps_every_edge_exact(make_node, make_relay, pattern):
    """Eight edges both ways with their own windows, read and write sizes, over a bad network."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    left = await make_node("left", datagram_size=1200, send_bound=draw.choice((5_000, 50_000)))
    right = await make_node("right", datagram_size=draw.choice((1200, 8900)))
    relay = make_relay(right, seed=seed, loss=0.02, repeat=0.02, reorder=0.05)
    left.transport.set_peer(right.peer(port=relay.port))

    async def write(edge, data: bytes, sizes: random.Random) -> None:
        at = 0
        while at < len(data):
            at += await edge.write(memoryview(data)[at : at + sizes.randrange(1, 9000)])
        await edge.finish()

    async def read(reader, window: int, sizes: random.Random) -> bytes:
        received = bytearray()
        granted = window
        reader.grant(granted)
        while True:
            chunk = memoryview(bytearray(sizes.randrange(1, 9000)))
            taken = await reader.read_into(chunk)
            if not taken:
                return bytes(received)
            received += chunk[:taken]
            assert len(received) <= granted, "more arrived than was granted"
            if sizes.random() < 0.7 or len(received) == granted:
                granted = len(received) + window
                reader.grant(granted)

    async def exchange(source, target, edge_id: int) -> None:
        own = random.Random(seed + edge_id)
        sender, reader = await source.edge_to(target, edge_id)
        data = pattern(seed + edge_id, own.randrange(40_000))
        received, _ = await asyncio.gather(
            read(reader, own.choice((1, 700, 5_000, 60_000)) if len(data) < 3_000 else 5_000, own),
            write(sender, data, random.Random(seed - edge_id)),
        )
        assert received == data, f"seed {seed} edge {edge_id}"

    await left.transport.connect(right.node_id, deadline=10)
    for edge_id in range(1, 9, 2):
        await asyncio.gather(exchange(left, right, edge_id), exchange(right, left, edge_id + 1))


async def test_a_node_may_dial_itself(make_node, flow):
    node = await make_node("node")
    node.transport.set_peer(node.peer())
    sender, reader = await node.edge_to(node)
    reader.grant(4)
    await flow.send_all(sender, b"self")
    assert await flow.read_exactly(reader, 4) == b"self"


@pytest.mark.parametrize("port", [0, 65536])
async def test_a_port_that_cannot_be_is_named(make_node, port):
    left, right = await make_node("left"), await make_node("right")
    left.transport.set_peer(Peer(right.node_id, right.key, "127.0.0.1", port))
    with pytest.raises(TransportError, match=f":{port}: no such port"):
        await left.transport.connect(right.node_id, deadline=5)
    if port:
        with pytest.raises(ResourceError, match="65536"):
            await make_node("other", port=port)


async def test_a_host_name_that_no_host_can_have_is_named(make_node):
    left, right = await make_node("left"), await make_node("right")
    left.transport.set_peer(Peer(right.node_id, right.key, "a..b", 4433))
    with pytest.raises(TransportError, match=r"no host has the name 'a\.\.b'") as caught:
        await left.transport.connect(right.node_id, deadline=5)
    assert caught.value.hint == "check the peer's address"


async def test_a_peer_that_moves_is_dialled_at_its_new_address(make_node, make_relay):
    left, right = await make_node("left"), await make_node("right")
    nowhere = make_relay(right)
    nowhere.holding = True
    left.transport.set_peer(right.peer(port=nowhere.port))
    connecting = asyncio.ensure_future(left.transport.connect(right.node_id, deadline=20))
    await asyncio.wait({connecting}, timeout=0.1)
    left.transport.set_peer(right.peer())
    await asyncio.wait_for(connecting, 3)
