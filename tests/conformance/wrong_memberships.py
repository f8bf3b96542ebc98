"""The static membership with one thing broken at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from swactor_core.errors import ResourceError
from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member, MembershipContext, MemberState
from swactor_testing.conformance import MembershipCapabilities, MembershipContract
from swactor_testing.conformance.membership import MembershipRig, Participant
from swactor_testing.static import CLUSTERS, StaticMembership
from wrong_kit import caught_by

VIEWS = "test_everyone_learns_everyone_with_every_fact"
TOLD = "test_a_change_is_told_once_and_never_of_oneself"
DEATH = "test_a_silent_end_is_a_death_within_the_bound"
LEFT = "test_a_departure_is_told_as_one"
REBORN = "test_a_restarted_member_is_a_new_life[Dead]"
ENDED = "test_after_close_nothing_is_told_and_nothing_is_left"

_kept: list[Any] = []
Told = Callable[[Member], None]


class Plugin:
    def __init__(self, parts: Any) -> None:
        self._parts = parts

    def create(self, context: MembershipContext) -> StaticMembership:
        told = context.on_change
        return self._parts.membership(replace(context, on_change=lambda m: self._parts.tell(told, m)))


class Wrong(MembershipContract):
    capabilities = MembershipCapabilities(
        provider="static", crosses_processes=False, sealed=False, converges_within=0.5, dead_within=0.5
    )
    membership: ClassVar[type] = StaticMembership
    verdicts = True

    @classmethod
    def tell(cls, told: Told, member: Member) -> None:
        told(member)

    @pytest.fixture
    def plugin(self) -> Any:
        return Plugin(type(self))

    async def kill(self, rig: MembershipRig, participant: Participant) -> None:
        await super().kill(rig, participant)
        if self.verdicts:
            CLUSTERS[rig.cluster_id].judge(participant.node_id, MemberState.DEAD)


class TestUnbroken(Wrong):
    capabilities = replace(Wrong.capabilities, converges_within=10.0, dead_within=10.0)


# --- views ---


@caught_by("test_a_participant_sees_itself", "unpack")
class TestLeavesItselfOut(Wrong):
    class membership(StaticMembership):
        def members(self) -> tuple[Member, ...]:
            return tuple(m for m in super().members() if m.node_id != self.node_id)


@caught_by(VIEWS, "in order of name")
class TestIsInNoOrder(Wrong):
    class membership(StaticMembership):
        def members(self) -> tuple[Member, ...]:
            return super().members()[::-1]


@caught_by(VIEWS, r"assert \('127.0.0.1', 0\) ==")
class TestForgetsPorts(Wrong):
    class membership(StaticMembership):
        def see(self, member: Member) -> None:
            super().see(replace(member, port=0))


@caught_by(VIEWS, "in vain for")
class TestReadyBeforeItConverged(Wrong):
    """It never learns of those that joined after it."""

    class membership(StaticMembership):
        def see(self, member: Member) -> None:
            if len(self._view) < 3:
                super().see(member)


@caught_by(TOLD, "told of itself")
class TestTellsOfItself(Wrong):
    class membership(StaticMembership):
        async def start(self) -> None:
            await super().start()
            self.see(self._view[self.node_id])


@caught_by(TOLD, "told again without a change")
class TestTellsTwice(Wrong):
    @classmethod
    def tell(cls, told: Told, member: Member) -> None:
        told(member)
        told(member)


@caught_by("test_a_view_is_never_behind_what_was_told", "in vain for a to see")
class TestTellsAheadOfItsView(Wrong):
    class membership(StaticMembership):
        def see(self, member: Member) -> None:
            if member.state is MemberState.DEAD:
                asyncio.get_running_loop().call_soon(self._tell, member)
            else:
                super().see(member)


@caught_by("test_clusters_do_not_meet", r"== \['friend', 'one'\]")
class TestHearsEverybody(Wrong):
    class membership(StaticMembership):
        def __init__(self, context: MembershipContext) -> None:
            super().__init__(replace(context, cluster_id=context.cluster_id.partition("-other")[0]))


@caught_by("test_a_seed_that_does_not_answer_is_tried_for_ever", "ResourceError")
class TestGivesUpOnItsSeeds(Wrong):
    class membership(StaticMembership):
        async def start(self) -> None:
            cluster = CLUSTERS.get(self._context.cluster_id)
            if self._context.seeds and cluster is None:
                raise ResourceError("no seed answers")
            await super().start()


# --- verdicts ---


@caught_by(DEATH, "in vain for a to see .* as Dead")
class TestNeverFindsADeath(Wrong):
    verdicts = False


@caught_by(DEATH, "a crash is no departure|in vain for a to see .* as Dead")
class TestSaysLeftOfACrash(Wrong):
    class membership(StaticMembership):
        async def close(self) -> None:
            self._end(MemberState.LEFT)


@caught_by(DEATH, "DEAD")
class TestAccusesABystander(Wrong):
    @classmethod
    def tell(cls, told: Told, member: Member) -> None:
        told(member)
        if member.state is MemberState.DEAD:
            key = b"b".ljust(32, b".")
            from swactor_core.ids import node_id_of

            told(replace(member, name="b", node_id=node_id_of(key)))


@caught_by("test_suspicion_from_outside_is_no_verdict", "to see each other alive|became a verdict")
class TestMakesSuspicionAVerdict(Wrong):
    class membership(StaticMembership):
        def suspect(self, node_id: NodeId, why: str) -> None:
            if self._cluster is not None and node_id in self._view:
                self._cluster.judge(node_id, MemberState.DEAD)


# --- departures and lives ---


@caught_by(LEFT, "in vain for a to see .* as Left")
class TestLeavesWithoutAWord(Wrong):
    class membership(StaticMembership):
        async def leave(self) -> None:
            await self.close()


@caught_by(LEFT, r"told_of\(people\[2\]\) ==")
class TestSaysDeadOfADeparture(Wrong):
    class membership(StaticMembership):
        async def leave(self) -> None:
            if self._cluster is not None and not self._ended:
                self._cluster.judge(self.node_id, MemberState.DEAD)
            await super().leave()


@caught_by("test_leaving_is_bounded_when_nobody_hears", "in vain for a departure that nobody hears")
class TestLeavingHangs(Wrong):
    class membership(StaticMembership):
        async def leave(self) -> None:
            await asyncio.sleep(5)


@caught_by(REBORN, "in vain for")
class TestKeepsTheWrongEpochAfterARestart(Wrong):
    class membership(StaticMembership):
        def see(self, member: Member) -> None:
            known = self._view.get(member.node_id)
            super().see(member if known is None else replace(member, epoch=known.epoch))


@caught_by(REBORN, "a member is listed twice")
class TestListsBothLives(Wrong):
    class membership(StaticMembership):
        former: tuple[Member, ...] = ()

        def see(self, member: Member) -> None:
            known = self._view.get(member.node_id)
            if known is not None and known.epoch < member.epoch:
                self.former += (known,)
            super().see(member)

        def members(self) -> tuple[Member, ...]:
            return tuple(sorted((*self.former, *super().members()), key=lambda m: m.name))


@caught_by("test_a_life_that_replaces_a_living_one_is_told", "in vain for")
class TestARestartIsNoNews(Wrong):
    class membership(StaticMembership):
        def see(self, member: Member) -> None:
            known = self._view.get(member.node_id)
            if known is not None and known.state is member.state:
                self._view[member.node_id] = member
            else:
                super().see(member)


@caught_by("test_a_former_life_does_not_come_back", "a former life")
class TestTakesTheLastOneThatSpeaks(Wrong):
    class membership(StaticMembership):
        async def start(self) -> None:
            cluster = CLUSTERS.get(self._context.cluster_id)
            if cluster is not None:
                cluster._members.pop(self.node_id, None)
            await super().start()


# --- the end ---


@caught_by(ENDED, "news after the close")
class TestTellsAfterItsClose(Wrong):
    class membership(StaticMembership):
        async def close(self) -> None:
            pass


@caught_by(ENDED, "left over")
class TestLeavesATask(Wrong):
    class membership(StaticMembership):
        async def start(self) -> None:
            await super().start()
            _kept.append(asyncio.ensure_future(asyncio.sleep(1000)))


@caught_by(ENDED, "left open")
class TestLeavesASocket(Wrong):
    class membership(StaticMembership):
        async def start(self) -> None:
            await super().start()
            _kept.append(socket.socket())
