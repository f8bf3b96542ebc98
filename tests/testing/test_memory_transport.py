"""The memory transport keeps the transport interface: credit to the byte, ends, peers, and its script."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_places import PATIENCE, Place, know, make, pending, read_all, read_some, write_all
from swactor_core.errors import ConfigError, EdgeBroken, EdgeClosed, TransportError, UsageError
from swactor_core.ids import EdgeId, NodeId
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind
from swactor_testing.memory.hub import HUB
from swactor_testing.memory.transport import MemoryPlugin

# --- edges ---


async def test_nothing_is_sent_that_was_not_granted(pair: tuple[Place, Place]) -> None:
    sender, reader = await pair[0].edge_to(pair[1])
    assert sender.room() == 0
    writing = await pending(sender.write(memoryview(b"abcdefgh")))
    reader.grant(3)
    assert await writing == 3
    assert sender.room() == 0
    again = await pending(sender.write(memoryview(b"defgh")))
    reader.grant(2)  # never lowered
    assert not again.done()
    reader.grant(5)
    assert await again == 2
    assert await read_some(reader, 10) == b"abcde"


async def test_reading_grants_nothing(pair: tuple[Place, Place]) -> None:
    sender, reader = await pair[0].edge_to(pair[1])
    reader.grant(4)
    assert await sender.write(memoryview(b"12345678")) == 4
    assert await read_some(reader, 4) == b"1234"
    assert sender.room() == 0


async def test_a_stalled_edge_stops_no_other(pair: tuple[Place, Place]) -> None:
    stalled, _ = await pair[0].edge_to(pair[1], 1)
    waiting = await pending(stalled.write(memoryview(b"x")))
    sender, reader = await pair[0].edge_to(pair[1], 2)
    reader.grant(5)
    await write_all(sender, b"other")
    assert await read_some(reader, 9) == b"other"
    waiting.cancel()


async def test_unacknowledged_bytes_are_bounded(place: Any) -> None:
    left, right = await place("left", send_bound=10, latency=0.01), await place("right")
    know(left, right)
    sender, reader = await left.edge_to(right)
    reader.grant(1000)
    assert sender.room() == 10
    assert await sender.write(memoryview(bytes(100))) == 10
    assert sender.room() == 0
    assert await sender.write(memoryview(bytes(100))) == 10  # once the first ten have arrived
    assert len(await read_some(reader, 100)) >= 10


async def test_a_cancelled_write_has_taken_nothing(pair: tuple[Place, Place]) -> None:
    sender, reader = await pair[0].edge_to(pair[1])
    writing = await pending(sender.write(memoryview(b"lost")))
    writing.cancel()
    await asyncio.wait((writing,))
    reader.grant(100)
    await write_all(sender, b"kept")
    await sender.finish()
    assert await read_all(reader) == b"kept"


async def test_a_cancelled_read_has_lost_nothing(pair: tuple[Place, Place]) -> None:
    sender, reader = await pair[0].edge_to(pair[1])
    reader.grant(100)
    reading = await pending(read_some(reader, 10))
    reading.cancel()
    await asyncio.wait((reading,))
    await write_all(sender, b"here")
    assert await read_some(reader, 10) == b"here"


async def test_written_bytes_are_copied(pair: tuple[Place, Place]) -> None:
    sender, reader = await pair[0].edge_to(pair[1])
    reader.grant(4)
    data = bytearray(b"good")
    await sender.write(memoryview(data))
    data[:] = b"evil"
    assert await read_some(reader, 4) == b"good"


async def test_finish_ends_after_all_bytes(pair: tuple[Place, Place]) -> None:
    sender, reader = await pair[0].edge_to(pair[1])
    reader.grant(3)
    await write_all(sender, b"abc")
    await sender.finish()
    await sender.finish()
    with pytest.raises(EdgeClosed, match="finished"):
        await sender.write(memoryview(b"d"))
    assert await read_all(reader) == b"abc"
    assert await read_some(reader, 1) == b""
    await sender.abort()
    assert await read_some(reader, 1) == b""


async def test_abort_breaks_the_reader(pair: tuple[Place, Place]) -> None:
    sender, reader = await pair[0].edge_to(pair[1])
    reader.grant(3)
    await write_all(sender, b"abc")
    await sender.abort()
    await sender.abort()
    with pytest.raises(EdgeBroken, match="aborted"):
        await read_some(reader, 3)
    with pytest.raises(EdgeClosed):
        await sender.write(memoryview(b"d"))


async def test_stop_breaks_the_sender(pair: tuple[Place, Place]) -> None:
    sender, reader = await pair[0].edge_to(pair[1])
    writing = await pending(sender.write(memoryview(b"abc")))
    await reader.stop()
    await reader.stop()
    with pytest.raises(EdgeBroken, match="stopped"):
        await writing
    with pytest.raises(EdgeClosed):
        await read_some(reader, 1)


@pytest.mark.parametrize("latency", [0.0, 0.001])
async def test_what_arrived_is_read_before_a_loss_is_told(place: Any, latency: float) -> None:
    left, right = await place("left", latency=latency), await place("right", latency=latency)
    know(left, right)
    sender, reader = await left.edge_to(right)
    reader.grant(10)
    await write_all(sender, b"abc")
    first = await read_some(reader, 1)
    HUB.lose(left.id, right.id)
    assert first + await read_some(reader, 9) == b"abc"
    with pytest.raises(EdgeBroken, match="script"):
        await read_some(reader, 1)
    with pytest.raises(EdgeBroken, match="script"):
        await sender.write(memoryview(b"d"))
    assert [left.lost, right.lost] == [[(right.id, "cut, by script")], [(left.id, "cut, by script")]]


async def test_an_edge_that_is_open_is_not_opened_twice(pair: tuple[Place, Place]) -> None:
    first, reader = await pair[0].edge_to(pair[1], 7)
    with pytest.raises(TransportError, match=r"edge 7 .*already open"):
        await pair[0].transport.open_edge(pair[1].id, EdgeId(7), deadline=1)
    reader.grant(1)
    assert await first.write(memoryview(b"x")) == 1
    await first.finish()
    assert await read_all(reader) == b"x"
    await pair[0].edge_to(pair[1], 7)


async def test_open_edges_are_limited(place: Any) -> None:
    left, right = await place("left"), await place("right", max_edges=2)
    know(left, right)
    edges = [await left.edge_to(right, edge_id) for edge_id in (1, 2)]
    with pytest.raises(TransportError, match="no more streams"):
        await left.transport.open_edge(right.id, EdgeId(3), deadline=0.05)
    await edges[0][0].finish()
    await left.edge_to(right, 3)


@pytest.mark.parametrize("call", ["write", "read_into"])
async def test_an_empty_view_is_refused(pair: tuple[Place, Place], call: str) -> None:
    edges = dict(zip(("write", "read_into"), await pair[0].edge_to(pair[1]), strict=True))
    with pytest.raises(ValueError, match="at least one byte"):
        await getattr(edges[call], call)(memoryview(b""))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_grants_writes_and_reads_loses_nothing(data: st.DataObject) -> None:
    """Against the plainest model: what was read is a prefix of what was taken, never beyond the grants."""

    async def walk() -> None:
        left, right = make("left", send_bound=data.draw(st.integers(1, 40))), make("right")
        try:
            await left.transport.start()
            await right.transport.start()
            know(left, right)
            sender, reader = await left.edge_to(right)
            taken, read, granted = b"", b"", 0
            for step in range(data.draw(st.integers(1, 25))):
                match data.draw(st.sampled_from(("grant", "write", "read"))):
                    case "grant":
                        granted = max(granted, data.draw(st.integers(0, 60)))
                        reader.grant(granted)
                    case "write":
                        assert sender.room() <= granted - len(taken)
                        if sender.room():
                            part = bytes([step]) * data.draw(st.integers(1, 30))
                            taken += part[: await sender.write(memoryview(part))]
                    case "read":
                        if len(read) < len(taken):
                            read += await read_some(reader, data.draw(st.integers(1, 30)))
                assert taken.startswith(read)
                assert len(taken) <= granted
            await sender.finish()
            assert read + await read_all(reader) == taken
        finally:
            await left.transport.close()
            await right.transport.close()

    asyncio.run(walk())


# --- the script ---


async def test_refused_dials_go_through_once_allowed(pair: tuple[Place, Place]) -> None:
    left, right = pair
    HUB.refuse("not now", dialler=left.id)
    with pytest.raises(TransportError, match="not now"):
        await left.transport.connect(right.id, deadline=0.05)
    dialling = await pending(left.transport.connect(right.id, deadline=PATIENCE))
    HUB.allow()
    await dialling


async def test_what_was_held_arrives_in_order_when_released(pair: tuple[Place, Place]) -> None:
    mine, theirs = await pair[0].control_to(pair[1])
    HUB.hold(sender=pair[0].id, receiver=pair[1].id)
    for number in range(3):
        await mine.send(b"%d" % number)
    receiving = await pending(theirs.receive())
    HUB.release()
    assert [await receiving, await theirs.receive(), await theirs.receive()] == [b"0", b"1", b"2"]


async def test_latency_is_kept_and_changed_on_a_live_connection(pair: tuple[Place, Place]) -> None:
    loop = asyncio.get_running_loop()
    mine, theirs = await pair[0].control_to(pair[1])
    HUB.delay(0.03, sender=pair[0].id)
    began = loop.time()
    await mine.send(b"late")
    assert await theirs.receive() == b"late"
    assert loop.time() - began >= 0.03
    await theirs.send(b"at once")
    assert await mine.receive() == b"at once"


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_scripted_edge_breaks_after_so_many_bytes(pair: tuple[Place, Place], after: int) -> None:
    HUB.break_edge(EdgeId(4), after=after)
    sender, reader = await pair[0].edge_to(pair[1], 4)
    reader.grant(100)
    with pytest.raises(EdgeBroken, match="script"):
        await write_all(sender, b"0123456789")
    with pytest.raises(EdgeBroken, match="script"):
        await read_all(reader)
    other, other_reader = await pair[0].edge_to(pair[1], 5)  # the connection lives
    other_reader.grant(1)
    assert await other.write(memoryview(b"x")) == 1
    assert pair[0].lost == pair[1].lost == []


def test_a_script_about_nobody_is_refused() -> None:
    with pytest.raises(UsageError, match="no endpoint"):
        HUB.vanish(NodeId(1))


async def test_a_script_about_no_connection_is_refused(pair: tuple[Place, Place]) -> None:
    with pytest.raises(UsageError, match="no connection"):
        HUB.lose(pair[0].id, pair[1].id)


# --- the plug-in ---


@pytest.mark.parametrize(("key", "value"), [("colour", "red"), ("send_bound", 0), ("latency", -1)])
async def test_a_bad_setting_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"memory: {key} = "):
        make("left", **{key: value})


def test_a_seed_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 bytes, expected 32"):
        MemoryPlugin().public_key(b"short")


def test_it_is_found_by_name_and_says_that_it_stays() -> None:
    provider = load_plugins().select(Kind.TRANSPORT, "memory")
    assert provider.crosses_processes is False
    assert isinstance(provider.factory(), MemoryPlugin)
