"""Control channels: whole frames in order, bounded in length and in number unread, and ends that are told.

The guarantees are those of `ControlChannel` in `swactor_core.spi.transport`.
"""

from __future__ import annotations

import asyncio

import pytest
from swactor_core.errors import EdgeBroken, EdgeClosed
from swactor_core.spi.transport import MAX_CONTROL_FRAME, ControlChannel

from swactor_testing.conformance.bounds import meanwhile, same_bytes, seeded, within
from swactor_testing.conformance.transport_rig import KIB, Neighbour, Pair
from swactor_testing.conformance.unacknowledged import UnacknowledgedContract


class ControlContract(UnacknowledgedContract):
    """What a channel keeps, and what it keeps of edges."""

    async def receive(self, channel: ControlChannel) -> bytes | None:
        return await within(self.capabilities.patience, channel.receive(), "a control frame, or an end")

    async def send(self, channel: ControlChannel, frame: bytes) -> None:
        await within(self.capabilities.patience, channel.send(frame), "a control frame to be taken")

    @pytest.mark.parametrize("seed", range(2))
    async def test_frames_arrive_whole_in_order_and_once(self, pair: Pair, seed: int) -> None:
        """An ordered, reliable channel of whole frames: of both directions at once, none merged or cut."""
        random = seeded(seed)
        mine, theirs = await pair.control()
        sizes = [1, 2, 40 * KIB, *(random.choice((1, 3, 500, 30 * KIB)) for _ in range(60))]
        frames = [random.randbytes(size) for size in sizes]

        async def send(channel: ControlChannel, sent: list[bytes]) -> None:
            for frame in sent:
                await self.send(channel, frame)

        async def received(channel: ControlChannel, sent: list[bytes]) -> None:
            for number, frame in enumerate(sent):
                arrived = await self.receive(channel)
                assert arrived is not None, f"seed {seed}: the channel ended at frame {number}"
                same_bytes(arrived, frame, f"seed {seed}, frame {number}")

        back = frames[::-1]
        async with meanwhile(send(mine, frames)) as forth, meanwhile(send(theirs, back)) as home:
            await asyncio.gather(received(theirs, frames), received(mine, back))
            await asyncio.gather(forth, home)

    async def test_the_longest_frame_passes_and_longer_ones_and_empty_ones_are_refused(
        self, pair: Pair
    ) -> None:
        """`send`: a frame of 1..MAX_CONTROL_FRAME bytes; ValueError for one out of bounds, which harms
        nothing."""
        mine, theirs = await pair.control()
        for size in (0, MAX_CONTROL_FRAME + 1):
            with pytest.raises(ValueError, match=r"\d"):
                await self.send(mine, bytes(size))
        longest = seeded(2).randbytes(MAX_CONTROL_FRAME)
        async with meanwhile(self.send(mine, longest)) as sending:
            arrived = await self.receive(theirs)
            assert arrived is not None
            same_bytes(arrived, longest, "the longest frame")
            await sending

    async def test_a_peer_that_does_not_read_stops_the_sender(self, pair: Pair) -> None:
        """`send` waits while the peer does not read: memory is bounded, edges and other channels go on."""
        neighbour = await Neighbour(pair).open()
        mine, theirs = await pair.control()
        frame, bound = bytes(256 * KIB), self.capabilities.control_bound
        sent = 0
        while True:
            async with meanwhile(mine.send(frame)) as sending:
                await neighbour.exchange()
                if not sending.done():
                    break
                await sending
            sent += len(frame)
            assert sent <= bound, f"{sent} bytes of frames were taken that nobody read, the bound is {bound}"
        for _ in range(sent // len(frame)):
            arrived = await self.receive(theirs)
            assert arrived is not None
            same_bytes(arrived, frame, "a frame that had waited")

    async def test_a_cancelled_send_leaves_no_half_frame(self, pair: Pair) -> None:
        """Whole frames: one whose send was cancelled arrives whole or not at all, and the channel goes on."""
        neighbour = await Neighbour(pair).open()
        mine, theirs = await pair.control()
        frames = [bytes([number]) * (200 * KIB + number) for number in range(1, 60)]
        for frame in frames:
            async with meanwhile(mine.send(frame)) as sending:
                await neighbour.exchange()
                waited = not sending.done()
            if waited:
                break
        else:
            raise AssertionError("nobody reads, and no send ever waited")
        async with meanwhile(self.send(mine, b"the last one")) as sending:
            expected = iter(frames)
            while (arrived := await self.receive(theirs)) != b"the last one":
                assert arrived is not None, "the channel ended after a cancelled send"
                same_bytes(arrived, next(expected), "after a cancelled send")
            await sending

    async def test_a_cancelled_receive_has_lost_nothing(self, pair: Pair) -> None:
        """Reliable: a host that gives up waiting misses no frame."""
        neighbour = await Neighbour(pair).open()
        mine, theirs = await pair.control()
        async with meanwhile(theirs.receive()) as receiving:
            await neighbour.proves_waiting(receiving, "a frame arrived that nobody sent")
        await self.send(mine, b"here")
        assert await self.receive(theirs) == b"here"

    async def test_channels_are_separate(self, pair: Pair) -> None:
        """Frames of one channel arrive on no other."""
        first, second = await pair.control(), await pair.control()
        await self.send(second[0], b"second")
        await self.send(first[0], b"first")
        assert await self.receive(first[1]) == b"first"
        assert await self.receive(second[1]) == b"second"

    async def test_both_ends_name_their_authenticated_peer(self, pair: Pair) -> None:
        """`peer` and `peer_key`: to one authenticated peer. Section 4: provisioning is accepted only from the
        authorised orchestrator, so this must be true."""
        mine, theirs = await pair.control()
        assert (mine.peer, mine.peer_key) == (pair.right.node_id, pair.right.key)
        assert (theirs.peer, theirs.peer_key) == (pair.left.node_id, pair.left.key)

    @pytest.mark.parametrize("opener", [True, False], ids=["the opener", "the acceptor"])
    async def test_a_close_is_told_after_every_frame(self, pair: Pair, opener: bool) -> None:
        """`receive`: None when the peer closed in order, after what it sent; then sending is an error."""
        channels = await pair.control()
        closing, other = channels if opener else channels[::-1]
        for number in range(5):
            await self.send(closing, bytes([number]) * 1000)
        await within(self.capabilities.patience, closing.close(), "an orderly close")
        await within(self.capabilities.patience, closing.close(), "a second close")
        for number in range(5):
            assert await self.receive(other) == bytes([number]) * 1000
        assert await self.receive(other) is None
        assert await self.receive(other) is None
        with pytest.raises(EdgeBroken):
            await self.send(other, b"to nobody")
        with pytest.raises(EdgeClosed):
            await self.send(closing, b"late")
        assert not pair.left.lost, "an orderly close is no loss"
        assert not pair.right.lost, "an orderly close is no loss"

    async def test_a_close_is_told_after_the_longest_frame(self, pair: Pair) -> None:
        """`close` ends the channel after all frames that `send` has taken, those still under way too."""
        mine, theirs = await pair.control()
        longest = seeded(5).randbytes(MAX_CONTROL_FRAME)

        async def send_and_close() -> None:
            await self.send(mine, longest)
            await within(self.capabilities.patience, mine.close(), "an orderly close")

        async with meanwhile(send_and_close()) as ending:
            arrived = await self.receive(theirs)
            assert arrived is not None, "the close has overtaken the longest frame"
            same_bytes(arrived, longest, "the longest frame before a close")
            await ending
        assert await self.receive(theirs) is None

    async def test_a_waiting_receiver_hears_of_a_close(self, pair: Pair) -> None:
        """The same for one that already waits."""
        neighbour = await Neighbour(pair).open()
        mine, theirs = await pair.control()
        async with meanwhile(theirs.receive()) as receiving:
            await neighbour.exchange()
            await mine.close()
            what = "the peer to hear of an orderly close"
            assert await within(self.capabilities.patience, receiving, what) is None
