"""What one participant holds: its own record, those of the others, and what a claim does to them.

The rules are SWIM's (section 4.2) with epochs: which claim stands (`members.py`), who is suspected and until
when, what is passed on as a rumour. Knows no packet, no probe and no clock but the `now` that it is given;
what follows from a claim outside of the table is handed back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from swactor_core.spi.membership import Member, MemberState
from swactor_core.values import frozen

from swactor_membership_swim.events import Changed, Superseded
from swactor_membership_swim.gossip import RumourQueue
from swactor_membership_swim.members import (
    MAX_INCARNATION,
    Claim,
    Entry,
    Life,
    Suspicion,
    Verdict,
    judge,
    later_life,
    life_of,
)
from swactor_membership_swim.roster import Roster
from swactor_membership_swim.settings import SwimSettings
from swactor_membership_swim.wire import encode_claim


@frozen
class Ask:
    """Somebody else suspects this member: ask it ourselves, and tell it so."""

    entry: Entry


Outcome = Ask | Changed | Superseded


class Standing:
    """`me` is this participant's record. For `answer_lasts` seconds an answer to a probe of ours outweighs
    somebody else's word of a death. `superseded`: another life stands in this one's place, and nothing more
    is to be heard."""

    def __init__(self, me: Member, settings: SwimSettings) -> None:
        self.me = me
        self.life = life_of(me)
        self.roster = Roster(limit=settings.member_limit, tombstone=settings.tombstone)
        self.rumours = RumourQueue(settings.retransmit)
        self.superseded = False
        self.counters: Counter[str] = Counter()
        self.answer_lasts = 2 * settings.probe_interval
        self._settings = settings

    def hear(self, claim: Claim, now: float, *, merged: bool = False) -> tuple[Outcome, ...]:
        """Takes a claim, and says what follows; `merged` when it stands in somebody's table and is nobody's
        evidence."""
        return tuple(self._hear(claim, now, merged=merged))

    def bury(self, entry: Entry, now: float) -> tuple[Outcome, ...]:
        """Its suspicion has lasted long enough: this participant says that it is dead."""
        death = replace(entry.member, state=MemberState.DEAD)
        return tuple(self._change(entry, Claim(death, self.life), now, merged=False))

    def depart(self) -> None:
        """From here on this participant's record says Left."""
        self.me = replace(self.me, state=MemberState.LEFT)

    def give_up(self, by: Member) -> Superseded:
        """Another life has this participant's place: it is over here, and nothing else is taken."""
        self.superseded = True
        self.me = replace(self.me, state=MemberState.DEAD)
        return Superseded(by)

    def members(self) -> tuple[Member, ...]:
        """This participant and all that it holds, the dead and departed for a while included, by name."""
        everybody = [self.me, *(entry.member for entry in self.roster)]
        return tuple(sorted(everybody, key=lambda member: member.name))

    def table(self) -> list[Member]:
        """What is told to whoever asks for all: deaths that are hearsay are not passed on."""
        return [self.me, *(entry.member for entry in self.roster if not entry.hearsay)]

    def claims_about(self, life: Life, *, own: bool = False) -> list[Claim]:
        """What a packet to or about that life must carry: the accusation against it, so that it can refute
        (the suspect is told first), and our own record where the receiver lacks it."""
        claims = [Claim(self.me)] if own or self.me.state is not MemberState.ALIVE else []
        entry = self.roster.of_life(life) or self.roster.of_node(life.node_id)
        if entry is not None and (
            entry.member.state is not MemberState.ALIVE or life_of(entry.member) != life
        ):
            witness = entry.suspicion is not None and self.life in entry.suspicion.accusers
            claims.append(Claim(entry.member, self.life if witness else None))
        return claims

    def record_of(self, life: Life) -> list[Claim]:
        """A relayed answer brings along what the relay holds of the subject: perhaps its refutation."""
        entry = self.roster.of_life(life)
        return [] if entry is None or entry.member.incarnation == 0 else [Claim(entry.member)]

    # Suspicions

    def suspects(self) -> list[tuple[Entry, Suspicion]]:
        return [(entry, entry.suspicion) for entry in self.roster if entry.suspicion is not None]

    def spare(self, until: float) -> None:
        """No suspect dies before then."""
        for _, suspicion in self.suspects():
            suspicion.not_before = until

    def dies_at(self, suspicion: Suspicion, *, isolated: bool) -> float:
        """When it becomes a death; later while this participant itself is `isolated`."""
        at = suspicion.deadline(self._settings, possible=len(self.roster.present()) - 1)
        if isolated:
            longest = self._settings.suspicion_max * self._settings.isolation_factor
            at = max(at, suspicion.began + longest)
        return at

    # What a claim does

    def _hear(self, claim: Claim, now: float, *, merged: bool) -> Iterator[Outcome]:
        member = claim.member
        if member.name == self.me.name:
            yield from self._hear_of_me(claim)
            return
        if member.node_id == self.life.node_id:
            return  # our own key under another name: a former life of ours
        entry = self.roster.get(member.name)
        verdict = judge(entry.member if entry is not None else None, member)
        if verdict in (Verdict.NEW, Verdict.REPLACES_LIFE):
            yield from self._adopt(claim, now, merged=merged)
        elif verdict is Verdict.CONFIRMS:
            assert entry is not None
            self._confirm(entry, claim, merged=merged)
        elif verdict is Verdict.CHANGES:
            assert entry is not None
            contested = member.state is MemberState.DEAD and entry.present
            if contested and (merged or now - entry.answered <= self.answer_lasts):
                # An old table, or a judge who is worse connected than we are: an accusation, not a death.
                suspect = replace(member, state=MemberState.SUSPECT)
                yield from self._hear(Claim(suspect, claim.accuser), now, merged=merged)
            else:
                yield from self._change(entry, claim, now, merged=merged)

    def _hear_of_me(self, claim: Claim) -> Iterator[Outcome]:
        member = claim.member
        if life_of(member) != self.life:
            if later_life(member, self.me):
                if member.state is not MemberState.SUSPECT:  # else its end, or its word, decides
                    yield self.give_up(member)
            else:
                self._announce()  # somebody still holds a former life of this name
        elif self.me.state is MemberState.LEFT:
            self._announce()
        elif member.state is MemberState.LEFT:
            yield self.give_up(member)
        elif member.state is not MemberState.ALIVE or member.incarnation > self.me.incarnation:
            # Stale accusations are answered too: their sender has missed an earlier refutation.
            if member.incarnation >= MAX_INCARNATION:
                yield self.give_up(member)
                return
            if member.incarnation >= self.me.incarnation:
                self.me = replace(self.me, incarnation=member.incarnation + 1)
                self.counters["refuted"] += 1
            self._announce()

    def _announce(self) -> None:
        self.rumours.put(self.me.name, encode_claim(Claim(self.me)))

    def _adopt(self, claim: Claim, now: float, *, merged: bool) -> Iterator[Outcome]:
        member = claim.member
        over = member.state in (MemberState.DEAD, MemberState.LEFT)
        entry = self.roster.put(member, now, hearsay=merged and over)
        if entry is None:
            self.counters["member limit"] += 1
            return
        if member.state is MemberState.SUSPECT:
            yield from self._begin_suspicion(entry, claim, now, merged=merged)
        if not entry.hearsay:
            self.rumours.put(member.name, encode_claim(claim))
        yield Changed(member)

    def _change(self, entry: Entry, claim: Claim, now: float, *, merged: bool) -> Iterator[Outcome]:
        before, member = entry.member, claim.member
        entry.member = member
        entry.suspicion = None
        if member.state is not before.state:
            entry.changed = now
        if member.state is MemberState.SUSPECT:
            yield from self._begin_suspicion(entry, claim, now, merged=merged)
        self.rumours.put(member.name, encode_claim(claim))
        if replace(before, incarnation=member.incarnation) != member:
            yield Changed(member)

    def _begin_suspicion(self, entry: Entry, claim: Claim, now: float, *, merged: bool) -> Iterator[Ask]:
        entry.suspicion = suspicion = Suspicion(now)
        self._count_witness(suspicion, entry, claim, merged=merged)
        if claim.accuser != self.life:
            yield Ask(entry)

    def _count_witness(self, suspicion: Suspicion, entry: Entry, claim: Claim, *, merged: bool) -> bool:
        """A merged table is no witness, nor is the accused itself."""
        accuser = claim.accuser
        if merged or accuser is None or accuser == life_of(entry.member) or accuser in suspicion.accusers:
            return False
        if len(suspicion.accusers) > self._settings.confirmations:
            return False
        suspicion.accusers.add(accuser)
        return True

    def _confirm(self, entry: Entry, claim: Claim, *, merged: bool) -> None:
        assert entry.suspicion is not None
        if self._count_witness(entry.suspicion, entry, claim, merged=merged):
            self.rumours.put(entry.member.name, encode_claim(claim))
