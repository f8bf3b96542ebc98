"""The transport contract (spec sections 23, 24, 35): peers by key and epoch, the end of everything.

With `edges.py`, `offers.py`, `unacknowledged.py`, `control.py`, `connections.py` and `losses.py` below it;
the guarantees are those of `swactor_core.spi.transport`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest
from swactor_core.errors import ConfigError, EdgeBroken, EdgeClosed, ResourceError, TransportError
from swactor_core.ids import NodeId, node_hex, node_id_of
from swactor_core.spi.provider import Kind
from swactor_core.spi.transport import TransportPlugin

from swactor_testing.conformance.bounds import Footprint, meanwhile, within
from swactor_testing.conformance.losses import LossContract
from swactor_testing.conformance.transport_rig import (
    CLOSE_BOUND,
    REFUSED_WITHIN,
    SLACK,
    Neighbour,
    Pair,
    TransportRig,
    openings,
    seed_of,
)


class TransportContract(LossContract):
    """Everything a transport keeps. Heirs give the fixture `plugin` and `capabilities`."""

    kind = Kind.TRANSPORT

    def test_it_is_registered_under_its_name(self) -> None:
        """Configuration chooses a provider by kind and name."""
        provider = self.provider()
        assert provider.crosses_processes == self.capabilities.crosses_processes

    async def test_an_unknown_setting_is_refused_by_name(self, plugin: TransportPlugin) -> None:
        """`create` raises ConfigError, which is bad usage, naming the key: a cluster file's mistake is not to
        pass in silence."""
        settings = {**self.capabilities.settings, "no_setting_has_this_name": 1}
        with pytest.raises(ConfigError, match="no_setting_has_this_name"):
            TransportRig(plugin, replace(self.capabilities, settings=settings)).create("never")

    # --- peers ---

    async def test_a_node_id_and_a_key_come_from_the_seed(self, rig: TransportRig) -> None:
        """`public_key` of the seed is the endpoint's; different seeds have different keys."""
        one = await rig.start("one")
        assert one.transport.public_key == rig.plugin.public_key(seed_of("one"))
        assert rig.plugin.public_key(seed_of("one")) != rig.plugin.public_key(seed_of("two"))

    async def test_a_known_peer_is_connected_and_either_side_may_open(self, pair: Pair) -> None:
        """`connect` ensures the cached connection; edges then go both ways between the same two nodes."""
        left, right = pair.left, pair.right
        await left.transport.connect(right.node_id, deadline=pair.patience)
        back = Pair(right, left, pair.patience)
        for direction in (pair, back):
            sender, reader = await direction.edge()
            reader.grant(10)
            await direction.write_all(sender, b"hello")
            assert await direction.read_exactly(reader, 5) == b"hello"

    async def test_an_unknown_peer_is_an_error_that_names_it(self, rig: TransportRig) -> None:
        """`connect` and `open_edge` raise TransportError naming the peer."""
        left = await rig.start("left")
        stranger = node_id_of(b"nobody")
        for call in openings(left, stranger, REFUSED_WITHIN):
            await self._fails(call(), stranger)

    async def test_a_peer_that_does_not_listen_fails_within_the_deadline(self, rig: TransportRig) -> None:
        """`connect`: within `deadline` seconds."""
        left, gone = await rig.start("left"), await rig.start("gone")
        left.transport.set_peer(gone.peer())
        await gone.transport.close()
        for call in openings(left, gone.node_id, REFUSED_WITHIN):
            await self._fails(call(), gone.node_id)

    async def test_another_key_at_a_peers_address_is_refused(self, rig: TransportRig) -> None:
        """Peers are pinned by key: who answers with another one is not the peer, and hears of no stream."""
        left, right, impostor = [await rig.start(name) for name in ("left", "right", "impostor")]
        impostor.transport.set_peer(left.peer())
        left.transport.set_peer(right.peer(port=impostor.transport.port))
        async with meanwhile(impostor.transport.accept_edge()) as accepting:
            for call in openings(left, right.node_id, REFUSED_WITHIN):
                await self._fails(call(), right.node_id)
            assert not accepting.done(), "a stream reached a node with another key"

    async def test_a_dialler_that_is_not_authorised_is_refused(self, rig: TransportRig) -> None:
        """`authorise` says whether an unknown dialler may complete its handshake."""
        left, right = await rig.start("left"), await rig.start("right", authorised=False)
        left.transport.set_peer(right.peer())
        async with meanwhile(right.transport.accept_edge()) as accepting:
            for call in openings(left, right.node_id, REFUSED_WITHIN):
                await self._fails(call(), right.node_id)
            assert not accepting.done(), "a stream of an unauthorised node arrived"

    async def test_a_known_dialler_needs_no_authorisation(self, rig: TransportRig) -> None:
        """`authorise` is asked about unknown diallers; one that `set_peer` named is known."""
        left, right = await rig.start("left"), await rig.start("right", authorised=False)
        left.transport.set_peer(right.peer())
        right.transport.set_peer(left.peer())
        await left.transport.connect(right.node_id, deadline=self.capabilities.patience)

    async def test_a_removed_peer_needs_authorisation_again(self, rig: TransportRig) -> None:
        """`remove_peer` forgets it: who is no member any more is an unknown dialler, whoever it was."""
        left, right = await rig.start("left"), await rig.start("right", authorised=False)
        left.transport.set_peer(right.peer())
        right.transport.set_peer(left.peer())
        pair = Pair(left, right, rig.patience)
        sender, _ = await pair.edge()
        right.transport.remove_peer(left.node_id)
        with pytest.raises(EdgeBroken):  # from then on left knows that it has to dial again
            await pair.write_all(sender, b"x")
        async with meanwhile(right.transport.accept_edge()) as accepting:
            for call in openings(left, right.node_id, REFUSED_WITHIN):
                await self._fails(call(), right.node_id)
            assert not accepting.done(), "a stream of a removed peer arrived"

    async def _fails(self, call: Awaitable[Any], node_id: NodeId) -> None:
        with pytest.raises(TransportError) as caught:
            await within(self.capabilities.patience, call, "a refusal")
        text = f"{caught.value}"
        assert node_hex(node_id) in text, f"the error does not name peer {node_hex(node_id)}: {text}"

    # --- lives ---

    async def test_a_newer_epoch_ends_connections_to_the_former_life(self, pair: Pair) -> None:
        """`set_peer`: a newer epoch ends connections to its former life at once."""
        sender, reader = await pair.edge()
        reader.grant(10)
        await pair.write_all(sender, b"old")
        pair.right.transport.set_peer(pair.left.peer(epoch=pair.left.epoch + 1))
        await pair.broken(reader, "a newer epoch of the sender")
        with pytest.raises(EdgeBroken):
            await pair.write_all(sender, bytes(100))

    async def test_a_restarted_peer_is_reached_in_its_new_life(self, rig: TransportRig) -> None:
        """Section 7: a restart is a new life, under the same key, on the same port if it likes."""
        pair = await rig.pair()
        await pair.edge()
        port = pair.right.transport.port
        await within(rig.patience, pair.right.transport.close(), "the end of the former life")
        reborn = await rig.start("right", epoch=2, port=port)
        reborn.transport.set_peer(pair.left.peer())
        pair.left.transport.set_peer(reborn.peer())
        again = Pair(pair.left, reborn, rig.patience)
        sender, reader = await again.edge()
        reader.grant(10)
        await again.write_all(sender, b"new life")
        assert await again.read_exactly(reader, 8) == b"new life"

    async def test_a_former_life_is_not_reached(self, rig: TransportRig) -> None:
        """`Peer.epoch`: a node that answers as an older life than the known one is refused."""
        left, right = await rig.start("left"), await rig.start("right", epoch=1)
        right.transport.set_peer(left.peer())
        left.transport.set_peer(right.peer(epoch=2))
        await self._fails(left.transport.connect(right.node_id, deadline=REFUSED_WITHIN), right.node_id)

    async def test_a_removed_peer_loses_its_connections(self, pair: Pair) -> None:
        """`remove_peer`: streams end on both sides as errors, and it has to be set again."""
        sender, reader = await pair.edge()
        reader.grant(10)
        await pair.write_all(sender, b"before")
        pair.left.transport.remove_peer(pair.right.node_id)
        await pair.broken(reader, "the removal of the peer")
        with pytest.raises(EdgeBroken):
            await pair.write_all(sender, bytes(100))
        await self._fails(
            pair.left.transport.connect(pair.right.node_id, deadline=REFUSED_WITHIN), pair.right.node_id
        )

    # --- the end ---

    async def test_a_close_is_bounded_and_ends_both_sides_of_everything(self, rig: TransportRig) -> None:
        """`close` ends every edge, channel and connection; idempotent, bounded by 2 s. The peer sees errors
        or orderly ends, nobody waits on, and it is no loss to either."""
        pair = await rig.pair()
        sender, reader = await pair.edge()
        unread, _ = await pair.edge()
        mine, theirs = await pair.control()
        waiting = [
            asyncio.ensure_future(call)
            for call in (
                unread.write(memoryview(b"x")),
                mine.receive(),
                pair.left.transport.accept_edge(),
                pair.left.transport.accept_control(),
            )
        ]
        reader.grant(10)
        await pair.write_all(sender, b"cut")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await within(CLOSE_BOUND + SLACK, pair.left.transport.close(), "close")
        await within(SLACK, pair.left.transport.close(), "a second close")
        assert loop.time() - begun <= CLOSE_BOUND + SLACK
        done, pending = await asyncio.wait(waiting, timeout=rig.patience)
        assert not pending, f"calls that outlive the close: {pending}"
        _, receiving, *accepting = waiting
        for call in done:
            error = call.exception()
            assert isinstance(error, TransportError) or call is receiving, f"{error!r} ended a waiting call"
        for call in accepting:
            error = call.exception()
            assert isinstance(error, EdgeClosed), (
                f"{error!r} ended an accept, EdgeClosed says that all is over"
            )
        await pair.broken(reader, "the close of its writer's transport")
        with contextlib.suppress(EdgeBroken):
            assert await within(rig.patience, theirs.receive(), "the channel's end") is None
        accepts = pair.left.transport.accept_edge, pair.left.transport.accept_control
        for opening in (*openings(pair.left, pair.right.node_id, rig.patience), *accepts):
            with pytest.raises(EdgeClosed):
                await within(rig.patience, opening(), "a refusal")
        assert pair.left.lost == pair.right.lost == [], "an orderly close is no loss"

    async def test_after_close_nothing_is_left(self, rig: TransportRig) -> None:
        """No task, no thread, no descriptor, and the port is free at once."""
        before = Footprint.now()
        pair = await rig.pair()
        for _ in range(3):
            sender, reader = await pair.edge()
            reader.grant(10)
            await pair.write_all(sender, b"something")
        mine, _ = await pair.control()
        await mine.send(b"something")
        port = pair.left.transport.port
        await rig.close()
        await before.assert_nothing_left()
        await rig.start("left", epoch=2, port=port)

    async def test_a_port_that_is_taken_is_an_error_that_names_it(self, rig: TransportRig) -> None:
        """`start` raises ResourceError naming address and reason."""
        first = await rig.start("first")
        second = rig.create("second", port=first.transport.port)
        with pytest.raises(ResourceError, match=str(first.transport.port)):
            await second.transport.start()

    async def test_an_endpoint_closes_before_it_was_started(self, rig: TransportRig) -> None:
        """`close` is idempotent, and a node may stop before it has bound."""
        never = rig.create("never")
        await within(CLOSE_BOUND + SLACK, never.transport.close(), "close")

    async def test_two_transports_of_one_process_do_not_disturb_each_other(self, rig: TransportRig) -> None:
        """A third node's end, in order, touches no other connection."""
        pair = await rig.pair()
        third = await rig.start("third")
        third.transport.set_peer(pair.right.peer())
        neighbour = await Neighbour(pair).open()
        beside = Pair(third, pair.right, rig.patience)
        _, reader = await beside.edge()
        await within(rig.patience, third.transport.close(), "the third's close")
        await beside.broken(reader, "the close of its writer's transport")
        await neighbour.exchange()
