"""The static membership: everyone alive at once, verdicts by script, and a registry that empties itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from swactor_core.errors import ConfigError, UsageError
from swactor_core.ids import NodeId, node_id_of
from swactor_core.plugins import load_plugins
from swactor_core.spi.membership import Member, MembershipContext, MemberState
from swactor_core.spi.provider import Kind
from swactor_testing.static import CLUSTERS, StaticMembership, StaticPlugin, Suspicion


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    yield
    left = dict(CLUSTERS)
    CLUSTERS.clear()
    assert not left


class Participant:
    """One participant and what it was told."""

    def __init__(
        self, name: str, *, cluster: str = "one", epoch: int = 1, secret: str = "", **settings: Any
    ) -> None:
        self.heard: list[Member] = []
        key = (secret or name).encode().ljust(32, b".")
        self.id = node_id_of(key)
        context = MembershipContext(
            cluster_id=cluster,
            gossip_key=bytes(32),
            name=name,
            node_id=self.id,
            epoch=epoch,
            public_key=key,
            role="node",
            host="127.0.0.1",
            port=7,
            bind_host="127.0.0.1",
            bind_port=0,
            seeds=(),
            on_change=self.heard.append,
            settings=settings,
        )
        self.membership: StaticMembership = StaticPlugin().create(context)

    def told(self) -> list[tuple[str, str]]:
        return [(member.name, str(member.state)) for member in self.heard]


async def started(*participants: Participant) -> None:
    for participant in participants:
        await participant.membership.start()
    await asyncio.sleep(0)


async def left(*participants: Participant) -> None:
    for participant in participants:
        await participant.membership.leave()


async def test_all_see_each_other_alive_at_once() -> None:
    a, b, c = (Participant(name) for name in "abc")
    await started(b, a, c)
    assert a.told() == [("b", "Alive"), ("c", "Alive")]
    assert b.told() == [("a", "Alive"), ("c", "Alive")]
    assert sorted(c.told()) == [("a", "Alive"), ("b", "Alive")]
    for participant in (a, b, c):
        assert [member.name for member in participant.membership.members()] == ["a", "b", "c"]
    await left(a, b, c)


async def test_clusters_do_not_meet() -> None:
    a, b = Participant("a"), Participant("b", cluster="two")
    await started(a, b)
    assert a.told() == b.told() == []
    assert sorted(CLUSTERS) == ["one", "two"]
    await left(a, b)


async def test_a_verdict_for_all_and_for_one() -> None:
    a, b, c = (Participant(name) for name in "abc")
    await started(a, b, c)
    for participant in (a, b, c):
        participant.heard.clear()
    cluster = CLUSTERS["one"]
    cluster.judge(b.id, MemberState.SUSPECT, observer=a.id)
    await asyncio.sleep(0)
    assert (a.told(), b.told(), c.told()) == ([("b", "Suspect")], [], [])
    cluster.judge(b.id, MemberState.DEAD)
    await asyncio.sleep(0)
    assert (a.told()[1:], b.told(), c.told()) == ([("b", "Dead")], [], [("b", "Dead")])
    assert a.heard[-1].incarnation > 0
    assert {m.name: m.state for m in a.membership.members()}["b"] is MemberState.DEAD
    await left(a, b, c)


async def test_a_newcomer_hears_the_verdicts() -> None:
    a, b = Participant("a"), Participant("b")
    await started(a)
    CLUSTERS["one"].judge(a.id, MemberState.SUSPECT)
    await started(b)
    assert b.told() == [("a", "Suspect")]
    await left(a, b)


async def test_leaving_is_told_and_closing_is_not() -> None:
    a, b, c = (Participant(name) for name in "abc")
    await started(a, b, c)
    a.heard.clear()
    await b.membership.leave()
    await b.membership.leave()
    await c.membership.close()
    await c.membership.close()
    await asyncio.sleep(0)
    assert a.told() == [("b", "Left")]
    CLUSTERS["one"].judge(c.id, MemberState.DEAD)  # what nobody told, the script may find out
    await asyncio.sleep(0)
    assert a.told() == [("b", "Left"), ("c", "Dead")]
    await a.membership.close()


async def test_nobody_is_told_after_its_end() -> None:
    a, b = Participant("a"), Participant("b")
    await a.membership.start()
    await b.membership.start()
    await a.membership.leave()  # the news of b is on its way
    await asyncio.sleep(0)
    assert a.told() == []
    await b.membership.leave()


async def test_a_later_life_takes_the_place_of_the_former() -> None:
    a, old = Participant("a"), Participant("b", epoch=1)
    await started(a, old)
    await old.membership.close()
    new = Participant("b", epoch=2)
    await started(new)
    assert [(member.name, member.epoch) for member in a.heard] == [("b", 1), ("b", 2)]
    await left(a, new)


async def test_suspicions_are_kept_and_change_nothing() -> None:
    a, b = Participant("a"), Participant("b")
    await started(a, b)
    a.membership.suspect(b.id, "link lost")
    assert CLUSTERS["one"].suspicions == [Suspicion(a.id, b.id, "link lost")]
    assert {member.state for member in a.membership.members()} == {MemberState.ALIVE}
    await left(a, b)


async def test_a_name_is_taken_once() -> None:
    a, twin = Participant("a"), Participant("a", secret="another")
    await started(a)
    with pytest.raises(ConfigError, match=r"two participants .* 'a'"):
        await twin.membership.start()
    await left(a)


async def test_a_listener_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    a, b = Participant("a"), Participant("b")

    def broken(member: Member) -> None:
        raise RuntimeError("a defect of the host")

    object.__setattr__(a.membership._context, "on_change", broken)
    await started(a, b)
    assert b.told() == [("a", "Alive")]
    assert "a defect of the host" in caplog.text
    await left(a, b)


async def test_scripts_about_strangers_and_settings_are_refused() -> None:
    a = Participant("a")
    await started(a)
    with pytest.raises(UsageError, match="0000000000000009 is not in the cluster 'one'"):
        CLUSTERS["one"].judge(NodeId(9), MemberState.DEAD)
    with pytest.raises(UsageError, match="0000000000000009"):
        CLUSTERS["one"].judge(a.id, MemberState.DEAD, observer=NodeId(9))
    with pytest.raises(ConfigError, match="'profile' is not a setting"):
        Participant("b", profile="lan")
    await left(a)


def test_it_is_found_by_name_and_says_that_it_stays() -> None:
    provider = load_plugins().select(Kind.MEMBERSHIP, "static")
    assert provider.crosses_processes is False
    assert isinstance(provider.factory(), StaticPlugin)
