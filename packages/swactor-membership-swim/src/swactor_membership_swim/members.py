"""Which claim about a member stands, and how long a suspicion lasts. Pure rules over `Member` records.

A life is (name, epoch): one start of one process. Within a life claims are ordered by incarnation, which only
the member itself raises, and then by the table below. Knows no clock but the `now` it is given, no network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member, MemberState
from swactor_core.values import frozen

from swactor_membership_swim.settings import SwimSettings

MAX_INCARNATION = 1 << 48
"""Highest incarnation on the wire. A member that would have to go beyond it to refute gives up loudly."""


@frozen
class Life:
    """One start of one node: what a datagram's seal proves about its sender."""

    node_id: NodeId
    epoch: int


@frozen
class Claim:
    """Somebody says: this member, in this state, at this incarnation. `accuser` is who first said Suspect or
    Dead from its own evidence; None where the claim is nobody's evidence (a merged table, an own record)."""

    member: Member
    accuser: Life | None = None


class Relation(Enum):
    """The claimed incarnation against the held one."""

    LOWER = -1
    EQUAL = 0
    HIGHER = 1


_ANY = frozenset(Relation)
_NEWER = frozenset({Relation.HIGHER})
_NOT_OLDER = frozenset({Relation.EQUAL, Relation.HIGHER})
_NEVER: frozenset[Relation] = frozenset()

PRECEDENCE: dict[tuple[MemberState, MemberState], frozenset[Relation]] = {
    # (held, claimed): relations of the claimed incarnation with which the claim replaces what is held
    (MemberState.ALIVE, MemberState.ALIVE): _NEWER,
    (MemberState.ALIVE, MemberState.SUSPECT): _NOT_OLDER,
    (MemberState.ALIVE, MemberState.DEAD): _NOT_OLDER,
    (MemberState.ALIVE, MemberState.LEFT): _ANY,
    (MemberState.SUSPECT, MemberState.ALIVE): _NEWER,
    (MemberState.SUSPECT, MemberState.SUSPECT): _NEWER,
    (MemberState.SUSPECT, MemberState.DEAD): _NOT_OLDER,
    (MemberState.SUSPECT, MemberState.LEFT): _ANY,
    (MemberState.DEAD, MemberState.ALIVE): _NEWER,  # a member behind a healed partition comes back
    (MemberState.DEAD, MemberState.SUSPECT): _NEWER,
    (MemberState.DEAD, MemberState.DEAD): _NEWER,
    (MemberState.DEAD, MemberState.LEFT): _ANY,
    (MemberState.LEFT, MemberState.ALIVE): _NEVER,  # only a new epoch returns
    (MemberState.LEFT, MemberState.SUSPECT): _NEVER,
    (MemberState.LEFT, MemberState.DEAD): _NEVER,
    (MemberState.LEFT, MemberState.LEFT): _NEVER,
}


class Verdict(StrEnum):
    """What a claim does to what is held about a name."""

    NEW = "new"  # the name was unknown
    REPLACES_LIFE = "replaces life"  # a later life of the name
    CHANGES = "changes"  # same life, the claim stands
    CONFIRMS = "confirms"  # the same suspicion, perhaps by another accuser
    STALE = "stale"  # nothing
    OLD_LIFE = "old life"  # about a life that is over


def life_of(member: Member) -> Life:
    return Life(member.node_id, member.epoch)


def later_life(member: Member, other: Member) -> bool:
    """Whether `member` is a later life of the name than `other`; equal epochs are settled by node id, so
    that two claimants of one name can never both stand."""
    return (member.epoch, member.node_id) > (other.epoch, other.node_id)


def judge(held: Member | None, claim: Member) -> Verdict:
    """The verdict on a claim about the name of `held`."""
    if held is None:
        return Verdict.NEW
    if life_of(held) != life_of(claim):
        return Verdict.REPLACES_LIFE if later_life(claim, held) else Verdict.OLD_LIFE
    difference = claim.incarnation - held.incarnation
    relation = Relation((difference > 0) - (difference < 0))
    if relation in PRECEDENCE[held.state, claim.state]:
        return Verdict.CHANGES
    if held.state is claim.state is MemberState.SUSPECT and relation is Relation.EQUAL:
        return Verdict.CONFIRMS
    return Verdict.STALE


def suspicion_length(settings: SwimSettings, confirmations: int, *, possible: int) -> float:
    """Seconds from suspicion to death (Lifeguard, section IV-B): falls from `suspicion_max` to
    `suspicion_min` with the logarithm of the independent confirmations, of which `possible` can come."""
    expected = min(settings.confirmations, possible)
    if expected < 1:
        return settings.suspicion_min
    share = math.log(min(confirmations, expected) + 1) / math.log(expected + 1)
    return settings.suspicion_max - (settings.suspicion_max - settings.suspicion_min) * share


@dataclass(slots=True)
class Suspicion:
    """A running suspicion of one (name, epoch, incarnation), of which any change begins another. `accusers`
    are independent witnesses; a merged table is none. `not_before` holds the verdict back after this
    participant itself was stalled."""

    began: float
    accusers: set[Life] = field(default_factory=set)
    not_before: float = 0.0

    def deadline(self, settings: SwimSettings, *, possible: int) -> float:
        confirmations = max(0, len(self.accusers) - 1)
        length = suspicion_length(settings, confirmations, possible=possible)
        return max(self.began + length, self.not_before)


@dataclass(slots=True)
class Entry:
    """What this participant holds about one name."""

    member: Member
    changed: float
    suspicion: Suspicion | None = None
    answered: float = -math.inf
    """When this life last answered a probe of ours."""
    hearsay: bool = False
    """A death learnt from a merged table: kept, but not passed on by tables, so that it ends."""
    outlived: float = math.inf
    """When an earlier life of its key was first heard beside it."""

    @property
    def present(self) -> bool:
        return self.member.state in (MemberState.ALIVE, MemberState.SUSPECT)

    @property
    def has_twin(self) -> bool:
        """Whether it answered a probe that was sent after an earlier life of its key had been heard: two
        processes live with that key, and this is not one that was killed and has not been missed yet."""
        return self.answered > self.outlived
