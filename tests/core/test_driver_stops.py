"""The driver's StopEdge (spec sections 24, 25, 38) reaches the pump, whatever peers have opened meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from swactor_core.actors import ActorSystem
from swactor_core.errors import EdgeClosed
from swactor_core.faults import Component
from swactor_core.ids import EdgeId, NodeId, RingId
from swactor_core.messages import (
    Address,
    DriverEdgeReady,
    EstablishRecv,
    EstablishSend,
    PumpStopped,
    StopEdge,
)
from swactor_core.node import data_plane
from swactor_core.node.data_plane import DRIVER, ESTABLISHER, Driver
from swactor_core.observe.bus import EventBus
from swactor_core.specs import RingLayout
from swactor_testing.heap import HeapArenas

EDGE, PEER, RING = EdgeId(6), NodeId(70), RingId(9)
LAYOUT = RingLayout(RING, 0, 4096, 0, 64, 4032, 64)
HOST, TX, RX = Address(Component.GPU_WORKER_CTL), Address(Component.TX_EDGE, 6), Address(Component.RX_EDGE, 6)
SEND = EstablishSend(EDGE, PEER, RING, LAYOUT, TX)
RECEIVE = EstablishRecv(EDGE, PEER, RING, LAYOUT, RX)


class Stream:
    """A stream of a peer on which nothing ever comes."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    def grant(self, total: int) -> None:
        pass

    def watch(self, wake: Callable[[], None]) -> None:
        pass

    def take(self, view: memoryview) -> int | None:
        return None

    async def stop(self) -> None:
        self.stopped.set()


class Network:
    """Every connection is made at once; streams arrive when a test says so."""

    def __init__(self) -> None:
        self.arriving: asyncio.Queue[tuple[NodeId, EdgeId, Stream] | None] = asyncio.Queue()

    async def connect(self, peer: NodeId, *, deadline: float) -> None:
        pass

    async def accept_edge(self) -> tuple[NodeId, EdgeId, Stream]:
        arrived = await self.arriving.get()
        if arrived is None:
            raise EdgeClosed("the end")
        return arrived

    def arrives(self, edge_id: EdgeId = EDGE) -> Stream:
        stream = Stream()
        self.arriving.put_nowait((PEER, edge_id, stream))
        return stream


class Hearer:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()

    def receive(self, message: object) -> None:
        self.heard.put_nowait(message)


@dataclass
class Rig:
    system: ActorSystem
    driver: Driver
    network: Network
    establisher: Hearer
    refusals: asyncio.Queue[dict[str, Any]]
    failures: list[Exception]

    async def hears(self) -> object:
        async with asyncio.timeout(10):
            return await self.establisher.heard.get()

    async def refuses(self) -> str:
        async with asyncio.timeout(10):
            return str((await self.refusals.get())["reason"])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    failures: list[Exception] = []
    refusals: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    system = ActorSystem(lambda address, error: failures.append(error))
    bus = EventBus(NodeId(7))
    bus.add_sink(lambda event: refusals.put_nowait(event) if event["event"] == "edge_refused" else None)
    establisher = Hearer()
    system.spawn(ESTABLISHER, establisher)
    system.spawn(HOST, Hearer())
    arena = HeapArenas().create(1 << 16)
    network: Any = Network()
    rings = {RING: arena.create_ring(LAYOUT)}
    driver = Driver(system, bus, network, rings=rings, ring_host=HOST)
    driver.start()
    yield Rig(system, driver, network, establisher, refusals, failures)
    network.arriving.put_nowait(None)
    await system.shutdown()
    assert failures == []


def tell(rig: Rig, message: object) -> None:
    rig.system.tell(DRIVER, message)


async def test_a_send_edge_is_stopped_although_a_peer_has_opened_a_stream_for_it(rig: Rig) -> None:
    tell(rig, SEND)
    assert await rig.hears() == DriverEdgeReady(EDGE)
    first, second = rig.network.arrives(), rig.network.arrives()
    assert await rig.refuses() == "DuplicateStream"  # so the first one is waiting by now
    tell(rig, StopEdge(EDGE))
    assert await rig.hears() == PumpStopped(EDGE, RING)
    assert await rig.refuses() == "UnknownEdge"
    async with asyncio.timeout(10):
        await first.stopped.wait()
        await second.stopped.wait()


async def test_a_send_edge_is_stopped_after_such_a_stream_was_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "PENDING_STREAM_BOUND", 0.0)
    tell(rig, SEND)
    assert await rig.hears() == DriverEdgeReady(EDGE)
    rig.network.arrives()
    assert await rig.refuses() == "UnknownEdge"
    tell(rig, StopEdge(EDGE))
    assert await rig.hears() == PumpStopped(EDGE, RING)


@pytest.mark.parametrize("streams", [0, 1, 2])
async def test_a_receive_edge_is_stopped_with_or_without_its_stream(rig: Rig, streams: int) -> None:
    tell(rig, RECEIVE)
    assert await rig.hears() == DriverEdgeReady(EDGE)
    for _ in range(streams):
        rig.network.arrives()
    if streams == 2:
        assert await rig.refuses() == "DuplicateStream"
    tell(rig, StopEdge(EDGE))
    assert await rig.hears() == PumpStopped(EDGE, RING)


async def test_a_stop_of_an_edge_that_the_driver_has_nothing_of_is_nothing(rig: Rig) -> None:
    tell(rig, StopEdge(EDGE))
    tell(rig, RECEIVE)
    assert await rig.hears() == DriverEdgeReady(EDGE)


async def test_a_peer_that_names_edges_without_end_is_not_remembered_without_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "PENDING_STREAM_BOUND", 0.0)
    streams = [rig.network.arrives(EdgeId(number)) for number in range(1, 3 * data_plane.UNASKED_KEPT)]
    for stream in streams:
        assert await rig.refuses() == "UnknownEdge"
        await asyncio.wait_for(stream.stopped.wait(), 10)
    actors = [address for address in rig.system._mailboxes if address.component is Component.DRIVER]
    assert len(actors) <= data_plane.UNASKED_KEPT + 1
    assert len(rig.driver._rendezvous) <= data_plane.UNASKED_KEPT
    latest = EdgeId(3 * data_plane.UNASKED_KEPT - 1)
    again = rig.network.arrives(latest)
    assert await rig.refuses() == "UnknownEdge"
    await asyncio.wait_for(again.stopped.wait(), 10)


async def test_a_stream_of_edge_0_is_refused_and_harms_nobody(rig: Rig) -> None:
    stream = rig.network.arrives(EdgeId(0))
    assert await rig.refuses() == "UnknownEdge"
    await asyncio.wait_for(stream.stopped.wait(), 10)
    tell(rig, RECEIVE)
    rig.network.arrives()
    assert await rig.hears() == DriverEdgeReady(EDGE)
    tell(rig, StopEdge(EDGE))
    assert await rig.hears() == PumpStopped(EDGE, RING)


async def test_a_stream_that_waits_when_its_edge_is_forgotten_is_refused_in_its_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came after the edge's own stop, as a peer may send one for an edge that this process sends on."""
    monkeypatch.setattr(data_plane, "PENDING_STREAM_BOUND", 0.2)
    stream = rig.network.arrives()
    while EDGE not in rig.driver._rendezvous:  # noqa: ASYNC110 - a turn or two of this loop
        await asyncio.sleep(0)
    rig.driver.forget((EDGE,))
    assert await rig.refuses() == "UnknownEdge"
    await asyncio.wait_for(stream.stopped.wait(), 10)
    assert rig.driver._streams == {}
