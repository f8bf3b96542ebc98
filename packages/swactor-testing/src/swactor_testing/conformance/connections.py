"""Connections (spec sections 7, 24): many callers at once, numbers of a real pool, and long lives.

The guarantees are those of `Transport` in `swactor_core.spi.transport`: a node lives for many runs, its peers
come and go, and it opens what a plan says all at once.
"""

from __future__ import annotations

import asyncio
import gc

import pytest
from swactor_core.errors import TransportError
from swactor_core.ids import EDGE_IDS, EdgeId

from swactor_testing.conformance.bounds import Footprint, meanwhile, same_bytes, seeded, within
from swactor_testing.conformance.control import ControlContract
from swactor_testing.conformance.transport_rig import KIB, REFUSED_WITHIN, Neighbour, Pair, TransportRig

EPOCH = 1_800_000_000_000_000_000
"""As epochs are: nanoseconds of the clock (`node/identity.py`)."""

ROUNDS = 4
LIVES = 60
MANY_TIMERS = 1000


class ConnectionContract(ControlContract):
    """What a connection keeps for all who use it, and what is left of it."""

    async def test_both_sides_may_open_at_the_same_moment(self, rig: TransportRig) -> None:
        """`open_edge`, `open_control`: neither side knows that the other one dials too. All that was opened
        carries, and it is no loss to anybody."""
        for number in range(ROUNDS):
            left, right = await rig.start(f"left {number}"), await rig.start(f"right {number}")
            left.transport.set_peer(right.peer())
            right.transport.set_peer(left.peer())
            forth, back = Pair(left, right, rig.patience), Pair(right, left, rig.patience)
            opened = await asyncio.gather(forth.edge(), back.edge(), forth.control(), back.control())
            (sender, reader), (home_sender, home_reader), *channels = opened
            for edge, other in ((sender, reader), (home_sender, home_reader)):
                other.grant(9)
                await forth.write_all(edge, b"both ways")
                assert await forth.read_exactly(other, 9) == b"both ways"
            for mine, theirs in channels:
                await within(rig.patience, mine.send(b"both ways"), "a frame to be taken")
                assert await within(rig.patience, theirs.receive(), "the frame") == b"both ways"
            assert left.lost == right.lost == [], "one of two connections is no loss"

    async def test_a_cancelled_opening_disturbs_no_other(self, pair: Pair) -> None:
        """`connect`, `open_edge`: several wait for one connection; who gives up, gives up for himself."""
        transport, peer = pair.left.transport, pair.right.node_id

        def opening(number: int) -> asyncio.Task[object]:
            call = transport.open_edge(peer, EdgeId(number), deadline=pair.patience)
            return asyncio.ensure_future(call)

        given_up, *others = [opening(number) for number in range(1, 6)]
        others.append(asyncio.ensure_future(transport.connect(peer, deadline=pair.patience)))
        await asyncio.sleep(0)
        given_up.cancel()
        await within(pair.patience, asyncio.gather(*others), "the openings that nobody cancelled")
        missing = set(range(2, 6))
        while missing:
            arrival = pair.right.transport.accept_edge()
            who, edge_id, _ = await within(pair.patience, arrival, f"the arrival of edges {missing}")
            assert who == pair.left.node_id
            missing.discard(edge_id)

    async def test_a_peer_that_is_set_again_keeps_its_connections(self, pair: Pair) -> None:
        """`set_peer`: only a newer epoch ends connections. A host sets a peer whenever its membership says
        something of it."""
        neighbour = await Neighbour(pair).open()
        for one, other in ((pair.left, pair.right), (pair.right, pair.left)):
            for _ in range(3):
                one.transport.set_peer(other.peer())
                await neighbour.exchange()
        assert pair.left.lost == pair.right.lost == []

    async def test_what_the_peer_has_not_got_is_opened_anew(self, pair: Pair) -> None:
        """`open_edge`, `open_control`: the peer has ended its connections and nobody here has heard of that.
        Nothing of what is opened then has reached it, so it is opened on a connection that the peer has."""
        for _ in range(ROUNDS):
            await self._edges_life(pair)
            await self._channels_life(pair)
            pair.right.transport.remove_peer(pair.left.node_id)
            pair.right.transport.set_peer(pair.left.peer())
            await asyncio.gather(self._edges_life(pair), self._channels_life(pair))
        assert pair.left.lost == pair.right.lost == []

    async def test_ids_epochs_and_grants_have_all_their_bits(self, rig: TransportRig) -> None:
        """`EdgeId` has 64 bits, an epoch is nanoseconds since 1970, a grant counts every byte of a run."""
        left, right = await rig.start("left", epoch=EPOCH), await rig.start("right", epoch=EPOCH + 1)
        left.transport.set_peer(right.peer())
        right.transport.set_peer(left.peer())
        pair = Pair(left, right, rig.patience)
        for edge_id in (EDGE_IDS[-1], 707, 707 + (1 << 32)):
            sender, reader = await pair.edge(edge_id)
            reader.grant(1 << 40)
            await pair.write_all(sender, b"large numbers")
            assert await pair.read_exactly(reader, 13) == b"large numbers"
        caller = await rig.start("caller", epoch=EPOCH)
        right.transport.set_peer(caller.peer())
        caller.transport.set_peer(right.peer(epoch=EPOCH + (1 << 40)))
        with pytest.raises(TransportError):
            await caller.transport.connect(right.node_id, deadline=REFUSED_WITHIN)

    # --- what is left ---

    @pytest.mark.parametrize("kind", ["edge", "channel"])
    async def test_streams_that_ended_are_forgotten(self, pair: Pair, kind: str) -> None:
        """A node serves run after run over the same connections: what has ended takes no memory."""
        neighbour = await Neighbour(pair).open()
        life = self._edges_life if kind == "edge" else self._channels_life

        async def objects_after(lives: int) -> int:
            for _ in range(lives):
                await life(pair)
            await neighbour.exchange()
            return await _objects()

        await objects_after(LIVES // 2)
        before = await objects_after(1)
        await objects_after(LIVES)
        what = f"the objects of {LIVES} streams that have ended to go"
        await within(pair.patience, _fall_below(before + LIVES), what)

    async def _edges_life(self, pair: Pair) -> None:
        sender, reader = await pair.edge()
        reader.grant(10)
        await pair.write_all(sender, b"something")
        await sender.finish()
        assert await pair.read_all(reader) == b"something"

    async def _channels_life(self, pair: Pair) -> None:
        mine, theirs = await pair.control()
        await within(pair.patience, mine.send(b"something"), "a frame to be taken")
        assert await within(pair.patience, theirs.receive(), "the frame") == b"something"
        await mine.close()
        assert await within(pair.patience, theirs.receive(), "the end of the channel") is None
        await theirs.close()

    async def test_connections_that_ended_leave_nothing(self, rig: TransportRig) -> None:
        """A node stays while others come, are refused, and go: no task, thread or descriptor stays."""
        host = await rig.start("host", authorised=False)
        before = Footprint.now()
        for number in range(ROUNDS):
            guest, stranger = await rig.start(f"guest {number}"), await rig.start(f"stranger {number}")
            for peer in (guest, stranger):
                peer.transport.set_peer(host.peer())
            host.transport.set_peer(guest.peer())
            with pytest.raises(TransportError):
                await stranger.transport.connect(host.node_id, deadline=REFUSED_WITHIN)
            forth, back = Pair(host, guest, rig.patience), Pair(guest, host, rig.patience)
            for pair in (forth, back):
                _, reader = await pair.edge()
                await pair.control()
                reader.grant(10)
            if number % 2:
                host.transport.remove_peer(guest.node_id)
            for peer in (guest, stranger):
                await within(rig.patience, peer.transport.close(), "the close of a guest")
        await before.settles(rig.patience)

    async def test_a_close_delivers_what_had_ended_before(self, pair: Pair) -> None:
        """`close`: what was finished or closed in order arrives whole, where its reader takes it within that
        time: a node says its last words and goes."""
        data = seeded(3).randbytes(200 * KIB)
        frames = [data[start : start + 40 * KIB] for start in range(0, len(data), 40 * KIB)]
        sender, reader = await pair.edge()
        mine, theirs = await pair.control()
        reader.grant(len(data))

        async def frames_and_an_end() -> list[bytes]:
            came = []
            while (frame := await within(pair.patience, theirs.receive(), "a frame, or the end")) is not None:
                came.append(frame)
            return came

        async with meanwhile(pair.read_all(reader)) as reading, meanwhile(frames_and_an_end()) as receiving:
            for frame in frames:
                await within(pair.patience, mine.send(frame), "a frame to be taken")
            await pair.write_all(sender, data)
            await sender.finish()
            await mine.close()
            await within(pair.patience, pair.left.transport.close(), "close")
            same_bytes(await reading, data, "finished right before the close")
            same_bytes(b"".join(await receiving), data, "frames right before the close")


async def _fall_below(bound: int) -> None:
    while await _objects() >= bound:  # noqa: ASYNC110 - a foreign plug-in has no event to wait for
        await asyncio.sleep(0.05)


async def _objects() -> int:
    """What the collector knows of, once the loop has dropped its cancelled timers: it keeps them, those of
    the kit's own waits too, until most of all timers are cancelled."""
    loop = asyncio.get_running_loop()
    for _ in range(MANY_TIMERS):
        loop.call_later(3600, gc.collect).cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    return len(gc.get_objects())
