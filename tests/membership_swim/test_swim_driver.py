"""The participant on real loopback sockets: joining, death, departure, noise, names, errors."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from swactor_core.errors import ConfigError, ResourceError, UsageError
from swactor_core.ids import node_id_of
from swactor_core.plugins import Plugins, PluginState, load_plugins
from swactor_core.spi.membership import Member, MembershipContext, MemberState
from swactor_core.spi.provider import Kind
from swactor_membership_swim import driver, plugin
from swactor_membership_swim.driver import SwimMembership
from swactor_membership_swim.settings import LOCAL

KEY = bytes(range(32))


@dataclass
class Started:
    membership: SwimMembership
    context: MembershipContext
    changes: list[tuple[float, Member]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[dict[str, Member]], bool], *, seconds: float = 5.0) -> float:
        """Waits for a view that fulfils the condition; the loop's time then."""
        async with asyncio.timeout(seconds):
            while not condition({m.name: m for m in self.membership.members()}):
                self.news.clear()
                await self.news.wait()
        return asyncio.get_running_loop().time()


def context_of(label: str, /, **changes: object) -> MembershipContext:
    public_key = label.encode().ljust(32, b".")
    context = MembershipContext(
        cluster_id="test",
        gossip_key=KEY,
        name=label,
        node_id=node_id_of(public_key),
        epoch=1,
        public_key=public_key,
        role="node",
        host="127.0.0.1",
        port=4433,
        bind_host="127.0.0.1",
        bind_port=0,
        seeds=(),
        on_change=lambda member: None,
        settings={"profile": "local"},
    )
    return replace(context, **changes)


@pytest.fixture
async def start() -> AsyncIterator[Callable]:
    running: list[SwimMembership] = []

    async def begin(
        name: str, *, seeds: tuple[Started | tuple[str, int], ...] = (), **changes: object
    ) -> Started:
        started: Started

        def on_change(member: Member) -> None:
            started.changes.append((asyncio.get_running_loop().time(), member))
            started.news.set()

        addresses = tuple(s.membership.address if isinstance(s, Started) else s for s in seeds)
        context = context_of(name, **({"seeds": addresses, "on_change": on_change} | changes))
        started = Started(SwimMembership(context), context)
        running.append(started.membership)
        await started.membership.start()
        return started

    yield begin
    for membership in running:
        await membership.close()


def alive(*names: str) -> Callable[[dict[str, Member]], bool]:
    return lambda view: {n for n, m in view.items() if m.state is MemberState.ALIVE} == set(names)


def state_of(name: str, state: MemberState) -> Callable[[dict[str, Member]], bool]:
    return lambda view: name in view and view[name].state is state


async def test_three_converge_one_is_killed_and_found_within_the_bound(start) -> None:
    a = await start("a")
    b = await start("b", seeds=(a,), role="orchestrator")
    c = await start("c", seeds=(a,), port=5000)
    for started in (a, b, c):
        await started.until(alive("a", "b", "c"))
    view = {m.name: m for m in a.membership.members()}
    assert [m.name for m in a.membership.members()] == ["a", "b", "c"]
    assert view["c"].port == 5000
    assert view["b"].role == "orchestrator"
    assert view["c"].public_key == c.context.public_key
    assert (view["c"].gossip_host, view["c"].gossip_port) == c.membership.address

    killed = asyncio.get_running_loop().time()
    await c.membership.close()
    for started in (a, b):
        seen = await started.until(state_of("c", MemberState.DEAD))
        assert seen - killed <= LOCAL.detection_bound(2) + 1.5  # a busy machine
    assert {m.name for _, m in a.changes if m.state is MemberState.DEAD} == {"c"}


async def test_a_departure_is_seen_as_left_at_once(start) -> None:
    a = await start("a")
    b = await start("b", seeds=(a,))
    await a.until(alive("a", "b"))
    await b.until(alive("a", "b"))
    begun = asyncio.get_running_loop().time()
    await b.membership.leave()
    assert asyncio.get_running_loop().time() - begun < 1.0
    await a.until(state_of("b", MemberState.LEFT))
    states = [m.state for _, m in a.changes if m.name == "b"]
    assert states == [MemberState.ALIVE, MemberState.LEFT]
    await b.membership.leave()
    await b.membership.close()


async def test_leaving_is_bounded_when_nobody_hears(start) -> None:
    a = await start("a")
    b = await start("b", seeds=(a,))
    await b.until(alive("a", "b"))
    await a.membership.close()
    begun = asyncio.get_running_loop().time()
    await b.membership.leave()
    assert asyncio.get_running_loop().time() - begun < 1.1


async def test_a_restart_on_the_same_port_is_a_new_life(start) -> None:
    """[9, 78] Killed and started again in place, faster than any verdict."""
    a = await start("a")
    b = await start("b", seeds=(a,))
    await a.until(alive("a", "b"))
    port = b.membership.address[1]
    await b.membership.close()
    again = await start("b", seeds=(a,), epoch=2, bind_port=port)
    await a.until(lambda view: view["b"].epoch == 2 and view["b"].state is MemberState.ALIVE, seconds=1.0)
    await again.until(alive("a", "b"))
    assert MemberState.DEAD not in {m.state for _, m in a.changes}


async def test_a_seed_that_comes_later_is_found_by_name(start) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    b = await start("b", seeds=(), settings={"profile": "local", "join_interval": 0.05})
    early = await start("early", seeds=(("localhost", port), b.membership.address))
    await early.until(alive("b", "early"))
    late = await start("late", bind_port=port)
    assert [m.name for m in late.membership.members()] == ["late"]
    # "early" asks seeds that are not members again, slowly; "b" has none, so it hears of it by gossip.
    await late.until(alive("b", "early", "late"), seconds=10.0)
    await b.until(alive("b", "early", "late"))


async def test_ipv6(start) -> None:
    """[32]"""
    a = await start("a", bind_host="::1", host="::1")
    b = await start("b", seeds=(a,), bind_host="::1", host="::1")
    await a.until(alive("a", "b"))
    await b.until(alive("a", "b"))


async def test_a_wildcard_socket_announces_the_host_and_reaches_both_kinds(start) -> None:
    a = await start("a", bind_host="::", host="127.0.0.1")
    assert a.membership.address[0] == "127.0.0.1"
    b = await start("b", seeds=(a,))
    await a.until(alive("a", "b"))
    await b.until(alive("a", "b"))


async def test_another_key_noise_and_replays_change_nothing_and_are_counted(start, caplog) -> None:
    a = await start("a")
    spy = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    spy.bind(("127.0.0.1", 0))
    spy.setblocking(False)
    b = await start("b", seeds=(a.membership.address, spy.getsockname()))
    await a.until(alive("a", "b"))
    loop = asyncio.get_running_loop()
    recorded = await loop.sock_recv(spy, 65535)
    stranger = await start("stranger", seeds=(a,), gossip_key=bytes(32))
    other = await start("other", seeds=(a,), cluster_id="another")
    for datagram in (b"", b"noise", os.urandom(200), b"\x01" + os.urandom(300), recorded, recorded, recorded):
        spy.sendto(datagram, a.membership.address)
    c = await start("c", seeds=(a,))  # heard after all of the above
    await a.until(alive("a", "b", "c"))
    await c.until(alive("a", "b", "c"))
    counters = a.membership.counters
    assert counters["unauthentic"] >= 3
    assert counters["malformed"] >= 2
    assert counters["replayed"] >= 2
    assert {m.name for m in stranger.membership.members()} == {"stranger"}
    assert {m.name for m in other.membership.members()} == {"other"}
    assert b.membership.members()
    assert "cannot be opened" not in caplog.text, "noise is nobody's business"
    spy.close()


async def test_who_has_another_key_is_told_of_on_both_sides(start, monkeypatch) -> None:
    """It is answered by silence, as where no seed is at all."""
    monkeypatch.setattr(driver, "PATIENCE", 0.3)
    a = await start("a")
    monkeypatch.setattr(driver, "PATIENCE", 0.2)
    said: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(driver._LOG, "warning", lambda text, *facts: said.put_nowait(text % facts))
    address = a.membership.address
    stranger = await start("stranger", seeds=(address, ("127.0.0.1", 9)), gossip_key=bytes(32))
    async with asyncio.timeout(20):
        lines = sorted([await said.get(), await said.get()])
        assert f"from 127.0.0.1:{stranger.membership.address[1]} cannot be opened" in lines[0]
        assert f"nobody has answered at the seeds 127.0.0.1:{address[1]}, 127.0.0.1:9 in 0.2 s" in lines[1]
        refused = a.membership.counters["unauthentic"]
        while a.membership.counters["unauthentic"] < refused + 3:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0.01)
    assert said.empty(), "once"


async def test_noise_of_many_addresses_is_not_told_of_and_hides_nobody(start, monkeypatch, caplog) -> None:
    a = await start("a")
    now = 100.0
    monkeypatch.setattr(a.membership, "_loop", SimpleNamespace(time=lambda: now))
    for _day in range(3):
        now += 86_400
        for port in range(1, 40):
            a.membership._hear_stranger(("192.0.2.1", port))
    assert not caplog.records
    assert len(a.membership._strangers) <= 16
    now += 86_400
    for _ in range(3):
        a.membership._hear_stranger(("192.0.2.1", 50))
        now += 15  # as seeds are asked by who has found others
    assert [record.getMessage() for record in caplog.records] == [
        "membership datagrams from 192.0.2.1:50 cannot be opened: another gossip_key or cluster id"
    ]
    monkeypatch.undo()


async def test_a_member_whose_datagrams_are_damaged_now_and_then_is_no_stranger(
    start, monkeypatch, caplog
) -> None:
    a = await start("a")
    b = await start("b", seeds=(a,))
    await a.until(alive("a", "b"))
    now, arrived, seal = 100.0, [], b.membership._seal

    def receive(size: int) -> tuple[bytes, tuple[str, int]]:
        if not arrived:
            raise BlockingIOError
        return arrived.pop(0), b.membership.address

    monkeypatch.setattr(a.membership, "_loop", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr(a.membership, "_take", lambda event: None)
    monkeypatch.setattr(a.membership, "_socket", SimpleNamespace(recvfrom=receive))
    for _ in range(5):
        damaged = bytearray(seal.seal(b"damaged"))
        damaged[-1] ^= 1
        arrived += [bytes(damaged), seal.seal(b"whole"), bytes(damaged)]
        a.membership._drain()
        now += driver.PATIENCE
    assert a.membership.counters["unauthentic"] == 10
    assert not caplog.records
    monkeypatch.undo()


async def test_a_listener_that_fails_does_not_stop_the_protocol(start, caplog) -> None:
    def fail(member: Member) -> None:
        raise RuntimeError("listener")

    a = await start("a", on_change=fail)
    b = await start("b", seeds=(a,))
    await b.until(alive("a", "b"))
    c = await start("c", seeds=(a,))
    await c.until(alive("a", "b", "c"))
    assert "listener failed" in caplog.text


async def test_a_listener_may_ask_for_a_probe_in_its_call(start) -> None:
    asked = []

    def ask(member: Member) -> None:
        if not asked:
            asked.append(member.node_id)
            a.membership.suspect(member.node_id, "test")

    a = await start("a", on_change=ask)
    b = await start("b", seeds=(a,))
    await b.until(alive("a", "b"))
    assert asked
    a.membership.suspect(node_id_of(b"unknown"), "nobody")


async def test_a_taken_name_is_said_once_and_the_later_epoch_stands(start, caplog, request) -> None:
    said = asyncio.Event()
    log = logging.getLogger("swactor_membership_swim.driver")

    def hear(record: logging.LogRecord) -> bool:
        said.set()
        return True

    log.addFilter(hear)
    request.addfinalizer(lambda: log.removeFilter(hear))
    a = await start("a")
    old = await start("twin", seeds=(a,), epoch=1)
    await old.until(alive("a", "twin"))
    key = b"another key".ljust(32)
    new = await start("twin", seeds=(a,), epoch=2, public_key=key, node_id=node_id_of(key))
    await new.until(alive("a", "twin"))
    await a.until(lambda view: view["twin"].epoch == 2)
    await new.until(lambda view: view["a"].state is MemberState.ALIVE)
    async with asyncio.timeout(5):
        await said.wait()
    assert caplog.text.count("stands in its place") == 1
    assert {m.name: m.state for m in old.membership.members()}["twin"] is MemberState.DEAD


async def test_a_blocked_loop_accuses_nobody_when_it_goes_on(start) -> None:
    """A stalled loop reads first and asks anew; one process, so both ends stall and both must be fair."""
    a = await start("a")
    b = await start("b", seeds=(a,))
    await a.until(alive("a", "b"))
    await b.until(alive("a", "b"))
    before = len(a.changes), len(b.changes)
    block = asyncio.get_running_loop().time() + 1.5
    while asyncio.get_running_loop().time() < block:
        sum(range(1000))
    for started in (a, b):
        other = "b" if started is a else "a"
        started.membership.suspect(context_of(other).node_id, "look")
    c = await start("c", seeds=(a,))
    await c.until(alive("a", "b", "c"))
    assert all(m.state is MemberState.ALIVE for _, m in [*a.changes[before[0] :], *b.changes[before[1] :]])
    assert a.membership.counters["stall"] >= 1


async def test_closing_is_idempotent_frees_the_port_and_leaves_no_task(start) -> None:
    a = await start("a", seeds=())
    b = await start("b", seeds=(("name.invalid", 9), a.membership.address))
    await b.until(alive("a", "b"))
    port = a.membership.address[1]
    await a.membership.close()
    await a.membership.close()
    await b.membership.close()
    again = await start("c", bind_port=port)
    await again.membership.close()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert [task for task in tasks if "resolve" in repr(task)] == []
    a.membership.suspect(node_id_of(b"x"), "after close")


async def test_a_taken_port_is_a_resource_error_with_a_remedy(start) -> None:
    a = await start("a")
    with pytest.raises(
        ResourceError, match=r"cannot receive at 127.0.0.1:\d+: Address already in use"
    ) as caught:
        await SwimMembership(context_of("b", bind_port=a.membership.address[1])).start()
    assert "another port" in caught.value.hint


async def test_an_address_that_is_not_ours_is_a_resource_error() -> None:
    with pytest.raises(ResourceError, match=r"cannot receive at"):
        await SwimMembership(context_of("a", bind_host="192.0.2.1")).start()
    with pytest.raises(ResourceError, match=r"name\.invalid"):
        await SwimMembership(context_of("a", bind_host="name.invalid")).start()
    with pytest.raises(ResourceError, match=r"membership address 'a\.\.b': no host has such a name"):
        await SwimMembership(context_of("a", bind_host="a..b")).start()


async def test_a_seed_that_no_host_can_be_called_is_tried_in_vain(start, caplog, monkeypatch) -> None:
    said, ear = asyncio.Event(), logging.Handler()
    monkeypatch.setattr(ear, "emit", lambda record: said.set())
    monkeypatch.setattr(logging.getLogger("swactor_membership_swim.driver"), "handlers", [ear])
    with caplog.at_level(logging.DEBUG, "swactor_membership_swim.driver"):
        a = await start("a", seeds=(("a..b", 9),))
        b = await start("b", seeds=(a,))
        await a.until(alive("a", "b"))
        await asyncio.wait_for(said.wait(), 5)  # a thread looks it up, at its leisure
        await b.membership.leave()
    assert "cannot resolve 'a..b'" in caplog.text


async def test_closing_while_it_starts_leaves_no_socket(monkeypatch) -> None:
    """Its name is looked up meanwhile; a reader of that socket would turn for ever."""
    loop = asyncio.get_running_loop()
    asked, found = asyncio.Event(), asyncio.Event()
    look_up = loop.getaddrinfo

    async def slow(*arguments, **options):
        asked.set()
        await found.wait()
        return await look_up(*arguments, **options)

    monkeypatch.setattr(loop, "getaddrinfo", slow)
    watched: list[int] = []
    monkeypatch.setattr(loop, "add_reader", lambda fd, *_: watched.append(fd))
    membership = SwimMembership(context_of("a"))
    starting = asyncio.ensure_future(membership.start())
    await asked.wait()
    await membership.close()
    found.set()
    with pytest.raises(ResourceError, match="closed while it started"):
        await starting
    assert watched == []


async def test_a_second_start_is_a_usage_error(start) -> None:
    a = await start("a")
    with pytest.raises(UsageError, match="started before"):
        await a.membership.start()
    await a.membership.close()
    with pytest.raises(UsageError, match="started before"):
        await a.membership.start()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bind_host": "0.0.0.0", "host": "0.0.0.0"}, "reach it at '0.0.0.0'"),
        ({"bind_host": "::", "host": ""}, "reach it at ''"),
        ({"name": "n" * 65}, "has 65 bytes"),
        ({"name": ""}, "needs a name"),
        ({"public_key": b"k" * 65}, "public key of 65 bytes"),
        ({"port": 70000}, "membership record"),
        ({"gossip_key": b"short"}, "gossip key has 5 bytes"),
        ({"settings": {"profile": "fast"}}, "profile 'fast'"),
    ],
)
def test_what_cannot_be_is_a_configuration_error_at_once(changes, text) -> None:
    """[31, 51]"""
    with pytest.raises(ConfigError, match=text):
        SwimMembership(context_of("a", **changes))


def test_before_the_start_the_view_is_oneself() -> None:
    membership = SwimMembership(context_of("a"))
    assert [m.name for m in membership.members()] == ["a"]
    membership.suspect(node_id_of(b"x"), "nothing yet")


def test_the_provider_is_found_by_its_entry_point() -> None:
    provider = load_plugins(only=["swactor-membership-swim"]).select(Kind.MEMBERSHIP, "swim")
    membership = provider.factory().create(context_of("a"))
    assert isinstance(membership, SwimMembership)
    record = Plugins().register(plugin, name="swim")
    assert record.state is PluginState.LOADED, record.reason


@pytest.mark.parametrize("orderly", [True, False], ids=["departed", "killed"])
async def test_a_start_of_an_earlier_epoch_is_told_whom_the_others_hold(start, orderly) -> None:
    """A machine whose clock was set back: refused for good, but not in silence."""
    a = await start("a")
    b = await start("b", seeds=(a,), epoch=9)
    for one in (a, b):
        await one.until(alive("a", "b"))
    await (b.membership.leave() if orderly else b.membership.close())
    ended = MemberState.LEFT if orderly else MemberState.DEAD
    told: asyncio.Queue[Member] = asyncio.Queue()
    await start("b", seeds=(a,), epoch=2, on_over=told.put_nowait)
    by = await asyncio.wait_for(told.get(), 15)
    assert (by.epoch, by.node_id, by.state) == (9, b.context.node_id, ended)
    await start("b", seeds=(a,), epoch=by.epoch + 1)
    await a.until(lambda view: view["b"].epoch == 10 and view["b"].state is MemberState.ALIVE)


@pytest.mark.parametrize(("first", "second"), [(2, 9), (9, 2)])
async def test_of_two_that_live_with_one_key_the_earlier_is_told_of_the_later(start, first, second) -> None:
    """A key that was copied to another machine: neither may be displaced in silence."""
    a = await start("a")
    told: dict[int, asyncio.Queue[Member]] = {first: asyncio.Queue(), second: asyncio.Queue()}
    ports = {}
    for epoch in (first, second):
        one = await start("b", seeds=(a,), epoch=epoch, on_over=told[epoch].put_nowait)
        ports[epoch] = one.membership.address[1]
        await a.until(lambda view: "b" in view)
    by = await asyncio.wait_for(told[2].get(), 15)
    assert (by.epoch, by.state, by.gossip_port) == (9, MemberState.ALIVE, ports[9])
    assert told[9].empty()
    assert {m.name: (m.epoch, m.state) for m in a.membership.members()}["b"] == (9, MemberState.ALIVE)


async def test_a_listener_that_fails_at_the_end_is_only_logged(start, caplog) -> None:
    asked = asyncio.Event()

    def fail(by: Member) -> None:
        asked.set()
        raise RuntimeError("boom")

    a = await start("a")
    b = await start("b", seeds=(a,), epoch=9)
    for one in (a, b):
        await one.until(alive("a", "b"))
    await b.membership.leave()
    await start("b", seeds=(a,), epoch=2, on_over=fail)
    await asyncio.wait_for(asked.wait(), 10)
    assert "boom" in caplog.text
