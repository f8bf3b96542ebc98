"""Membership interface (spec section 9): liveness evidence for the pool gate, never a graph protocol.

Provider factory of kind `membership`: `factory() -> MembershipPlugin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, Protocol

from swactor_core.ids import NodeId
from swactor_core.values import frozen


class MemberState(StrEnum):
    ALIVE = "Alive"
    SUSPECT = "Suspect"
    DEAD = "Dead"
    LEFT = "Left"


@frozen
class Member:
    """A participant's one life: (name, epoch) identify it, incarnation orders claims about it.

    `host` and `port` are its data-plane endpoint; `gossip_host`/`gossip_port` its membership endpoint;
    `public_key` is its node key. `role` is `node` or `orchestrator`.
    """

    name: str
    node_id: NodeId
    epoch: int
    incarnation: int
    state: MemberState
    public_key: bytes
    host: str
    port: int
    gossip_host: str
    gossip_port: int
    role: str = "node"


@frozen
class MembershipContext:
    """`gossip_key` (32 bytes) seals every datagram. `seeds` are (host, port) membership endpoints to join
    through. `on_change(member)` is called on the event loop for every change of a member's state, epoch or
    endpoint, other members only. `on_over(by)` is called once when this life's membership has ended unasked:
    the others hold `by` in its place, another life of its name, or a later one of its key. It takes part no
    more, and only a start with a later epoch than `by` returns."""

    cluster_id: str
    gossip_key: bytes
    name: str
    node_id: NodeId
    epoch: int
    public_key: bytes
    role: str
    host: str
    port: int
    bind_host: str
    bind_port: int
    seeds: tuple[tuple[str, int], ...]
    on_change: Callable[[Member], None]
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_over: Callable[[Member], None] = lambda by: None


class Membership(Protocol):
    @property
    def address(self) -> tuple[str, int]:
        """Where this participant receives membership datagrams, after `start`."""

    async def start(self) -> None:
        """Binds and begins to join; seeds that do not answer are retried for ever. Raises ResourceError."""

    def members(self) -> tuple[Member, ...]:
        """The current view, this participant included, in order of name."""

    def suspect(self, node_id: NodeId, why: str) -> None:
        """Outside evidence (a broken link): probe that member at once. Never a verdict by itself."""

    async def leave(self) -> None:
        """Tells the others that this is a departure, then stops. Bounded by 1 s."""

    async def close(self) -> None:
        """Stops without a word, as a crash would. Idempotent; leaves no task, thread or descriptor."""


class MembershipPlugin(Protocol):
    def create(self, context: MembershipContext) -> Membership: ...
