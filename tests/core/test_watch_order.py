"""Orchestrators that begin at once: none waits for what another holds while that one waits for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from swactor_core.actors import ActorSystem
from swactor_core.ids import NodeId
from swactor_core.messages import NodeAvailable, NodeLost, Watch, WatchRefused
from swactor_core.node.control import CONTROL
from swactor_core.orchestrator import links
from swactor_core.orchestrator.links import GIVEN_BACK, POOL, NodeLinks

NODES = tuple(NodeId(number) for number in (11, 22, 33))


class Node:
    """Takes one watch at a time, as a node's control service does."""

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.holder: Channel | None = None
        self.refusal: WatchRefused | None = None
        self.asked: Callable[[], None] = lambda: None
        self.ends = asyncio.Event()
        """Not set, an end of one of its channels takes its time."""
        self.ends.set()


class Channel:
    def __init__(self, node: Node, owner: Orchestrator) -> None:
        self.node, self.owner = node, owner
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send(self, frame: bytes) -> None:
        assert isinstance(CONTROL.decode(frame), Watch)
        node = self.node
        node.asked()
        if node.refusal is not None:
            answer: object = node.refusal
        elif node.holder is None:
            node.holder = self
            answer = NodeAvailable(node.node_id, 1, f"n{node.node_id}", 0, {})
        else:
            answer = WatchRefused(node.node_id, "busy", final=False)
        self.frames.put_nowait(CONTROL.encode(answer))

    async def receive(self) -> bytes | None:
        return await self.frames.get()

    async def close(self) -> None:
        await self.node.ends.wait()
        if self.node.holder is self:
            self.node.holder = None
        self.frames.put_nowait(None)


class Orchestrator:
    """The links of one, on these nodes; `gate` is what its pool was told."""

    def __init__(self, nodes: dict[NodeId, Node]) -> None:
        self.nodes = nodes
        self.asked: list[NodeId] = []
        self.failures: list[Exception] = []
        self.system = ActorSystem(lambda address, error: self.failures.append(error))
        self.gate: list[object] = []
        self.system.spawn(POOL, self)
        self.links = NodeLinks(self.system, objects=False, on_report=lambda node_id, said: self.receive(said))
        self.begin(nodes)

    def begin(self, nodes: Iterable[NodeId]) -> None:
        transport: Any = self
        self.links.begin(transport, nodes)

    def receive(self, message: object) -> None:
        self.gate.append(message)

    async def open_control(self, node_id: NodeId, *, deadline: float) -> Channel:
        self.asked.append(node_id)
        return Channel(self.nodes[node_id], self)

    def see(self, node_id: NodeId) -> None:
        self.links.seen(node_id, alive=True)

    @property
    def held(self) -> list[NodeId]:
        return [n for n, node in self.nodes.items() if node.holder and node.holder.owner is self]

    async def close(self) -> None:
        await self.links.close()
        await self.system.shutdown()
        assert self.failures == []


@pytest.fixture
async def begin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[int], list[Orchestrator]]]:
    monkeypatch.setattr(links, "ASK_AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(links, "REDIAL_SECONDS", 0.001)
    begun: list[Orchestrator] = []

    def make(count: int) -> list[Orchestrator]:
        nodes = {node_id: Node(node_id) for node_id in NODES}
        begun.extend(Orchestrator(nodes) for _ in range(count))
        return begun

    yield make
    for one in begun:
        await one.close()


async def settled(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a fake node has no event
            await asyncio.sleep(0.001)


async def test_who_holds_what_the_other_waits_for_gives_it_back(begin) -> None:
    first, second = begin(2)
    first.see(NODES[0])
    first.see(NODES[1])
    second.see(NODES[2])
    await settled(lambda: len(first.held) == 2 and len(second.held) == 1)
    for one in (first, second):
        for node_id in NODES:
            one.see(node_id)
    await settled(lambda: len(first.held) == 3)
    assert WatchRefused(NODES[2], GIVEN_BACK, final=False) in second.gate
    assert not any(isinstance(said, NodeLost) for said in second.gate)
    await first.close()
    await settled(lambda: len(second.held) == 3)
    assert [said.node_id for said in second.gate if isinstance(said, NodeAvailable)][-3:] == list(NODES)


@pytest.mark.parametrize("seed", range(12))
async def test_everybody_has_a_turn_whoever_comes_first_where(begin, seed) -> None:
    chance = random.Random(seed)
    waiting = list(begin(3))
    sights = [(one, node_id) for one in waiting for node_id in NODES]
    chance.shuffle(sights)
    for one, node_id in sights:
        one.see(node_id)
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
    while waiting:
        await settled(lambda: any(len(one.held) == 3 for one in waiting))
        (done,) = [one for one in waiting if len(one.held) == 3]
        waiting.remove(done)
        await done.close()


async def test_a_run_that_has_its_nodes_gives_none_back(begin) -> None:
    """One of them began anew, and another orchestrator was faster: the run's end needs the others."""
    first, _ = begin(2)
    for node_id in NODES:
        first.see(node_id)
    await settled(lambda: len(first.held) == 3)
    first.links.settle()
    node = first.nodes[NODES[0]]
    lost, node.holder = node.holder, Channel(node, begin(1)[-1])
    assert lost is not None
    lost.frames.put_nowait(None)
    await settled(lambda: WatchRefused(NODES[0], "busy", final=False) in first.gate)
    assert first.held == list(NODES[1:])


@pytest.mark.parametrize("how", ["refused for good", "gone"])
async def test_nobody_waits_in_turn_for_a_node_that_never_comes(begin, how) -> None:
    (one,) = begin(1)
    first, *others = NODES
    final = how == "refused for good"
    one.nodes[first].refusal = WatchRefused(first, "another version" if final else "busy", final=final)
    for node_id in NODES:
        one.see(node_id)
    await settled(lambda: any(isinstance(said, WatchRefused) and said.node_id == first for said in one.gate))
    if not final:
        await settled(lambda: not one.held)
        one.links.seen(first, alive=False)
    await settled(lambda: one.held == others)


async def test_a_node_that_is_wanted_again_before_its_channel_has_ended_is_not_lost(begin) -> None:
    """The end waits for a frame that is on its way; what the node says meanwhile holds no more."""
    (one,) = begin(1)
    first, *others = NODES
    one.nodes[first].refusal = WatchRefused(first, "busy", final=False)
    for node_id in others:
        one.see(node_id)
    await settled(lambda: one.held == others)
    channels = [one.nodes[node_id].holder for node_id in others]
    for node_id in others:
        one.nodes[node_id].ends.clear()
    one.see(first)
    given_back = [WatchRefused(node_id, GIVEN_BACK, final=False) for node_id in others]
    await settled(lambda: all(said in one.gate for said in given_back))
    for channel in channels:
        channel.frames.put_nowait(CONTROL.encode(NodeAvailable(channel.node.node_id, 2, "late", 0, {})))
    one.links.seen(first, alive=False)
    for node_id in others:
        one.nodes[node_id].ends.set()
    await settled(lambda: min(map(one.asked.count, others)) > 1 and one.held == others)
    await settled(lambda: len([said for said in one.gate if isinstance(said, NodeAvailable)]) == 4)
    assert not any(isinstance(said, NodeLost) for said in one.gate)
    assert not any(isinstance(said, NodeAvailable) and said.name == "late" for said in one.gate)


async def test_a_later_run_takes_no_node_behind_one_that_is_still_busy(begin, monkeypatch) -> None:
    (one,) = begin(1)
    first, *others = NODES
    await one.links.close()
    monkeypatch.setattr(links, "ASK_AGAIN_SECONDS", 3600.0)
    one.nodes[first].refusal = WatchRefused(first, "busy", final=False)
    one.begin([first])
    one.see(first)
    await settled(lambda: one.nodes[first].refusal in one.gate)
    one.begin(NODES)
    for node_id in others:
        one.see(node_id)
    for _ in range(20):
        await asyncio.sleep(0)
    assert one.asked == [first]
    one.links.seen(first, alive=False)
    await settled(lambda: one.held == others)


async def test_a_refusal_of_a_node_that_has_gone_meanwhile_is_nothing_to_wait_for(begin) -> None:
    (one,) = begin(1)
    first, *others = NODES
    node = one.nodes[first]
    node.refusal = WatchRefused(first, "busy", final=False)
    node.asked = lambda: one.links.seen(first, alive=False)
    for node_id in NODES:
        one.see(node_id)
    await settled(lambda: node.refusal in one.gate)
    await settled(lambda: one.held == others)
