"""The short way of 1-RTT packets beside aioquic's own: whatever a peer puts into a packet, both agree.

One side of a connection is given random packets, sealed with the real keys, once through the short way and
once with it switched off. Events, counters, credit, what is acknowledged and how the connection ends must be
equal.
"""

from __future__ import annotations

import random

import pytest
from aioquic.quic.connection import QuicConnection
from swactor_transport_quic.admission import Admitted
from swactor_transport_quic.compat.arriving import ArrivingPackets, decode_varint
from swactor_transport_quic.compat.packets import encode_varint
from swactor_transport_quic.connections import ConnectionMaker
from swactor_transport_quic.link import Alpn
from swactor_transport_quic.settings import QuicSettings

SERVER, CLIENT = ("192.0.2.1", 1), ("192.0.2.2", 2)
CREDIT = 5000


class Pair:
    """A sealing side, and a receiving side that is looked at. The receiver has two streams: one that the peer
    writes and one of its own with data in flight."""

    def __init__(self) -> None:
        settings = QuicSettings(datagram_size=1200)
        left = ConnectionMaker(seed=b"d" * 32, epoch=3, settings=settings)
        right = ConnectionMaker(seed=b"a" * 32, epoch=4, settings=settings)
        self.now = 1.0
        self.left = left.dialling(Alpn.EDGE, lambda claim: "", local=True)
        self.left.connect(SERVER, self.now)
        first = self.left.original_destination_connection_id
        self.right = right.accepting(Admitted(first, first, None), lambda claim: "", local=True)
        self.exchange()
        self.theirs = self.left.open_stream(b"preamble", is_unidirectional=True).stream_id
        self.own = self.right.open_stream(b"preamble", is_unidirectional=True).stream_id
        self.exchange()
        self.right.receive_half(self.theirs).advertise(8 + CREDIT)
        self.left.receive_half(self.own).advertise(8 + CREDIT)
        self.exchange()
        self.right.send_stream_data(self.own, bytes(range(200)))
        self.in_flight = [n for data, n in self.outgoing(self.right)]
        while self.right.next_event() is not None:
            pass
        self.number = self.left._packet_number

    def outgoing(self, side) -> list[tuple[bytes, int]]:
        side.renew_burst()
        before = side._packet_number
        return [(data, before + i) for i, (data, _) in enumerate(side.datagrams_to_send(self.now))]

    def exchange(self) -> None:
        for _ in range(12):
            self.now += 0.02
            for source, target, address in (
                (self.left, self.right, CLIENT),
                (self.right, self.left, SERVER),
            ):
                if source is self.right and not source._network_paths:
                    continue
                timer = source.get_timer()
                if timer is not None and timer <= self.now:
                    source.handle_timer(self.now)
                for data, _ in self.outgoing(source):
                    target.receive_datagram(data, address, self.now)
                target.settle()

    def give(self, payload: bytes, *, number: int | None = None) -> None:
        self.now += 0.0001
        if number is None:
            number = self.number = self.number + 1
        self.right.receive_datagram(self.left._seal(payload, number), CLIENT, self.now)
        self.right.settle()
        assert (self.right.get_timer(), self.right._loss_at) == self.timers_of_aioquic()

    def timers_of_aioquic(self) -> tuple[float | None, float | None]:
        return QuicConnection.get_timer(self.right), self.right._loss_at

    def state(self) -> tuple[object, ...]:
        """What the receiving side has become."""
        quic = self.right
        space = quic._keys()[1]
        occurred = []
        while (event := quic.next_event()) is not None:
            occurred.append(repr(event))
        streams = {
            number: (
                stream.max_stream_data_remote,
                stream.receiver.highest_offset,
                stream.receiver.is_finished,
                stream.sender._buffer_start,
                stream.sender.is_finished,
            )
            for number, stream in quic._streams.items()
        }
        ending = quic.ending
        # What was in the packet that ended it was or was not noted: nobody will hear of it.
        received = None if ending else (list(space.ack_queue), space.ack_at is not None)
        return occurred, streams, ending, received, sorted(space.sent_packets), quic._loss.bytes_in_flight


def frame(draw: random.Random, pair: Pair) -> bytes:
    """A frame: mostly right, sometimes wrong in one place, sometimes not a frame at all."""
    streams = [pair.theirs, pair.theirs, pair.theirs, pair.own, pair.theirs + 4, pair.theirs + 4000, 0, 1]
    kind = draw.choice("sssssaaccppxr")
    if kind == "s":
        flags = draw.choice((0x08, 0x0A, 0x0C, 0x0E, 0x0E, 0x0E, 0x0E, 0x0F))
        data = draw.randbytes(draw.choice((0, 1, 5, 60)))
        made = bytes((flags,)) + encode_varint(draw.choice(streams))
        if flags & 4:
            made += encode_varint(draw.choice((0, 3, 8, 8, 9, 13, 68, 100, CREDIT, CREDIT + 8, 2**62 - 1)))
        if flags & 2:
            made += encode_varint(len(data) + draw.choice((0, 0, 0, 0, 0, 1, 70)))
        return made + data
    if kind == "a":
        largest = draw.choice([*pair.in_flight, *pair.in_flight, 0, 2, pair.in_flight[-1] + 50, 2**40])
        ranges = draw.choice((0, 0, 0, 1, 2))
        made = b"\x02" + encode_varint(largest) + encode_varint(draw.randrange(3000)) + encode_varint(ranges)
        made += encode_varint(draw.choice((0, 0, 1, largest, largest + 1)))
        return made + b"".join(encode_varint(draw.randrange(3)) for _ in range(2 * ranges))
    if kind == "c":
        limit = draw.choice((0, 9, 5000, 100_000, 2**61))
        return b"\x11" + encode_varint(draw.choice(streams)) + encode_varint(limit)
    if kind == "p":
        return draw.choice((b"\x01", b"\x00\x00\x00"))
    if kind == "r":
        return b"\x04" + encode_varint(pair.theirs) + b"\x01" + encode_varint(draw.choice((8, 20, 9000)))
    return draw.randbytes(draw.randrange(1, 12))


def outcome(seed: int, *, short: bool, monkeypatch) -> list[object]:
    pair = Pair()
    draw = random.Random(seed)
    with monkeypatch.context() as patch:
        if not short:
            patch.setattr(ArrivingPackets, "_receive_short", lambda self, data, addr, now: False)
        seen: list[object] = []
        for _ in range(6):
            payload = b"".join(frame(draw, pair) for _ in range(draw.randrange(1, 5)))
            number = draw.choice(
                (None, None, None, None, pair.number, pair.number + 3, max(0, pair.number - 2))
            )
            if number is not None:
                pair.number = max(pair.number, number)
            pair.give(payload.ljust(4, b"\0"), number=number)
            seen.append((payload.hex(), pair.state()))
            if pair.right.ending is not None:
                break
        return seen


@pytest.mark.parametrize("block", range(4))
def test_random_packets_have_the_same_effect_either_way(block, monkeypatch):
    base = random.randrange(2**32)
    taken = 0
    for seed in range(base, base + 60):
        print("seed", seed)
        short = outcome(seed, short=True, monkeypatch=monkeypatch)
        assert short == outcome(seed, short=False, monkeypatch=monkeypatch), f"seed {seed}"
        taken += sum(state[1] is not None for _, state in short)
    assert taken > 60


@pytest.mark.parametrize("value", [0, 1, 63, 64, 16_383, 16_384, 2**30 - 1, 2**30, 2**62 - 1])
def test_numbers_are_coded_as_rfc_9000_says(value):
    coded = encode_varint(value)
    assert decode_varint(b"\xff" + coded + b"\0", 1) == (value, 1 + len(coded))
    for cut in range(len(coded)):
        with pytest.raises(IndexError):
            decode_varint(coded[:cut], 0)


def test_a_wrong_program_is_noticed(monkeypatch):
    """The comparison above is worth something: with the credit check left out it fails."""
    real = ArrivingPackets._take_stream_frame

    def careless(self, payload, at, kind):
        for stream in self._streams.values():
            stream.max_stream_data_local = max(stream.max_stream_data_local, 2**20)
        return real(self, payload, at, kind)

    monkeypatch.setattr(ArrivingPackets, "_take_stream_frame", careless)
    assert any(
        outcome(seed, short=True, monkeypatch=monkeypatch)
        != outcome(seed, short=False, monkeypatch=monkeypatch)
        for seed in range(200)
    )


def test_a_damaged_or_repeated_packet_changes_nothing():
    pair = Pair()
    stream = b"\x0e" + encode_varint(pair.theirs) + b"\x08\x04data"
    whole = pair.left._seal(stream, pair.number + 1)
    before = pair.state()
    for place in range(9, len(whole)):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1
        pair.right.receive_datagram(bytes(spoilt), CLIENT, pair.now)
        assert pair.state() == before
    pair.right.receive_datagram(whole, CLIENT, pair.now)
    after = pair.state()
    assert after[0]
    assert after != before
    pair.right.receive_datagram(whole, CLIENT, pair.now)
    assert pair.state() == ([], *after[1:])
