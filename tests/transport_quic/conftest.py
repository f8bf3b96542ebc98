"""Started transports over real loopback sockets, and a UDP relay that loses, repeats, reorders and holds."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from swactor_core.ids import NodeId, node_id_of
from swactor_core.spi.transport import Peer, TransportContext
from swactor_transport_quic.transport import QuicPlugin, QuicTransport

PATIENCE = 20.0


@dataclass
class Node:
    """A transport with what its host would keep beside it."""

    transport: QuicTransport
    node_id: NodeId
    key: bytes
    epoch: int
    allowed: set[bytes] | None
    lost: asyncio.Queue[tuple[NodeId, str]] = field(default_factory=asyncio.Queue)

    def peer(self, *, port: int | None = None, epoch: int = 0, key: bytes | None = None) -> Peer:
        """This node as others know it."""
        return Peer(self.node_id, key or self.key, self.transport.host, port or self.transport.port, epoch)

    async def edge_to(self, other: Node, edge_id: int = 1) -> tuple[Any, Any]:
        """A fresh edge: its sender here and its reader at `other`."""
        sender = await self.transport.open_edge(other.node_id, edge_id, deadline=5)
        node_id, seen, reader = await asyncio.wait_for(other.transport.accept_edge(), PATIENCE)
        assert (node_id, seen) == (self.node_id, edge_id)
        return sender, reader

    async def control_to(self, other: Node) -> tuple[Any, Any]:
        mine = await self.transport.open_control(other.node_id, deadline=5)
        theirs = await asyncio.wait_for(other.transport.accept_control(), PATIENCE)
        return mine, theirs


NodeMaker = Callable[..., Any]


@pytest_asyncio.fixture
async def make_node() -> AsyncIterator[NodeMaker]:
    """`await make_node(name, ...)`: started, and closed at the end of the test."""
    nodes: list[Node] = []

    async def make(
        name: str,
        *,
        epoch: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed: set[bytes] | None = None,
        **settings: Any,
    ) -> Node:
        seed = name.encode().ljust(32, b".")
        plugin = QuicPlugin()
        key = plugin.public_key(seed)
        lost: asyncio.Queue[tuple[NodeId, str]] = asyncio.Queue()
        context = TransportContext(
            seed=seed,
            node_id=node_id_of(key),
            epoch=epoch,
            bind_host=host,
            bind_port=port,
            authorise=lambda candidate: allowed is None or candidate in allowed,
            on_peer_lost=lambda node_id, why: lost.put_nowait((node_id, why)),
            settings=settings,
        )
        node = Node(plugin.create(context), node_id_of(key), key, epoch, allowed, lost)
        await node.transport.start()
        nodes.append(node)
        return node

    yield make
    await asyncio.gather(*(node.transport.close() for node in nodes))


@pytest_asyncio.fixture
async def pair(make_node: NodeMaker) -> tuple[Node, Node]:
    """Two nodes that know each other."""
    left, right = await make_node("left"), await make_node("right")
    left.transport.set_peer(right.peer())
    right.transport.set_peer(left.peer())
    return left, right


class Relay:
    """Stands between a dialler and `target`; what happens to each datagram is drawn from a seed."""

    def __init__(
        self, target: tuple[str, int], *, seed: int, loss: float, repeat: float, reorder: float
    ) -> None:
        self._random = random.Random(seed)
        self._target = target
        self._loss, self._repeat, self._reorder = loss, repeat, reorder
        self._held: list[tuple[socket.socket, bytes, tuple[str, int]]] = []
        self._back: dict[tuple[str, int], socket.socket] = {}
        self._front = self._socket()
        self.holding = False
        self.dropped = 0
        self.passed = 0
        asyncio.get_running_loop().add_reader(self._front, self._from_dialler)

    @staticmethod
    def _socket() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024 * 1024)
        made.bind(("127.0.0.1", 0))
        return made

    @property
    def port(self) -> int:
        return self._front.getsockname()[1]

    def _from_dialler(self) -> None:
        while True:
            try:
                data, source = self._front.recvfrom(65535)
            except BlockingIOError:
                return
            back = self._back.get(source)
            if back is None:
                back = self._back[source] = self._socket()
                asyncio.get_running_loop().add_reader(back, self._from_target, back, source)
            self._pass(back, data, self._target)

    def _from_target(self, back: socket.socket, dialler: tuple[str, int]) -> None:
        while True:
            try:
                data, _ = back.recvfrom(65535)
            except BlockingIOError:
                return
            self._pass(self._front, data, dialler)

    def _pass(self, via: socket.socket, data: bytes, to: tuple[str, int]) -> None:
        if self.holding or self._random.random() < self._loss:
            self.dropped += 1
            return
        self.passed += 1
        if self._random.random() < self._reorder:
            self._held.append((via, data, to))
            return
        via.sendto(data, to)
        if self._random.random() < self._repeat:
            via.sendto(data, to)
        held, self._held = self._held, []
        for entry in held:
            entry[0].sendto(entry[1], entry[2])

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for made in (self._front, *self._back.values()):
            loop.remove_reader(made)
            made.close()


@pytest_asyncio.fixture
async def make_relay() -> AsyncIterator[Callable[..., Relay]]:
    relays: list[Relay] = []

    def make(
        target: Node, *, seed: int = 1, loss: float = 0.0, repeat: float = 0.0, reorder: float = 0.0
    ) -> Relay:
        where = (target.transport.host, target.transport.port)
        relay = Relay(where, seed=seed, loss=loss, repeat=repeat, reorder=reorder)
        relays.append(relay)
        return relay

    yield make
    for relay in relays:
        relay.close()


@pytest.fixture
def pattern() -> Callable[[int, int], bytes]:
    """`pattern(seed, count)`: bytes that differ at every place, the same for the same seed."""
    return lambda seed, count: random.Random(seed).randbytes(count)


async def send_all(edge: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[await edge.write(view) :]


async def read_exactly(reader: Any, count: int, *, granted: int | None = None) -> bytes:
    """Reads `count` bytes; with `granted`, grants that much ahead of what was read."""
    received = bytearray()
    if granted is not None:
        reader.grant(granted)
    while len(received) < count:
        chunk = memoryview(bytearray(min(65536, count - len(received))))
        taken = await reader.read_into(chunk)
        assert taken, f"end of stream after {len(received)} of {count} bytes"
        received += chunk[:taken]
        if granted is not None:
            reader.grant(len(received) + granted)
    return bytes(received)


@dataclass(frozen=True)
class Flow:
    """What both ends of an edge do in most tests."""

    send_all: Callable[[Any, bytes], Any]
    read_exactly: Callable[..., Any]


@pytest.fixture
def flow() -> Flow:
    return Flow(send_all, read_exactly)
