"""Edges over real loopback sockets (spec sections 23, 24): credit to the byte, isolation, and ends."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from swactor_core.errors import EdgeBroken, EdgeClosed, TransportError

KIB = 1024
MIB = 1024 * KIB


async def write_until_stalled(edge, data: bytes, *, meanwhile) -> int:
    """Writes until a write has waited through whole calls of `meanwhile()`; returns how much was taken.

    Several calls: what is on its way of a mebibyte may need more than one to be acknowledged.
    """
    view, taken, waits = memoryview(data), 0, 0
    write = asyncio.ensure_future(edge.write(view))
    while waits < 6:
        await meanwhile()
        waits += 1
        if write.done():
            taken, waits = taken + write.result(), 0
            write = asyncio.ensure_future(edge.write(view[taken:]))
    write.cancel()
    return taken


async def test_bytes_arrive_in_order_and_end_is_seen(pair, flow, pattern):
    left, right = pair
    sender, reader = await left.edge_to(right, 7)
    data = pattern(3, 3 * MIB + 17)
    received, _ = await asyncio.gather(
        flow.read_exactly(reader, len(data), granted=100 * KIB), flow.send_all(sender, data)
    )
    assert received == data
    await sender.finish()
    await sender.finish()
    assert await reader.read_into(memoryview(bytearray(8))) == 0
    assert await reader.read_into(memoryview(bytearray(8))) == 0
    with pytest.raises(EdgeClosed, match="edge 7"):
        await sender.write(memoryview(b"late"))


@pytest.mark.parametrize("granted", [1, 1000, 256 * KIB, 2 * MIB])
async def test_a_stalled_reader_stops_its_sender_at_the_granted_byte(pair, flow, pattern, granted):
    left, right = pair
    stalled, stalled_reader = await left.edge_to(right, 1)
    running, running_reader = await left.edge_to(right, 2)
    stalled_reader.grant(granted)

    async def neighbour_moves() -> None:
        # A whole exchange on the other edge of the same connection: while it lasts the stalled edge could
        # have moved, were there anything to move it.
        nonlocal round_
        round_ += 1
        data = pattern(round_, 64 * KIB)
        sending = asyncio.ensure_future(flow.send_all(running, data))
        running_reader.grant(round_ * len(data))
        assert await flow.read_exactly(running_reader, len(data)) == data
        await sending

    round_ = 0
    data = pattern(9, granted + 300 * KIB)
    taken = await write_until_stalled(stalled, data, meanwhile=neighbour_moves)
    assert taken == granted
    for _ in range(3):
        await neighbour_moves()
    assert await write_until_stalled(stalled, data[taken:], meanwhile=neighbour_moves) == 0

    rest = asyncio.ensure_future(flow.send_all(stalled, data[taken:]))
    assert await flow.read_exactly(stalled_reader, len(data), granted=max(granted, 64 * KIB)) == data
    await rest


async def test_nothing_but_the_preamble_arrives_before_the_first_grant(pair, flow):
    left, right = pair
    sender, reader = await left.edge_to(right, 3)
    write = asyncio.ensure_future(sender.write(memoryview(b"early")))
    other, other_reader = await left.edge_to(right, 4)
    other_reader.grant(10)
    await flow.send_all(other, b"neighbours")
    assert await flow.read_exactly(other_reader, 10) == b"neighbours"
    assert not write.done()
    reader.grant(3)
    assert await write == 3
    assert await flow.read_exactly(reader, 3) == b"ear"


async def test_a_grant_on_an_idle_connection_is_told_at_once(pair, flow):
    left, right = pair
    sender, reader = await left.edge_to(right)
    reader.grant(8)
    await flow.send_all(sender, b"12345678")
    assert await flow.read_exactly(reader, 8) == b"12345678"
    for total in range(9, 60):
        reader.grant(total)
        assert await asyncio.wait_for(sender.write(memoryview(b"xyz")), 2) == 1
        assert await flow.read_exactly(reader, 1) == b"x"


async def test_a_grant_is_never_lowered(pair, flow):
    left, right = pair
    sender, reader = await left.edge_to(right)
    reader.grant(100)
    reader.grant(10)
    await asyncio.wait_for(flow.send_all(sender, bytes(100)), 5)
    assert await flow.read_exactly(reader, 100) == bytes(100)


async def test_accepted_and_unacknowledged_bytes_stay_within_the_send_bound(
    make_node, make_relay, flow, pattern
):
    bound = 64 * KIB
    left, right = await make_node("left", send_bound=bound), await make_node("right")
    relay = make_relay(right)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    reader.grant(10 * MIB)
    await flow.send_all(sender, b"go")
    assert await flow.read_exactly(reader, 2) == b"go"
    relay.holding = True  # from here on nothing is acknowledged
    data, taken = pattern(4, MIB), 0
    with contextlib.suppress(TimeoutError):
        while True:
            taken += await asyncio.wait_for(sender.write(memoryview(data)[taken:]), 0.3)
    assert bound - 16 <= taken <= bound  # the preamble and the first two bytes may be unacknowledged too
    relay.holding = False
    await asyncio.gather(flow.read_exactly(reader, len(data)), flow.send_all(sender, data[taken:]))


async def test_a_cancelled_write_has_taken_nothing_and_a_cancelled_read_has_lost_nothing(pair, flow):
    left, right = pair
    sender, reader = await left.edge_to(right)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sender.write(memoryview(b"cancelled")), 0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read_into(memoryview(bytearray(10))), 0.01)
    reader.grant(100)
    await flow.send_all(sender, b"only this")
    assert await flow.read_exactly(reader, 9) == b"only this"


async def test_three_hundred_edges_on_one_connection(pair, flow, pattern):
    left, right = pair
    senders = await asyncio.gather(
        *(left.transport.open_edge(right.node_id, edge_id, deadline=10) for edge_id in range(300))
    )
    readers = {}
    for _ in range(300):
        _, edge_id, reader = await asyncio.wait_for(right.transport.accept_edge(), 10)
        readers[edge_id] = reader
    assert set(readers) == set(range(300))

    async def exchange(edge_id: int) -> None:
        data = pattern(edge_id, 2000 + edge_id)
        received, _ = await asyncio.gather(
            flow.read_exactly(readers[edge_id], len(data), granted=512), flow.send_all(senders[edge_id], data)
        )
        assert received == data

    await asyncio.gather(*map(exchange, range(300)))


async def test_streams_beyond_the_peers_limit_wait_and_then_fail_by_name(make_node, flow):
    left, right = await make_node("left"), await make_node("right", max_edges=3)
    left.transport.set_peer(right.peer())
    edges = [await left.edge_to(right, edge_id) for edge_id in range(3)]
    with pytest.raises(TransportError, match=r"allows no more streams.*edge 3") as caught:
        await left.transport.open_edge(right.node_id, 3, deadline=0.2)
    assert f"{right.node_id:016x}" in str(caught.value)
    # A finished edge makes room, for as long as edges come and go.
    for edge_id in range(4, 12):
        opening = asyncio.ensure_future(left.transport.open_edge(right.node_id, edge_id, deadline=5))
        sender, reader = edges.pop(0)
        await sender.finish()
        assert await reader.read_into(memoryview(bytearray(1))) == 0
        fresh = await opening
        _, seen, fresh_reader = await asyncio.wait_for(right.transport.accept_edge(), 5)
        assert seen == edge_id
        edges.append((fresh, fresh_reader))


async def test_abort_is_seen_as_broken(pair, flow):
    left, right = pair
    sender, reader = await left.edge_to(right)
    reader.grant(1000)
    await flow.send_all(sender, b"some")
    assert await flow.read_exactly(reader, 4) == b"some"
    reading = asyncio.ensure_future(reader.read_into(memoryview(bytearray(10))))
    await sender.abort()
    await sender.abort()
    with pytest.raises(EdgeBroken, match="aborted"):
        await asyncio.wait_for(reading, 5)
    with pytest.raises(EdgeBroken):
        await reader.read_into(memoryview(bytearray(10)))
    with pytest.raises(EdgeClosed):
        await sender.write(memoryview(b"x"))


async def test_stop_ends_a_waiting_writer(pair):
    left, right = pair
    sender, reader = await left.edge_to(right)
    writing = asyncio.ensure_future(sender.write(memoryview(b"waits for room")))
    await reader.stop()
    await reader.stop()
    with pytest.raises(EdgeBroken, match="stopped"):
        await asyncio.wait_for(writing, 5)
    with pytest.raises(EdgeClosed):
        await reader.read_into(memoryview(bytearray(1)))
    await sender.finish()
    await sender.abort()


async def test_finish_wakes_a_waiting_writer(pair):
    left, right = pair
    sender, _ = await left.edge_to(right)
    writing = asyncio.ensure_future(sender.write(memoryview(b"waits")))
    await asyncio.wait({writing}, timeout=0.01)
    await sender.finish()
    with pytest.raises(EdgeClosed):
        await asyncio.wait_for(writing, 5)


async def test_an_edge_without_bytes_has_an_end(pair):
    left, right = pair
    sender = await left.transport.open_edge(right.node_id, 5, deadline=5)
    await sender.finish()
    _, edge_id, reader = await asyncio.wait_for(right.transport.accept_edge(), 5)
    assert edge_id == 5
    assert await asyncio.wait_for(reader.read_into(memoryview(bytearray(1))), 5) == 0


async def test_an_edge_id_is_free_again_after_its_end(pair, flow):
    left, right = pair
    for round_ in range(3):
        sender, reader = await left.edge_to(right, 9)
        reader.grant(10)
        await flow.send_all(sender, bytes([round_]))
        await sender.finish()
        assert await flow.read_exactly(reader, 1) == bytes([round_])
        assert await reader.read_into(memoryview(bytearray(1))) == 0


async def test_both_directions_share_one_connection(pair, flow):
    left, right = pair
    there, there_reader = await left.edge_to(right, 1)
    back, back_reader = await right.edge_to(left, 1)
    there_reader.grant(10)
    back_reader.grant(10)
    await asyncio.gather(flow.send_all(there, b"ping"), flow.send_all(back, b"pong"))
    assert await flow.read_exactly(there_reader, 4) == b"ping"
    assert await flow.read_exactly(back_reader, 4) == b"pong"
    assert len(left.transport._endpoint.links) == len(right.transport._endpoint.links) == 1


@pytest.mark.parametrize("datagram_size", [1200, 16_200])
async def test_keys_are_updated_in_mid_transfer(make_node, flow, pattern, datagram_size):
    settings = {"key_update_packets": 300, "datagram_size": datagram_size}
    left, right = await make_node("left", **settings), await make_node("right", **settings)
    left.transport.set_peer(right.peer())
    sender, reader = await left.edge_to(right)
    data = pattern(5, 1000 * datagram_size)
    received, _ = await asyncio.gather(
        flow.read_exactly(reader, len(data), granted=MIB), flow.send_all(sender, data)
    )
    assert received == data
    (link,) = left.transport._endpoint.links
    assert link.key_updates >= 2


async def test_memoryviews_of_other_formats_are_taken_as_bytes(pair, flow):
    left, right = pair
    sender, reader = await left.edge_to(right)
    reader.grant(100)
    words = memoryview(bytearray(range(16))).cast("I")
    assert await sender.write(words) == 16
    into = memoryview(bytearray(16)).cast("H")
    taken = 0
    while taken < 16:
        taken += await reader.read_into(into[taken // 2 :])
    assert bytes(into) == bytes(range(16))


async def test_empty_views_are_refused(pair):
    left, right = pair
    sender, reader = await left.edge_to(right)
    with pytest.raises(ValueError, match="at least one byte"):
        await sender.write(memoryview(b""))
    with pytest.raises(ValueError, match="at least one byte"):
        await reader.read_into(memoryview(bytearray()))
