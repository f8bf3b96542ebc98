"""Single rules of the conversation: refutation, witnesses, strangers, tombstones, bounds, bad input.

Numbers in brackets refer to failures that other implementations had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member, MemberState
from swactor_membership_swim.events import (
    Action,
    Changed,
    LeaveAsked,
    Outlived,
    ProbeAsked,
    Received,
    SendFailed,
    Superseded,
    Tick,
    Transmit,
)
from swactor_membership_swim.machine import SwimMachine
from swactor_membership_swim.members import MAX_INCARNATION, Claim, Life, life_of
from swactor_membership_swim.settings import LOCAL
from swactor_membership_swim.wire import Ack, Gossip, Packet, Ping, PingRequest, Sync, decode, encode

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT
T0 = 50.0


class Rig:
    """One machine and the packets a test sends it by hand."""

    def __init__(
        self, record: Callable[..., Member], *others: str, limits: dict[str, int] | None = None
    ) -> None:
        self.record = record
        self.settings = replace(LOCAL, **(limits or {}))
        self.machine = SwimMachine(record("me"), (), self.settings, random=Random(1), now=T0)
        self.now = T0
        for name in others:
            self.hear(record(name), sender=name)

    def packet(self, packet: Packet, *, sender: str | Member) -> list[Action]:
        member = self.record(sender) if isinstance(sender, str) else sender
        source = (member.gossip_host, member.gossip_port)
        return list(self.machine.step(Received(life_of(member), encode(packet), source), self.now))

    def hear(self, *members: Member, sender: str, accuser: Life | None = None) -> list[Action]:
        return self.packet(Packet(Gossip(), tuple(Claim(m, accuser) for m in members)), sender=sender)

    def until(self, at: float) -> list[Action]:
        """Ticks on time up to a moment; nobody answers."""
        actions: list[Action] = []
        while self.machine.deadline <= at:
            self.now = max(self.now, self.machine.deadline)
            actions += self.machine.step(Tick(), self.now)
        self.now = at
        return actions

    def of(self, name: str) -> Member:
        return next(m for m in self.machine.members() if m.name == name)


@pytest.fixture
def rig(record) -> Callable[..., Rig]:
    return lambda *others, **limits: Rig(record, *others, limits=limits)


def sent(actions: list[Action], kind: type) -> list[tuple[tuple[str, int], Packet]]:
    packets = [(a.address, decode(a.data)) for a in actions if isinstance(a, Transmit)]
    return [(address, packet) for address, packet in packets if isinstance(packet.body, kind)]


def changed(actions: list[Action]) -> list[tuple[str, MemberState]]:
    return [(a.member.name, a.member.state) for a in actions if isinstance(a, Changed)]


def test_a_ping_is_answered_with_its_sequence_to_where_it_came_from(rig, record) -> None:
    r = rig("a")
    actions = r.packet(Packet(Ping(77, life_of(record("me")))), sender="a")
    ((address, packet),) = sent(actions, Ack)
    assert packet.body == Ack(77, life_of(record("me")))
    assert address == (record("a").gossip_host, record("a").gossip_port)


def test_a_ping_for_a_former_life_is_not_answered_but_set_right(rig, record) -> None:
    """[13]"""
    r = rig("a")
    actions = r.packet(Packet(Ping(1, Life(record("me").node_id, 0))), sender="a")
    assert sent(actions, Ack) == []
    ((_, packet),) = sent(actions, Gossip)
    assert packet.claims[0].member == record("me")


@pytest.mark.parametrize("state", [SUSPECT, DEAD])
@pytest.mark.parametrize("incarnation", [0, 5, MAX_INCARNATION - 1])
def test_an_accusation_of_ourselves_is_refuted_in_the_very_answer(rig, record, state, incarnation) -> None:
    """[2, 8]"""
    r = rig("a")
    accusation = Claim(replace(record("me"), state=state, incarnation=incarnation), life_of(record("a")))
    actions = r.packet(Packet(Ping(1, life_of(record("me"))), (accusation,)), sender="a")
    ((_, packet),) = sent(actions, Ack)
    assert packet.claims[0].member == replace(record("me"), incarnation=incarnation + 1)
    assert r.machine.me.state is ALIVE


def test_an_accusation_that_leaves_no_room_to_refute_ends_this_life_loudly(rig, record) -> None:
    r = rig("a")
    actions = r.hear(replace(record("me"), state=SUSPECT, incarnation=MAX_INCARNATION), sender="a")
    assert [type(a) for a in actions] == [Superseded]
    assert r.machine.deadline == float("inf")
    assert r.packet(Packet(Ping(1, life_of(record("me")))), sender="a") == []


def test_a_later_life_of_ourselves_that_is_suspected_stands_in_nobodys_place_yet(rig, record) -> None:
    """A node that was killed and starts again with its clock set back hears of its former life so."""
    r = rig("a")
    former = replace(record("me"), epoch=record("me").epoch + 1)
    assert r.hear(replace(former, state=SUSPECT), sender="a") == []
    assert r.machine.me.state is ALIVE
    (over,) = r.hear(replace(former, state=DEAD), sender="a")
    assert over == Superseded(replace(former, state=DEAD))


def test_a_stale_accusation_is_answered_again(rig, record) -> None:
    """[17] Who still accuses has missed the refutation."""
    r = rig("a", "b")
    old = replace(record("me"), state=SUSPECT, incarnation=0)
    r.hear(old, sender="a")
    assert r.machine.me.incarnation == 1
    actions = r.packet(Packet(Ping(1, life_of(record("me"))), (Claim(old),)), sender="b")
    ((_, packet),) = sent(actions, Ack)
    assert packet.claims[0].member == replace(record("me"), incarnation=1)
    assert r.machine.me.incarnation == 1, "a stale accusation raises nothing"


def test_gossip_about_a_former_life_of_ourselves_does_us_no_harm(record) -> None:
    """[11]"""
    r = Rig(record)
    r.machine = SwimMachine(record("me", epoch=5), (), LOCAL, random=Random(1), now=T0)
    for state in MemberState:
        r.hear(replace(record("me", epoch=4), state=state, incarnation=9), sender="a")
    assert (r.machine.me.state, r.machine.me.incarnation) == (ALIVE, 0)


@pytest.mark.parametrize("state", list(MemberState))
def test_late_gossip_about_an_old_life_of_another_changes_nothing(rig, record, state) -> None:
    """[3, 10, 12]"""
    r = rig()
    r.hear(record("a", epoch=7), sender="a")
    assert changed(r.hear(record("a", epoch=6, state=state, incarnation=99), sender="b")) == []
    assert r.of("a") == record("a", epoch=7)


def test_a_new_epoch_drops_a_running_suspicion(rig, record) -> None:
    """[3] The old timer is inert."""
    r = rig("a", "b")
    r.hear(replace(record("a"), state=SUSPECT), sender="b", accuser=life_of(record("b")))
    r.until(T0 + 0.5)
    r.hear(record("a", epoch=2), sender="a")
    actions = r.until(T0 + 1.1)
    assert ("a", DEAD) not in changed(actions)


def test_a_suspicion_at_a_higher_incarnation_starts_its_time_anew(rig, record) -> None:
    """[18]"""
    r = rig("a", "b")
    r.hear(replace(record("a"), state=SUSPECT), sender="b")
    r.until(T0 + 0.55)
    r.hear(replace(record("a"), incarnation=1), sender="b")
    r.hear(replace(record("a"), state=SUSPECT, incarnation=1), sender="b")
    assert ("a", DEAD) not in changed(r.until(T0 + 1.1))
    assert ("a", DEAD) in changed(r.until(T0 + 4.0))


def test_the_suspect_is_told_first(rig, record) -> None:
    r = rig("a", "b")
    actions = r.hear(replace(record("a"), state=SUSPECT), sender="b", accuser=life_of(record("b")))
    pings = [p for address, p in sent(actions, Ping) if address == ("a", record("a").gossip_port)]
    assert pings
    assert pings[0].claims[0].member == replace(record("a"), state=SUSPECT)


def test_accusers_shorten_a_suspicion_but_tables_and_the_accused_do_not(rig, record) -> None:
    """[19] Attribution."""

    def dies_after(*witnesses: Callable[[Rig, Member], None]) -> float:
        r = rig("a", "b", "c", "d")
        suspect = replace(record("a"), state=SUSPECT)
        r.packet(Packet(Sync(False), (Claim(suspect),)), sender="b")
        for witness in witnesses:
            witness(r, suspect)
        # Only the suspect stays silent, so that this observer does not think itself cut off.
        while r.now < T0 + 5:
            due = r.machine.deadline
            r.now = max(r.now, due)
            actions = list(r.machine.step(Tick(), r.now))
            if ("a", DEAD) in changed(actions):
                return r.now - T0
            for _, packet in sent(actions, Ping):
                if packet.body.target != life_of(record("a")):
                    for name in ("b", "c", "d"):
                        if packet.body.target == life_of(record(name)):
                            r.packet(Packet(Ack(packet.body.sequence, life_of(record(name)))), sender=name)
        raise AssertionError("never died")

    def by(name: str) -> Callable[[Rig, Member], None]:
        return lambda r, suspect: r.hear(suspect, sender="b", accuser=life_of(record(name)))

    def table(r: Rig, suspect: Member) -> None:
        r.packet(Packet(Sync(False), (Claim(suspect, life_of(record("c"))),)), sender="c")

    alone = dies_after()
    assert alone == pytest.approx(LOCAL.suspicion_max)
    assert dies_after(table, table) == pytest.approx(alone)
    assert dies_after(by("a"), by("a")) == pytest.approx(alone)
    assert dies_after(by("b"), by("b")) < alone, "ourselves and b"
    assert dies_after(by("b"), by("c"), by("d")) == pytest.approx(LOCAL.suspicion_min)


def test_a_death_told_by_another_is_only_an_accusation_while_the_member_answers_us(rig, record) -> None:
    r = rig("a", "b")
    actions = r.until(T0 + 0.01)
    ping = next(p.body for _, p in sent(actions, Ping) if p.body.target == life_of(record("a")))
    r.packet(Packet(Ack(ping.sequence, life_of(record("a")))), sender="a")
    told = r.hear(replace(record("a"), state=DEAD), sender="b", accuser=life_of(record("b")))
    assert changed(told) == [("a", SUSPECT)]
    assert sent(told, Ping), "and it is asked at once"


def test_a_death_told_by_another_stands_when_the_member_has_been_silent(rig, record) -> None:
    r = rig("a", "b")
    r.now = T0 + 1.0
    assert changed(r.hear(replace(record("a"), state=DEAD), sender="b")) == [("a", DEAD)]


def test_a_death_in_a_table_is_an_accusation_of_the_present_and_hearsay_of_the_unknown(rig, record) -> None:
    r = rig("a")
    rows = (
        Claim(record("b")),
        Claim(replace(record("a"), state=DEAD)),
        Claim(replace(record("x"), state=DEAD)),
    )
    actions = r.packet(Packet(Sync(False), rows), sender="b")
    assert changed(actions) == [("b", ALIVE), ("a", SUSPECT), ("x", DEAD)]
    reply = r.packet(Packet(Sync(True), (Claim(record("b")),)), sender="b")
    told = {c.member.name for _, p in sent(reply, Sync) for c in p.claims}
    assert told == {"me", "a", "b"}, "hearsay is not passed on: tombstones end"


def test_tombstones_end_everywhere_even_when_tables_are_exchanged(world) -> None:
    """[47] Longer than any rumour, and no ping-pong of old deaths."""
    w = world(4, settings=replace(LOCAL, tombstone=20.0, sync_interval=1.0))
    names = w.cluster(4)
    w.crash(names[3])
    w.run(15.0)
    assert all(w.state_at(n, names[3]) is MemberState.DEAD for n in names[:3])
    w.start("late", seeds=(names[0],))
    w.run(30.0)
    for name in [*names[:3], "late"]:
        assert names[3] not in w.people[name].states(), name


def test_relayed_answers_count_only_from_those_who_were_asked_and_for_the_life_that_was_meant(rig, record):
    r = rig("a", "b")
    actions = r.until(T0 + LOCAL.probe_timeout + 0.01)
    request = next(p.body for _, p in sent(actions, PingRequest) if p.body.target == life_of(record("a")))
    stranger = record("x")
    r.packet(Packet(Ack(request.sequence, request.target)), sender=stranger)
    r.packet(Packet(Ack(request.sequence, Life(record("a").node_id, 2))), sender="b")
    r.packet(Packet(Ack(request.sequence, life_of(record("b")))), sender="b")
    later = r.until(T0 + LOCAL.probe_interval + 0.01)
    assert ("a", SUSPECT) in changed(later)


def test_a_relay_asks_once_and_passes_the_answer_on(rig, record) -> None:
    r = rig("a", "b")
    request = PingRequest(9, life_of(record("b")), "b", record("b").gossip_port)
    ((address, ping),) = sent(r.packet(Packet(request), sender="a"), Ping)
    assert address == ("b", record("b").gossip_port)
    answer = r.packet(Packet(Ack(ping.body.sequence, life_of(record("b")))), sender="b")
    ((back, packet),) = sent(answer, Ack)
    assert back == ("a", record("a").gossip_port)
    assert packet.body == Ack(9, life_of(record("b")))
    again = r.packet(Packet(Ack(ping.body.sequence, life_of(record("b")))), sender="b")
    assert sent(again, Ack) == []


def test_a_stranger_gets_our_table_once_a_round_and_is_asked_for_his(rig, record) -> None:
    r = rig("a")
    first = r.packet(Packet(Ping(1, life_of(record("me")))), sender="x")
    ((_, packet),) = sent(first, Sync)
    assert packet.body.reply_wanted
    assert sent(r.packet(Packet(Ping(2, life_of(record("me")))), sender="x"), Sync) == []
    r.now += LOCAL.probe_interval
    assert sent(r.packet(Packet(Ping(3, life_of(record("me")))), sender="x"), Sync)


def test_tables_are_given_a_bounded_number_of_times_a_second(rig, record) -> None:
    """[49]"""
    r = rig("a")
    replies = sum(bool(sent(r.packet(Packet(Sync(True)), sender="a"), Sync)) for _ in range(100))
    assert replies == LOCAL.sync_replies_per_second
    assert r.machine.counters["table refused"] == 100 - replies


def test_a_table_goes_in_as_many_packets_as_it_takes_and_only_one_asks_back(rig, record) -> None:
    r = rig()
    for i in range(60):
        r.hear(record(f"member-{i}"), sender=f"member-{i}")
    parts = sent(r.packet(Packet(Sync(True)), sender="member-0"), Sync)
    assert len(parts) > 3
    assert not any(packet.body.reply_wanted for _, packet in parts)
    assert len({c.member.name for _, p in parts for c in p.claims}) == 61
    asked = sent(r.packet(Packet(Gossip()), sender="stranger"), Sync)
    assert [packet.body.reply_wanted for _, packet in asked] == [True] + [False] * (len(parts) - 1)


def test_invented_members_are_capped_and_the_dead_make_room(rig, record) -> None:
    """[59]"""
    r = rig("a", member_limit=10)
    for start in range(0, 2000, 5):
        r.hear(*(record(f"invented-{i}") for i in range(start, start + 5)), sender="a")
    assert len(r.machine.members()) == 10
    assert r.machine.counters["member limit"] > 1900
    victim = next(m for m in r.machine.members() if m.name.startswith("invented"))
    r.now += 5
    r.hear(replace(victim, state=LEFT), sender="a")
    assert changed(r.hear(record("newcomer"), sender="newcomer")) == [("newcomer", ALIVE)]
    assert victim.name not in {m.name for m in r.machine.members()}


def test_departures_are_final_for_a_life_and_a_new_epoch_returns(rig, record) -> None:
    """[16, 22, 44]"""
    r = rig("a", "b")
    assert changed(r.hear(replace(record("a"), state=LEFT), sender="a")) == [("a", LEFT)]
    for state in MemberState:
        assert changed(r.hear(replace(record("a"), state=state, incarnation=8), sender="b")) == []
    assert changed(r.hear(record("a", epoch=2), sender="a")) == [("a", ALIVE)]


def test_a_departing_participant_tells_everybody_until_they_have_heard(rig, record) -> None:
    r = rig("a", "b")
    told = list(r.machine.step(LeaveAsked(), r.now))
    pings = {p.body.target: p for _, p in sent(told, Ping)}
    assert set(pings) == {life_of(record("a")), life_of(record("b"))}
    assert all(p.claims[0].member == replace(record("me"), state=LEFT) for p in pings.values())
    r.packet(Packet(Ack(pings[life_of(record("a"))].body.sequence, life_of(record("a")))), sender="a")
    assert not r.machine.departed
    again = r.until(T0 + LOCAL.probe_timeout)
    assert [p.body.target for _, p in sent(again, Ping)] == [life_of(record("b"))]
    assert list(r.machine.step(LeaveAsked(), r.now)) == []
    r.until(T0 + LOCAL.leave_attempts * LOCAL.probe_timeout + 0.01)
    assert r.machine.departed
    answer = r.packet(Packet(Ping(5, life_of(record("me")))), sender="b")
    ((_, packet),) = sent(answer, Ack)
    assert packet.claims[0].member.state is LEFT, "and who asks later is told too"


def test_a_departure_goes_on_without_those_who_were_forgotten_meanwhile(rig, record) -> None:
    """The table is full: a newcomer takes the place of a member that departed while it was being told."""
    r = rig("a", member_limit=2)
    r.machine.step(LeaveAsked(), r.now)
    assert changed(r.hear(replace(record("a"), state=LEFT), sender="a")) == [("a", LEFT)]
    assert changed(r.hear(record("newcomer"), sender="newcomer")) == [("newcomer", ALIVE)]
    r.until(T0 + LOCAL.leave_attempts * LOCAL.probe_timeout + 0.01)
    assert r.machine.departed


def test_somebody_elses_word_that_we_have_departed_ends_this_life_loudly(rig, record) -> None:
    r = rig("a")
    actions = r.hear(replace(record("me"), state=LEFT), sender="a")
    assert any(isinstance(a, Superseded) for a in actions)


def test_a_member_is_reported_once_for_each_change_of_state_life_or_endpoint(rig, record) -> None:
    """[60]"""
    r = rig("a")
    heard = []
    for claim in (
        record("b"),
        record("b"),
        replace(record("b"), incarnation=3),
        replace(record("b"), incarnation=4, port=9),
        replace(record("b"), incarnation=4, port=9, state=SUSPECT),
        replace(record("b"), incarnation=4, port=9, state=DEAD),
        replace(record("b"), incarnation=4, port=9, state=DEAD),
        replace(record("b"), incarnation=7, port=9, state=DEAD),
        record("b", epoch=2),
    ):
        heard += changed(r.hear(claim, sender="a"))
    assert heard == [("b", ALIVE), ("b", ALIVE), ("b", SUSPECT), ("b", DEAD), ("b", ALIVE)]


def test_questions_about_unknown_nodes_and_addresses_change_nothing(rig) -> None:
    r = rig("a")
    assert r.machine.step(ProbeAsked(NodeId(1)), r.now) == ()
    assert r.machine.step(SendFailed(("nowhere", 1)), r.now) == ()


def test_an_earlier_twin_with_our_own_key_is_told_of_us_once_a_round_and_not_heard(rig, record) -> None:
    r = rig("a")
    twin = replace(record("me", epoch=0), gossip_host="10.9.9.9")
    said = Packet(Gossip(), (Claim(replace(record("a"), state=DEAD)),))
    ((address, packet),) = sent(r.packet(said, sender=twin), Gossip)
    assert (address, packet.claims[0].member) == (("10.9.9.9", twin.gossip_port), record("me"))
    assert r.packet(said, sender=twin) == []
    assert r.machine.counters["own key"] == 2
    assert r.of("a").state is ALIVE


def test_a_later_twin_with_our_own_key_ends_this_life_loudly_with_its_own_record(rig, record) -> None:
    r = rig("a")
    twin = replace(record("me", epoch=3), gossip_host="10.9.9.9")
    assert r.packet(Packet(Gossip(), (Claim(replace(record("a"), state=DEAD)),)), sender=twin) == []
    assert r.machine.step(Received(life_of(twin), b"\xff", ("10.9.9.9", 99)), r.now) == ()
    assert r.packet(Packet(Sync(reply_wanted=True), (Claim(twin),)), sender=twin) == [Superseded(twin)]
    assert r.of("a").state is ALIVE


def test_a_member_that_was_renamed_dies_under_its_old_name(rig, record) -> None:
    r = rig("a", "b")
    renamed = replace(record("a", epoch=2), name="a-new")
    r.hear(renamed, sender="b")
    actions = r.until(T0 + 5.0)
    assert ("a", DEAD) in changed(actions)


def test_undecodable_packets_of_the_authentic_are_counted(rig, record) -> None:
    r = rig("a")
    assert list(r.machine.step(Received(life_of(record("a")), b"\xffnoise", ("a", 1)), r.now)) == []
    assert r.machine.counters["undecodable"] == 1


names = st.sampled_from(["me", "a", "b", "c"])


@st.composite
def hostile(draw: st.DrawFn, record: Callable[..., Member]) -> Packet:
    life = st.builds(lambda name, epoch: Life(record(name).node_id, epoch), names, st.integers(0, 3))
    member = st.builds(
        lambda name, epoch, incarnation, state, port: record(
            name, epoch=epoch, incarnation=incarnation, state=state, port=port
        ),
        names,
        st.integers(0, 3),
        st.sampled_from([0, 1, 2, MAX_INCARNATION - 1, MAX_INCARNATION]),
        st.sampled_from(list(MemberState)),
        st.integers(0, 65535),
    )
    body = draw(
        st.one_of(
            st.builds(Ping, st.integers(0, 9), life),
            st.builds(Ack, st.integers(0, 2**32 - 1), life),
            st.builds(PingRequest, st.integers(0, 9), life, st.just("a"), st.integers(0, 65535)),
            st.just(Gossip()),
            st.builds(Sync, st.booleans()),
        )
    )
    return Packet(body, tuple(draw(st.lists(st.builds(Claim, member, st.none() | life), max_size=4))))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_authentic_packet_at_any_time_makes_the_machine_raise_or_flood(record, data) -> None:
    """[41, 43] Any packets, any lateness of ticks: no exception, and bounded answers."""
    r = Rig(record, "a", "b")
    for _ in range(data.draw(st.integers(1, 15))):
        r.now += data.draw(st.sampled_from([0.0, 0.001, 0.1, 0.3, 5.0, 1000.0]))
        actions = r.packet(data.draw(hostile(record)), sender=data.draw(names))
        assert sum(isinstance(a, Transmit) for a in actions) <= 12
        for _ in range(data.draw(st.integers(0, 3))):
            if r.machine.deadline == float("inf"):
                break
            r.now = max(r.now, r.machine.deadline)
            actions = list(r.machine.step(Tick(), r.now))
            assert sum(isinstance(a, Transmit) for a in actions) <= 40
        me = r.machine.me
        assert me.state is ALIVE or r.machine.deadline == float("inf")
        assert sorted(m.name for m in r.machine.members()) == [m.name for m in r.machine.members()]


def outlived(r: Rig, member: Member, *claims: Member, epoch: int) -> list[Action]:
    """What the machine answers to a packet of that former life."""
    data = encode(Packet(Sync(reply_wanted=True), tuple(Claim(claim) for claim in claims)))
    source = ("10.9.9.9", 99)
    return list(r.machine.step(Outlived(life_of(member), data, source, epoch), r.now))


@pytest.mark.parametrize("state", [DEAD, LEFT])
def test_an_outlived_life_is_answered_with_what_stands_once_a_round(rig, record, state) -> None:
    r = rig("a")
    stands = replace(record("b", epoch=9), state=state)
    r.hear(stands, sender="a")
    former = record("b", epoch=2)
    ((address, packet),) = sent(outlived(r, former, former, epoch=9), Gossip)
    assert address == ("10.9.9.9", 99)
    assert packet.claims[0].member == stands
    assert r.of("b") == stands
    assert outlived(r, former, former, epoch=9) == []


def test_an_outlived_life_whose_later_one_is_forgotten_hears_its_epoch(rig, record) -> None:
    r = rig("a")
    former = record("b", epoch=2)
    ((_, packet),) = sent(outlived(r, former, former, epoch=9), Gossip)
    assert packet.claims[0].member == replace(former, epoch=9, state=LEFT)
    assert [m.name for m in r.machine.members()] == ["a", "me"]


def probed(r: Rig, member: Member) -> None:
    """A later probe of that member, which answers it at once."""
    r.now += r.settings.probe_interval
    while True:
        for _, packet in sent(r.until(max(r.now, r.machine.deadline)), Ping):
            if packet.body.target == life_of(member):
                r.packet(Packet(Ack(packet.body.sequence, life_of(member))), sender=member)
                return


def test_an_outlived_life_is_not_answered_while_the_later_one_may_have_died(rig, record) -> None:
    """Killed, and started again with its clock set back: until it is missed nothing is known."""
    r = rig("a", "b")
    probed(r, record("b"))
    former = replace(record("b"), epoch=record("b").epoch - 1)
    for _ in range(3):
        assert outlived(r, former, former, epoch=record("b").epoch) == []
        r.until(r.now + 2 * r.settings.probe_interval)


def test_of_two_that_live_with_one_key_the_earlier_hears_of_the_later(rig, record) -> None:
    r = rig("a", "b")
    former = replace(record("b"), epoch=record("b").epoch - 1)
    assert outlived(r, former, former, epoch=record("b").epoch) == []
    probed(r, record("b"))
    r.now += r.settings.probe_interval
    ((address, packet),) = sent(outlived(r, former, former, epoch=record("b").epoch), Gossip)
    assert address == ("10.9.9.9", 99)
    assert packet.claims[0].member == record("b")
    assert outlived(r, former, former, epoch=record("b").epoch) == []  # once a round
    r.hear(record("b", epoch=7), sender="a")  # one more life: nothing is known of it yet
    r.until(r.now + 2 * r.settings.probe_interval)
    assert outlived(r, former, former, epoch=7) == []


def test_a_recording_of_an_outlived_life_changes_nothing_and_noise_is_counted(rig, record) -> None:
    r = rig("a")
    r.hear(replace(record("b", epoch=9), state=LEFT), sender="a")
    before = r.machine.members()
    former = record("b", epoch=2)
    outlived(r, former, former, replace(record("a"), state=DEAD), epoch=9)
    assert r.machine.members() == before
    stranger = record("c", epoch=2)
    assert list(r.machine.step(Outlived(life_of(stranger), b"\xff", ("10.9.9.9", 99), 9), r.now)) == []
    assert r.machine.counters["undecodable"] == 1
    own = replace(record("me"), epoch=0)
    assert outlived(r, own, own, epoch=1) == []
