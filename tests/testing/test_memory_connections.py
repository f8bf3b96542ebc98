"""The memory transport keeps the transport interface: control frames, peers, and how connections end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from memory_places import PATIENCE, Place, know, make, pending, read_all, read_some, write_all
from swactor_core.errors import EdgeBroken, EdgeClosed, ResourceError, TransportError
from swactor_core.ids import NodeId
from swactor_core.spi.transport import MAX_CONTROL_FRAME, Peer
from swactor_testing.memory.hub import HUB

# --- control ---


async def test_frames_arrive_whole_and_in_order(pair: tuple[Place, Place]) -> None:
    mine, theirs = await pair[0].control_to(pair[1])
    assert (mine.peer, theirs.peer) == (pair[1].id, pair[0].id)
    assert (mine.peer_key, theirs.peer_key) == (pair[1].key, pair[0].key)
    for number in range(5):
        await mine.send(b"%d" % number)
    await theirs.send(b"back")
    assert [await theirs.receive() for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    assert await mine.receive() == b"back"


async def test_a_peer_that_does_not_read_stops_the_sender(place: Any) -> None:
    left, right = await place("left"), await place("right", control_window=10)
    know(left, right)
    mine, theirs = await left.control_to(right)
    await mine.send(b"12345678")
    waiting = await pending(mine.send(b"abc"))
    assert await theirs.receive() == b"12345678"
    await waiting
    large = await pending(mine.send(bytes(100)))  # larger than the window: alone, when all is read
    assert await theirs.receive() == b"abc"
    await large
    assert await theirs.receive() == bytes(100)


@pytest.mark.parametrize("size", [0, MAX_CONTROL_FRAME + 1])
async def test_a_frame_out_of_bounds_is_refused(pair: tuple[Place, Place], size: int) -> None:
    mine, _ = await pair[0].control_to(pair[1])
    with pytest.raises(ValueError, match=f"{size} bytes"):
        await mine.send(bytes(size))


@pytest.mark.parametrize("latency", [0.0, 0.002])
async def test_an_ordered_close_comes_after_the_frames(place: Any, latency: float) -> None:
    left, right = await place("left", latency=latency), await place("right")
    know(left, right)
    mine, theirs = await left.control_to(right)
    await mine.send(b"last")
    await mine.close()
    await mine.close()
    assert await theirs.receive() == b"last"
    assert await theirs.receive() is None
    assert await mine.receive() is None
    with pytest.raises(EdgeClosed):
        await mine.send(b"x")
    with pytest.raises(EdgeBroken, match="peer closed"):
        await theirs.send(b"x")


async def test_a_lost_connection_breaks_the_channel(pair: tuple[Place, Place]) -> None:
    mine, theirs = await pair[0].control_to(pair[1])
    receiving = await pending(theirs.receive())
    HUB.lose(pair[0].id, pair[1].id)
    with pytest.raises(EdgeBroken):
        await receiving
    with pytest.raises(EdgeBroken):
        await mine.send(b"x")


# --- peers and life ---


async def test_an_unknown_peer_is_named(place: Any) -> None:
    left = await place("left")
    with pytest.raises(TransportError, match="0000000000000005 is not known"):
        await left.transport.connect(NodeId(5), deadline=1)


async def test_a_dial_waits_for_the_listener(place: Any) -> None:
    left, right = await place("left"), make("right", port=5000)
    left.transport.set_peer(Peer(right.id, right.key, "127.0.0.1", 5000, 1))
    with pytest.raises(TransportError, match=r"5000 cannot be reached .* nobody listens"):
        await left.transport.connect(right.id, deadline=0.05)
    dialling = await pending(left.transport.connect(right.id, deadline=PATIENCE))
    await right.transport.start()
    await dialling
    await right.transport.close()


async def test_both_sides_share_one_connection(pair: tuple[Place, Place]) -> None:
    left, right = pair
    await asyncio.gather(
        left.transport.connect(right.id, deadline=1), right.transport.connect(left.id, deadline=1)
    )
    assert len(left.transport.links) == 1
    assert left.transport.links == right.transport.links


async def test_a_stranger_is_not_let_in(place: Any) -> None:
    left, right = await place("left"), await place("right", allowed=lambda key: False)
    left.transport.set_peer(right.peer())
    with pytest.raises(TransportError, match=f"key {left.key.hex()} is not authorised"):
        await left.transport.connect(right.id, deadline=0.05)
    right.transport.set_peer(left.peer())  # a known peer needs nobody's word
    await left.transport.connect(right.id, deadline=1)


async def test_another_key_is_refused_at_once(pair: tuple[Place, Place]) -> None:
    left, right = pair
    left.transport.set_peer(right.peer(public_key=bytes(32)))
    with pytest.raises(TransportError, match="answers with key"):
        await left.transport.connect(right.id, deadline=60)


async def test_a_newer_epoch_ends_connections_to_the_former_life(pair: tuple[Place, Place]) -> None:
    left, right = pair
    sender, _ = await left.edge_to(right)
    left.transport.set_peer(right.peer(epoch=2))
    with pytest.raises(EdgeBroken, match="restarted"):
        await sender.write(memoryview(b"x"))
    assert left.lost == right.lost == []
    with pytest.raises(TransportError, match="epoch 1, expected 2"):
        await left.transport.connect(right.id, deadline=0.05)


async def test_a_former_life_is_refused(place: Any) -> None:
    left, right = await place("left", epoch=3), await place("right")
    left.transport.set_peer(right.peer())
    right.transport.set_peer(left.peer(epoch=4))
    with pytest.raises(TransportError, match="epoch 3 is a former life"):
        await left.transport.connect(right.id, deadline=0.05)


async def test_a_removed_peers_connections_end_without_a_loss(pair: tuple[Place, Place]) -> None:
    left, right = pair
    sender, reader = await left.edge_to(right)
    left.transport.remove_peer(right.id)
    with pytest.raises(EdgeBroken, match="gave the other side up"):
        await sender.write(memoryview(b"x"))
    with pytest.raises(EdgeBroken):
        await read_some(reader, 1)
    assert left.lost == right.lost == []


async def test_a_killed_endpoint_is_lost_to_others_only(pair: tuple[Place, Place]) -> None:
    left, right = pair
    await left.edge_to(right)
    HUB.vanish(right.id)
    assert [who for who, _ in left.lost] == [right.id]
    assert right.lost == []
    with pytest.raises(EdgeClosed):
        await right.transport.accept_edge()


async def test_close_delivers_what_was_finished_and_frees_the_port(place: Any) -> None:
    left, right = await place("left", latency=0.01), await place("right")
    know(left, right)
    sender, reader = await left.edge_to(right)
    reader.grant(3)
    await write_all(sender, b"abc")
    await sender.finish()
    port = left.transport.port
    accepting = await pending(left.transport.accept_edge())
    await left.transport.close()
    await left.transport.close()
    with pytest.raises(EdgeClosed):
        await accepting
    assert await read_all(reader) == b"abc"
    assert right.lost == []
    again = await place("another", port=port)
    assert again.transport.port == port


async def test_close_is_bounded_when_nothing_arrives(pair: tuple[Place, Place]) -> None:
    left, right = pair
    sender, reader = await left.edge_to(right)
    reader.grant(3)
    HUB.hold(sender=left.id)
    await write_all(sender, b"abc")
    await sender.finish()
    began = asyncio.get_running_loop().time()
    await left.transport.close()
    assert asyncio.get_running_loop().time() - began < 2.0


async def test_one_port_has_one_endpoint(place: Any) -> None:
    left = await place("left")
    with pytest.raises(ResourceError, match=f"127.0.0.1:{left.transport.port}"):
        await place("right", port=left.transport.port)


async def test_calls_before_start_are_named(place: Any) -> None:
    left = make("left")
    with pytest.raises(TransportError, match="not started"):
        await left.transport.accept_edge()
    await left.transport.close()
