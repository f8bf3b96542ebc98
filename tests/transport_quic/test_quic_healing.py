"""A connection that one side has ended while the other could not hear it: what is opened next must arrive."""

from __future__ import annotations

import asyncio

import pytest
from swactor_core.errors import EdgeBroken, EdgeClosed, TransportError
from swactor_transport_quic.edges import QuicSendEdge
from swactor_transport_quic.link import Alpn, CloseCode, LinkState

QUICK = {"probe_interval": 0.05, "loss_after": 0.3}


async def came_to(relay, count):
    """Until `count` more datagrams have come to the relay, whatever became of them."""
    came, inner = asyncio.Semaphore(0), relay._pass

    def counted(*datagram):
        inner(*datagram)
        came.release()

    relay._pass = counted
    async with asyncio.timeout(5):
        for _ in range(count):
            await came.acquire()
    relay._pass = inner


async def cut_and_heal(left, right, relay, how):
    """`right` ends its connections to `left` while nothing passes between them, and then all is as before."""
    relay.holding = True
    links = right.transport._endpoint.links
    if how == "unresponsive":
        for link in links:
            link.close(CloseCode.UNRESPONSIVE, "no answer to a ping")
    else:
        right.transport.remove_peer(left.node_id)
    await came_to(relay, len(links))  # so nobody hears of it
    if how == "forgotten":
        right.transport._endpoint._farewells.clear()
    relay.holding = False


async def idle_pair(make_node, make_relay, names=("left", "right"), **settings):
    """Two nodes, and the relay by which the first has dialled a connection for edges and one for control."""
    left, right = [await make_node(name, **settings) for name in names]
    relay = make_relay(right)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    await sender.finish()
    assert await reader.read_into(memoryview(bytearray(1))) == 0
    mine, theirs = await left.control_to(right)
    await mine.close()
    assert await theirs.receive() is None
    await theirs.close()
    async with asyncio.timeout(5):
        for link in left.transport._endpoint.links:
            while link.handlers:
                await link.activity.wait()
    return left, right, relay


HOW = ["removed", "unresponsive", "forgotten"]


@pytest.mark.parametrize("how", HOW)
async def test_an_edge_opened_after_an_unheard_end_arrives_once(make_node, make_relay, flow, how):
    left, right, relay = await idle_pair(make_node, make_relay, **QUICK)
    await cut_and_heal(left, right, relay, how)
    sender, reader = await left.edge_to(right, 7)
    reader.grant(5)
    await flow.send_all(sender, b"whole")
    await sender.finish()
    assert await flow.read_exactly(reader, 5) == b"whole"
    assert await reader.read_into(memoryview(bytearray(1))) == 0
    assert not right.transport._edges
    assert left.lost.empty() is (how == "removed"), "a removal is no loss, silence is"


@pytest.mark.parametrize("how", HOW)
async def test_a_channel_opened_after_an_unheard_end_arrives_once(make_node, make_relay, how):
    left, right, relay = await idle_pair(make_node, make_relay, **QUICK)
    await cut_and_heal(left, right, relay, how)
    mine, theirs = await left.control_to(right)
    await mine.send(b"there")
    assert await theirs.receive() == b"there"
    await theirs.send(b"and back")
    assert await mine.receive() == b"and back"
    assert not right.transport._channels


@pytest.mark.parametrize("names", [("left", "right"), ("right", "left")])
async def test_many_edges_opened_at_once_after_an_unheard_end_arrive_on_one_connection(
    make_node, make_relay, flow, names
):
    """Whoever prefers its own old connection, and though the peer meanwhile has made a new one."""
    left, right, relay = await idle_pair(make_node, make_relay, names)
    await cut_and_heal(left, right, relay, "removed")
    right.transport.set_peer(left.peer())
    await right.transport.connect(left.node_id, deadline=5)
    opened = await asyncio.gather(
        *(left.transport.open_edge(right.node_id, number, deadline=5) for number in range(20))
    )
    arrived = {}
    for _ in opened:
        _, number, reader = await asyncio.wait_for(right.transport.accept_edge(), 5)
        arrived[number] = reader
    assert sorted(arrived) == list(range(20))
    for number, sender in enumerate(opened):
        arrived[number].grant(1)
        await flow.send_all(sender, bytes([number]))
        assert await flow.read_exactly(arrived[number], 1) == bytes([number])
    assert not right.transport._edges
    assert len({sender._link for sender in opened}) == 1


async def test_what_was_acknowledged_is_not_sent_again(make_node, make_relay, flow):
    """A connection that ends under an open edge breaks it: nobody knows what of its bytes was used."""
    left, right, relay = await idle_pair(make_node, make_relay, **QUICK)
    sender, reader = await left.edge_to(right, 7)
    reader.grant(5)
    await flow.send_all(sender, b"once.")
    assert await flow.read_exactly(reader, 5) == b"once."
    await cut_and_heal(left, right, relay, "removed")
    with pytest.raises(EdgeBroken, match="gave the other side up"):
        await asyncio.wait_for(flow.send_all(sender, b"twice"), 5)
    sender, reader = await left.edge_to(right, 7)
    reader.grant(3)
    await flow.send_all(sender, b"new")
    assert await flow.read_exactly(reader, 3) == b"new"
    assert not right.transport._edges


async def test_an_end_that_came_with_the_acknowledgement_opens_nothing_anew(make_node, make_relay):
    left, right, _ = await idle_pair(make_node, make_relay)
    (link,) = [link for link in left.transport._endpoint.links if link.alpn is Alpn.EDGE]
    pump = link.pump

    def ended_before(now):
        if link.quic._late_acks:
            link.lose("here and now")
        pump(now)

    link.pump = ended_before
    sender = await left.transport.open_edge(right.node_id, 7, deadline=5)
    assert sender._link is link
    with pytest.raises(EdgeBroken, match="here and now"):
        await sender.write(memoryview(b"x"))


async def test_whoever_opens_a_stream_waits_for_no_timer_of_the_peer(make_node, make_relay, monkeypatch):
    left, right, _ = await idle_pair(make_node, make_relay)
    monkeypatch.setattr("swactor_transport_quic.compat.arriving._ACK_DELAY", 60.0)
    await left.edge_to(right, 7)
    await left.control_to(right)
    assert all(link.quic._loss._pto_count == 0 for link in left.transport._endpoint.links)


async def test_an_edge_that_nobody_acknowledges_fails_within_the_deadline_and_leaves_nothing(
    make_node, make_relay, flow
):
    left, right, relay = await idle_pair(make_node, make_relay)
    relay.holding = True
    with pytest.raises(TransportError, match=r"does not acknowledge edge 7 within 0\.05 s") as raised:
        await left.transport.open_edge(right.node_id, 7, deadline=0.05)
    assert "both ways" in raised.value.hint
    with pytest.raises(TransportError, match=r"does not acknowledge a control channel within 0\.05 s"):
        await left.transport.open_control(right.node_id, deadline=0.05)
    cancelled = asyncio.ensure_future(left.transport.open_edge(right.node_id, 8, deadline=5))
    await came_to(relay, 1)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    edges = [
        handler
        for link in left.transport._endpoint.links
        for handler in link.handlers.values()
        if isinstance(handler, QuicSendEdge)
    ]
    assert [(edge.edge_id, edge.ended) for edge in edges] == [(7, True), (8, True)]
    relay.holding = False
    sender, reader = await left.edge_to(right, 8)
    reader.grant(2)
    await flow.send_all(sender, b"ok")
    assert await flow.read_exactly(reader, 2) == b"ok"


async def test_a_peer_that_ends_each_connection_at_once_is_dialled_with_pauses(pair):
    left, right = pair
    ended = []
    ready = right.transport.link_ready

    def turned_away(link):
        ready(link)
        ended.append(link)
        link.close(CloseCode.SHUTDOWN, "not today")

    right.transport.link_ready = turned_away
    with pytest.raises(TransportError, match=r"cannot be reached in 0\.4 s: .*not today"):
        await left.transport.open_edge(right.node_id, 1, deadline=0.4)
    assert 2 <= len(ended) <= 17  # pauses of 25 ms at least
    assert all(link.state is LinkState.CLOSED for link in ended)


async def test_a_transport_that_closes_ends_who_waits_for_an_acknowledgement(make_node, make_relay):
    left, right, relay = await idle_pair(make_node, make_relay, drain_timeout=0.0)
    relay.holding = True
    opening = asyncio.ensure_future(left.transport.open_edge(right.node_id, 7, deadline=5))
    await came_to(relay, 1)
    await left.transport.close()
    with pytest.raises(EdgeClosed, match="closed"):
        await opening


async def test_the_end_of_every_connection_of_a_large_cluster_is_told(make_node):
    """Each connection has eight ids, and a node that was cut off ends all of its connections at once."""
    node, told = await make_node("node"), []
    endpoint = node.transport._endpoint
    endpoint.send = lambda datagram, address: told.append(datagram)
    for number in range(256):
        for index in range(8):
            endpoint.add_id(bytes([number] * 7 + [index]), number)
        endpoint.forget(number, b"end of %d" % number)
    for number in range(256):
        assert endpoint._route(b"\x40" + bytes([number] * 7 + [0]) + bytes(20), ("127.0.0.1", 1), 0.0) is None
    assert told == [b"end of %d" % number for number in range(256)]
