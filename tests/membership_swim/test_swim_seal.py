"""Sealed datagrams: nothing unauthentic and nothing recorded gets through."""

from __future__ import annotations

import random

import pytest
from swactor_core.errors import ConfigError
from swactor_core.ids import NodeId
from swactor_membership_swim.members import Life
from swactor_membership_swim.seal import SEAL_BYTES, WINDOW, Refusal, Seal

KEY = bytes(range(32))
ALICE, BOB = Life(NodeId(1), 10), Life(NodeId(2), 10)


def seal_of(life: Life, *, key: bytes = KEY, cluster: str = "c", first: int = 1000) -> Seal:
    return Seal(key, cluster, life, first_counter=first)


def test_a_packet_arrives_with_its_proven_sender() -> None:
    alice, bob = seal_of(ALICE), seal_of(BOB)
    for packet in (b"", b"x", b"y" * 1351):
        datagram = alice.seal(packet)
        assert len(datagram) == len(packet) + SEAL_BYTES
        assert packet == b"" or len(packet) < 2 or packet not in datagram
        assert bob.open(datagram) == (ALICE, packet)
    assert not bob.refusals


def test_every_flipped_bit_is_noticed() -> None:
    alice = seal_of(ALICE)
    datagram = alice.seal(b"packet")
    for bit in range(len(datagram) * 8):
        bob = seal_of(BOB)
        changed = bytearray(datagram)
        changed[bit // 8] ^= 1 << bit % 8
        assert isinstance(bob.open(bytes(changed)), Refusal), bit
        assert bob.open(datagram) == (ALICE, b"packet"), "a forgery must not spoil the window"


@pytest.mark.parametrize("length", range(SEAL_BYTES + 3))
def test_every_truncation_is_refused(length) -> None:
    datagram = seal_of(ALICE).seal(b"abc")
    assert isinstance(seal_of(BOB).open(datagram[:length]), Refusal)


@pytest.mark.parametrize(
    "stranger", [{"key": bytes(32)}, {"cluster": "other"}], ids=["another key", "another cluster"]
)
def test_other_keys_and_other_clusters_are_unauthentic(stranger) -> None:
    bob = seal_of(BOB)
    assert bob.open(seal_of(ALICE, **stranger).seal(b"x")) is Refusal.UNAUTHENTIC
    assert bob.refusals == {Refusal.UNAUTHENTIC: 1}


def test_noise_is_counted_and_costs_at_most_one_decryption(monkeypatch) -> None:
    bob = seal_of(BOB)
    decryptions = []
    real = Seal._cipher_of

    class Counting:
        def __init__(self, cipher):
            self._cipher = cipher

        def decrypt(self, *arguments):
            decryptions.append(arguments)
            return self._cipher.decrypt(*arguments)

    monkeypatch.setattr(Seal, "_cipher_of", lambda self, *key: Counting(real(self, *key)))
    draw = random.Random(5)
    for i in range(500):
        bob.open(draw.randbytes(i % 120))
        bob.open(b"\x01" + draw.randbytes(100))
    assert sum(bob.refusals.values()) == 1000
    assert len(decryptions) <= 1000
    assert bob.refusals[Refusal.UNAUTHENTIC] >= 500
    assert len(bob._windows) == len(bob._ciphers) == 0, "nothing is remembered of what is not authentic"


def test_a_datagram_counts_once_and_order_may_differ() -> None:
    alice, bob = seal_of(ALICE), seal_of(BOB)
    datagrams = [alice.seal(bytes([i])) for i in range(200)]
    shuffled = list(enumerate(datagrams))
    random.Random(3).shuffle(shuffled)
    for i, datagram in shuffled:
        assert bob.open(datagram) == (ALICE, bytes([i]))
    for datagram in datagrams:
        assert bob.open(datagram) is Refusal.REPLAYED
    assert bob.refusals[Refusal.REPLAYED] == 200


def test_what_the_window_has_forgotten_is_refused() -> None:
    alice, bob = seal_of(ALICE), seal_of(BOB)
    held_back = [alice.seal(b"old"), alice.seal(b"edge")]
    for _ in range(WINDOW - 2):
        assert bob.open(alice.seal(b"x")) == (ALICE, b"x")
    assert bob.open(held_back[1]) == (ALICE, b"edge")
    bob.open(alice.seal(b"x"))
    assert bob.open(held_back[0]) is Refusal.REPLAYED


def test_a_former_epoch_is_refused_once_a_later_one_was_heard() -> None:
    """[58] Recordings of a former life change nothing."""
    bob = seal_of(BOB)
    old, new = seal_of(ALICE), seal_of(Life(ALICE.node_id, 11), first=5)
    recorded = [old.seal(b"alive") for _ in range(3)]
    assert bob.open(recorded[0]) == (ALICE, b"alive")
    assert bob.open(new.seal(b"hello")) == (Life(ALICE.node_id, 11), b"hello")
    assert bob.open(recorded[1]) is Refusal.OLD_EPOCH
    assert bob.open(recorded[0]) is Refusal.OLD_EPOCH
    assert bob.outlived(recorded[0]) == (ALICE, b"alive", 11)
    assert bob.outlived(recorded[0][:-1] + bytes((recorded[0][-1] ^ 1,))) is None
    assert seal_of(BOB).outlived(recorded[0]) is None


def test_a_second_start_of_one_life_reuses_no_nonce_and_its_recordings_are_old() -> None:
    first, second, bob = seal_of(ALICE, first=1000), seal_of(ALICE, first=900_000), seal_of(BOB)
    recorded = [first.seal(b"same packet") for _ in range(3)]
    assert bob.open(recorded[0]) == (ALICE, b"same packet")
    same_counter = seal_of(ALICE, first=1000).seal(b"same packet")
    assert same_counter[33:] != recorded[0][33:], "the salt makes another key"
    assert bob.open(second.seal(b"again")) == (ALICE, b"again")
    assert bob.open(recorded[1]) is Refusal.REPLAYED


def test_an_own_datagram_that_comes_back_is_dropped() -> None:
    alice = seal_of(ALICE)
    assert alice.open(alice.seal(b"x")) is Refusal.OWN


def test_memory_for_senders_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("swactor_membership_swim.seal._SENDERS", 8)
    monkeypatch.setattr("swactor_membership_swim.seal._CIPHERS", 4)
    bob = seal_of(BOB)
    for number in range(100, 150):
        sender = seal_of(Life(NodeId(number), 1))
        assert bob.open(sender.seal(b"x")) == (Life(NodeId(number), 1), b"x")
        assert bob.open(sender.seal(b"y")) == (Life(NodeId(number), 1), b"y")
    assert len(bob._windows) == 8
    assert len(bob._ciphers) == 4


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_gossip_key_of_another_length_is_a_configuration_error(length) -> None:
    with pytest.raises(ConfigError, match=f"has {length} bytes, needed are 32") as caught:
        seal_of(ALICE, key=bytes(length))
    assert "cluster file" in caught.value.hint
