"""A peer that is going to be killed: it opens one stream, sends a farewell on it, and waits for the end.

`main` runs it: the provider's name, a plan and settings, both JSON, as arguments; it ends with its stdin
where nobody kills it. Knows the transport interface only.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swactor_core.ids import EdgeId, NodeId, node_id_of
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind
from swactor_core.spi.transport import Peer, Transport, TransportContext, TransportPlugin

FAREWELL = b"before the end"
DEADLINE = 10.0
_SEED = b"doomed".ljust(32, b".")


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom to reach, and by which stream: `edge` or `control`."""

    peer: Peer
    stream: str

    def to_json(self) -> dict[str, Any]:
        peer = self.peer
        return {
            "stream": self.stream,
            "node_id": peer.node_id,
            "public_key": peer.public_key.hex(),
            "host": peer.host,
            "port": peer.port,
            "epoch": peer.epoch,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        key = bytes.fromhex(data["public_key"])
        peer = Peer(NodeId(data["node_id"]), key, data["host"], data["port"], data["epoch"])
        return cls(peer, data["stream"])

    async def act(self, transport: Transport) -> None:
        """Sends the farewell, and holds the stream open for ever."""
        if self.stream == "control":
            channel = await transport.open_control(self.peer.node_id, deadline=DEADLINE)
            await channel.send(FAREWELL)
        else:
            edge = await transport.open_edge(self.peer.node_id, EdgeId(1), deadline=DEADLINE)
            view = memoryview(FAREWELL)
            while view:
                view = view[await edge.write(view) :]
        await asyncio.get_running_loop().create_future()


async def live(plugin: TransportPlugin, plan: Plan, settings: Mapping[str, Any]) -> None:
    """A whole life, up to the kill or the end of stdin."""
    key = plugin.public_key(_SEED)
    context = TransportContext(
        seed=_SEED,
        node_id=node_id_of(key),
        epoch=1,
        bind_host="127.0.0.1",
        bind_port=0,
        authorise=lambda candidate: True,
        on_peer_lost=lambda node_id, why: None,
        settings=settings,
    )
    transport = plugin.create(context)
    await transport.start()
    transport.set_peer(plan.peer)
    acting = asyncio.ensure_future(plan.act(transport))
    await asyncio.to_thread(sys.stdin.read)
    acting.cancel()
    await transport.close()


def main() -> None:
    name, plan, settings = sys.argv[1:]
    plugin: TransportPlugin = load_plugins().select(Kind.TRANSPORT, name).factory()
    asyncio.run(live(plugin, Plan.from_json(json.loads(plan)), json.loads(settings)))
