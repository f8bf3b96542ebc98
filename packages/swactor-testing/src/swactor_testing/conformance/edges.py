"""Edges (spec sections 23, 35): bytes in order, exactly once, whole; credit to the byte; every kind of end.

The guarantees are those of `SendEdge` and `RecvEdge` in `swactor_core.spi.transport`.
"""

from __future__ import annotations

import asyncio

import pytest
from swactor_core.errors import EdgeBroken, EdgeClosed, TransportError
from swactor_core.ids import EdgeId, node_hex
from swactor_core.spi.transport import RecvEdge, SendEdge

from swactor_testing.conformance.bounds import meanwhile, same_bytes, seeded, within
from swactor_testing.conformance.companions import CompanionTests
from swactor_testing.conformance.transport_rig import KIB, Neighbour, Pair


async def write_until_it_waits(pair: Pair, edge: SendEdge, data: bytes, *, neighbour: Neighbour) -> int:
    """Bytes taken until one write has waited through a whole exchange of the neighbour."""
    taken = 0
    while taken < len(data):
        async with meanwhile(edge.write(memoryview(data)[taken:])) as write:
            await neighbour.exchange()
            if not write.done():
                return taken
            taken += write.result()
    return taken


async def cancelled(task: asyncio.Task[int]) -> int:
    """Cancels a call and returns what it did before: 0 when the cancellation took."""
    task.cancel()
    await asyncio.wait((task,))
    return 0 if task.cancelled() else task.result()


class EdgeContract(CompanionTests):
    """What one edge keeps, and what edges keep of each other."""

    # --- bytes ---

    @pytest.mark.parametrize("seed", range(4))
    async def test_bytes_arrive_in_order_once_and_whole(self, pair: Pair, seed: int) -> None:
        """Section 23: QUIC owns reliability and stream ordering. Whatever the pieces in which it is written,
        granted and read."""
        random = seeded(seed)
        data = random.randbytes(random.randint(1, 300 * KIB))
        sender, reader = await pair.edge()

        async def write() -> None:
            start = 0
            while start < len(data):
                end = start + random.choice((1, 40, 1000, 70 * KIB))
                await pair.write_all(sender, data[start:end])
                start = end
            await sender.finish()

        async with meanwhile(write()) as writing:
            received = bytearray()
            while True:
                reader.grant(len(received) + random.choice((1, 64, 5000, 100 * KIB)))
                part = await pair.read(reader, random.choice((1, 40, 3000, 64 * KIB)))
                if not part:
                    break
                received += part
            same_bytes(received, data, f"seed {seed}")
            await within(pair.patience, writing, "the writer's end")

    async def test_a_large_payload_arrives_whole(self, pair: Pair) -> None:
        """Section 34: an object may be larger than the ring, and than every window on its way."""
        data = seeded(1).randbytes(self.capabilities.large_payload + 17)
        sender, reader = await pair.edge()

        async def write() -> None:
            await pair.write_all(sender, data)
            await sender.finish()

        async with meanwhile(write()) as writing:
            same_bytes(await pair.read_all(reader, window=256 * KIB), data, "a large payload")
            await writing

    async def test_many_edges_carry_their_own_bytes(self, pair: Pair) -> None:
        """Section 24: all edges between two nodes share one connection; each is a stream of its own."""
        edges = [await pair.edge() for _ in range(self.capabilities.edges)]
        payloads = [seeded(i).randbytes(1 + i * 997 % 9000) for i in range(len(edges))]

        async def carry(sender: SendEdge, reader: RecvEdge, data: bytes) -> bytes:
            async def write() -> None:
                await pair.write_all(sender, data)
                await sender.finish()

            async with meanwhile(write()):
                return await pair.read_all(reader, window=700)

        carried = [carry(*edge, data) for edge, data in zip(edges, payloads, strict=True)]
        for number, received in enumerate(await asyncio.gather(*carried)):
            same_bytes(received, payloads[number], f"edge {number} of {len(edges)}")

    async def test_written_bytes_are_copied(self, pair: Pair) -> None:
        """`write`: the bytes are copied before return; the ring reuses them at once."""
        sender, reader = await pair.edge()
        reader.grant(4)
        data = bytearray(b"good")
        taken = await within(pair.patience, sender.write(memoryview(data)), "room for a write")
        data[:] = b"evil"
        await pair.write_all(sender, b"good"[taken:])
        same_bytes(await pair.read_exactly(reader, 4), b"good", "bytes overwritten after write returned")

    # --- credit ---

    @pytest.mark.parametrize("granted", [0, 1, 1000, 200 * KIB])
    async def test_a_reader_that_does_not_read_stops_its_writer_at_the_granted_byte(
        self, pair: Pair, granted: int
    ) -> None:
        """Section 35 and the interface: what nobody reads, nobody can send; measured. Meanwhile another edge
        and a control channel of the same two nodes go on, and afterwards every byte is there."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge()
        if granted:
            reader.grant(granted)
        data = seeded(granted).randbytes(granted + 300 * KIB)
        taken = await write_until_it_waits(pair, sender, data, neighbour=neighbour)
        assert taken == granted, f"{granted} bytes were granted and none was read, the writer took {taken}"

        async def write_rest() -> None:
            await pair.write_all(sender, data[taken:])
            await sender.finish()

        async with meanwhile(write_rest()) as writing:
            received = await pair.read_all(reader, window=max(granted, 64 * KIB))
            same_bytes(received, data, "after the stall")
            await writing

    async def test_room_is_what_write_takes_without_waiting(self, pair: Pair) -> None:
        """`room`: bytes that `write` would take now without waiting."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge()
        assert sender.room() == 0, "room before the first grant"
        reader.grant(5000)
        await neighbour.exchange()
        await pair.write_all(sender, b"first")
        await neighbour.exchange()
        room = sender.room()
        assert room == 4995, f"room is {room} with 5000 bytes granted and 5 taken"
        assert await within(pair.patience, sender.write(memoryview(bytes(9000))), "a write with room") == room
        assert sender.room() == 0

    async def test_reading_grants_nothing(self, pair: Pair) -> None:
        """`read_into` grants nothing by itself; the count is the reader's ring, not its appetite."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge()
        reader.grant(4)
        await pair.write_all(sender, b"1234")
        assert await pair.read_exactly(reader, 4) == b"1234"
        async with meanwhile(sender.write(memoryview(b"5"))) as write:
            await neighbour.proves_waiting(write, "a read made room that was never granted")

    async def test_a_grant_is_never_lowered(self, pair: Pair) -> None:
        """`grant`: an absolute count, never lowered."""
        sender, reader = await pair.edge()
        reader.grant(100)
        reader.grant(10)
        await pair.write_all(sender, bytes(100))
        assert await pair.read_exactly(reader, 100) == bytes(100)

    async def test_a_grant_reaches_a_waiting_writer_on_an_idle_connection(self, pair: Pair) -> None:
        """`grant`: the sender learns it promptly, also on an idle connection. A byte at a time."""
        sender, reader = await pair.edge()
        for total in range(1, 40):
            async with meanwhile(sender.write(memoryview(b"xyz"))) as write:
                reader.grant(total)
                assert await within(pair.patience, write, f"the grant of byte {total}") == 1
            assert await pair.read_exactly(reader, 1) == b"x"

    # --- ids ---

    async def test_an_id_that_is_open_is_refused_and_its_edge_goes_on(self, pair: Pair) -> None:
        """`open_edge` raises TransportError naming peer and id where an edge of that id is open to that peer.
        Nothing of the open one is lost, and no second stream comes out of `accept_edge`."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge(707)
        data = seeded(707).randbytes(5000)
        reader.grant(len(data))
        await pair.write_all(sender, data[:2000])
        for _ in range(3):
            call = pair.left.transport.open_edge(pair.right.node_id, EdgeId(707), deadline=pair.patience)
            with pytest.raises(TransportError, match="707") as caught:
                await within(pair.patience, call, "a refusal")
            assert node_hex(pair.right.node_id) in str(caught.value), "the error does not name the peer"
            async with meanwhile(pair.right.transport.accept_edge()) as arrival:
                await neighbour.proves_waiting(arrival, "an edge arrived twice")
        await pair.write_all(sender, data[2000:])
        await sender.finish()
        same_bytes(await pair.read_all(reader), data, "the edge that was open")

    async def test_an_id_is_free_in_other_directions_and_after_its_end(self, pair: Pair) -> None:
        """`open_edge`: edges from the peer have ids of their own; until `finish`, `abort` or the break an id
        is taken, and no longer."""
        back = Pair(pair.right, pair.left, pair.patience)
        _, theirs = await back.edge(707)
        for end in ("finish", "abort", "stop"):
            sender, reader = await pair.edge(707)
            reader.grant(9)
            await pair.write_all(sender, end.encode())
            assert await pair.read_exactly(reader, len(end)) == end.encode()
            if end == "stop":
                await reader.stop()
                with pytest.raises(EdgeBroken):
                    await pair.write_all(sender, bytes(100))
            else:
                await getattr(sender, end)()
        await pair.edge(707)
        await theirs.stop()

    # --- cancellation ---

    async def test_a_cancelled_write_has_taken_nothing(self, pair: Pair) -> None:
        """`write`: a cancelled call has taken nothing; the edge stays usable, and no half record is in it."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge()
        async with meanwhile(sender.write(memoryview(b"lost"))) as write:
            await neighbour.proves_waiting(write, "a write was taken without a grant")
            assert await cancelled(write) == 0
        reader.grant(100)
        await pair.write_all(sender, b"kept")
        await sender.finish()
        same_bytes(await pair.read_all(reader), b"kept", "after a cancelled write")

    async def test_a_cancelled_read_has_lost_nothing(self, pair: Pair) -> None:
        """`read_into`: a cancelled call has lost nothing."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge()
        reader.grant(100)
        async with meanwhile(reader.read_into(memoryview(bytearray(9)))) as read:
            await neighbour.proves_waiting(read, "a read returned before anything was written")
            assert await cancelled(read) == 0
        await pair.write_all(sender, b"here")
        await sender.finish()
        same_bytes(await pair.read_all(reader), b"here", "after a cancelled read")

    @pytest.mark.parametrize("seed", range(3))
    async def test_calls_cancelled_at_any_moment_neither_lose_nor_repeat(self, pair: Pair, seed: int) -> None:
        """Both of the above while bytes flow: what was read is exactly what was taken."""
        random = seeded(seed)
        sender, reader = await pair.edge()
        taken, received = bytearray(), bytearray()

        async def somewhen(call: asyncio.Task[int]) -> int:
            for _ in range(random.choice((0, 1, 2, 5, 50))):
                await asyncio.sleep(0)
            return await cancelled(call)

        async def write() -> None:
            for _ in range(150):
                part = random.randbytes(random.choice((1, 100, 9000)))
                taken.extend(part[: await somewhen(asyncio.ensure_future(sender.write(memoryview(part))))])
            await sender.finish()

        async with meanwhile(write()) as writing:
            while not writing.done():
                reader.grant(len(received) + 5000)
                buffer = bytearray(random.choice((1, 70, 8000)))
                read = asyncio.ensure_future(reader.read_into(memoryview(buffer)))
                received += buffer[: await somewhen(read)]
            await writing
        received += await pair.read_all(reader)
        same_bytes(received, taken, f"seed {seed}")

    # --- ends ---

    async def test_the_end_of_stream_comes_after_every_byte_and_stays(self, pair: Pair) -> None:
        """`finish` ends the stream after all accepted bytes; `read_into` returns 0 at the end of stream, as
        often as it is asked."""
        sender, reader = await pair.edge()
        reader.grant(1000)
        await pair.write_all(sender, bytes(range(200)))
        await sender.finish()
        await sender.finish()
        same_bytes(await pair.read_all(reader), bytes(range(200)), "before the end")
        assert await pair.read(reader, 10) == b""

    async def test_an_edge_without_a_byte_ends_cleanly(self, pair: Pair) -> None:
        """An edge may be stopped before its first object; that is no fault."""
        sender, reader = await pair.edge()
        await sender.finish()
        assert await pair.read_all(reader) == b""

    async def test_an_end_needs_no_further_grant(self, pair: Pair) -> None:
        """The end of stream is not payload: it passes when exactly the payload was granted."""
        sender, reader = await pair.edge()
        reader.grant(5)
        await pair.write_all(sender, b"exact")
        await sender.finish()
        assert await pair.read_exactly(reader, 5) == b"exact"
        assert await pair.read(reader, 1) == b""

    async def test_an_abort_breaks_the_reader_with_a_reason(self, pair: Pair) -> None:
        """`abort`: the peer's reader sees EdgeBroken, never a clean end (section 36: stream EOF inside an
        object and a stream fault are different faults)."""
        sender, reader = await pair.edge()
        reader.grant(3)
        await pair.write_all(sender, b"abc")
        await sender.abort()
        await sender.abort()
        await pair.broken(reader, "an abort")

    async def test_a_waiting_reader_hears_of_an_abort(self, pair: Pair) -> None:
        """The same for a reader that already waits."""
        neighbour = await Neighbour(pair).open()
        sender, reader = await pair.edge()
        async with meanwhile(pair.broken(reader, "an abort")) as reading:
            await neighbour.exchange()
            await sender.abort()
            await within(pair.patience, reading, "the reader to hear of the abort")

    async def test_a_stopped_reader_breaks_its_waiting_writer(self, pair: Pair) -> None:
        """`stop` tells the sender to stop: a write that waits for room raises EdgeBroken with a reason.
        This is also how a host refuses a stream whose edge it does not know."""
        sender, reader = await pair.edge()
        async with meanwhile(pair.write_all(sender, b"abc")) as write:
            await reader.stop()
            await reader.stop()
            with pytest.raises(EdgeBroken, match=r"\S"):
                await within(pair.patience, write, "the writer to hear of the stop")
        with pytest.raises(EdgeBroken):
            await pair.write_all(sender, b"again")

    async def test_calls_after_an_own_end_say_so(self, pair: Pair) -> None:
        """EdgeClosed: this side has closed the edge; the call came after it."""
        finished, _ = await pair.edge()
        await finished.finish()
        aborted, _ = await pair.edge()
        await aborted.abort()
        for sender in (finished, aborted):
            with pytest.raises(EdgeClosed):
                await within(pair.patience, sender.write(memoryview(b"late")), "a refusal")
        _, stopped = await pair.edge()
        await stopped.stop()
        with pytest.raises(EdgeClosed):
            await pair.read(stopped, 1)

    async def test_one_edge_ends_and_the_others_stay(self, pair: Pair) -> None:
        """Section 27: an edge's end, in order or not, is its own."""
        neighbour = await Neighbour(pair).open()
        for end in ("finish", "abort", "stop"):
            sender, reader = await pair.edge()
            await getattr(reader if end == "stop" else sender, end)()
            await neighbour.exchange()
        assert not pair.left.lost
        assert not pair.right.lost
