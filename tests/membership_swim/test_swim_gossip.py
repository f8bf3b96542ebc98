"""The rumour queue: every rumour goes out so many times, the freshest first, never twice in one packet."""

from __future__ import annotations

import pytest
from swactor_membership_swim.gossip import RumourQueue


@pytest.mark.parametrize(("members", "sends"), [(1, 6), (2, 6), (9, 6), (10, 12), (99, 12), (100, 18)])
def test_a_rumour_goes_out_its_number_of_times_and_ends(members, sends) -> None:
    queue = RumourQueue(6)
    queue.put("a", b"rumour")
    taken = [queue.take(1000, members=members) for _ in range(sends + 3)]
    assert taken == [[b"rumour"]] * sends + [[]] * 3
    assert len(queue) == 0


def test_the_least_sent_goes_first_and_the_newest_among_equals() -> None:
    queue = RumourQueue(6)
    queue.put("a", b"A" * 10)
    assert queue.take(10, members=3) == [b"A" * 10]
    queue.put("b", b"B" * 10)
    queue.put("c", b"C" * 10)
    assert queue.take(10, members=3) == [b"C" * 10]
    assert queue.take(30, members=3)[0] == b"B" * 10


def test_a_newer_rumour_about_a_name_replaces_the_older() -> None:
    queue = RumourQueue(6)
    queue.put("a", b"old")
    queue.take(100, members=3)
    queue.put("a", b"new")
    assert len(queue) == 1
    assert [queue.take(100, members=3) for _ in range(7)] == [[b"new"]] * 6 + [[]]


def test_what_does_not_fit_or_is_carried_already_waits() -> None:
    queue = RumourQueue(6)
    queue.put("long", b"L" * 50)
    queue.put("short", b"S" * 10)
    assert queue.take(40, members=3) == [b"S" * 10]
    assert queue.take(100, members=3, without=["long"]) == [b"S" * 10]
    assert queue.take(0, members=3) == []
    assert queue.take(60, members=3) == [b"L" * 50, b"S" * 10]
