"""Control channels over real sockets: whole frames, backpressure both ways, orderly and broken ends."""

from __future__ import annotations

import asyncio
import time

import pytest
from swactor_core.errors import EdgeBroken, EdgeClosed
from swactor_core.spi.transport import MAX_CONTROL_FRAME

KIB = 1024


async def waits(awaitable) -> asyncio.Future:
    """Starts it and shows that it waits."""
    future = asyncio.ensure_future(awaitable)
    await asyncio.wait({future}, timeout=0.05)
    assert not future.done()
    return future


async def test_frames_travel_both_ways_and_name_their_peer(pair):
    left, right = pair
    mine, theirs = await left.control_to(right)
    assert (mine.peer, mine.peer_key) == (right.node_id, right.key)
    assert (theirs.peer, theirs.peer_key) == (left.node_id, left.key)
    await mine.send(b"question")
    assert await theirs.receive() == b"question"
    await theirs.send(b"answer")
    assert await mine.receive() == b"answer"


async def test_frames_of_every_size_keep_their_borders(pair, pattern):
    left, right = pair
    mine, theirs = await left.control_to(right)
    sizes = [1, 2, 1199, 1200, 65535, 65536, 300 * KIB, MAX_CONTROL_FRAME]
    frames = [pattern(size, size) for size in sizes]

    async def send() -> None:
        for frame in frames:
            await mine.send(frame)

    sending = asyncio.ensure_future(send())
    assert [await theirs.receive() for _ in frames] == frames
    await sending


@pytest.mark.parametrize("size", [0, MAX_CONTROL_FRAME + 1])
async def test_a_frame_out_of_bounds_is_refused_here(pair, size):
    left, right = pair
    mine, theirs = await left.control_to(right)
    with pytest.raises(ValueError, match="control frame"):
        await mine.send(bytes(size))
    await mine.send(b"still works")
    assert await theirs.receive() == b"still works"


async def test_an_oversize_announcement_closes_the_channel(pair):
    left, right = pair
    mine, theirs = await left.control_to(right)
    mine._link.quic.send_stream_data(mine._stream_id, (MAX_CONTROL_FRAME + 1).to_bytes(4, "little"))
    mine._link.flush()
    with pytest.raises(EdgeBroken, match="announced"):
        await asyncio.wait_for(theirs.receive(), 5)
    with pytest.raises(EdgeBroken):
        await asyncio.wait_for(mine.receive(), 5)
    again, answer = await left.control_to(right)
    await again.send(b"the connection lives")
    assert await answer.receive() == b"the connection lives"


async def test_a_peer_that_does_not_read_stops_the_sender(make_node):
    window = 64 * KIB
    left, right = await make_node("left"), await make_node("right", control_window=window)
    left.transport.set_peer(right.peer())
    mine, theirs = await left.control_to(right)
    sent, frame = 0, bytes(1000)

    async def send_for_ever() -> None:
        nonlocal sent
        while True:
            await mine.send(frame)
            sent += 1

    sending = asyncio.ensure_future(send_for_ever())
    await asyncio.wait({sending}, timeout=0.3)
    assert not sending.done()
    # One window of unread frames, and the one that is on its way.
    assert window - 2 * 1004 <= sent * 1004 <= 2 * window
    stalled_at = sent
    await asyncio.wait({sending}, timeout=0.1)
    assert sent == stalled_at
    for _ in range(stalled_at + 100):
        assert await asyncio.wait_for(theirs.receive(), 5) == frame
    assert sent > stalled_at
    sending.cancel()


async def test_a_stalled_channel_leaves_its_neighbour_alone(make_node):
    left, right = await make_node("left"), await make_node("right", control_window=8 * KIB)
    left.transport.set_peer(right.peer())
    stalled, _ = await left.control_to(right)
    running, answer = await left.control_to(right)
    sending = await waits(_flood(stalled))
    for number in range(50):
        await running.send(number.to_bytes(2, "big"))
        assert await asyncio.wait_for(answer.receive(), 5) == number.to_bytes(2, "big")
    sending.cancel()


async def _flood(channel) -> None:
    while True:
        await channel.send(bytes(1000))


async def test_a_cancelled_send_leaves_whole_frames(make_node, pattern):
    left, right = await make_node("left"), await make_node("right", control_window=8 * KIB)
    left.transport.set_peer(right.peer())
    mine, theirs = await left.control_to(right)
    for _ in range(9):
        await mine.send(bytes(1000))
    large = pattern(1, 100 * KIB)
    first = await waits(mine.send(large))
    second = await waits(mine.send(b"queued behind it"))
    first.cancel()
    second.cancel()
    third = asyncio.ensure_future(mine.send(b"after both"))
    received = []
    while not received or received[-1] != b"after both":
        received.append(await asyncio.wait_for(theirs.receive(), 5))
    await third
    # The large frame had begun and goes out whole; the one behind it had not.
    assert received == [bytes(1000)] * 9 + [large, b"after both"]


async def test_concurrent_senders_do_not_mix(pair, pattern):
    left, right = pair
    mine, theirs = await left.control_to(right)
    frames = [pattern(n, 50 * KIB + n) for n in range(12)]
    sending = asyncio.gather(*(mine.send(frame) for frame in frames))
    received = [await asyncio.wait_for(theirs.receive(), 5) for _ in frames]
    await sending
    assert received == frames


async def test_close_is_orderly(pair):
    left, right = pair
    mine, theirs = await left.control_to(right)
    await mine.send(b"last words")
    await mine.close()
    await mine.close()
    assert await theirs.receive() == b"last words"
    assert await theirs.receive() is None
    assert await theirs.receive() is None
    with pytest.raises(EdgeClosed):
        await mine.send(b"late")
    assert await mine.receive() is None
    with pytest.raises(EdgeBroken, match="closed"):
        await asyncio.wait_for(_flood(theirs), 5)
    await theirs.close()


async def test_close_ends_an_own_waiting_receive(pair):
    left, right = pair
    mine, _ = await left.control_to(right)
    reading = await waits(mine.receive())
    await mine.close()
    assert await asyncio.wait_for(reading, 5) is None


async def test_close_of_the_peer_ends_a_waiting_send(make_node):
    left, right = await make_node("left"), await make_node("right", control_window=8 * KIB)
    left.transport.set_peer(right.peer())
    mine, theirs = await left.control_to(right)
    sending = await waits(_flood(mine))
    other = await waits(mine.send(b"behind"))
    await theirs.close()
    for future in (sending, other):
        with pytest.raises(EdgeBroken):
            await asyncio.wait_for(future, 5)


async def test_closed_channels_make_room_for_new_ones(make_node):
    left, right = await make_node("left"), await make_node("right", max_channels=2)
    left.transport.set_peer(right.peer())
    for number in range(12):
        mine, theirs = await left.control_to(right)
        await mine.send(number.to_bytes(1, "big"))
        assert await theirs.receive() == number.to_bytes(1, "big")
        await theirs.close()
        assert await mine.receive() is None
        await mine.close()


async def test_a_lost_connection_breaks_the_channel_after_what_had_arrived(pair):
    left, right = pair
    mine, theirs = await left.control_to(right)
    await mine.send(b"before")
    assert await theirs.receive() == b"before"
    reading = await waits(theirs.receive())
    await left.transport.close()
    with pytest.raises(EdgeBroken, match="shutting down"):
        await asyncio.wait_for(reading, 5)
    with pytest.raises(EdgeBroken):
        await theirs.send(b"to nobody")
    await theirs.close()


async def test_something_else_than_a_channel_is_refused(pair):
    left, right = pair
    await left.control_to(right)
    (link,) = left.transport._endpoint.links
    half = link.quic.open_stream(b"GET / HTTP/1.1", is_unidirectional=False)
    assert half is not None
    link.flush()
    while not half.reset:
        assert await link.activity.wait(5)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(right.transport.accept_control(), 0.01)


async def test_a_pause_of_both_ends_longer_than_the_idle_timeout_loses_nothing(make_node):
    """As SIGSTOP and SIGCONT of a whole cluster: nobody was there to be silent."""
    quick = {"idle_timeout": 1.0, "keepalive_interval": 0.2, "probe_interval": 0.1, "loss_after": 0.5}
    left, right = await make_node("left", **quick), await make_node("right", **quick)
    left.transport.set_peer(right.peer())
    channel, answer = await left.control_to(right)
    await channel.send(b"before")
    assert await asyncio.wait_for(answer.receive(), 5) == b"before"
    time.sleep(1.5)  # noqa: ASYNC251 - the pause of this whole process
    await asyncio.sleep(0.05)
    await channel.send(b"after")
    assert await asyncio.wait_for(answer.receive(), 5) == b"after"
