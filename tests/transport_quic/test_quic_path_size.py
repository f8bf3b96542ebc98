"""How large datagrams may be: the search, black holes, what the kernel refuses, bulk through a narrow one."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from aioquic.quic import events
from swactor_core.errors import EdgeBroken
from swactor_transport_quic.admission import Admitted
from swactor_transport_quic.compat.connection import PacedBursts
from swactor_transport_quic.connections import ConnectionMaker
from swactor_transport_quic.link import Alpn
from swactor_transport_quic.liveness import Delivery
from swactor_transport_quic.path_size import LADDER, PathSize
from swactor_transport_quic.settings import LARGEST_DATAGRAM, SMALLEST_DATAGRAM, QuicSettings

DIALLER, ACCEPTOR = ("192.0.2.2", 2), ("192.0.2.1", 1)
AGAIN = 600.0


def search(sizer: PathSize, carries: int, now: float = 0.0) -> list[int]:
    """Probes until the search rests; the sizes that were tried."""
    tried = []
    while size := sizer.due(now):
        assert len(tried) < 50, tried
        tried.append(size)
        sizer.sent(size)
        assert sizer.due(now) == 0, "one probe at a time"
        (sizer.acknowledged if size <= carries else sizer.lost)(size, now)
    return tried


@pytest.mark.parametrize(
    ("carries", "found"), [(16_200, 16_200), (9_000, 8_952), (4_352, 4_352), (1_500, 1_452), (1_300, 1_200)]
)
def test_the_largest_step_that_passes_is_found(carries, found):
    sizer = PathSize(SMALLEST_DATAGRAM, LARGEST_DATAGRAM)
    tried = search(sizer, carries)
    assert sizer.size == found
    # Three tries for each that is too large, one for the one that passes.
    assert tried == [step for step in LADDER if step > carries for _ in range(3)] + [found] * (found > 1200)
    assert search(sizer, carries, AGAIN - 1) == []
    again = search(sizer, 16_200, AGAIN)
    assert again == ([16_200] if found < 16_200 else [])
    assert sizer.size == 16_200


def test_a_bound_of_the_host_is_the_top_of_the_ladder():
    sizer = PathSize(SMALLEST_DATAGRAM, 8_000)
    assert search(sizer, 16_200) == [8_000]
    assert search(PathSize(SMALLEST_DATAGRAM, SMALLEST_DATAGRAM), 16_200) == []
    assert search(PathSize(8_000, 8_000), 16_200) == []


def test_what_the_kernel_refuses_is_not_tried_again_and_a_late_answer_counts_for_nothing():
    sizer = PathSize(SMALLEST_DATAGRAM, LARGEST_DATAGRAM)
    sizer.sent(sizer.due(0.0))
    sizer.refused(16_200, 0.0)
    assert sizer.due(0.0) == 8_952
    sizer.acknowledged(16_200, 0.0)
    assert sizer.size == SMALLEST_DATAGRAM
    assert search(sizer, 16_200) == [8_952]
    sizer.refused(8_952, 1.0)  # the route has changed
    assert sizer.size == SMALLEST_DATAGRAM
    assert sizer.due(1.0) == 16_200


def test_a_path_that_narrows_is_searched_again():
    sizer = PathSize(SMALLEST_DATAGRAM, LARGEST_DATAGRAM)
    assert not sizer.fall_back(0.0)
    search(sizer, 16_200)
    assert sizer.fall_back(5.0)
    assert sizer.size == SMALLEST_DATAGRAM
    search(sizer, 1_500, 5.0)
    assert sizer.size == 1_452


def test_a_fast_path_gets_as_much_as_a_timer_can_release():
    pacer = PacedBursts(max_datagram_size=1200)
    pacer.update_rate(congestion_window=1_200_000, smoothed_rtt=0.01)  # 1.25 * 1000 datagrams in 10 ms
    now, sent = 1.0, 0
    while now < 1.1:
        while pacer.next_send_time(now) is None:
            pacer.update_after_send(now)
            sent += 1
        now = max(pacer.next_send_time(now), now + 0.001)
    assert 12_000 < sent < 13_500  # aioquic's own would have let 16 go each millisecond: 1600


class NarrowWire:
    """Two connections in virtual time, over a path that drops what exceeds `carries` and takes `delay`
    seconds, with `rate` as many more as its queue, of any length, needs for so many bytes a second. With
    `pings` each side asks so often whether the other is there. `loses` says of a datagram that it is lost."""

    def __init__(
        self, carries: int, *, local: bool, delay: float = 0.0, pings: float = 0.0, rate: float = math.inf
    ) -> None:
        self.carries = carries
        self.rate = rate
        self.queue_until = dict.fromkeys(("left", "right"), 0.0)
        self.loses = lambda: False
        self.delay = delay
        self.pings = pings
        self.pinged_at = 0.0
        self.under_way = []
        self.now = 1.0
        self.largest = 0
        left = ConnectionMaker(seed=b"d" * 32, epoch=3, settings=QuicSettings())
        right = ConnectionMaker(seed=b"a" * 32, epoch=4, settings=QuicSettings())
        self.left = left.dialling(Alpn.EDGE, lambda claim: "", local=local)
        self.left.connect(ACCEPTOR, self.now)
        first = self.left.original_destination_connection_id
        self.right = right.accepting(Admitted(first, first, None), lambda claim: "", local=local)
        self.got = bytearray()
        self.known = {self.left}

    def run(self, seconds: float, *, until=lambda: False) -> None:
        end = self.now + seconds
        while self.now < end and not until():
            self.now += 0.001
            if self.pings and self.now >= self.pinged_at + self.pings:
                self.pinged_at = self.now
                for side in (self.left, self.right):
                    side.send_ping(int(self.now * 1000))
            for name, source, target, address in (
                ("left", self.left, self.right, DIALLER),
                ("right", self.right, self.left, ACCEPTOR),
            ):
                if source not in self.known:
                    continue
                timer = source.get_timer()
                if timer is not None and timer <= self.now:
                    source.handle_timer(self.now)
                source.renew_burst()
                for data, _ in source.datagrams_to_send(self.now):
                    if len(data) <= self.carries and not self.loses():
                        self.largest = max(self.largest, len(data))
                        sent = max(self.now, self.queue_until[name]) + len(data) / self.rate
                        self.queue_until[name] = sent
                        self.under_way.append((sent + self.delay, target, data, address))
                self.under_way.sort(key=lambda one: one[0])
                while self.under_way and self.under_way[0][0] <= self.now:
                    _, to, data, origin = self.under_way.pop(0)
                    self.known.add(to)
                    to.receive_datagram(data, origin, self.now)
                    to.settle()
                target.settle()
                while (event := target.next_event()) is not None:
                    if isinstance(event, events.StreamDataReceived):
                        self.got += event.data


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    ("carries", "found"), [(16_200, 16_200), (9_000, 8_952), (1_500, 1_452), (1_200, 1_200)]
)
def test_a_connection_finds_its_path_and_bytes_are_whole(carries, found, local):
    wire = NarrowWire(carries, local=local)
    wire.run(60, until=lambda: wire.left.confirmed)
    window = wire.left._loss.congestion_window
    wire.run(
        60, until=lambda: wire.left._max_datagram_size == found and wire.right._max_datagram_size == found
    )
    wire.run(5)
    assert wire.left._max_datagram_size == found
    assert wire.left._loss.congestion_window >= window, "a lost probe is no congestion"
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    data = bytes(range(256)) * 2000
    wire.run(1)
    wire.right.receive_half(half.stream_id).advertise(len(data) + 8)
    wire.left.send_stream_data(half.stream_id, data)
    wire.run(30, until=lambda: half.unacknowledged == 0)
    assert wire.got[8:] == data
    assert wire.largest <= found


def test_a_black_hole_is_left_within_seconds_and_the_path_is_found_anew():
    wire = NarrowWire(16_200, local=False)
    wire.run(60, until=lambda: wire.left._max_datagram_size == 16_200)
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.run(1)
    data = bytes(range(256)) * 400
    wire.right.receive_half(half.stream_id).advertise(len(data) + 8)
    wire.run(1)
    wire.carries = 1_500
    began = wire.now
    wire.left.send_stream_data(half.stream_id, data)
    wire.run(60, until=lambda: half.unacknowledged == 0)
    assert wire.got[8:] == data
    assert wire.now - began < 5
    wire.run(10)
    assert wire.left._max_datagram_size == 1_452


@pytest.mark.parametrize("before", [16_200, 1_500])
@pytest.mark.parametrize("delay", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("pings", [0.1, 0.4])
def test_a_black_hole_is_left_though_pings_are_answered(before, delay, pings):
    """Answers to what is small come sooner than three timeouts of what is large, and end their row."""
    wire = NarrowWire(before, local=False, delay=delay, pings=pings)
    wire.run(60, until=lambda: wire.left._max_datagram_size > SMALLEST_DATAGRAM)
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.run(2)
    data = bytes(range(256)) * 40
    wire.right.receive_half(half.stream_id).advertise(len(data) + 8)
    wire.run(2)
    wire.carries = 1_300
    began = wire.now
    wire.left.send_stream_data(half.stream_id, data)
    wire.run(60, until=lambda: half.unacknowledged == 0)
    assert wire.got[8:] == data
    assert wire.now - began < 5
    wire.run(20)
    assert wire.left._max_datagram_size == SMALLEST_DATAGRAM


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("seconds", [0.3, 1.0, 1.9])
def test_a_peers_pause_costs_no_size(local, seconds):
    """Nothing is answered meanwhile, small or large."""
    wire = NarrowWire(16_200, local=local, delay=0.0005, pings=0.4)
    wire.run(10, until=lambda: wire.left._max_datagram_size == LARGEST_DATAGRAM)
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.run(1)
    wire.right.receive_half(half.stream_id).advertise(200_000)
    wire.run(1)
    wire.left.send_stream_data(half.stream_id, bytes(100_000))
    wire.loses = lambda: True
    wire.run(seconds)
    wire.loses = lambda: False
    wire.run(10, until=lambda: half.unacknowledged == 0)
    wire.left.send_stream_data(half.stream_id, bytes(50_000))
    wire.run(1)
    assert wire.left._max_datagram_size == LARGEST_DATAGRAM


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("seconds", [0.3, 1.0, 1.9])
@pytest.mark.parametrize("after", [0.0, 0.002])
def test_a_pause_while_the_path_is_searched_costs_no_size(local, seconds, after):
    """Where a node has just begun pauses are common; what was not found then is missed for ten minutes."""
    wire = NarrowWire(16_200, local=local, delay=0.0005, pings=0.4)
    wire.run(10, until=lambda: wire.left.confirmed)
    wire.run(after)
    wire.loses = lambda: True
    wire.run(seconds)
    wire.loses = lambda: False
    wire.run(2)
    assert wire.left._max_datagram_size == wire.right._max_datagram_size == LARGEST_DATAGRAM


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_path_that_loses_many_keeps_its_size_most_of_the_time(share):
    """One datagram at a time: three that are lost in a row look like a black hole."""
    wire = NarrowWire(16_200, local=False, delay=0.005, pings=0.4)
    wire.run(10, until=lambda: wire.left._max_datagram_size == LARGEST_DATAGRAM)
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.run(1)
    wire.right.receive_half(half.stream_id).advertise(1 << 24)
    wire.run(1)
    dice = random.Random(7)
    wire.loses = lambda: dice.random() < share
    large, rounds = 0, 400
    for _ in range(rounds):
        wire.left.send_stream_data(half.stream_id, bytes(10_000))
        wire.run(0.04)
        large += wire.left._max_datagram_size > 1_452
    assert large / rounds > 0.8


def test_what_waits_in_a_slow_paths_queue_is_not_stuck():
    """A MiB of each of four edges over 1 Mbit/s: what a fifth sends then has seconds of it before it."""
    wire = NarrowWire(1_500, local=False, delay=0.02, pings=0.4, rate=125_000)
    wire.run(5)
    halves = [wire.left.open_stream(b"preamble", is_unidirectional=True) for _ in range(5)]
    wire.run(1)
    for half in halves:
        wire.right.receive_half(half.stream_id).advertise(1 << 21)
    wire.run(1)
    for half in halves[:4]:
        wire.left.send_stream_data(half.stream_id, bytes(1 << 20))
    wire.run(14)
    wire.left.send_stream_data(halves[4].stream_id, b"a token")
    delivery, waited, since = Delivery(wire.now, stuck_after=10.0), 0.0, wire.now
    while any(half.unacknowledged for half in halves):
        wire.run(delivery.next_look - wire.now)
        wire.left.settle()
        assert not delivery.stuck(wire.now, wire.left.undelivered())
        if halves[4].unacknowledged:
            waited = wire.now - since
    assert waited > 10, "else nothing waits here"


def test_what_never_arrives_is_counted_and_forgotten_when_it_does():
    wire = NarrowWire(1_200, local=False, delay=0.02, pings=0.4)
    wire.run(5)
    half = wire.left.open_stream(b"preamble", is_unidirectional=True)
    wire.run(1)
    wire.right.receive_half(half.stream_id).advertise(1 << 20)
    wire.run(1)
    assert wire.left.undelivered() == {}
    wire.carries = 1_100
    wire.left.send_stream_data(half.stream_id, bytes(50_000))
    delivery, began = Delivery(wire.now, stuck_after=10.0), wire.now
    while not delivery.stuck(wire.now, wire.left.undelivered()):
        wire.run(delivery.next_look - wire.now)
        assert wire.now - began < 40, "remainders small enough may pass, but not for ever"
    wire.carries = 1_200
    wire.run(20, until=lambda: half.unacknowledged == 0)
    assert wire.left.undelivered() == {}
    assert not wire.left._oldest_lost


def test_losses_of_congestion_are_no_black_hole():
    sizer = PathSize(SMALLEST_DATAGRAM, LARGEST_DATAGRAM)
    search(sizer, 16_200)
    for number in range(20):
        assert not sizer.missed(16_200, acknowledged=16_200, sent_at=number, now=number + 0.5)
    assert sizer.size == 16_200
    for _ in range(20):  # all of one flight
        assert not sizer.missed(8_000, acknowledged=300, sent_at=30.0, now=30.5)
    assert sizer.missed(8_000, acknowledged=300, sent_at=32.0, now=32.5)
    assert sizer.size == SMALLEST_DATAGRAM


def test_the_ends_of_messages_that_pass_hide_no_black_hole():
    """A path of Ethernet's size that was one of jumbo frames carries every message's last piece."""
    sizer = PathSize(SMALLEST_DATAGRAM, 8_952)
    search(sizer, 8_952)
    assert [sizer.missed(8_952, acknowledged=1_330, sent_at=at, now=at + 0.5) for at in (1.0, 2.0, 3.0)] == [
        False,
        False,
        True,
    ]


def test_probes_that_are_lost_in_silence_are_no_tries():
    sizer = PathSize(SMALLEST_DATAGRAM, LARGEST_DATAGRAM)
    for _ in range(20):
        assert sizer.due(1.0) == LARGEST_DATAGRAM
        sizer.sent(LARGEST_DATAGRAM)
        sizer.lost(LARGEST_DATAGRAM, 1.0, silence=True)
    search(sizer, 20_000)
    assert sizer.size == LARGEST_DATAGRAM


async def test_bulk_passes_a_relay_that_drops_what_is_large(make_node, make_relay, flow, pattern):
    left, right = await make_node("left"), await make_node("right")
    relay = make_relay(right)
    inner = relay._pass
    relay._pass = lambda via, data, to: inner(via, data, to) if len(data) <= 1500 else None
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    data = pattern(3, 400_000)
    received, _ = await asyncio.gather(
        flow.read_exactly(reader, len(data), granted=100_000), flow.send_all(sender, data)
    )
    assert received == data
    (link,) = left.transport._endpoint.links
    assert link.quic._max_datagram_size <= 1_452


async def test_a_path_that_carries_pings_only_is_lost_in_bounded_time(make_node, make_relay, flow):
    """Below what QUIC may assume: no size is left to fall back to, and the peer answers all the same."""
    left, right = [await make_node(name, stuck_after=1.0, datagram_size=1200) for name in ("left", "right")]
    relay = make_relay(right)
    inner = relay._pass
    left.transport.set_peer(right.peer(port=relay.port))
    sender, reader = await left.edge_to(right)
    reader.grant(100_000)
    await flow.send_all(sender, b"x")
    assert await flow.read_exactly(reader, 1) == b"x"
    relay._pass = lambda via, data, to: inner(via, data, to) if len(data) <= 1100 else None
    began = asyncio.get_running_loop().time()
    await flow.send_all(sender, bytes(50_000))
    with pytest.raises(EdgeBroken, match="what was sent has not arrived for 1 s, though pings are answered"):
        await flow.send_all(sender, bytes(100_000))
    assert asyncio.get_running_loop().time() - began < 10
    with pytest.raises(EdgeBroken, match="what was sent has not arrived"):
        await flow.read_exactly(reader, 50_000)
    for node, other in ((left, right), (right, left)):
        peer, why = await asyncio.wait_for(node.lost.get(), 10)
        assert peer == other.node_id
        assert "has not arrived" in why


async def test_a_reader_that_takes_its_time_is_not_stuck(make_node, flow, monkeypatch):
    """What nobody has granted waits unsent, and what was granted is acknowledged though nobody reads it."""
    left, right = [await make_node(name, stuck_after=0.2) for name in ("left", "right")]
    left.transport.set_peer(right.peer())
    sender, reader = await left.edge_to(right)
    mine, theirs = await left.control_to(right)
    reader.grant(1000)
    writing = asyncio.ensure_future(flow.send_all(sender, bytes(5000)))
    sending = asyncio.ensure_future(mine.send(bytes(1 << 20)))
    looks, inner, enough = 0, Delivery.stuck, asyncio.Event()

    def counted(self, now, waiting):
        nonlocal looks
        looks += 1
        if looks == 30:
            enough.set()
        return inner(self, now, waiting)

    monkeypatch.setattr(Delivery, "stuck", counted)
    await asyncio.wait_for(enough.wait(), 20)
    assert left.lost.empty()
    received = await flow.read_exactly(reader, 5000, granted=5000)
    assert len(await theirs.receive()) == 1 << 20
    await asyncio.gather(writing, sending)
    assert received == bytes(5000)


async def test_large_datagrams_are_in_use_on_this_machine_right_away(pair, flow):
    left, right = pair
    sender, reader = await left.edge_to(right)
    reader.grant(100)
    await flow.send_all(sender, b"x")
    assert await flow.read_exactly(reader, 1) == b"x"
    for node in pair:
        (link,) = node.transport._endpoint.links
        async with asyncio.timeout(5):
            while link.quic._max_datagram_size < LARGEST_DATAGRAM:
                await link.activity.wait(0.05)
