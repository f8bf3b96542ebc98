"""Whom this process may talk to: members, the authorised orchestrators, the nodes of the cluster file.

Keeps the transport's peer table equal to the membership view, and takes leave of all of them. Shared by node
and orchestrator, and must not know which of the two it serves, nor any run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from swactor_core.config import ClusterConfig
from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member, Membership, MemberState
from swactor_core.spi.transport import Peer, Transport

log = logging.getLogger(__name__)

CLOSE_BOUND = 4.0
"""Seconds for each of membership and transport to end."""

_GONE = (MemberState.DEAD, MemberState.LEFT)


async def take_leave(membership: Membership | None, transport: Transport | None) -> None:
    """Departs from membership, then closes the transport, whatever became of the first; both in bounded
    time. What `Membership.leave` raises comes out of it at the end."""
    try:
        if membership is not None:
            await _bounded(membership.leave(), "membership")
    finally:
        if transport is not None:
            await _bounded(transport.close(), "the transport")


async def _bounded(ending: Coroutine[Any, Any, None], part: str) -> None:
    try:
        async with asyncio.timeout(CLOSE_BOUND):
            await ending
    except TimeoutError:
        log.warning("%s did not close within %g s", part, CLOSE_BOUND)


def replacement(by: Member, node_id: NodeId, epoch: int) -> str:
    """Who stands in the place of that life in membership, and what an operator can do, for people."""
    if by.node_id != node_id:
        return f"another process, at {by.host}:{by.port}, under its name {by.name!r}: give every node its own"
    lives = f"epoch {by.epoch}, now {epoch}"
    if by.state in (MemberState.DEAD, MemberState.LEFT):
        return f"a former life of it that began later ({lives}): set this machine's clock"
    where = f"at {by.host}:{by.port}"
    return (
        f"a later life of its key {where} ({lives}): end one of the two, and give every node a key of its own"
    )


class PeerBook:
    def __init__(self, cluster: ClusterConfig, orchestrators: set[bytes]) -> None:
        self._fixed = orchestrators | {bytes.fromhex(node.public_key) for node in cluster.nodes}
        self._members: dict[NodeId, Member] = {}
        self._awaited: dict[NodeId, asyncio.Event] = {}
        self._transport: Transport | None = None
        self.on_member: Callable[[Member], None] = lambda member: None

    def knows(self, public_key: bytes) -> bool:
        """Whether a dialler with this key may complete its handshake."""
        return public_key in self._fixed or any(m.public_key == public_key for m in self._members.values())

    def attach(self, transport: Transport) -> None:
        self._transport = transport
        for member in self._members.values():
            self._apply(member)

    def member_changed(self, member: Member) -> None:
        self._members[member.node_id] = member
        self._apply(member)
        if member.state not in _GONE and (heard := self._awaited.pop(member.node_id, None)) is not None:
            heard.set()
        self.on_member(member)

    async def met(self, node_id: NodeId, *, deadline: float) -> None:
        """Returns when membership has told of that node, or after `deadline` seconds: gossip may reach the
        one that is to dial later than the one that planned it."""
        member = self._members.get(node_id)
        if member is not None and member.state not in _GONE:
            return
        heard = self._awaited.setdefault(node_id, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await heard.wait()

    def _apply(self, member: Member) -> None:
        if self._transport is None:
            return
        if member.state in _GONE:
            self._transport.remove_peer(member.node_id)
        else:
            peer = Peer(member.node_id, member.public_key, member.host, member.port, member.epoch)
            self._transport.set_peer(peer)
