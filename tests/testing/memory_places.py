"""Endpoints of the memory transport with what their hosts would keep beside them, for its tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swactor_core.ids import EdgeId, NodeId, node_id_of
from swactor_core.spi.transport import Peer, TransportContext
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


def know(*places: Place) -> None:
    for one in places:
        for other in places:
            if other is not one:
                one.transport.set_peer(other.peer())


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
