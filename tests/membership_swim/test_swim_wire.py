"""The packet codec: round trips, limits; bytes from anywhere give a packet or PacketError, nothing else."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member, MemberState
from swactor_membership_swim.members import MAX_INCARNATION, Claim, Life
from swactor_membership_swim.seal import SEAL_BYTES
from swactor_membership_swim.settings import LOCAL
from swactor_membership_swim.wire import (
    BODY_LIMIT,
    CLAIM_LIMIT,
    HOST_LIMIT,
    KEY_LIMIT,
    NAME_LIMIT,
    ROLE_LIMIT,
    Ack,
    Gossip,
    Packet,
    PacketError,
    Ping,
    PingRequest,
    Sync,
    decode,
    encode,
    encode_body,
    encode_claim,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ports = st.integers(0, 65535)
hosts = st.sampled_from(["127.0.0.1", "::1", "node-3.example", "x" * HOST_LIMIT, "ä.example", ""])
lives = st.builds(Life, u64.map(NodeId), u64)
members = st.builds(
    Member,
    name=st.text(min_size=1, max_size=NAME_LIMIT // 4),
    node_id=u64.map(NodeId),
    epoch=u64,
    incarnation=st.integers(0, MAX_INCARNATION),
    state=st.sampled_from(list(MemberState)),
    public_key=st.binary(max_size=KEY_LIMIT),
    host=hosts,
    port=ports,
    gossip_host=hosts,
    gossip_port=ports,
    role=st.sampled_from(["node", "orchestrator", "r" * ROLE_LIMIT]),
)
bodies = st.one_of(
    st.builds(Ping, u32, lives),
    st.builds(Ack, u32, lives),
    st.builds(PingRequest, u32, lives, hosts, ports),
    st.just(Gossip()),
    st.builds(Sync, st.booleans()),
)
packets = st.builds(
    Packet, bodies, st.lists(st.builds(Claim, members, st.none() | lives), max_size=5).map(tuple)
)


@given(packets)
def test_what_was_encoded_is_decoded(packet) -> None:
    assert decode(encode(packet)) == packet


@given(packets, st.data())
def test_a_truncated_packet_is_an_error_or_a_shorter_packet(packet, data) -> None:
    encoded = encode(packet)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    try:
        shorter = decode(encoded[:cut])
    except PacketError:
        return
    assert encode(shorter) == encoded[:cut], "only whole claims may be missing"


@given(st.binary(max_size=400))
@example(b"")
@example(b"\x05\x02")
@example(b"\x04" + b"\xff" * 200)
def test_any_bytes_give_a_packet_or_a_packet_error(data) -> None:
    try:
        packet = decode(data)
    except PacketError:
        return
    assert encode(packet) == data


def test_mutated_packets_never_raise_anything_else(record) -> None:
    seed = 99
    draw = random.Random(seed)
    claims = tuple(Claim(record(f"node-{i}", state=state)) for i, state in enumerate(MemberState))
    original = encode(Packet(PingRequest(7, Life(NodeId(3), 4), "10.0.0.9", 77), claims))
    refused = 0
    for _ in range(8000):
        data = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.choice([0, 1, 2, 127, 128, 255, draw.randrange(256)])
        try:
            decode(bytes(data))
        except PacketError:
            refused += 1
    assert 1000 < refused < 8000, f"seed {seed}"


def test_decoding_allocates_in_proportion_to_what_came() -> None:
    """[55] No length field announces memory."""
    data = b"\x04" + b"\x00" * 44 + b"\xff" * 255
    tracemalloc.start()
    with pytest.raises(PacketError):
        decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000


def test_the_largest_legal_claim_fits_the_smallest_packet_beside_any_body(record) -> None:
    """[50, 51] A refutation can always be sent."""
    largest = record(
        "n" * NAME_LIMIT,
        host="h" * HOST_LIMIT,
        gossip_host="g" * HOST_LIMIT,
        role="r" * ROLE_LIMIT,
        public_key=b"k" * KEY_LIMIT,
    )
    assert len(encode_claim(Claim(largest, Life(NodeId(1), 1)))) == CLAIM_LIMIT
    body = PingRequest(2**32 - 1, Life(NodeId(2**64 - 1), 2**64 - 1), "h" * HOST_LIMIT, 65535)
    assert len(encode_body(body)) == BODY_LIMIT
    assert SEAL_BYTES + BODY_LIMIT + 2 * CLAIM_LIMIT <= 1200 <= LOCAL.packet_limit


@pytest.mark.parametrize(
    "change",
    [
        {"name": "n" * (NAME_LIMIT + 1)},
        {"host": "h" * (HOST_LIMIT + 1)},
        {"gossip_host": "ä" * (HOST_LIMIT // 2 + 1)},
        {"role": "r" * (ROLE_LIMIT + 1)},
        {"public_key": b"k" * (KEY_LIMIT + 1)},
        {"incarnation": MAX_INCARNATION + 1},
        {"incarnation": -1},
        {"port": 65536},
        {"gossip_port": -1},
        {"epoch": 2**64},
    ],
)
def test_a_record_beyond_the_limits_cannot_be_encoded(record, change) -> None:
    with pytest.raises(PacketError):
        encode_claim(Claim(replace(record("a"), **change)))


def test_an_incarnation_that_could_not_be_refuted_is_refused(record) -> None:
    """[2]"""
    encoded = bytearray(encode(Packet(Gossip(), (Claim(record("a", incarnation=MAX_INCARNATION)),))))
    at = encoded.index(MAX_INCARNATION.to_bytes(8, "little"))
    encoded[at : at + 8] = (MAX_INCARNATION + 1).to_bytes(8, "little")
    with pytest.raises(PacketError, match="incarnation"):
        decode(bytes(encoded))


@pytest.mark.parametrize("count", [0, 1, 255, 256, 1000])
def test_any_number_of_claims_is_framed_correctly(record, count) -> None:
    """[52]"""
    packet = Packet(Sync(True), tuple(Claim(record(f"n{i}")) for i in range(count)))
    assert decode(encode(packet)) == packet
