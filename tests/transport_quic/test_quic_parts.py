"""The pure parts: settings, identity, admission, congestion window, and the wake-up."""

from __future__ import annotations

import asyncio
import random

import pytest
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.tls import Epoch
from swactor_core.errors import ConfigError
from swactor_transport_quic.admission import Admission, Admitted, Reply
from swactor_transport_quic.congestion import BoundedReno, congestion_name
from swactor_transport_quic.connections import ConnectionMaker
from swactor_transport_quic.endpoint import is_loopback, is_unspecified
from swactor_transport_quic.identity import (
    Claim,
    IdentityRejected,
    make_certificate,
    private_key,
    public_key,
    read_certificate,
)
from swactor_transport_quic.link import Alpn
from swactor_transport_quic.settings import QuicSettings, parse_settings
from swactor_transport_quic.waiting import Signal

# Settings


def test_settings_have_their_documented_bounds():
    settings = parse_settings({})
    assert settings == QuicSettings()
    assert settings.probe_interval + settings.loss_after < 3.0, "a killed peer is known within 3 s"
    assert settings.loss_after > 2.0, "a peer paused for 2 s is spared"
    assert parse_settings({"datagram_size": 8900, "idle_timeout": 20}).datagram_size == 8900


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"datagram_sise": 1200}, "datagram_sise"),
        ({"datagram_size": 16_384}, "datagram_size"),
        ({"datagram_size": 1199}, "datagram_size"),
        ({"send_bound": 0}, "send_bound"),
        ({"probe_interval": "often"}, "probe_interval"),
        ({"drain_timeout": 5}, "drain_timeout"),
        ({"idle_timeout": 7}, "idle_timeout"),
        ({"key_update_packets": 2**24}, "key_update_packets"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(settings, named):
    with pytest.raises(ConfigError) as caught:
        parse_settings(settings)
    assert named in str(caught.value)
    assert str(next(iter(settings.values()))) in str(caught.value)
    assert caught.value.hint


# Identity


def test_a_certificate_carries_key_and_epoch():
    key = private_key(b"s" * 32)
    for epoch in (0, 1, 2**64 - 1):
        claim = read_certificate(make_certificate(key, epoch), [])
        assert claim == Claim(public_key(b"s" * 32), epoch)


@pytest.mark.parametrize("epoch", [-1, 2**64])
def test_an_epoch_out_of_range_is_refused(epoch):
    with pytest.raises(ConfigError, match="epoch"):
        make_certificate(private_key(b"s" * 32), epoch)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_seed_of_another_size_is_refused(size):
    with pytest.raises(ConfigError, match=f"{size} bytes"):
        public_key(bytes(size))


def test_a_chain_is_rejected():
    certificate = make_certificate(private_key(b"s" * 32), 1)
    with pytest.raises(IdentityRejected, match="chain of 2"):
        read_certificate(certificate, [certificate])


@pytest.mark.parametrize(
    ("host", "loopback", "unspecified"),
    [
        ("127.0.0.1", True, False),
        ("127.9.9.9", True, False),
        ("::1", True, False),
        ("::ffff:127.0.0.1", True, False),
        ("192.0.2.1", False, False),
        ("fe80::1%eth0", False, False),
        ("::ffff:192.0.2.1", False, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
    ],
)
def test_addresses_are_classed(host, loopback, unspecified):
    assert (is_loopback(host), is_unspecified(host)) == (loopback, unspecified)


# Admission

FAR, NEAR = ("192.0.2.7", 4000), ("127.0.0.1", 4000)


def first_datagram(token: bytes = b"") -> bytes:
    maker = ConnectionMaker(seed=b"x" * 32, epoch=1, settings=QuicSettings())
    quic = maker.dialling(Alpn.EDGE, lambda claim: "", local=False)
    quic._peer_token = token
    quic.connect(("192.0.2.1", 1), 0.0)
    return quic.datagrams_to_send(0.0)[0][0]


def retry_token(reply: Reply) -> tuple[bytes, bytes]:
    """The source connection id and the token of a retry packet."""
    data = reply.datagram
    assert data[0] & 0xF0 == 0xF0
    destination_length = data[5]
    at = 6 + destination_length
    return data[at + 1 : at + 1 + data[at]], data[at + 1 + data[at] : -16]


def test_loopback_is_admitted_and_far_addresses_prove_themselves():
    admission = Admission(QuicSettings())
    assert isinstance(admission.consider(first_datagram(), NEAR, 0.0, loopback=True), Admitted)
    question = first_datagram()
    reply = admission.consider(question, FAR, 0.0, loopback=False)
    assert isinstance(reply, Reply)
    assert len(reply.datagram) <= len(question)
    source_id, token = retry_token(reply)
    answer = bytearray(first_datagram(token))
    answer[6 : 6 + answer[5]] = source_id
    admitted = admission.consider(bytes(answer), FAR, 1.0, loopback=False)
    assert admitted == Admitted(source_id, question[6:14], source_id)
    assert admission.consider(bytes(answer), ("192.0.2.8", 4000), 1.0, loopback=False) is None
    assert admission.consider(bytes(answer), FAR, 40.0, loopback=False) is None
    other = Admission(QuicSettings())
    assert other.consider(bytes(answer), FAR, 1.0, loopback=False) is None


def test_loopback_too_proves_itself_once_many_are_half_open():
    admission = Admission(QuicSettings(retry_above=3))
    for number in range(3):
        assert isinstance(admission.consider(first_datagram(), NEAR, 0.0, loopback=True), Admitted)
        admission.started(number, NEAR)
    assert isinstance(admission.consider(first_datagram(), NEAR, 0.0, loopback=True), Reply)
    admission.finished(0)
    admission.finished(0)
    assert isinstance(admission.consider(first_datagram(), NEAR, 0.0, loopback=True), Admitted)


def test_half_open_connections_are_capped_in_all_and_by_source():
    admission = Admission(QuicSettings(half_open_total=5, half_open_per_source=2, retry_above=100))
    for number in range(2):
        admission.started(number, FAR)
    assert admission.consider(first_datagram(), FAR, 0.0, loopback=False) is None
    assert isinstance(admission.consider(first_datagram(), ("192.0.2.8", 1), 0.0, loopback=False), Reply)
    for number in range(2, 5):
        admission.started(number, NEAR)
    assert admission.consider(first_datagram(), NEAR, 0.0, loopback=True) is None
    assert admission.half_open == 5
    for number in range(5):
        admission.finished(number)
    assert admission.half_open == 0
    assert not admission._by_source


def test_handshakes_begin_at_a_bounded_rate():
    admission = Admission(QuicSettings(half_open_total=4, handshakes_per_second=10, retry_above=100))
    begun = [admission.consider(first_datagram(), NEAR, 50.0, loopback=True) for _ in range(6)]
    assert [isinstance(answer, Admitted) for answer in begun] == [True] * 4 + [False] * 2
    assert admission.consider(first_datagram(), NEAR, 50.05, loopback=True) is None
    assert isinstance(admission.consider(first_datagram(), NEAR, 50.2, loopback=True), Admitted)
    later = [admission.consider(first_datagram(), NEAR, 90.0, loopback=True) for _ in range(6)]
    assert (
        sum(isinstance(answer, Admitted) for answer in later) == 4
    )  # unused time earns no more than a burst


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
    ],
)
def test_a_network_of_ipv6_is_one_source(one, other, same):
    admission = Admission(QuicSettings(half_open_per_source=1))
    admission.started("link", (one, 1))
    answer = admission.consider(first_datagram(), (other, 1), 0.0, loopback=False)
    assert (answer is None) == same


def test_an_unknown_version_is_told_ours_only_for_a_full_datagram():
    admission = Admission(QuicSettings())
    question = bytearray(first_datagram())
    question[1:5] = b"\x0a\x0a\x0a\x0a"
    reply = admission.consider(bytes(question), FAR, 0.0, loopback=False)
    assert isinstance(reply, Reply)
    assert reply.datagram[1:5] == b"\0\0\0\0"
    assert reply.datagram[-4:] == b"\0\0\0\x01"
    assert admission.consider(bytes(question[:1199]), FAR, 0.0, loopback=False) is None
    assert (
        admission.consider(bytes([question[0]]) + b"\0\0\0\0" + bytes(question[5:]), FAR, 0.0, loopback=False)
        is None
    )


def test_no_bytes_raise():
    seed = random.randrange(2**32)
    print("seed", seed)
    draw, admission = random.Random(seed), Admission(QuicSettings(retry_above=0))
    real = first_datagram()
    for _ in range(3000):
        data = bytearray(real if draw.random() < 0.5 else draw.randbytes(1200))
        for _ in range(draw.randrange(4)):
            data[draw.randrange(60)] = draw.randrange(256)
        data[0] |= 0x80
        outcome = admission.consider(bytes(data), FAR, 0.0, loopback=draw.random() < 0.5)
        assert outcome is None or isinstance(outcome, Reply)


# Congestion


def packet(sent_time: float, size: int = 1000) -> QuicSentPacket:
    return QuicSentPacket(
        epoch=Epoch.ONE_RTT,
        in_flight=True,
        is_ack_eliciting=True,
        is_crypto_packet=False,
        packet_number=0,
        packet_type=QuicPacketType.ONE_RTT,
        sent_time=sent_time,
        sent_bytes=size,
    )


def filled(window: BoundedReno, now: float) -> list[QuicSentPacket]:
    packets = []
    while window.bytes_in_flight + 1000 <= window.congestion_window:
        packets.append(packet(now))
        window.on_packet_sent(packet=packets[-1])
    return packets


def test_the_window_doubles_to_its_ceiling_and_ignores_jitter():
    window = BoundedReno(max_datagram_size=1000, first=10_000, ceiling=100_000)
    sizes = []
    for round_ in range(1, 6):
        for acknowledged in filled(window, round_):
            window.on_packet_acked(now=round_ + 0.5, packet=acknowledged)
        window.on_rtt_measurement(now=round_, rtt=0.001 * 10**round_)
        sizes.append(window.congestion_window)
    assert sizes == [20_000, 40_000, 80_000, 100_000, 100_000]
    assert window.bytes_in_flight == 0


def test_one_round_of_loss_halves_once_and_the_floor_holds():
    window = BoundedReno(max_datagram_size=1000, first=40_000, ceiling=100_000)
    flight = filled(window, 1.0)
    window.on_packets_lost(now=2.0, packets=flight[:3])
    window.on_packets_lost(now=2.1, packets=flight[3:6])
    assert window.congestion_window == window.ssthresh == 20_000
    for later in range(3, 20):
        window.on_packets_lost(now=later + 0.5, packets=[packet(later)])
    assert window.congestion_window == 2000
    window.on_persistent_congestion()
    assert window.congestion_window == 2000


def test_after_loss_the_window_grows_by_one_datagram_a_round():
    window = BoundedReno(max_datagram_size=1000, first=20_000, ceiling=100_000)
    window.on_packet_sent(packet=packet(1.0))
    window.on_packets_lost(now=2.0, packets=[packet(1.0)])
    assert window.congestion_window == 10_000
    acknowledged = 0
    while acknowledged < 10_000:
        filled(window, 3.0)
        window.on_packet_acked(now=4.0, packet=packet(3.0))
        acknowledged += 1000
    assert window.congestion_window == 11_000


def test_an_unused_window_does_not_grow():
    window = BoundedReno(max_datagram_size=1000, first=20_000, ceiling=100_000)
    for round_ in range(50):
        window.on_packet_sent(packet=packet(round_ + 1.0))
        window.on_packet_acked(now=round_ + 2.0, packet=packet(round_ + 1.0))
    assert window.congestion_window == 20_000


def test_a_window_is_registered_once_by_its_numbers():
    assert congestion_name(1, 2) == congestion_name(1, 2) != congestion_name(1, 3)


# Waiting


async def test_a_signal_wakes_all_who_wait_and_times_out_alone():
    signal = Signal()
    waiting = [asyncio.ensure_future(signal.wait()) for _ in range(3)]
    alone = asyncio.ensure_future(signal.wait(0.01))
    assert await alone is False
    assert signal
    waiting[0].cancel()
    await asyncio.sleep(0)
    signal.fire()
    assert await asyncio.gather(*waiting[1:]) == [True, True]
    assert waiting[0].cancelled()
    assert not signal
    signal.fire()
