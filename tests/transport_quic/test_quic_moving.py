"""When a dialler follows its acceptor to another address, and when it does not: by a clock that is told.

Two connections in memory. What the dialler sends to the known address arrives or is lost, what the acceptor
sends comes from wherever a test says.
"""

from __future__ import annotations

import pytest
from aioquic.quic.connection import QuicConnectionId, QuicNetworkPath
from swactor_transport_quic.admission import Admitted
from swactor_transport_quic.connections import ConnectionMaker
from swactor_transport_quic.link import Alpn
from swactor_transport_quic.settings import QuicSettings

HOME, AWAY, THIRD, DIALLER = ("192.0.2.1", 1), ("192.0.2.1", 2), ("198.51.100.9", 3), ("192.0.2.2", 2)


class Moving:
    """`dead` are the acceptor's addresses where nothing arrives, `source` is where it sends from,
    `dialled_from` the dialler's only address; `to` counts the datagrams that the dialler sent, by address. No
    datagram above `largest` arrives, and each needs `delay` seconds."""

    def __init__(self, settings: QuicSettings | None = None) -> None:
        settings = settings or QuicSettings(datagram_size=1200)
        self.now = 1.0
        self.delay = 0.001
        self.largest = 65535
        self.source = HOME
        self.dialled_from = DIALLER
        self.dead: set[tuple[str, int]] = set()
        self.to: dict[tuple[str, int], int] = {}
        self.dialler = ConnectionMaker(seed=b"d" * 32, epoch=3, settings=settings).dialling(
            Alpn.EDGE, lambda claim: "", local=True
        )
        self.dialler.connect(HOME, self.now)
        first = self.dialler.original_destination_connection_id
        maker = ConnectionMaker(seed=b"a" * 32, epoch=4, settings=settings)
        self.acceptor = maker.accepting(Admitted(first, first, None), lambda claim: "", local=True)
        self.pass_time(0.3)
        self.mine = self.dialler.open_stream(b"preamble", is_unidirectional=True).stream_id
        self.theirs = self.acceptor.open_stream(b"preamble", is_unidirectional=True).stream_id
        self.pass_time(0.3)
        self.acceptor.receive_half(self.mine).advertise(1 << 20)
        self.dialler.receive_half(self.theirs).advertise(1 << 20)
        self.pass_time(0.3)

    def turn(self) -> None:
        """A round trip."""
        self.now += self.delay
        for data, to in self._made_by(self.dialler):
            self.to[to] = self.to.get(to, 0) + 1
            if to not in self.dead and len(data) <= self.largest:
                self.acceptor.receive_datagram(data, self.dialled_from, self.now)
        self.acceptor.settle()
        self.now += self.delay
        if self.acceptor._network_paths:
            for data, to in self._made_by(self.acceptor):
                if to == self.dialled_from and len(data) <= self.largest:
                    self.dialler.receive_datagram(data, self.source, self.now)
        self.dialler.settle()
        for side in (self.dialler, self.acceptor):
            while side.next_event() is not None:
                pass

    def _made_by(self, side):
        timer = side.get_timer()
        if timer is not None and timer <= self.now:
            side.handle_timer(self.now)
        side.renew_burst()
        return side.datagrams_to_send(self.now)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.turn()

    def speak(self, side, seconds: float = 0.1) -> None:
        """One message of `side`, and time for its acknowledgement."""
        side.send_stream_data(self.mine if side is self.dialler else self.theirs, b"12345678")
        self.pass_time(seconds)

    @property
    def followed(self) -> tuple[str, int]:
        return self.dialler.get_peer_address()


def test_a_peer_that_is_heard_at_home_again_is_not_looked_for_where_it_was_heard_once():
    """An outage long after a stray datagram from elsewhere is spent on the known address, not on that one."""
    moving = Moving()
    moving.source = AWAY
    moving.speak(moving.acceptor)
    moving.source = HOME
    moving.speak(moving.acceptor)
    moving.dead = {HOME, AWAY}
    moving.to.clear()
    moving.speak(moving.dialler, 2.0)
    assert moving.followed == HOME
    assert set(moving.to) == {HOME}


def test_what_comes_from_elsewhere_with_an_acknowledgement_is_no_reason_to_follow():
    """The known address was silent for two timeouts, and took what was sent there after all: the packet that
    says so may be a copy, which came first."""
    moving = Moving()
    moving.source = AWAY
    moving.speak(moving.acceptor)
    moving.dialler.send_stream_data(moving.mine, b"12345678")
    moving.acceptor.send_stream_data(moving.theirs, b"12345678")
    moving.turn()  # the message has arrived; its acknowledgement waits for company
    moving.dialler._loss._pto_count = 2
    moving.acceptor.send_stream_data(moving.theirs, b"12345678")
    moving.acceptor.acknowledge_now(moving.now)
    moving.turn()
    assert moving.followed == HOME
    assert moving.dialler._loss._pto_count == 0


def test_small_messages_that_put_off_every_timeout_do_not_keep_a_dialler_at_a_dead_address():
    moving = Moving()
    moving.speak(moving.dialler)
    moving.source, moving.dead = AWAY, {HOME}
    until = moving.now + 1.0
    while moving.now < until and moving.followed == HOME:
        moving.speak(moving.acceptor, 0.01)
        moving.speak(moving.dialler, 0.01)
    assert moving.followed == AWAY
    moving.pass_time(0.2)
    assert moving.dialler._network_paths[0].is_validated
    moving.dead = {HOME, THIRD}
    moving.speak(moving.dialler)
    assert moving.dialler.undelivered() == {}


def test_a_live_address_is_asked_a_few_times_a_second_however_often_packets_come_from_elsewhere():
    moving = Moving()
    moving.speak(moving.dialler)
    asked = 0
    for number in range(400):
        moving.source = (HOME, AWAY, THIRD)[number % 3]
        before = moving.dialler._asked_at
        moving.speak(moving.acceptor, 0.002)
        asked += moving.dialler._asked_at != before
    assert 3 <= asked <= 12  # in 0.8 s
    assert moving.followed == HOME
    assert set(moving.to) == {HOME}


def test_a_peer_that_goes_back_and_forth_is_followed_each_time():
    moving = Moving()
    for source, dead in ((AWAY, HOME), (HOME, AWAY), (THIRD, HOME), (AWAY, THIRD), (HOME, AWAY)):
        moving.source, moving.dead = source, {dead}
        moving.speak(moving.acceptor, 0.02)
        moving.speak(moving.dialler, 1.0)
        assert moving.followed == source
        assert moving.dialler._network_paths[0].is_validated
        assert len(moving.dialler._network_paths) <= 2
        assert moving.dialler.undelivered() == moving.acceptor.undelivered() == {}


def test_who_only_copies_cannot_keep_an_unproved_address():
    """Nothing is answered from where a copy came: the known address is gone back to, with what was due."""
    moving = Moving()
    moving.source = AWAY
    moving.speak(moving.acceptor)
    moving.dead = {HOME, AWAY}  # an outage, and the copies go on
    moving.dialler.send_stream_data(moving.mine, b"12345678")
    until = moving.now + 1.0
    while moving.now < until and moving.followed == HOME:
        moving.speak(moving.acceptor, 0.02)
    assert moving.followed == AWAY
    path = moving.dialler._network_paths[0]
    moving.dead = {AWAY}
    moving.source = HOME
    while moving.now < until + 2.0 and moving.followed == AWAY:
        moving.turn()
        assert path.bytes_sent <= 3 * path.bytes_received
    assert moving.followed == HOME
    moving.pass_time(1.0)
    assert moving.dialler.undelivered() == {}


def test_an_address_that_is_left_for_good_gives_back_its_connection_id():
    moving = Moving()
    quic = moving.dialler
    old = QuicNetworkPath(THIRD, is_validated=True)
    old.peer_cid = quic._peer_cid_available.pop(0)
    quic._network_paths += [QuicNetworkPath(AWAY, is_validated=True), old]
    quic.elsewhere = quic._network_paths[1]
    quic._loss._pto_count = 2
    quic._follow(moving.now)
    assert moving.followed == AWAY
    assert old.peer_cid.sequence_number in quic._retire_connection_ids
    assert isinstance(old.peer_cid, QuicConnectionId)


@pytest.mark.parametrize("count", [0, 4, 6, 32])
def test_no_more_challenges_are_kept_than_a_peer_needs(count):
    moving = Moving()
    quic = moving.dialler
    known = quic._network_paths[0]
    known.remote_challenges.extend(bytes([number]) * 8 for number in range(count))
    number = moving.acceptor._packet_number + 1
    challenges = b"".join(b"\x1a" + bytes([100 + i]) * 8 for i in range(20))
    quic.receive_datagram(moving.acceptor._seal(challenges, number), AWAY, moving.now)
    assert len(known.remote_challenges) == max(count, 5)


@pytest.mark.parametrize("who", ["dialler", "acceptor"])
def test_a_far_address_is_proved_though_its_way_carries_less(who):
    """A round trip of 100 ms, where a challenge in a datagram of the former size would come too late."""
    moving = Moving(QuicSettings(loopback_datagram_size=1452))
    moving.pass_time(0.2)
    moving.delay = 0.05
    for _ in range(10):
        moving.speak(moving.dialler, 0.2)
        moving.speak(moving.acceptor, 0.2)
    sides = moving.dialler, moving.acceptor
    assert [side._max_datagram_size for side in sides] == [1452, 1452]
    moving.largest = 1300
    if who == "acceptor":
        moving.source, moving.dead = AWAY, {HOME}
    else:
        moving.dialled_from = THIRD
    until = moving.now + 2.3
    abandoned = 0
    for side, stream in ((moving.acceptor, moving.theirs), (moving.dialler, moving.mine)):
        side.send_stream_data(stream, bytes(20_000))
    while moving.now < until:
        before = [side.get_peer_address() for side in sides]
        moving.turn()
        after = [side.get_peer_address() for side in sides]
        abandoned += before != after and after == [HOME, DIALLER]
    assert not abandoned
    assert [side.get_peer_address() for side in sides] == [moving.source, moving.dialled_from]
    assert all(side._network_paths[0].is_validated for side in sides)
    moving.pass_time(5.0)
    assert [side.undelivered() for side in sides] == [{}, {}]


def test_answers_to_questions_bring_about_no_further_ones():
    """A far acceptor that is always heard elsewhere, and takes what is sent where it is known to be: a
    connection without traffic falls silent."""
    moving = Moving()
    moving.delay = 0.1
    moving.source = AWAY
    for _ in range(5):
        moving.speak(moving.acceptor, 1.0)
    moving.pass_time(2.0)
    moving.to.clear()
    moving.pass_time(10.0)
    assert moving.followed == HOME
    assert sum(moving.to.values()) <= 2
