"""What a peer may do with a stream before it is an edge: split, late, twice, cut short, and too often."""

from __future__ import annotations

import asyncio

import pytest
from swactor_core.errors import EdgeBroken
from swactor_core.wire import PREAMBLE_BYTES, encode_preamble
from swactor_transport_quic.edges import QuicSendEdge
from swactor_transport_quic.link import LinkState


async def ready_link(left, right):
    await left.transport.connect(right.node_id, deadline=5)
    (link,) = left.transport._endpoint.links
    return link


async def acknowledged(link, half) -> None:
    """Everything written to the stream has arrived at the peer."""
    async with asyncio.timeout(5):
        while half.unacknowledged:
            await link.activity.wait()


async def stopped(link, half) -> None:
    async with asyncio.timeout(5):
        while not half.reset:
            await link.activity.wait()


async def nothing_arrives(node) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(node.transport.accept_edge(), 0.01)


@pytest.mark.parametrize("cut", range(1, PREAMBLE_BYTES))
async def test_a_preamble_may_arrive_in_two_pieces(pair, cut):
    left, right = pair
    link = await ready_link(left, right)
    preamble = encode_preamble(0x1122334455667788)
    half = link.quic.open_stream(preamble[:cut], is_unidirectional=True)
    link.flush()
    await acknowledged(link, half)
    await nothing_arrives(right)
    link.quic.send_stream_data(half.stream_id, preamble[cut:])
    link.flush()
    node_id, edge_id, _ = await asyncio.wait_for(right.transport.accept_edge(), 5)
    assert (node_id, edge_id) == (left.node_id, 0x1122334455667788)


async def test_a_preamble_byte_by_byte_and_payload_right_behind(pair, flow):
    left, right = pair
    link = await ready_link(left, right)
    half = None
    for byte in encode_preamble(77):
        if half is None:
            half = link.quic.open_stream(bytes([byte]), is_unidirectional=True)
        else:
            link.quic.send_stream_data(half.stream_id, bytes([byte]))
        link.flush()
        await acknowledged(link, half)
    link.quic.send_stream_data(half.stream_id, b"payload")
    link.flush()
    _, edge_id, reader = await asyncio.wait_for(right.transport.accept_edge(), 5)
    assert edge_id == 77
    reader.grant(7)
    assert await flow.read_exactly(reader, 7) == b"payload"


async def test_a_preamble_that_stays_away_is_stopped(make_node):
    left, right = await make_node("left"), await make_node("right", preamble_timeout=0.1)
    left.transport.set_peer(right.peer())
    link = await ready_link(left, right)
    half = link.quic.open_stream(b"abc", is_unidirectional=True)
    link.flush()
    await stopped(link, half)
    assert link.state is LinkState.READY
    (there,) = right.transport._endpoint.links
    assert not there.handlers


async def test_streams_opened_by_a_higher_one_have_the_same_deadline(make_node):
    left, right = await make_node("left"), await make_node("right", preamble_timeout=0.1)
    left.transport.set_peer(right.peer())
    link = await ready_link(left, right)
    first = link.quic.get_next_available_stream_id(is_unidirectional=True)
    link.quic.send_stream_data(first + 12, encode_preamble(5))  # opens three lower ones by implication
    link.flush()
    _, edge_id, _ = await asyncio.wait_for(right.transport.accept_edge(), 5)
    assert edge_id == 5
    (there,) = right.transport._endpoint.links
    assert len(there.handlers) == 4
    async with asyncio.timeout(5):
        while len(there.handlers) > 1:
            await there.activity.wait(0.05)
    assert there._violations == 3


@pytest.mark.parametrize("how", ["end", "reset"])
async def test_a_stream_cut_short_is_no_edge(pair, how):
    left, right = pair
    link = await ready_link(left, right)
    (there,) = right.transport._endpoint.links
    half = link.quic.open_stream(b"abc", is_unidirectional=True)
    if how == "end":
        link.quic.send_stream_data(half.stream_id, b"", end_stream=True)
    else:
        link.quic.reset_stream(half.stream_id, 1)
    link.flush()
    async with asyncio.timeout(5):
        while not there._violations:
            await there.activity.wait()
    await nothing_arrives(right)
    assert not there.handlers
    assert there.state is LinkState.READY


async def test_an_edge_that_is_already_open_is_stopped_and_the_first_lives(pair, flow):
    """By the acceptor, when the sender opens a second one all the same."""
    left, right = pair
    sender, reader = await left.edge_to(right, 6)
    link = await ready_link(left, right)
    half = link.quic.open_stream(encode_preamble(6), is_unidirectional=True)
    second = QuicSendEdge(link, half, 6)
    link.flush()
    with pytest.raises(EdgeBroken, match="stopped"):
        await asyncio.wait_for(second.write(memoryview(b"x")), 5)
    await nothing_arrives(right)
    reader.grant(5)
    await flow.send_all(sender, b"first")
    assert await flow.read_exactly(reader, 5) == b"first"


async def test_the_same_edge_id_of_two_peers_is_two_edges(make_node, flow):
    left, other, right = [await make_node(name) for name in ("left", "other", "right")]
    for node in (left, other):
        node.transport.set_peer(right.peer())
        sender, reader = await node.edge_to(right, 6)
        reader.grant(2)
        await flow.send_all(sender, b"ok")
        assert await flow.read_exactly(reader, 2) == b"ok"


async def test_too_many_violations_close_the_connection(make_node):
    left, right = await make_node("left"), await make_node("right", violations_allowed=3)
    left.transport.set_peer(right.peer())
    link = await ready_link(left, right)
    for _ in range(4):
        half = link.quic.open_stream(b"abc", is_unidirectional=True)
        link.quic.send_stream_data(half.stream_id, b"", end_stream=True)
        link.flush()
    async with asyncio.timeout(5):
        while link.state is not LinkState.CLOSED:
            await link.activity.wait()
    assert "ended in its preamble" in link.reason
    assert right.transport._endpoint.links == ()


async def test_data_beyond_the_credit_closes_the_connection(pair):
    left, right = pair
    link = await ready_link(left, right)
    half = link.quic.open_stream(encode_preamble(1), is_unidirectional=True)
    half._stream.max_stream_data_remote = 1000  # a sender that does not keep to what it was granted
    link.quic.send_stream_data(half.stream_id, b"too much")
    link.flush()
    node_id, why = await asyncio.wait_for(left.lost.get(), 5)
    assert node_id == right.node_id
    assert "stream data limit" in why
    assert (await asyncio.wait_for(right.lost.get(), 5))[0] == left.node_id


async def test_a_stream_of_the_wrong_kind_closes_the_connection(pair):
    left, right = pair
    link = await ready_link(left, right)
    link.quic._remote_max_streams_bidi = 1  # the peer allowed none
    half = link.quic.open_stream(b"hello", is_unidirectional=False)
    half._stream.max_stream_data_remote = 5
    link.flush()
    _, why = await asyncio.wait_for(left.lost.get(), 5)
    assert "Too many streams" in why
