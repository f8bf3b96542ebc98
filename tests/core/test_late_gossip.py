"""Gossip may reach the node that is to dial later than the orchestrator that planned the edge."""

from __future__ import annotations

import asyncio
from typing import Any

from swactor_core.config import ClusterConfig
from swactor_core.faults import Component
from swactor_core.fsm import Address
from swactor_core.ids import EdgeId, NodeId, RingId
from swactor_core.machines.pumps import Connected, EnsureConnection
from swactor_core.messages import EstablishSend
from swactor_core.node import pumps
from swactor_core.node.peers import PeerBook
from swactor_core.node.pumps import SendPumpTask
from swactor_core.spi.membership import Member, MemberState
from swactor_testing.heap import HeapArenas
from test_pump_damage import LAYOUT

PEER = NodeId(7)
CLUSTER = ClusterConfig(id="ab" * 16, gossip_key="cd" * 32, orchestrators=())
SPEC = EstablishSend(EdgeId(2), PEER, RingId(3), LAYOUT, Address(Component.TX_EDGE, EdgeId(2)))


def member(node_id: NodeId = PEER, *, state: MemberState = MemberState.ALIVE) -> Member:
    return Member("late", node_id, 1, 0, state, b"k" * 32, "host", 1, "host", 2)


async def test_a_peer_is_met_when_membership_tells_of_it() -> None:
    book = PeerBook(CLUSTER, set())
    waiting = [asyncio.ensure_future(book.met(PEER, deadline=60)) for _ in range(2)]
    await asyncio.sleep(0)
    book.member_changed(member(NodeId(8)))
    book.member_changed(member(state=MemberState.DEAD))  # a former life
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    book.member_changed(member())
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    await asyncio.wait_for(book.met(PEER, deadline=60), 5)


async def test_nobody_waits_for_ever_for_a_peer_that_never_comes() -> None:
    await asyncio.wait_for(PeerBook(CLUSTER, set()).met(PEER, deadline=0.01), 5)


class Dialled:
    def __init__(self, order: list[str]) -> None:
        self.order, self.deadline = order, 0.0

    async def connect(self, peer: NodeId, *, deadline: float) -> None:
        assert peer == PEER
        self.order.append("dialled")
        self.deadline = deadline


async def test_a_send_pump_dials_whom_its_node_has_met() -> None:
    order: list[str] = []

    async def met(node_id: NodeId, *, deadline: float) -> None:
        assert (node_id, deadline) == (PEER, pumps.CONNECT_DEADLINE)
        await asyncio.sleep(0)
        order.append("met")

    arena = HeapArenas().create(LAYOUT.total_len)
    hooks: dict[str, Any] = {"now": lambda: 0.0, "tell": lambda send: None, "hint": lambda message: None}
    transport = Dialled(order)
    pump = SendPumpTask(SPEC, arena.create_ring(LAYOUT), transport, met=met, **hooks)  # type: ignore[arg-type] # all that it asks of a transport here
    assert await pump._do(EnsureConnection()) == Connected()
    assert order == ["met", "dialled"]
    assert 0 < transport.deadline < pumps.CONNECT_DEADLINE
    arena.close()
