"""Machines in a seeded world (spec section 9): crashes are found in time, and nobody healthy ever dies.

Numbers in brackets refer to failures that other implementations had and that research collected: restart and
identity, small clusters, paused and starved processes, asymmetric partitions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from swactor_core.spi.membership import MemberState
from swactor_membership_swim.events import Tick
from swactor_membership_swim.settings import LAN, LOCAL

SLACK = 0.05  # packet delays of the world, several hops


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_crash_is_seen_by_everybody_within_the_bound(world, count, loss) -> None:
    worst = 0.0
    for seed in range(12):
        w = world(seed, loss=loss)
        names = w.cluster(count)
        w.run(0.03 * seed)
        w.crash(names[-1])
        crashed = w.now
        w.run(LOCAL.detection_bound(count - 1) + SLACK)
        deaths = [(o, at) for o, n, _, at in w.verdicts(MemberState.DEAD) if n == names[-1]]
        assert sorted(o for o, _ in deaths) == sorted(names[:-1]), f"seed {seed}, loss {loss}"
        worst = max(worst, max(at for _, at in deaths) - crashed)
        assert {n for _, n, _, _ in w.verdicts(MemberState.DEAD)} == {names[-1]}, f"seed {seed}"
    assert worst <= 1.5 + SLACK, "the local profile promises a verdict in about 1.5 s"


def test_the_bound_of_the_lan_profile_is_three_seconds_and_a_quarter(world) -> None:
    assert LAN.detection_bound(7) == pytest.approx(3.25)
    for seed in range(6):
        w = world(seed, settings=LAN, loss=0.01)
        names = w.cluster(4)
        w.crash(names[1])
        w.run(LAN.detection_bound(3) + SLACK)
        seen = {o for o, n, _, _ in w.verdicts(MemberState.DEAD) if n == names[1]}
        assert seen == {names[0], names[2], names[3]}, f"seed {seed}"


@pytest.mark.parametrize("count", [2, 3, 5])
def test_no_healthy_member_dies_at_five_percent_loss(world, count) -> None:
    lost = 0
    for seed in range(20):
        w = world(seed, loss=0.05)
        w.cluster(count)
        w.run(25.0)
        lost += w.lost
        assert w.verdicts(MemberState.DEAD) == [], f"seed {seed}"
        assert all(
            set(p.states().values()) <= {MemberState.ALIVE, MemberState.SUSPECT} for p in w.people.values()
        )
    assert lost > 500, "the network lost nothing: this run proves nothing"


def test_suspicions_under_heavy_loss_are_refuted(world) -> None:
    """At 25 % loss suspicions do happen; each is refuted and ends in Alive at every observer."""
    suspicions = 0
    for seed in range(10):
        w = world(seed, loss=0.25)
        names = w.cluster(4)
        w.run(20.0)
        suspicions += len(w.verdicts(MemberState.SUSPECT))
        w.loss = 0.0
        w.run(5.0)
        for name in names:
            assert w.people[name].states() == dict.fromkeys(names, MemberState.ALIVE), f"seed {seed}"
    assert suspicions > 20


@pytest.mark.parametrize("settings", [LAN, LOCAL], ids=["lan", "local"])
@pytest.mark.parametrize("count", [5, 12, 24])
def test_a_path_that_carries_what_quic_needs_is_enough(world, settings, count) -> None:
    """What is full, as views and rumours of a dozen are, must pass where the data plane does."""
    w = world(count, settings=settings)
    w.carries = 1200
    names = w.cluster(count)
    w.crash(names[1])
    w.run(settings.detection_bound(count - 1) + 1.0)
    seen = {o for o, n, _, _ in w.verdicts(MemberState.DEAD) if n == names[1]}
    assert seen == {*names} - {names[1]}
    assert {n for _, n, _, _ in w.verdicts(MemberState.DEAD)} == {names[1]}


@pytest.mark.parametrize("seconds", [0.5, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_paused_process_accuses_nobody_when_it_resumes(world, count, seconds) -> None:
    """[37, 39, 40] It reads its backlog, asks anew, and comes back to life for the others."""
    for seed in range(6):
        w = world(seed)
        names = w.cluster(count)
        w.run(0.037 * seed)
        w.pause(names[0], seconds)
        w.run(seconds + 3.0)
        wrong = [
            m for _, m in w.people[names[0]].changes if m.state in (MemberState.SUSPECT, MemberState.DEAD)
        ]
        assert wrong == [], f"seed {seed}"
        for name in names:
            assert w.people[name].states() == dict.fromkeys(names, MemberState.ALIVE), f"seed {seed}, {name}"
        if seconds >= 3:
            assert {n for _, n, _, _ in w.verdicts(MemberState.DEAD)} == {names[0]}
            assert w.people[names[0]].machine.counters["stall"] > 0


@pytest.mark.parametrize("delay", [0.08, 0.15, 0.3, 0.5])
def test_a_starved_participant_kills_nobody(world, delay) -> None:
    """[36] One node reads everything late while its timers are on time."""
    for seed in range(8):
        w = world(seed, loss=0.02)
        names = w.cluster(4)
        w.people[names[0]].extra_delay = delay
        w.run(20.0)
        w.people[names[0]].extra_delay = 0.0
        assert [v for v in w.verdicts(MemberState.DEAD) if v[1] != names[0]] == [], f"seed {seed}"
        w.run(4.0)
        for name in names:
            assert w.people[name].states() == dict.fromkeys(names, MemberState.ALIVE), f"seed {seed}, {name}"


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.5])
def test_a_participant_that_hears_nothing_for_a_while_kills_nobody(world, seconds) -> None:
    """[36] All its input is late at once: it is more likely the one that is cut off. The others may give it
    up, and take it back."""
    for seed in range(8):
        w = world(seed)
        names = w.cluster(4)
        w.people[names[0]].extra_delay = seconds
        w.run(seconds)
        w.people[names[0]].extra_delay = 0.0
        w.run(6.0)
        assert [v for v in w.verdicts(MemberState.DEAD) if v[1] != names[0]] == [], f"seed {seed}"
        for name in names:
            assert w.people[name].states() == dict.fromkeys(names, MemberState.ALIVE), f"seed {seed}, {name}"


@pytest.mark.parametrize("away", [0.0, 0.1, 0.4, 3.0])
@pytest.mark.parametrize("count", [2, 4])
def test_a_restart_replaces_the_former_life_at_once_and_never_inherits_its_death(world, count, away) -> None:
    """[3, 8, 9, 11, 12, 15] Same name, address and key, a later epoch."""
    for seed in range(6):
        w = world(seed, loss=0.02)
        names = w.cluster(count)
        w.run(0.041 * seed)
        w.crash(names[-1])
        w.run(away)
        w.start(names[-1], seeds=(names[0],), epoch=2)
        restarted = w.now
        w.run(6.0)
        for observer in names[:-1]:
            seen = [(at, m.epoch, m.state) for at, m in w.people[observer].changes if m.name == names[-1]]
            first_new = next(at for at, epoch, _ in seen if epoch == 2)
            assert first_new - restarted < 0.7, f"seed {seed}"
            later = [(epoch, state) for at, epoch, state in seen if at > first_new]
            assert all(epoch == 2 for epoch, _ in later), f"seed {seed}: the former life came back"
            assert (2, MemberState.DEAD) not in later, f"seed {seed}"
        for name in names:
            assert w.people[name].states() == dict.fromkeys(names, MemberState.ALIVE), f"seed {seed}, {name}"


def test_everybody_restarting_at_once_ends_with_everybody_alive(world) -> None:
    """[1] Mass restart, faster than one round."""
    for seed in range(10):
        w = world(seed, loss=0.05)
        names = w.cluster(5)
        for name in names:
            w.crash(name)
            w.start(name, seeds=tuple(n for n in names if n != name), epoch=2)
            w.run(0.02)
        w.run(8.0)
        for name in names:
            held = {m.name: (m.epoch, m.state) for m in w.people[name].machine.members()}
            assert held == dict.fromkeys(names, (2, MemberState.ALIVE)), f"seed {seed}, {name}"


@pytest.mark.parametrize("length", [0.5, 4.0, 60.0])
def test_a_partition_heals_without_seeds(world, length) -> None:
    """[25] Two sides; each sees the other dead when it lasts, and all come back with no restart."""
    for seed in range(4):
        w = world(seed)
        names = w.cluster(5)
        left = set(names[:2])
        w.cut = lambda a, b, left=left: (a in left) != (b in left)
        w.run(length)
        if length > LOCAL.isolation_bound():
            for name in names:
                other = set(names) - left if name in left else left
                assert all(w.state_at(name, o) is MemberState.DEAD for o in other), f"seed {seed}"
        w.cut = lambda a, b: False
        w.run(3 * LOCAL.reconnect_interval + 2.0)
        for name in names:
            assert w.people[name].states() == dict.fromkeys(names, MemberState.ALIVE), f"seed {seed}, {name}"


def test_a_partition_longer_than_every_memory_heals_through_seeds(world) -> None:
    """[25] Ten times the tombstone: nobody remembers anybody, the seeds do."""
    settings = replace(LOCAL, tombstone=12.0)
    w = world(7, settings=settings)
    names = w.cluster(4)
    left = set(names[:1])  # the seed itself is alone
    w.cut = lambda a, b: (a in left) != (b in left)
    w.run(120.0)
    assert set(w.people[names[0]].states()) == {names[0]}
    assert set(w.people[names[1]].states()) == set(names[1:])
    w.cut = lambda a, b: False
    w.run(2 * settings.seed_interval)
    for name in names:
        assert w.people[name].states() == dict.fromkeys(names, MemberState.ALIVE), name


def test_an_isolated_participant_sees_the_others_dead_within_its_bound(world) -> None:
    """[28] It is slower to judge, but it does judge."""
    for seed in range(6):
        w = world(seed)
        names = w.cluster(4)
        w.cut = lambda a, b, lone=names[0]: lone in (a, b)
        w.run(LOCAL.isolation_bound() + SLACK)
        assert all(w.state_at(names[0], n) is MemberState.DEAD for n in names[1:]), f"seed {seed}"
        assert w.state_at(names[1], names[0]) is MemberState.DEAD


@pytest.mark.parametrize("seed", range(6))
def test_a_broken_pair_is_bridged_by_relays(world, seed) -> None:
    """[29, 30] Two members cannot reach each other, a third reaches both: nobody dies, nobody flaps."""
    w = world(seed)
    names = w.cluster(3)
    pair = {names[0], names[1]}
    w.cut = lambda a, b: {a, b} == pair
    w.run(30.0)
    assert w.verdicts(MemberState.DEAD) == []
    assert w.verdicts(MemberState.SUSPECT) == []


@pytest.mark.parametrize("direction", ["in", "out"])
def test_one_way_loss_to_one_member_kills_no_other(world, direction) -> None:
    """[29] The victim may be judged dead, the healthy never by a healthy observer."""
    for seed in range(6):
        w = world(seed)
        names = w.cluster(4)
        victim = names[0]
        w.cut = lambda a, b, v=victim: (b if direction == "in" else a) == v
        w.run(15.0)
        healthy = set(names[1:])
        wrong = [v for v in w.verdicts(MemberState.DEAD) if v[0] in healthy and v[1] in healthy]
        assert wrong == [], f"seed {seed}"
        assert all(w.state_at(name, victim) is not MemberState.ALIVE for name in healthy), f"seed {seed}"
        w.cut = lambda a, b: False
        w.run(10.0)
        for name in names:
            assert w.people[name].states() == dict.fromkeys(names, MemberState.ALIVE), f"seed {seed}, {name}"


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_a_departure_is_seen_as_left_and_never_as_death(world, count, loss) -> None:
    for seed in range(10):
        w = world(seed, loss=loss)
        names = w.cluster(count)
        w.leave(names[-1])
        w.run(LOCAL.leave_attempts * LOCAL.probe_timeout + SLACK)
        assert w.people[names[-1]].machine.departed
        w.crash(names[-1])
        w.run(5.0)
        for observer in names[:-1]:
            states = [m.state for _, m in w.people[observer].changes if m.name == names[-1]]
            assert states[-1] is MemberState.LEFT, f"seed {seed}"
            assert MemberState.DEAD not in states, f"seed {seed}"


def test_the_last_one_departs_at_once(world) -> None:
    w = world(0)
    w.start("lonely")
    w.run(1.0)
    w.leave("lonely")
    assert w.people["lonely"].machine.departed
    assert w.people["lonely"].machine.deadline == float("inf")


def test_outside_evidence_makes_the_verdict_come_sooner_and_is_never_a_verdict(world) -> None:
    for seed in range(8):
        w = world(seed)
        names = w.cluster(3)
        w.suspect(names[0], names[1])
        w.run(3.0)
        assert w.verdicts(MemberState.SUSPECT) == [], f"seed {seed}: a member that answers was accused"
        w.crash(names[1])
        told = w.now
        w.suspect(names[0], names[1])
        w.run(LOCAL.probe_interval + 0.01)
        accused = [at for o, n, _, at in w.verdicts(MemberState.SUSPECT) if (o, n) == (names[0], names[1])]
        assert accused, f"seed {seed}"
        assert accused[0] - told <= LOCAL.probe_interval + 0.01


def test_a_send_error_is_a_failed_probe(world) -> None:
    """[28] No waiting for a time-out that can only fail."""
    w = world(3)
    names = w.cluster(3)
    w.run(0.11)
    before = w.sent_packets
    w.suspect(names[0], names[1])
    w.fail_send(names[0], names[1])
    assert w.sent_packets - before >= 3, "the probe, its repetition and the relay's request"


def test_ten_join_through_one_seed_within_two_seconds_even_when_it_starts_last(world) -> None:
    for seed in range(4):
        w = world(seed, loss=0.05)
        w.start("seed")
        w.crash("seed")
        names = [f"node-{i}" for i in range(10)]
        for name in names:
            w.start(name, seeds=("seed",))
        w.run(5.0)
        assert all(w.people[n].states() == {n: MemberState.ALIVE} for n in names)
        w.start("seed", epoch=2)
        w.run(2.0)
        everybody = dict.fromkeys([*names, "seed"], MemberState.ALIVE)
        for name in everybody:
            assert w.people[name].states() == everybody, f"seed {seed}, {name}"


def test_forty_members_are_probed_in_turns(world) -> None:
    """Above the full-mesh limit: rotation covers everybody, and the bound is the formula's."""
    w = world(5)
    names = w.cluster(40)
    w.crash(names[7])
    w.run(LOCAL.detection_bound(39) + SLACK)
    observers = {o for o, n, _, _ in w.verdicts(MemberState.DEAD) if n == names[7]}
    assert observers == set(names) - {names[7]}
    assert {n for _, n, _, _ in w.verdicts(MemberState.DEAD)} == {names[7]}


@pytest.mark.parametrize(("first", "second"), [(1, 9), (9, 1), (5, 5)])
def test_two_claimants_of_one_name_leave_exactly_one_and_a_clear_word(world, first, second) -> None:
    """[24] Different keys and addresses, both running; the later epoch stands, a tie is settled too."""
    for seed in range(4):
        w = world(seed, loss=0.02)
        w.cluster(3)
        claimants = [w.start(label, seeds=("node-0",), epoch=epoch, name="twin")
                     for label, epoch in (("one", first), ("two", second))]  # fmt: skip
        w.run(6.0)
        silent = [person for person in claimants if person.superseded]
        assert len(silent) == 1, f"seed {seed}"
        stands = next(person for person in claimants if not person.superseded)
        assert stands.machine.me.epoch == max(first, second)
        for name in ("node-0", "node-1", "node-2"):
            held = [m for m in w.people[name].machine.members() if m.name == "twin"]
            assert [(m.node_id, m.state) for m in held] == [(stands.machine.me.node_id, MemberState.ALIVE)]
        sent = w.sent_packets
        silent[0].machine.step(Tick(), w.now)
        assert silent[0].machine.deadline == float("inf")
        assert w.sent_packets == sent


def test_traffic_is_bounded_idle_and_in_trouble(world) -> None:
    """[43, 45, 46] Eight members: 35 probes and answers a second each, no storm when things go wrong."""
    w = world(2)
    names = w.cluster(8)
    packets, size = w.sent_packets, w.sent_bytes
    w.run(10.0)
    idle = (w.sent_packets - packets) / 8 / 10
    assert idle < 75
    assert (w.sent_bytes - size) / 8 / 10 < 7000
    packets = w.sent_packets
    w.crash(names[3])
    w.cut = lambda a, b: {a, b} == {names[0], names[1]}
    w.loss = 0.1
    w.run(10.0)
    assert (w.sent_packets - packets) / 7 / 10 < 4 * idle


def test_a_participant_alone_for_a_week_keeps_nothing(world) -> None:
    """[46]"""
    settings = replace(LOCAL, probe_interval=60.0, probe_timeout=1.0, suspicion_min=60.0, suspicion_max=60.0,
                       tombstone=600.0, reconnect_interval=60.0, sync_interval=60.0)  # fmt: skip
    w = world(0, settings=settings)
    person = w.start("lonely")
    w.run(7 * 24 * 3600.0)
    assert w.sent_packets == 0
    assert person.states() == {"lonely": MemberState.ALIVE}


def test_one_seed_is_one_history(world) -> None:
    def history(seed: int) -> list[object]:
        w = world(seed, loss=0.1)
        names = w.cluster(4)
        w.crash(names[2])
        w.run(3.0)
        w.start(names[2], seeds=(names[0],), epoch=2)
        w.run(3.0)
        return [w.sent_packets, w.sent_bytes, *((n, p.changes) for n, p in sorted(w.people.items()))]

    assert history(11) == history(11)
    assert history(11) != history(12)
