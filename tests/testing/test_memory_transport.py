"""The memory transport keeps the transport interface: credit to the byte, ends, peers, and its script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.errors import ConfigError, EdgeBroken, EdgeClosed, ResourceError, TransportError, UsageError
from swactor_core.ids import EdgeId, NodeId, node_id_of
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind
from swactor_core.spi.transport import MAX_CONTROL_FRAME, Peer, TransportContext
from swactor_testing.memory.hub import HUB
from swactor_testing.memory.transport import MemoryPlugin, MemoryTransport

PATIENCE = 5.0


@dataclass
class Place:
    """A started endpoint with what its host would keep beside it."""

    transport: MemoryTransport
    key: bytes
    epoch: int
    lost: list[tuple[NodeId, str]] = field(default_factory=list)

    @property
    def id(self) -> NodeId:
        return self.transport.node_id

    def peer(self, **changed: Any) -> Peer:
        known = {
            "node_id": self.id,
            "public_key": self.key,
            "host": self.transport.host,
            "port": self.transport.port,
            "epoch": self.epoch,
        }
        return Peer(**{**known, **changed})

    async def edge_to(self, other: Place, edge_id: int = 1) -> tuple[Any, Any]:
        sender = await self.transport.open_edge(other.id, EdgeId(edge_id), deadline=1)
        async with asyncio.timeout(PATIENCE):
            who, seen, reader = await other.transport.accept_edge()
        assert (who, seen) == (self.id, edge_id)
        return sender, reader

    async def control_to(self, other: Place) -> tuple[Any, Any]:
        mine = await self.transport.open_control(other.id, deadline=1)
        async with asyncio.timeout(PATIENCE):
            return mine, await other.transport.accept_control()


def make(
    name: str,
    *,
    epoch: int = 1,
    port: int = 0,
    allowed: Callable[[bytes], bool] = lambda key: True,
    **chosen: Any,
) -> Place:
    """An endpoint that is not started."""
    seed = name.encode().ljust(32, b".")
    key = MemoryPlugin().public_key(seed)
    lost: list[tuple[NodeId, str]] = []
    context = TransportContext(
        seed=seed,
        node_id=node_id_of(key),
        epoch=epoch,
        bind_host="127.0.0.1",
        bind_port=port,
        authorise=allowed,
        on_peer_lost=lambda node_id, why: lost.append((node_id, why)),
        settings=chosen,
    )
    return Place(MemoryPlugin().create(context), key, epoch, lost)


@pytest_asyncio.fixture
async def place() -> AsyncIterator[Callable[..., Any]]:
    """`await place(name, …)`: started; closed at the end, and the hub is empty then."""
    places: list[Place] = []

    async def start(name: str, **options: Any) -> Place:
        made = make(name, **options)
        await made.transport.start()
        places.append(made)
        return made

    yield start
    await asyncio.gather(*(one.transport.close() for one in places))
    assert not HUB.endpoints
    assert HUB.break_after(EdgeId(1)) is None


def know(*places: Place) -> None:
    for one in places:
        for other in places:
            if other is not one:
                one.transport.set_peer(other.peer())


@pytest_asyncio.fixture
async def pair(place: Any) -> tuple[Place, Place]:
    left, right = await place("left"), await place("right")
    know(left, right)
    return left, right


async def write_all(edge: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[await edge.write(view) :]


async def read_some(edge: Any, count: int) -> bytes:
    data = bytearray(count)
    async with asyncio.timeout(PATIENCE):
        return bytes(data[: await edge.read_into(memoryview(data))])


async def read_all(edge: Any) -> bytes:
    data = b""
    while part := await read_some(edge, 1 << 16):
        data += part
    return data


async def pending(work: Any) -> asyncio.Task[Any]:
    """A task that waits: it has had every chance to go on."""
    task = asyncio.ensure_future(work)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    return task


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
    with pytest.raises(EdgeBroken, match="removed"):
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
