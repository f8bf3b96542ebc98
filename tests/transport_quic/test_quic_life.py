"""Connections that end: killed, silent and restarted peers, two dials at once, and an orderly close."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import pytest
from swactor_core.errors import EdgeBroken, EdgeClosed, TransportError
from swactor_core.ids import node_id_of
from swactor_core.spi.transport import Peer
from swactor_transport_quic.link import LinkState
from swactor_transport_quic.transport import QuicPlugin

CHILD = """
import asyncio, sys
from swactor_core.ids import node_id_of
from swactor_core.spi.transport import Peer, TransportContext
from swactor_transport_quic.transport import QuicPlugin

async def main():
    plugin, seed = QuicPlugin(), sys.argv[1].encode().ljust(32, b".")
    transport = plugin.create(TransportContext(
        seed=seed, node_id=node_id_of(plugin.public_key(seed)), epoch=int(sys.argv[2]), bind_host="127.0.0.1",
        bind_port=int(sys.argv[3]), authorise=lambda key: True, on_peer_lost=lambda node, why: None))
    await transport.start()
    print(transport.port, flush=True)
    while True:
        node, edge, reader = await transport.accept_edge()
        reader.grant(4)
        buffer = bytearray(4)
        assert await reader.read_into(memoryview(buffer)) == 4
        print(buffer.decode(), flush=True)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def child(name: str, *, epoch: int = 1, port: int = 0):
    """A node in its own process: it, its port, and its peer record."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, name, str(epoch), str(port), stdout=asyncio.subprocess.PIPE
    )
    try:
        bound = int(await asyncio.wait_for(process.stdout.readline(), 20))
        key = QuicPlugin().public_key(name.encode().ljust(32, b"."))
        yield process, Peer(node_id_of(key), key, "127.0.0.1", bound, epoch)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_process_is_known_and_its_edges_break(make_node, flow):
    left = await make_node("left")
    async with child("child") as (process, peer):
        left.transport.set_peer(peer)
        sender = await left.transport.open_edge(peer.node_id, 1, deadline=5)
        await flow.send_all(sender, b"here")
        assert await asyncio.wait_for(process.stdout.readline(), 5) == b"here\n"
        writing = asyncio.ensure_future(sender.write(memoryview(b"never read")))
        loop = asyncio.get_running_loop()
        killed_at = loop.time()
        process.send_signal(signal.SIGKILL)
        node_id, why = await asyncio.wait_for(left.lost.get(), 3)
        assert node_id == peer.node_id
        assert "process is gone" in why
        assert loop.time() - killed_at < 3
        with pytest.raises(EdgeBroken, match="process is gone"):
            await asyncio.wait_for(writing, 1)


async def test_a_process_restarted_in_place_is_reached_again(make_node, flow):
    left = await make_node("left")
    async with child("child", epoch=1) as (process, peer):
        left.transport.set_peer(peer)
        sender = await left.transport.open_edge(peer.node_id, 1, deadline=5)
        await flow.send_all(sender, b"one.")
        assert await asyncio.wait_for(process.stdout.readline(), 5) == b"one.\n"
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with child("child", epoch=2, port=peer.port) as (process, reborn):
        left.transport.set_peer(reborn)
        sender = await left.transport.open_edge(reborn.node_id, 1, deadline=5)
        await flow.send_all(sender, b"two.")
        assert await asyncio.wait_for(process.stdout.readline(), 5) == b"two.\n"


async def test_a_silent_peer_is_lost_on_both_sides(make_node, make_relay, flow):
    quick = {"probe_interval": 0.05, "loss_after": 0.3}
    left, right = await make_node("left", **quick), await make_node("right", **quick)
    relay = make_relay(right)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    reading = asyncio.ensure_future(reader.read_into(memoryview(bytearray(1))))
    writing = asyncio.ensure_future(sender.write(memoryview(b"x")))
    relay.holding = True
    for node, other in ((left, right), (right, left)):
        node_id, why = await asyncio.wait_for(node.lost.get(), 3)
        assert node_id == other.node_id
        assert "no answer to a ping for 0.3 s" in why
    for future in (reading, writing):
        with pytest.raises(EdgeBroken, match="no answer"):
            await future


async def test_an_idle_connection_outlives_its_idle_timeout(make_node, make_relay, flow):
    quick = {"idle_timeout": 0.5, "keepalive_interval": 0.1, "loss_after": 0.3}
    left, right = await make_node("left", **quick), await make_node("right", **quick)
    relay = make_relay(right)
    left.transport.set_peer(right.peer(port=relay.port))
    await left.transport.connect(right.node_id, deadline=5)
    (link,) = left.transport._endpoint.links
    before = relay.passed
    while relay.passed < before + 40:  # far more keep-alives than one idle timeout needs
        assert await link.activity.wait(2), "no keep-alive was answered"
    assert link.state is LinkState.READY
    assert left.lost.empty()
    assert right.lost.empty()


async def test_a_newer_epoch_ends_the_former_life_at_once(pair, flow):
    left, right = pair
    sender, reader = await left.edge_to(right)
    writing = asyncio.ensure_future(sender.write(memoryview(b"x")))
    reading = asyncio.ensure_future(reader.read_into(memoryview(bytearray(1))))
    await asyncio.sleep(0)
    left.transport.set_peer(right.peer(epoch=2))
    with pytest.raises(EdgeBroken, match="restarted"):
        await writing
    with pytest.raises(EdgeBroken, match="it knows a later life of this process's key"):
        await asyncio.wait_for(reading, 5)
    assert left.lost.empty(), "the host told us; it need not hear it back"
    left.transport.set_peer(right.peer(epoch=1))


async def test_the_same_epoch_again_keeps_the_connection(pair, flow):
    left, right = pair
    sender, reader = await left.edge_to(right)
    left.transport.set_peer(right.peer(epoch=1))
    right.transport.set_peer(left.peer(epoch=1))
    reader.grant(5)
    await flow.send_all(sender, b"lives")
    assert await flow.read_exactly(reader, 5) == b"lives"


async def test_a_new_life_that_dials_replaces_the_old_one(make_node, make_relay, flow):
    """The old life is cut off without a word, as by a kill; its successor dials from another port."""
    old, right = await make_node("left", epoch=1), await make_node("right")
    relay = make_relay(right)
    old.transport.set_peer(right.peer(port=relay.port))
    _, old_reader = await old.edge_to(right)
    reading = asyncio.ensure_future(old_reader.read_into(memoryview(bytearray(1))))
    relay.holding = True
    new = await make_node("left", epoch=2)
    new.transport.set_peer(right.peer())
    sender, reader = await new.edge_to(right)
    with pytest.raises(EdgeBroken, match="restarted"):
        await asyncio.wait_for(reading, 5)
    node_id, why = right.lost.get_nowait()
    assert node_id == old.node_id
    assert "epoch 2" in why
    reader.grant(3)
    await flow.send_all(sender, b"new")
    assert await flow.read_exactly(reader, 3) == b"new"


async def test_a_peer_that_dials_again_replaces_its_dead_connection(make_node, make_relay, flow):
    left, right = await make_node("left"), await make_node("right")
    relay = make_relay(right)
    left.transport.set_peer(right.peer(port=relay.port))
    _, reader = await left.edge_to(right)
    reading = asyncio.ensure_future(reader.read_into(memoryview(bytearray(1))))
    relay.holding = True
    left.transport.remove_peer(right.node_id)  # its farewell is lost on the way
    left.transport.set_peer(right.peer())
    sender, reader = await left.edge_to(right)
    with pytest.raises(EdgeBroken, match="new connection"):
        await asyncio.wait_for(reading, 5)
    reader.grant(5)
    await flow.send_all(sender, b"again")
    assert await flow.read_exactly(reader, 5) == b"again"
    assert len(right.transport._endpoint.links) == 1


async def test_two_dials_at_once_end_in_one_connection(pair, flow, monkeypatch):
    left, right = pair
    monkeypatch.setattr("swactor_transport_quic.link.DUPLICATE_LINGER", 0.1)
    opened = await asyncio.gather(
        left.transport.open_edge(right.node_id, 1, deadline=5),
        right.transport.open_edge(left.node_id, 2, deadline=5),
    )
    readers = [(await asyncio.wait_for(node.transport.accept_edge(), 5))[2] for node in (right, left)]
    for sender, reader in zip(opened, readers, strict=True):
        reader.grant(2)
        await flow.send_all(sender, b"ok")
        assert await flow.read_exactly(reader, 2) == b"ok"
        await sender.finish()
        assert await reader.read_into(memoryview(bytearray(1))) == 0
    async with asyncio.timeout(5):
        while max(len(node.transport._endpoint.links) for node in pair) > 1:
            (link, *_) = left.transport._endpoint.links
            await link.activity.wait(0.1)
    smaller = min(pair, key=lambda node: node.node_id)
    (kept,) = smaller.transport._endpoint.links
    assert kept.dialled
    assert left.lost.empty()
    assert right.lost.empty()
    sender, reader = await left.edge_to(right, 3)
    reader.grant(2)
    await flow.send_all(sender, b"on")
    assert await flow.read_exactly(reader, 2) == b"on"


async def test_close_delivers_finished_streams_whole(make_node, make_relay, flow, pattern):
    left, right = await make_node("left"), await make_node("right")
    relay = make_relay(right, seed=11, loss=0.1)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    data = pattern(2, 300_000)
    reader.grant(len(data))
    await flow.send_all(sender, data)
    await sender.finish()
    await left.transport.close()
    assert await flow.read_exactly(reader, len(data)) == data
    assert await reader.read_into(memoryview(bytearray(1))) == 0
    assert relay.dropped > 0


async def test_close_does_not_wait_longer_than_its_bound_for_a_silent_peer(make_node, make_relay, flow):
    left, right = await make_node("left", drain_timeout=0.3), await make_node("right")
    relay = make_relay(right)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    reader.grant(100)
    await flow.send_all(sender, b"arrives")
    assert await flow.read_exactly(reader, 7) == b"arrives"
    relay.holding = True
    await flow.send_all(sender, b"will never arrive")
    await sender.finish()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await left.transport.close()
    assert 0.25 < loop.time() - began < 2


async def test_close_ends_everyone_who_waits(pair):
    left, right = pair
    sender, reader = await left.edge_to(right)
    mine, theirs = await left.control_to(right)
    here = [
        asyncio.ensure_future(coroutine)
        for coroutine in (
            sender.write(memoryview(b"x")),
            left.transport.accept_edge(),
            left.transport.accept_control(),
            left.transport.open_edge(1234, 1, deadline=60),
            mine.receive(),
        )
    ]
    there = [asyncio.ensure_future(c) for c in (reader.read_into(memoryview(bytearray(1))), theirs.receive())]
    await asyncio.sleep(0)
    await asyncio.gather(left.transport.close(), left.transport.close())
    await asyncio.wait(here + there, timeout=5)
    outcomes = [type(future.exception()) for future in here]
    assert outcomes == [EdgeBroken, EdgeClosed, EdgeClosed, TransportError, EdgeBroken]
    for future in there:
        assert isinstance(future.exception(), EdgeBroken)
    assert right.lost.empty(), "an orderly close is no loss"
    for attempt in (left.transport.accept_edge(), left.transport.connect(right.node_id, deadline=1)):
        with pytest.raises(EdgeClosed):
            await attempt


async def test_close_leaves_nothing_in_the_loop_and_frees_the_port(pair, make_node):
    left, right = pair
    await left.edge_to(right, 1)
    await right.control_to(left)
    loop = asyncio.get_running_loop()
    port = left.transport.port
    for node in pair:
        await node.transport.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    ours = [handle for handle in loop._scheduled if not handle.cancelled()]
    assert ours == []
    watched = {key.fileobj for key in loop._selector.get_map().values()}
    assert watched <= {loop._ssock, loop._ssock.fileno()}
    again = await make_node("again", port=port)
    assert again.transport.port == port


async def test_close_before_start_and_start_after_close(make_node):
    node = await make_node("node")
    with pytest.raises(TransportError, match="starts once"):
        await node.transport.start()
    await node.transport.close()
    with pytest.raises(TransportError, match="starts once"):
        await node.transport.start()


async def test_a_peer_that_nobody_hears_fails_within_the_deadline(make_node, make_relay):
    left, right = await make_node("left"), await make_node("right")
    relay = make_relay(right)
    relay.holding = True
    left.transport.set_peer(right.peer(port=relay.port))
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TransportError, match=r"cannot be reached in 0\.3 s") as caught:
        await left.transport.connect(right.node_id, deadline=0.3)
    assert loop.time() - began < 3
    assert f"{right.node_id:016x} at 127.0.0.1:{relay.port}" in str(caught.value)
    relay.holding = False
    await left.transport.connect(right.node_id, deadline=5)


async def test_dialling_waits_for_a_peer_that_starts_later(make_node):
    left, late = await make_node("left"), await make_node("late")
    peer = late.peer()
    await late.transport.close()
    left.transport.set_peer(peer)
    connecting = asyncio.ensure_future(left.transport.connect(late.node_id, deadline=10))
    await asyncio.wait({connecting}, timeout=0.2)
    assert not connecting.done()
    await make_node("late", epoch=2, port=peer.port)
    await connecting


async def test_an_internal_error_ends_its_own_connection_only(make_node, flow, caplog):
    left, other, right = [await make_node(name) for name in ("left", "other", "right")]
    for node in (left, other):
        node.transport.set_peer(right.peer())
    _, reader = await left.edge_to(right)
    neighbour, neighbour_reader = await other.edge_to(right)
    reading = asyncio.ensure_future(reader.read_into(memoryview(bytearray(1))))

    def fail(data: bytes, end: bool) -> None:
        raise RuntimeError("planted")

    (link,) = [link for link in right.transport._endpoint.links if link.peer == left.node_id]
    link.handlers[next(iter(link.handlers))].received = fail
    reader.grant(1)
    sender = left.transport._endpoint.links[0].handlers
    await next(iter(sender.values())).write(memoryview(b"x"))
    assert await asyncio.wait_for(right.lost.get(), 5) == (
        left.node_id,
        "internal error: RuntimeError: planted",
    )
    with pytest.raises(EdgeBroken, match="planted"):
        await asyncio.wait_for(reading, 5)
    assert "planted" in caplog.text
    neighbour_reader.grant(2)
    await flow.send_all(neighbour, b"ok")
    assert await flow.read_exactly(neighbour_reader, 2) == b"ok"


async def test_after_an_own_pause_the_socket_is_read_before_any_timeout(pair, monkeypatch):
    left, right = pair
    await left.transport.connect(right.node_id, deadline=5)
    (link,) = left.transport._endpoint.links
    order: list[str] = []
    timed = asyncio.Event()
    drain, handle = left.transport._endpoint.drain, link.quic.handle_timer
    monkeypatch.setattr(left.transport._endpoint, "drain", lambda: (order.append("drain"), drain()))
    monkeypatch.setattr(
        link.quic, "handle_timer", lambda now: (order.append("timer"), timed.set(), handle(now))
    )
    monkeypatch.setattr(link.quic, "get_timer", lambda: link._loop.time() - 1)
    link._timer.cancel()
    link._timer = link._loop.call_at(link._loop.time() - 1, link._on_timer)
    async with asyncio.timeout(5):
        await timed.wait()
    assert order[0] == "drain"
    monkeypatch.undo()


async def test_a_host_callback_that_fails_is_logged(make_node, make_relay, caplog):
    quick = {"probe_interval": 0.05, "loss_after": 0.2}
    left, right = await make_node("left", **quick), await make_node("right")
    relay = make_relay(right)
    left.transport.set_peer(right.peer(port=relay.port))
    sender, _ = await left.edge_to(right)
    object.__setattr__(left.transport._context, "on_peer_lost", lambda node_id, why: 1 / 0)
    relay.holding = True
    with pytest.raises(EdgeBroken):
        await asyncio.wait_for(sender.write(memoryview(b"x")), 5)
    assert "ZeroDivisionError" in caplog.text


async def test_close_delivers_what_control_channels_had_sent(make_node, make_relay, pattern):
    left, right = await make_node("left"), await make_node("right")
    relay = make_relay(right, seed=3, loss=0.15)
    left.transport.set_peer(right.peer(port=relay.port))
    mine, theirs = await left.control_to(right)
    frames = [pattern(n, 3000) for n in range(40)]
    for frame in frames:
        await mine.send(frame)
    await left.transport.close()
    assert [await asyncio.wait_for(theirs.receive(), 5) for _ in frames] == frames
    assert relay.dropped > 0


async def test_a_peer_removed_while_it_is_dialled_is_not_connected(make_node, make_relay):
    left, right = await make_node("left"), await make_node("right")
    relay = make_relay(right)
    relay.holding = True
    left.transport.set_peer(right.peer(port=relay.port))
    connecting = asyncio.ensure_future(left.transport.connect(right.node_id, deadline=20))
    await asyncio.wait({connecting}, timeout=0.05)
    left.transport.remove_peer(right.node_id)
    with pytest.raises(TransportError, match="not known"):
        await asyncio.wait_for(connecting, 5)
    assert left.transport._endpoint.links == ()
