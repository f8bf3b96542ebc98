"""Endpoints of a transport under test, with what their hosts keep beside them, and streams between them.

Knows the transport interface only. Every wait is bounded by the capabilities' `patience`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest_asyncio
from swactor_core.errors import EdgeBroken
from swactor_core.ids import EdgeId, NodeId, node_id_of
from swactor_core.spi.transport import (
    ControlChannel,
    Peer,
    RecvEdge,
    SendEdge,
    Transport,
    TransportContext,
    TransportPlugin,
)

from swactor_testing.conformance.base import Contract
from swactor_testing.conformance.bounds import meanwhile, same_bytes, seeded, within
from swactor_testing.conformance.capabilities import TransportCapabilities

HOST = "127.0.0.1"
KIB = 1024

CLOSE_BOUND = 2.0
SLACK = 1.0
"""For a busy machine, beyond a bound that the interface states."""

REFUSED_WITHIN = 0.25
"""Deadline of attempts that must fail."""


def seed_of(name: str) -> bytes:
    """A node's 32-byte secret, the same for the same name."""
    return name.encode().ljust(32, b".")


@dataclass(slots=True)
class Endpoint:
    """A started transport. `lost` is what its host was told by `on_peer_lost`, in order."""

    transport: Transport
    node_id: NodeId
    key: bytes
    epoch: int
    lost: list[tuple[NodeId, str]] = field(default_factory=list)

    def peer(self, *, port: int = 0, epoch: int | None = None) -> Peer:
        """This endpoint as others know it; `port` where another one listens in its place."""
        where = port or self.transport.port
        known = self.epoch if epoch is None else epoch
        return Peer(self.node_id, self.key, self.transport.host, where, known)


class TransportRig:
    """Makes endpoints of one plug-in, and closes them."""

    def __init__(self, plugin: TransportPlugin, capabilities: TransportCapabilities) -> None:
        self.plugin = plugin
        self.patience = capabilities.patience
        self._settings = capabilities.settings
        self._endpoints: list[Endpoint] = []

    def create(self, name: str, *, epoch: int = 1, port: int = 0, authorised: bool = True) -> Endpoint:
        """An endpoint that is not started; `authorised` is its answer to every unknown dialler."""
        key = self.plugin.public_key(seed_of(name))
        lost: list[tuple[NodeId, str]] = []
        context = TransportContext(
            seed=seed_of(name),
            node_id=node_id_of(key),
            epoch=epoch,
            bind_host=HOST,
            bind_port=port,
            authorise=lambda candidate: authorised,
            on_peer_lost=lambda node_id, why: lost.append((node_id, why)),
            settings=dict(self._settings),
        )
        made = Endpoint(self.plugin.create(context), node_id_of(key), key, epoch, lost)
        self._endpoints.append(made)
        return made

    async def start(self, name: str, *, epoch: int = 1, port: int = 0, authorised: bool = True) -> Endpoint:
        made = self.create(name, epoch=epoch, port=port, authorised=authorised)
        await within(self.patience, made.transport.start(), f"the start of {name}")
        return made

    async def pair(self) -> Pair:
        """Two endpoints that know each other."""
        left, right = await self.start("left"), await self.start("right")
        left.transport.set_peer(right.peer())
        right.transport.set_peer(left.peer())
        return Pair(left, right, self.patience)

    async def close(self) -> None:
        closing = asyncio.gather(*(one.transport.close() for one in self._endpoints))
        await within(self.patience, closing, "the close of every endpoint")


@dataclass(slots=True)
class Pair:
    """Streams from `left` to `right`, both ends in hand."""

    left: Endpoint
    right: Endpoint
    patience: float
    _edge_ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def edge(self, edge_id: int | None = None) -> tuple[SendEdge, RecvEdge]:
        """A new edge; the next free id when none is given."""
        wanted = EdgeId(next(self._edge_ids) if edge_id is None else edge_id)
        sender = await self.left.transport.open_edge(self.right.node_id, wanted, deadline=self.patience)
        arrival = self.right.transport.accept_edge()
        who, seen, reader = await within(self.patience, arrival, f"the arrival of edge {wanted}")
        assert (who, seen) == (self.left.node_id, wanted), "another edge arrived, or from another sender"
        return sender, reader

    async def control(self) -> tuple[ControlChannel, ControlChannel]:
        """A new channel: the end that opened it, the end that accepted it."""
        mine = await self.left.transport.open_control(self.right.node_id, deadline=self.patience)
        theirs = await within(self.patience, self.right.transport.accept_control(), "a control channel")
        return mine, theirs

    async def write_all(self, edge: SendEdge, data: bytes) -> None:
        view = memoryview(data)
        while view:
            taken = await within(self.patience, edge.write(view), "room for a write")
            assert 1 <= taken <= len(view), f"write took {taken} of {len(view)} bytes"
            view = view[taken:]

    async def read(self, edge: RecvEdge, count: int) -> bytes:
        """At most `count` bytes, empty at the end of the stream."""
        buffer = bytearray(count)
        taken = await within(self.patience, edge.read_into(memoryview(buffer)), "bytes or an end of stream")
        assert 0 <= taken <= count, f"read_into returned {taken} for room of {count}"
        return bytes(buffer[:taken])

    async def read_exactly(self, edge: RecvEdge, count: int) -> bytes:
        received = b""
        while len(received) < count:
            part = await self.read(edge, count - len(received))
            assert part, f"end of stream after {len(received)} of {count} bytes"
            received += part
        return received

    async def read_all(self, edge: RecvEdge, *, window: int = 64 * KIB) -> bytes:
        """Everything up to the end of the stream, granting `window` ahead of what was read."""
        received = bytearray()
        while True:
            edge.grant(len(received) + window)
            part = await self.read(edge, window)
            if not part:
                return bytes(received)
            received += part

    async def broken(self, edge: RecvEdge, after: str) -> str:
        """Reads until the edge breaks and returns the reason. Raises AssertionError for a clean end."""
        reason = None
        try:
            while await self.read(edge, 64 * KIB):
                pass
        except EdgeBroken as error:
            reason = str(error)
        assert reason is not None, f"after {after} the reader saw a clean end of stream"
        assert reason, f"after {after} the reader was told no reason"
        return reason


class Neighbour:
    """An edge and a channel beside the one under test. One `exchange` moves both: whatever could have
    happened on other streams of the connection has had its chance then."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._moved = 0

    async def open(self) -> Neighbour:
        self._sender, self._reader = await self._pair.edge()
        self._mine, self._theirs = await self._pair.control()
        return self

    async def exchange(self) -> None:
        data = seeded(self._moved).randbytes(32 * KIB)
        self._moved += len(data)
        self._reader.grant(self._moved)
        async with meanwhile(self._pair.write_all(self._sender, data)) as writing:
            same_bytes(await self._pair.read_exactly(self._reader, len(data)), data, "the other edge")
            await writing
        frame = data[:KIB]
        await within(self._pair.patience, self._mine.send(frame), "a control frame to be taken")
        received = await within(self._pair.patience, self._theirs.receive(), "a control frame to arrive")
        assert received == frame, "control was disturbed"

    async def proves_waiting(self, task: asyncio.Task[object], what: str) -> None:
        """Raises AssertionError when `task` ends during a whole exchange."""
        await self.exchange()
        assert not task.done(), what


def openings(endpoint: Endpoint, peer: NodeId, deadline: float) -> list[Callable[[], Awaitable[Any]]]:
    """The three ways to reach a peer."""
    transport = endpoint.transport
    return [
        lambda: transport.connect(peer, deadline=deadline),
        lambda: transport.open_edge(peer, EdgeId(1), deadline=deadline),
        lambda: transport.open_control(peer, deadline=deadline),
    ]


class TransportTests(Contract[TransportPlugin, TransportCapabilities]):
    """Fixtures of the transport contract."""

    @pytest_asyncio.fixture(loop_scope="function")
    async def rig(self, plugin: TransportPlugin) -> AsyncIterator[TransportRig]:
        rig = TransportRig(plugin, self.capabilities)
        yield rig
        await rig.close()

    @pytest_asyncio.fixture(loop_scope="function")
    async def pair(self, rig: TransportRig) -> Pair:
        return await rig.pair()
