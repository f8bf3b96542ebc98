"""Membership mock `static`: participants of one process that see each other at once, and verdicts by script.

`CLUSTERS` has each cluster of this process by its id, from its first participant's start to its last one's
end. Nobody is probed: a member is what the script says, alive by default. Knows no address and no datagram.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field, replace

from swactor_core.errors import ConfigError, UsageError
from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member, MembershipContext, MemberState
from swactor_core.values import frozen

log = logging.getLogger(__name__)

_PORTS = itertools.count(1)


@frozen
class Suspicion:
    """What a participant was told by `suspect`."""

    observer: NodeId
    suspect: NodeId
    why: str


@dataclass(slots=True)
class StaticCluster:
    """The participants of one cluster id. `suspicions` are all that were ever told, in order."""

    cluster_id: str
    suspicions: list[Suspicion] = field(default_factory=list)
    _participants: dict[NodeId, StaticMembership] = field(default_factory=dict)
    _members: dict[NodeId, Member] = field(default_factory=dict)

    @property
    def members(self) -> tuple[Member, ...]:
        """Everyone, as the script has it, in order of name."""
        return tuple(sorted(self._members.values(), key=lambda member: member.name))

    def judge(self, node_id: NodeId, state: MemberState, *, observer: NodeId | None = None) -> None:
        """From now on the member is `state` for `observer`, for all others when None.

        Raises UsageError for a node that is not of the cluster.
        """
        former = self._members.get(node_id)
        if former is None or (observer is not None and observer not in self._participants):
            who = node_id if former is None else observer
            raise UsageError(f"node {who:016x} is not in the cluster {self.cluster_id!r}")
        member = replace(former, state=state, incarnation=former.incarnation + 1)
        if observer is None:
            self._members[node_id] = member
        for participant in self._watching(node_id):
            if observer in (None, participant.node_id):
                participant.see(member)

    def join(self, participant: StaticMembership, member: Member) -> None:
        """Everybody sees the newcomer, it sees everybody; a former life of a known member nobody sees.
        Raises ConfigError for a name that is taken."""
        taken = next((m for m in self._members.values() if m.name == member.name), None)
        if taken is not None and taken.node_id != member.node_id and taken.node_id in self._participants:
            raise ConfigError(
                f"two participants of the cluster {self.cluster_id!r} are called {member.name!r}",
                hint="give each a name of its own",
            )
        former = self._members.get(member.node_id)
        if former is not None and former.epoch > member.epoch:
            log.error("%r of epoch %d is over: epoch %d is known", member.name, member.epoch, former.epoch)
            return
        for other in self._members.values():
            if other.node_id != member.node_id:
                participant.see(other)
        self._members[member.node_id] = member
        self._participants[member.node_id] = participant
        for watching in self._watching(member.node_id):
            watching.see(member)

    def end(self, participant: StaticMembership, state: MemberState | None) -> None:
        """The participant stops; the others see it as `state`, or as before when None."""
        node_id = participant.node_id
        if self._participants.get(node_id) is not participant:
            return
        if state is not None:
            self.judge(node_id, state)
        del self._participants[node_id]
        if not self._participants:
            CLUSTERS.pop(self.cluster_id, None)

    def _watching(self, node_id: NodeId) -> list[StaticMembership]:
        return [other for key, other in self._participants.items() if key != node_id]


CLUSTERS: dict[str, StaticCluster] = {}


class StaticMembership:
    """`swactor_core.spi.membership.Membership`. Raises ConfigError for settings: it has none."""

    def __init__(self, context: MembershipContext) -> None:
        if context.settings:
            raise ConfigError(
                f"membership static: {sorted(context.settings)[0]!r} is not a setting",
                hint="it has none; its script is swactor_testing.static.CLUSTERS",
            )
        self.node_id = context.node_id
        self._context = context
        self._port = context.bind_port or next(_PORTS) % 65535 + 1
        self._view: dict[NodeId, Member] = {}
        self._cluster: StaticCluster | None = None
        self._ended = False

    @property
    def address(self) -> tuple[str, int]:
        """A name only: nobody listens there."""
        return self._context.bind_host, self._port

    async def start(self) -> None:
        context = self._context
        member = Member(
            name=context.name,
            node_id=context.node_id,
            epoch=context.epoch,
            incarnation=0,
            state=MemberState.ALIVE,
            public_key=context.public_key,
            host=context.host,
            port=context.port,
            gossip_host=context.bind_host,
            gossip_port=self._port,
            role=context.role,
        )
        cluster = CLUSTERS.get(context.cluster_id) or StaticCluster(context.cluster_id)
        cluster.join(self, member)
        CLUSTERS[context.cluster_id] = self._cluster = cluster
        self._view[context.node_id] = member

    def see(self, member: Member) -> None:
        """The cluster's news of another member: in the view at once, told in the loop's next turn."""
        self._view[member.node_id] = member
        asyncio.get_running_loop().call_soon(self._tell, member)

    def _tell(self, member: Member) -> None:
        if self._ended:
            return
        try:
            self._context.on_change(member)
        except Exception:
            log.exception("on_change failed")

    def members(self) -> tuple[Member, ...]:
        return tuple(sorted(self._view.values(), key=lambda member: member.name))

    def suspect(self, node_id: NodeId, why: str) -> None:
        """Kept in the cluster's `suspicions`; changes nothing."""
        if self._cluster is not None and not self._ended:
            self._cluster.suspicions.append(Suspicion(self.node_id, node_id, why))

    async def leave(self) -> None:
        self._end(MemberState.LEFT)

    async def close(self) -> None:
        self._end(None)

    def _end(self, state: MemberState | None) -> None:
        if not self._ended:
            self._ended = True
            if self._cluster is not None:
                self._cluster.end(self, state)


class StaticPlugin:
    """`swactor_core.spi.membership.MembershipPlugin`."""

    def create(self, context: MembershipContext) -> StaticMembership:
        """Raises ConfigError."""
        return StaticMembership(context)
