"""What a sender holds for a peer that acknowledges nothing: no more than its bound, and none of it is lost.

The guarantee is that of `SendEdge.write` in `swactor_core.spi.transport`. The peer is alive and has granted
plenty; it is stopped as a whole, so that nothing but the bound is left to stop its writer.
"""

from __future__ import annotations

import json
from hashlib import sha256

from swactor_core.ids import EdgeId

from swactor_testing.conformance.bounds import meanwhile, seeded, until, within
from swactor_testing.conformance.doomed import Plan, peer_from_json
from swactor_testing.conformance.edges import write_until_it_waits
from swactor_testing.conformance.offers import OfferContract
from swactor_testing.conformance.transport_rig import Neighbour, Pair, TransportRig


class UnacknowledgedContract(OfferContract):
    """What a sender holds."""

    async def test_a_peer_that_acknowledges_nothing_stops_its_writer_at_the_bound(
        self, rig: TransportRig
    ) -> None:
        """`write`: at most `send_bound` accepted bytes per edge are not yet acknowledged, however much was
        granted. When the peer goes on every byte arrives."""
        bound, patience = self.capabilities.send_bound, rig.patience
        writer, third = await rig.start("writer"), await rig.start("third")
        writer.transport.set_peer(third.peer())
        third.transport.set_peer(writer.peer())
        elsewhere = await Neighbour(Pair(writer, third, patience)).open()
        data = seeded(bound).randbytes(2 * bound)
        async with self.companion(rig, Plan(writer.peer(), "reader", granted=len(data))) as silent:
            arrival = writer.transport.accept_control()
            channel = await within(patience, arrival, "the channel of the reader")
            where = await within(patience, channel.receive(), "the reader's address")
            assert where is not None, "the reader's channel was closed"
            peer = peer_from_json(json.loads(where))
            writer.transport.set_peer(peer)
            edge = await writer.transport.open_edge(peer.node_id, EdgeId(1), deadline=patience)
            await until(patience, lambda: edge.room() > 0, "the reader's grant")
            await elsewhere.exchange()
            await silent.silence()
            pair = Pair(writer, writer, patience)
            taken = await write_until_it_waits(pair, edge, data, neighbour=elsewhere)
            silent.resume()
            assert taken <= bound, f"{taken} bytes were taken of which none was acknowledged, {bound} is said"

            async def write_rest() -> None:
                await pair.write_all(edge, data[taken:])
                await edge.finish()

            async with meanwhile(write_rest()) as writing:
                said = await within(patience, channel.receive(), "the reader's digest")
                await writing
            assert said == sha256(data).hexdigest().encode(), "other bytes than those written have arrived"
