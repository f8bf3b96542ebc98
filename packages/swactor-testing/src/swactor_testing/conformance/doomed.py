"""A peer that is going to be killed or stopped: it sends a farewell on one stream, reads one, or takes any.

`main` runs it: the provider's name, a plan and settings, both JSON, as arguments; it prints where it listens
in one line and ends with its stdin where nobody kills it. Knows the transport interface only.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from swactor_core.ids import EdgeId, NodeId, node_id_of
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind
from swactor_core.spi.transport import (
    ControlChannel,
    Peer,
    RecvEdge,
    Transport,
    TransportContext,
    TransportPlugin,
)
from swactor_core.values import frozen

FAREWELL = b"before the end"
DEADLINE = 10.0
EPOCH = 1
_SEED = b"doomed".ljust(32, b".")


@frozen
class Plan:
    """Whom to reach, and by which stream: `edge` or `control`. A `reader` says on a control channel where it
    listens, grants `granted` bytes of the first edge that comes at once, and says the digest of what came. A
    `listener` reaches nobody: it takes what comes, grants `granted` bytes of every edge, and reads none."""

    peer: Peer
    stream: str
    granted: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"stream": self.stream, "granted": self.granted, "peer": peer_to_json(self.peer)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        return cls(peer_from_json(data["peer"]), data["stream"], data["granted"])

    async def act(self, transport: Transport) -> None:
        """Does its part, and holds the stream open for ever."""
        if self.stream == "listener":
            await asyncio.gather(self._hold_edges(transport), _hold_channels(transport))
        elif self.stream == "edge":
            edge = await transport.open_edge(self.peer.node_id, EdgeId(1), deadline=DEADLINE)
            view = memoryview(FAREWELL)
            while view:
                view = view[await edge.write(view) :]
        else:
            channel = await transport.open_control(self.peer.node_id, deadline=DEADLINE)
            if self.stream == "reader":
                await self._read(transport, channel)
            else:
                await channel.send(FAREWELL)
        await asyncio.get_running_loop().create_future()

    async def _hold_edges(self, transport: Transport) -> None:
        held: list[RecvEdge] = []
        while True:
            _, _, edge = await transport.accept_edge()
            edge.grant(self.granted)
            held.append(edge)

    async def _read(self, transport: Transport, channel: ControlChannel) -> None:
        await channel.send(json.dumps(peer_to_json(place_of(transport))).encode())
        _, _, edge = await transport.accept_edge()
        edge.grant(self.granted)
        came, buffer = sha256(), memoryview(bytearray(1 << 16))
        while count := await edge.read_into(buffer):
            came.update(buffer[:count])
        await channel.send(came.hexdigest().encode())


async def _hold_channels(transport: Transport) -> None:
    held: list[ControlChannel] = []
    while True:
        held.append(await transport.accept_control())


def place_of(transport: Transport) -> Peer:
    """A started transport as its peers are to know it."""
    key = transport.public_key
    return Peer(node_id_of(key), key, transport.host, transport.port, EPOCH)


def peer_to_json(peer: Peer) -> dict[str, Any]:
    return {
        "node_id": peer.node_id,
        "public_key": peer.public_key.hex(),
        "host": peer.host,
        "port": peer.port,
        "epoch": peer.epoch,
    }


def peer_from_json(data: Mapping[str, Any]) -> Peer:
    key = bytes.fromhex(data["public_key"])
    return Peer(NodeId(data["node_id"]), key, data["host"], data["port"], data["epoch"])


async def live(plugin: TransportPlugin, plan: Plan, settings: Mapping[str, Any]) -> None:
    """A whole life, up to the kill or the end of stdin."""
    key = plugin.public_key(_SEED)
    context = TransportContext(
        seed=_SEED,
        node_id=node_id_of(key),
        epoch=EPOCH,
        bind_host="127.0.0.1",
        bind_port=0,
        authorise=lambda candidate: True,
        on_peer_lost=lambda node_id, why: None,
        settings=settings,
    )
    transport = plugin.create(context)
    await transport.start()
    transport.set_peer(plan.peer)
    sys.stdout.write(json.dumps(peer_to_json(place_of(transport))) + "\n")
    sys.stdout.flush()
    acting = asyncio.ensure_future(plan.act(transport))
    await asyncio.to_thread(sys.stdin.read)
    acting.cancel()
    await transport.close()


def main() -> None:
    name, plan, settings = sys.argv[1:]
    plugin: TransportPlugin = load_plugins().select(Kind.TRANSPORT, name).factory()
    asyncio.run(live(plugin, Plan.from_json(json.loads(plan)), json.loads(settings)))
