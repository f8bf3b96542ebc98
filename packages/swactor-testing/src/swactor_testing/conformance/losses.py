"""Losses (spec sections 7, 24, 35): a peer that was killed, one that answers no more, whoever had dialled.

The guarantees are those of `TransportContext.on_peer_lost`, of what edges and channels raise, and of
deadlines, in `swactor_core.spi.transport`.
"""

from __future__ import annotations

import asyncio

import pytest
from swactor_core.errors import EdgeBroken, TransportError
from swactor_core.ids import EdgeId, NodeId, node_hex
from swactor_core.spi.transport import SendEdge

from swactor_testing.conformance.bounds import meanwhile, until, within
from swactor_testing.conformance.companions import Companion
from swactor_testing.conformance.connections import ConnectionContract
from swactor_testing.conformance.doomed import FAREWELL, Plan
from swactor_testing.conformance.transport_rig import (
    CLOSE_BOUND,
    REFUSED_WITHIN,
    SLACK,
    Endpoint,
    Neighbour,
    Pair,
    TransportRig,
    openings,
)


class LossContract(ConnectionContract):
    """What is told of a peer that has gone without a word, to whom, and when."""

    async def test_a_killed_peer_breaks_its_edge_and_is_told_once(self, rig: TransportRig) -> None:
        """What arrived is read first; then EdgeBroken with a reason, never a clean end; `on_peer_lost` hears
        when an authenticated connection ends without either side having closed it."""
        survivor = await rig.start("survivor")
        async with self.companion(rig, Plan(survivor.peer(), "edge")) as doomed:
            arrival = survivor.transport.accept_edge()
            who, _, reader = await within(rig.patience, arrival, "the edge of the doomed peer")
            reader.grant(100)
            pair = Pair(survivor, survivor, rig.patience)
            assert await pair.read_exactly(reader, len(FAREWELL)) == FAREWELL
            doomed.kill()
            await self._lost(survivor, who)
            await pair.broken(reader, "the death of its writer")
        assert len(survivor.lost) == 1, f"one connection was lost, told were {survivor.lost}"

    async def test_a_killed_peer_breaks_its_channel_and_is_told_once(self, rig: TransportRig) -> None:
        """`receive` raises EdgeBroken: None is only for a peer that closed in order."""
        survivor = await rig.start("survivor")
        async with self.companion(rig, Plan(survivor.peer(), "control")) as doomed:
            channel = await within(rig.patience, survivor.transport.accept_control(), "the doomed channel")
            assert await within(rig.patience, channel.receive(), "its frame") == FAREWELL
            doomed.kill()
            await self._lost(survivor, channel.peer)
            with pytest.raises(EdgeBroken, match=r"\S"):
                await within(rig.patience, channel.receive(), "the channel to break")
        assert len(survivor.lost) == 1, f"one connection was lost, told were {survivor.lost}"

    async def test_a_killed_peer_breaks_the_edge_to_it_and_is_told_once(self, rig: TransportRig) -> None:
        """The same for a connection that this side has dialled: a write that waits raises EdgeBroken, and the
        loss is told to whoever had dialled too."""
        survivor = await rig.start("survivor")
        async with self.companion(rig, Plan(survivor.peer(), "listener", granted=10)) as doomed:
            edge = await self._edge_to(survivor, doomed, granted=10)
            async with meanwhile(edge.write(memoryview(b"x"))) as writing:
                doomed.kill()
                await self._lost(survivor, doomed.peer.node_id)
                with pytest.raises(EdgeBroken, match=r"\S"):
                    await within(rig.patience, writing, "the waiting write to break")
            with pytest.raises(EdgeBroken, match=r"\S"):
                edge.offer(memoryview(b"x"))
        assert len(survivor.lost) == 1, f"one connection was lost, told were {survivor.lost}"

    async def test_a_killed_peer_breaks_the_channel_to_it_and_is_told_once(self, rig: TransportRig) -> None:
        """The same for a channel that this side has opened, and a receiver that waits."""
        survivor = await rig.start("survivor")
        async with self.companion(rig, Plan(survivor.peer(), "listener")) as doomed:
            survivor.transport.set_peer(doomed.peer)
            opening = survivor.transport.open_control(doomed.peer.node_id, deadline=rig.patience)
            channel = await within(rig.patience, opening, "a channel to the doomed peer")
            async with meanwhile(channel.receive()) as receiving:
                await within(rig.patience, channel.send(FAREWELL), "a frame to be taken")
                doomed.kill()
                await self._lost(survivor, doomed.peer.node_id)
                with pytest.raises(EdgeBroken, match=r"\S"):
                    await within(rig.patience, receiving, "the waiting receiver to hear of it")
            with pytest.raises(EdgeBroken, match=r"\S"):
                await within(rig.patience, channel.send(FAREWELL), "a refusal")
        assert len(survivor.lost) == 1, f"one connection was lost, told were {survivor.lost}"

    async def test_a_silent_peer_is_lost_to_its_reader(self, rig: TransportRig) -> None:
        """`on_peer_lost`: a peer that answers nothing any more is lost in bounded time, on a connection over
        which nothing is sent either: its machine may be gone, or the network. It is stopped as a whole here.
        Peers of one process have no such end: what they held back arrives when they go on."""
        survivor = await rig.start("survivor")
        async with self.companion(rig, Plan(survivor.peer(), "edge")) as silent:
            arrival = survivor.transport.accept_edge()
            who, _, reader = await within(rig.patience, arrival, "the edge of the silent peer")
            reader.grant(100)
            pair = Pair(survivor, survivor, rig.patience)
            assert await pair.read_exactly(reader, len(FAREWELL)) == FAREWELL
            await silent.silence()
            if not self.capabilities.crosses_processes:
                await self._goes_on(rig, survivor, silent)
                return
            await self._lost(survivor, who, self.capabilities.silence_within)
            await pair.broken(reader, "the silence of its writer")
        assert len(survivor.lost) == 1, f"one connection was lost, told were {survivor.lost}"

    async def test_a_silent_peer_is_lost_to_its_writer(self, rig: TransportRig) -> None:
        """The same for a connection that this side has dialled, and a write that waits for room."""
        survivor = await rig.start("survivor")
        async with self.companion(rig, Plan(survivor.peer(), "listener", granted=10)) as silent:
            edge = await self._edge_to(survivor, silent, granted=10)
            async with meanwhile(edge.write(memoryview(b"x"))) as writing:
                await silent.silence()
                if not self.capabilities.crosses_processes:
                    await self._goes_on(rig, survivor, silent)
                    return
                await self._lost(survivor, silent.peer.node_id, self.capabilities.silence_within)
                with pytest.raises(EdgeBroken, match=r"\S"):
                    await within(rig.patience, writing, "the waiting write to break")
        assert len(survivor.lost) == 1, f"one connection was lost, told were {survivor.lost}"

    async def test_a_peer_that_answers_nothing_fails_within_the_deadline(self, rig: TransportRig) -> None:
        """`connect`, `open_edge`, `open_control`: within `deadline`, also where nothing refuses them; and
        `close` ends one that is under way."""
        caller = await rig.start("caller")
        async with self.companion(rig, Plan(caller.peer(), "listener")) as silent:
            caller.transport.set_peer(silent.peer)
            await silent.silence()
            name = node_hex(silent.peer.node_id)
            for call in openings(caller, silent.peer.node_id, REFUSED_WITHIN):
                with pytest.raises(TransportError, match=name):
                    await within(REFUSED_WITHIN + SLACK, call(), f"a failure {REFUSED_WITHIN:g} s later")
            dial = caller.transport.connect(silent.peer.node_id, deadline=10 * rig.patience)
            async with meanwhile(dial) as dialling:
                await asyncio.sleep(0)
                await within(CLOSE_BOUND + SLACK, caller.transport.close(), "close")
                with pytest.raises(TransportError, match=r"\S"):
                    await within(SLACK, dialling, "the dial to end with its transport")
            silent.resume()

    async def _edge_to(self, survivor: Endpoint, listener: Companion, *, granted: int) -> SendEdge:
        """An edge to a companion over which everything that it grants is under way."""
        patience = self.capabilities.patience
        survivor.transport.set_peer(listener.peer)
        opening = survivor.transport.open_edge(listener.peer.node_id, EdgeId(1), deadline=patience)
        edge = await within(patience, opening, "an edge to the companion")
        await Pair(survivor, survivor, patience).write_all(edge, bytes(granted))
        return edge

    async def _goes_on(self, rig: TransportRig, survivor: Endpoint, silent: Companion) -> None:
        third = await rig.start("third")
        third.transport.set_peer(survivor.peer())
        neighbour = await Neighbour(Pair(third, survivor, rig.patience)).open()
        await neighbour.exchange()
        assert survivor.lost == [], "a peer of this process was lost by its silence"
        silent.resume()
        await neighbour.exchange()
        assert survivor.lost == [], "a peer of this process was lost when it went on"

    async def _lost(self, survivor: Endpoint, who: NodeId, bound: float | None = None) -> None:
        bound = self.capabilities.loss_within if bound is None else bound
        await until(bound, lambda: bool(survivor.lost), f"on_peer_lost of {node_hex(who)}")
        node_id, why = survivor.lost[0]
        assert node_id == who
        assert why, "a loss without a reason"
