"""When a silent peer is pinged, given up, and spared: virtual time only."""

from __future__ import annotations

import random

import pytest
from swactor_transport_quic.liveness import Delivery, Liveness, Verdict
from swactor_transport_quic.settings import QuicSettings

DEFAULTS = QuicSettings()
INTERVAL, LOSS_AFTER = DEFAULTS.probe_interval, DEFAULTS.loss_after


def made(now: float = 0.0) -> Liveness:
    return Liveness(now, loss_after=LOSS_AFTER, stall_grace=DEFAULTS.stall_grace)


def run_until_lost(peer_answers, *, until: float, looks_late: float = 0.0) -> float | None:
    """Drives a Liveness as a link does; `peer_answers(sent_at)` is when a ping's answer arrives, or None."""
    liveness, answers = made(), []
    now = 0.0
    while now < until:
        wanted = liveness.next_look(INTERVAL)
        now = min([wanted + looks_late, *answers])
        if now in answers:
            answers.remove(now)
            liveness.heard(now)
            continue
        verdict = liveness.look(now, INTERVAL)
        if verdict is Verdict.LOST:
            return now
        if verdict is Verdict.PING:
            answer = peer_answers(now)
            if answer is not None:
                answers.append(max(answer, now + 1e-6))
    return None


@pytest.mark.parametrize("died_at", [0.0, 0.1, 3.3, 3.399, 3.4, 3.7])
def test_a_killed_peer_is_known_within_three_seconds(died_at):
    lost_at = run_until_lost(lambda sent: sent + 0.001 if sent < died_at else None, until=60)
    assert lost_at is not None
    assert lost_at - died_at < 3.0


def test_a_peer_paused_for_two_seconds_is_spared():
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(200):
        paused_at = draw.uniform(0, 5)
        resumes_at = paused_at + 2.0
        lost_at = run_until_lost(
            lambda sent, a=paused_at, b=resumes_at: b + 0.2 if a <= sent < b else sent + 0.01, until=20
        )
        assert lost_at is None, (seed, paused_at)


def test_a_busy_connection_is_never_pinged():
    liveness = made()
    for step in range(100):
        now = step * 0.1
        liveness.heard(now)
        assert liveness.look(now + 0.09, INTERVAL) is Verdict.WAIT


def test_an_own_pause_restarts_the_wait_once():
    liveness = made()
    liveness.next_look(INTERVAL)
    assert liveness.look(0.4, INTERVAL) is Verdict.PING
    wanted = liveness.next_look(INTERVAL)
    assert liveness.look(wanted + 30, INTERVAL) is Verdict.PING
    second = liveness.next_look(INTERVAL)
    assert second == pytest.approx(wanted + 30 + LOSS_AFTER)
    assert liveness.look(second + 30, INTERVAL) is Verdict.LOST


def test_a_peer_that_answers_after_our_pause_is_kept():
    liveness = made()
    liveness.next_look(INTERVAL)
    assert liveness.look(0.4, INTERVAL) is Verdict.PING
    liveness.next_look(INTERVAL)
    liveness.heard(30.0)  # read from the socket before looking, as links do
    assert liveness.look(30.0, INTERVAL) is Verdict.WAIT


def test_a_process_that_is_always_late_still_notices():
    assert run_until_lost(lambda sent: None, until=60, looks_late=0.5) is not None


def test_what_is_never_acknowledged_is_stuck_in_bounded_time():
    delivery, now = Delivery(0.0, stuck_after=10.0), 0.0
    while not delivery.stuck(now, {4: (100, 5), 8: (int(now * 1000), 5)}):  # stream 8 goes on all the time
        now = delivery.next_look
        assert now < 14
    assert now >= 10


def test_what_is_acknowledged_bit_by_bit_is_not_stuck():
    delivery, now = Delivery(0.0, stuck_after=10.0), 0.0
    while now < 1000:
        now = delivery.next_look
        steady = {4: (int(now) // 8, 5)}
        assert not delivery.stuck(now, steady | {8: (7, 5)} if int(now) % 3 else steady)


def test_what_was_hardly_lost_is_slow_and_not_stuck():
    """It waits in a queue of the path, behind what others send."""
    delivery, now = Delivery(0.0, stuck_after=10.0), 0.0
    while now < 60:
        now = delivery.next_look
        assert not delivery.stuck(now, {4: (100, 2)})
    assert delivery.stuck(now + 2, {4: (100, 3)})


def test_an_own_pause_is_no_stuck_path():
    delivery = Delivery(0.0, stuck_after=10.0)
    assert not delivery.stuck(2.0, {4: (0, 9)})
    assert not delivery.stuck(500.0, {4: (0, 9)})
    assert not delivery.stuck(502.0, {4: (0, 9)})
