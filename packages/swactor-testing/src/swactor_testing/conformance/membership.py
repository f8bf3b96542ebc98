"""The membership contract (spec section 9): views that converge, verdicts within bounds, lives, ends.

The guarantees are those of `swactor_core.spi.membership`. Membership is liveness evidence for the pool gate:
what it never told is as wrong as what it told late.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from swactor_core.errors import ResourceError
from swactor_core.ids import NodeId, node_hex, node_id_of
from swactor_core.spi.membership import Member, Membership, MembershipContext, MembershipPlugin, MemberState
from swactor_core.spi.provider import Kind

from swactor_testing.conformance import bystander
from swactor_testing.conformance.base import Contract
from swactor_testing.conformance.bounds import Footprint, until, within
from swactor_testing.conformance.capabilities import MembershipCapabilities

LEAVE_BOUND = 1.0
SLACK = 1.0
"""For a busy machine, beyond a bound that the interface states."""

_BYSTANDER = "from swactor_testing.conformance.bystander import main; main()"
_CLUSTERS = itertools.count(1)


@dataclass(slots=True)
class Participant:
    """A started membership. `told` is what `on_change` said, in order."""

    membership: Membership
    context: MembershipContext
    told: list[Member] = field(default_factory=list)

    @property
    def node_id(self) -> NodeId:
        return self.context.node_id

    def view(self) -> dict[str, Member]:
        return {member.name: member for member in self.membership.members()}

    def state_of(self, other: Participant) -> MemberState | None:
        """How it sees that life of `other`, or a later one; None when it knows neither."""
        member = self.view().get(other.context.name)
        return None if member is None or member.epoch < other.context.epoch else member.state

    def told_of(self, other: Participant) -> list[MemberState]:
        """The states of that life of `other` that it was told, without repeats for an endpoint's sake."""
        life = (other.node_id, other.context.epoch)
        states = [member.state for member in self.told if (member.node_id, member.epoch) == life]
        return [state for state, _ in itertools.groupby(states)]


class MembershipRig:
    """Makes participants of one cluster, and closes them."""

    def __init__(self, plugin: MembershipPlugin, capabilities: MembershipCapabilities) -> None:
        self._plugin = plugin
        self._settings = capabilities.settings
        self.patience = capabilities.converges_within
        self.cluster_id = f"conformance-{next(_CLUSTERS)}"
        self._all: list[Participant] = []

    def create(
        self,
        name: str,
        *,
        seeds: tuple[Participant | tuple[str, int], ...] = (),
        epoch: int = 1,
        port: int = 0,
        cluster_id: str = "",
        gossip_key: bytes = bytes(range(32)),
        role: str = "node",
    ) -> Participant:
        """A participant that is not started."""
        told: list[Member] = []
        key = name.encode().ljust(32, b".")
        context = MembershipContext(
            cluster_id=cluster_id or self.cluster_id,
            gossip_key=gossip_key,
            name=name,
            node_id=node_id_of(key),
            epoch=epoch,
            public_key=key,
            role=role,
            host="127.0.0.1",
            port=4000 + len(self._all),
            bind_host="127.0.0.1",
            bind_port=port,
            seeds=tuple(s.membership.address if isinstance(s, Participant) else s for s in seeds),
            on_change=told.append,
            settings=dict(self._settings),
        )
        made = Participant(self._plugin.create(context), context, told)
        self._all.append(made)
        return made

    async def start(self, made: Participant) -> Participant:
        await within(self.patience, made.membership.start(), f"the start of {made.context.name}")
        return made

    async def cluster(self, *names: str) -> list[Participant]:
        """Participants that see each other alive, all joined through the first."""
        people = [await self.start(self.create(names[0]))]
        for name in names[1:]:
            people.append(await self.start(self.create(name, seeds=(people[0],))))
        await self.converged(*people)
        return people

    async def converged(self, *people: Participant) -> None:
        """Everyone sees everyone alive, in the life that is given, and was told so."""

        def sees(one: Participant, other: Participant) -> bool:
            if one.state_of(other) is not MemberState.ALIVE:
                return False
            same_life = one.view()[other.context.name].epoch == other.context.epoch
            return same_life and (one is other or MemberState.ALIVE in one.told_of(other))

        def all_alive() -> bool:
            return all(sees(one, other) for one in people for other in people)

        names = ", ".join(f"{one.context.name} (epoch {one.context.epoch})" for one in people)
        await until(self.patience, all_alive, f"{names} to see each other alive")

    async def close(self) -> None:
        for one in self._all:
            await within(self.patience, one.membership.close(), f"the close of {one.context.name}")


class MembershipContract(Contract[MembershipPlugin, MembershipCapabilities]):
    """Everything a membership keeps. Heirs give the fixture `plugin` and `capabilities`."""

    kind = Kind.MEMBERSHIP

    @pytest_asyncio.fixture(loop_scope="function")
    async def rig(self, plugin: MembershipPlugin) -> AsyncIterator[MembershipRig]:
        rig = MembershipRig(plugin, self.capabilities)
        yield rig
        await rig.close()

    async def kill(self, rig: MembershipRig, participant: Participant) -> None:
        """Ends it without a word, as a crash would. Heirs whose verdicts come by script add it here."""
        await within(rig.patience, participant.membership.close(), "a silent end")

    def test_it_is_registered_under_its_name(self) -> None:
        """Configuration chooses a provider by kind and name."""
        provider = self.provider()
        assert provider.crosses_processes == self.capabilities.crosses_processes

    # --- views ---

    async def test_a_participant_sees_itself(self, rig: MembershipRig) -> None:
        """`members`: the current view, this participant included; `address`: where it receives."""
        one = await rig.start(rig.create("one", role="orchestrator"))
        (member,) = one.membership.members()
        context = one.context
        assert (member.name, member.node_id, member.epoch) == ("one", context.node_id, context.epoch)
        assert (member.state, member.role) == (MemberState.ALIVE, "orchestrator")
        host, port = one.membership.address
        assert host
        assert 0 < port < 1 << 16
        assert (member.gossip_host, member.gossip_port) == (host, port)
        assert one.told == [], "`on_change` is for other members only"

    async def test_everyone_learns_everyone_with_every_fact(self, rig: MembershipRig) -> None:
        """Section 9: the pool is ready when every candidate is live in the view, with the endpoint material
        that edges are provisioned with. Those that joined through one seed learn of each other."""
        people = await rig.cluster("a", "b", "c", "d")
        for one in people:
            names = [member.name for member in one.membership.members()]
            assert names == sorted(names), "members are in order of name"
            for other in people:
                member, context = one.view()[other.context.name], other.context
                assert member.public_key == context.public_key
                assert (member.host, member.port) == (context.host, context.port)
                assert (member.gossip_host, member.gossip_port) == other.membership.address
                assert member.role == context.role

    async def test_a_change_is_told_once_and_never_of_oneself(self, rig: MembershipRig) -> None:
        """`on_change(member)` for every change of a member's state, epoch or endpoint, other members only:
        each other member is told alive, once."""
        people = await rig.cluster("a", "b", "c")
        for one in people:
            assert all(member.node_id != one.node_id for member in one.told), "told of itself"
            for other in people:
                if other is not one:
                    facts = [
                        (m.state, m.epoch, m.host, m.port, m.gossip_host, m.gossip_port)
                        for m in one.told
                        if m.node_id == other.node_id
                    ]
                    repeats = [left for left, right in itertools.pairwise(facts) if left == right]
                    assert not repeats, f"told again without a change: {repeats}"
                    assert one.told_of(other) == [MemberState.ALIVE]

    async def test_a_view_is_never_behind_what_was_told(self, rig: MembershipRig) -> None:
        """A host that is told asks `members` next: the last told state of each is in the view."""
        people = await rig.cluster("a", "b")
        await self.kill(rig, people[1])
        await self._seen(people[0], people[1], MemberState.DEAD)
        assert people[0].view()["b"].state is people[0].told[-1].state

    async def test_a_seed_that_does_not_answer_is_tried_for_ever(self, rig: MembershipRig) -> None:
        """`start`: seeds that do not answer are retried for ever; who starts first does not matter."""
        seed = await rig.start(rig.create("seed"))
        address = seed.membership.address
        await within(rig.patience, seed.membership.close(), "the end of the first seed")
        early = await rig.start(rig.create("early", seeds=(address,)))
        late = await rig.start(rig.create("late", port=address[1], seeds=(early,)))
        await rig.converged(early, late)

    async def test_clusters_do_not_meet(self, rig: MembershipRig) -> None:
        """`cluster_id`, and `gossip_key` where datagrams are sealed: a stranger at the right address is not
        heard."""
        one = await rig.start(rig.create("one"))
        strangers = [rig.create("other cluster", seeds=(one,), cluster_id=f"{rig.cluster_id}-other")]
        if self.capabilities.sealed:
            strangers.append(rig.create("other key", seeds=(one,), gossip_key=bytes(32)))
        for stranger in strangers:
            await rig.start(stranger)
        friend = await rig.start(rig.create("friend", seeds=(one,)))
        await rig.converged(one, friend)
        assert sorted(one.view()) == ["friend", "one"]
        assert all(len(stranger.view()) == 1 for stranger in strangers)

    # --- verdicts ---

    async def test_a_silent_end_is_a_death_within_the_bound(self, rig: MembershipRig) -> None:
        """Section 9: if pool readiness is lost after provisioning begins, the run faults; so death is told,
        once, by everyone, of the right member, within the bound."""
        people = await rig.cluster("a", "b", "c")
        await self.kill(rig, people[2])
        for one in people[:2]:
            await self._seen(one, people[2], MemberState.DEAD)
            states = one.told_of(people[2])
            assert states.count(MemberState.DEAD) == 1
            assert states[-1] is MemberState.DEAD
            assert MemberState.LEFT not in states, "a crash is no departure"
        assert people[0].told_of(people[1]) == people[1].told_of(people[0]) == [MemberState.ALIVE]

    async def test_suspicion_from_outside_is_no_verdict(self, rig: MembershipRig) -> None:
        """`suspect`: probe that member at once; never a verdict by itself. One that is alive refutes it."""
        one, other = await rig.cluster("a", "b")
        for _ in range(20):
            one.membership.suspect(other.node_id, "a link broke")
        one.membership.suspect(node_id_of(b"nobody"), "of a node that nobody knows")
        # A newcomer's way through the cluster, and then a death of it: time enough for a verdict.
        third = await rig.start(rig.create("c", seeds=(one,)))
        await rig.converged(one, other, third)
        await self.kill(rig, third)
        await self._seen(one, third, MemberState.DEAD)
        assert one.state_of(other) is MemberState.ALIVE
        assert MemberState.DEAD not in one.told_of(other), "outside evidence became a verdict"

    @contextlib.asynccontextmanager
    async def stopped(self, rig: MembershipRig, survivor: Participant) -> AsyncIterator[None]:
        """A third participant, joined and then stopped for a while; it goes on when the block ends. Heirs
        that do not cross processes say how; in all others a process is stopped in earnest."""
        host, port = survivor.membership.address
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _BYSTANDER, self.capabilities.provider),
            *(json.dumps(bystander.to_json(survivor.context)), host, str(port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=dict(os.environ),
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            await within(30.0, child.stdout.readline(), "the bystander's process")
            known = lambda: bystander.NAME in survivor.view()  # noqa: E731
            await until(rig.patience, known, "the bystander to join")
            child.send_signal(signal.SIGSTOP)
            yield
            child.send_signal(signal.SIGCONT)
            alive = lambda: survivor.view()[bystander.NAME].state is MemberState.ALIVE  # noqa: E731
            await until(self.capabilities.dead_within, alive, "the bystander, which goes on, to be alive")
        finally:
            child.kill()
            await within(30.0, child.wait(), "the bystander's end")
            child.stdin.close()

    async def test_one_that_was_stopped_for_a_while_refutes(self, rig: MembershipRig) -> None:
        """`Member`: incarnation orders claims about a life. One that did not answer for `survives` seconds
        may be suspected; when it goes on it is alive, by a later claim of its own, and was never dead."""
        (survivor,) = await rig.cluster("survivor")

        def told() -> list[Member]:
            return [member for member in survivor.told if member.name == bystander.NAME]

        async with self.stopped(rig, survivor):
            with contextlib.suppress(AssertionError):  # not every membership suspects so soon
                suspected = lambda: told()[-1].state is MemberState.SUSPECT  # noqa: E731
                await until(self.capabilities.survives, suspected, "a suspicion")
        alive = lambda: told()[-1].state is MemberState.ALIVE  # noqa: E731
        await until(self.capabilities.dead_within, alive, "the bystander to be told alive")
        life = told()
        states = [member.state for member in life]
        assert MemberState.DEAD not in states, "a participant that goes on was declared dead"
        claims = [member.incarnation for member in life]
        assert claims == sorted(claims), f"claims went back: {claims}"
        if MemberState.SUSPECT in states:
            accused = life[states.index(MemberState.SUSPECT)].incarnation
            assert claims[-1] > accused, "a suspicion ended without a later claim of the accused"

    # --- departures ---

    async def test_a_departure_is_told_as_one(self, rig: MembershipRig) -> None:
        """`leave` tells the others that this is a departure, then stops; bounded by 1 s."""
        people = await rig.cluster("a", "b", "c")
        await within(LEAVE_BOUND + SLACK, people[2].membership.leave(), "a departure")
        for one in people[:2]:
            await self._seen(one, people[2], MemberState.LEFT)
            assert one.told_of(people[2]) == [MemberState.ALIVE, MemberState.LEFT]
        await within(LEAVE_BOUND + SLACK, people[2].membership.leave(), "a second departure")

    async def test_leaving_is_bounded_when_nobody_hears(self, rig: MembershipRig) -> None:
        """`leave`: bounded by 1 s, whoever answers."""
        one, other = await rig.cluster("a", "b")
        await within(rig.patience, one.membership.close(), "a silent end")
        await within(LEAVE_BOUND + SLACK, other.membership.leave(), "a departure that nobody hears")

    # --- lives ---

    @pytest.mark.parametrize("after", [MemberState.DEAD, MemberState.LEFT])
    async def test_a_restarted_member_is_a_new_life(self, rig: MembershipRig, after: MemberState) -> None:
        """`Member`: (name, epoch) identify a life. After its death or departure, a start of the same name
        with a later epoch is alive again, and told as such."""
        one, other = await rig.cluster("a", "b")
        if after is MemberState.DEAD:
            await self.kill(rig, other)
        else:
            await within(LEAVE_BOUND + SLACK, other.membership.leave(), "a departure")
        await self._seen(one, other, after)
        reborn = await rig.start(rig.create("b", seeds=(one,), epoch=2))
        await rig.converged(one, reborn)
        assert [member.name for member in one.membership.members()] == ["a", "b"], "a member is listed twice"
        assert one.told_of(reborn) == [MemberState.ALIVE], "the new life was not told, or not as alive"

    async def test_a_life_that_replaces_a_living_one_is_told(self, rig: MembershipRig) -> None:
        """A restart faster than any verdict: the new epoch is a change, and the host must hear of it, for
        everything of the former life is void (section 39)."""
        one, other = await rig.cluster("a", "b")
        await within(rig.patience, other.membership.close(), "a silent end")
        reborn = await rig.start(rig.create("b", seeds=(one,), epoch=2))
        await rig.converged(one, reborn)
        assert one.told_of(reborn) == [MemberState.ALIVE]
        assert one.view()["b"].epoch == 2

    async def test_a_former_life_does_not_come_back(self, rig: MembershipRig) -> None:
        """Claims are ordered by epoch, then incarnation: a life that was replaced is not seen again."""
        one, other = await rig.cluster("a", "b")
        await within(rig.patience, other.membership.close(), "a silent end")
        reborn = await rig.start(rig.create("b", seeds=(one,), epoch=3))
        await rig.converged(one, reborn)
        await within(rig.patience, reborn.membership.close(), "a silent end")
        ghost = rig.create("b", seeds=(one,), epoch=2)
        await rig.start(ghost)
        friend = await rig.start(rig.create("c", seeds=(one,)))
        await rig.converged(one, friend)
        assert one.view()["b"].epoch == 3, "a former life stands in the place of a later one"
        assert not one.told_of(ghost), "a former life was told"

    # --- the end ---

    async def test_after_close_nothing_is_told_and_nothing_is_left(self, rig: MembershipRig) -> None:
        """`close` stops without a word; idempotent. No task, no thread, no descriptor, no news."""
        before = Footprint.now()
        people = await rig.cluster("a", "b")
        await people[1].membership.close()
        await people[1].membership.close()
        told = len(people[1].told)
        newcomer = await rig.start(rig.create("c", seeds=(people[0],)))
        await rig.converged(people[0], newcomer)
        assert len(people[1].told) == told, "news after the close"
        await rig.close()
        await before.assert_nothing_left()

    async def test_one_that_was_never_started_ends(self, rig: MembershipRig) -> None:
        """A node may stop before it has joined."""
        one = rig.create("one")
        one.membership.suspect(node_id_of(b"nobody"), "before the start")
        await within(LEAVE_BOUND + SLACK, one.membership.leave(), "a departure")
        await within(LEAVE_BOUND + SLACK, one.membership.close(), "a close")

    async def test_an_address_that_is_taken_is_a_resource_error(self, rig: MembershipRig) -> None:
        """`start` binds, and raises ResourceError. Where nothing leaves the process nothing is bound, and a
        second participant of the same address is no trouble."""
        one = await rig.start(rig.create("one"))
        second = rig.create("two", port=one.membership.address[1])
        if self.capabilities.crosses_processes:
            with pytest.raises(ResourceError):
                await second.membership.start()
        else:
            await rig.start(second)

    async def _seen(self, one: Participant, other: Participant, state: MemberState) -> None:
        what = f"{one.context.name} to see {node_hex(other.node_id)} ({other.context.name}) as {state}"
        await until(self.capabilities.dead_within, lambda: one.state_of(other) is state, what)
        # What is in the view is told in the loop's next turns at the latest.
        await until(self.capabilities.dead_within, lambda: state in one.told_of(other), f"{what}, told")
