"""Sealed datagrams: authenticity, secrecy, and no replay.

A datagram is version u8, node id u64, epoch u64, salt 8 bytes, counter u64, then ChaCha20-Poly1305 over the
packet with those 33 bytes as associated data. The key is the sender's own for this salt, derived from the
gossip key and the cluster id with keyed BLAKE2b, so that the 64-bit counter alone is a nonce that never
repeats, even if a process were started twice with one epoch. Counters begin at the wall clock's nanoseconds:
a later start of the same life is above all that was recorded from an earlier one.

A receiver holds a window of counters for each sender and its latest epoch. What the window has forgotten, or
what belongs to an earlier epoch, is refused. Knows no member and no packet content.
"""

from __future__ import annotations

import os
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from swactor_core.errors import ConfigError
from swactor_core.ids import NodeId

from swactor_membership_swim.members import Life

_HEADER = struct.Struct("<BQQ8sQ")
_NONCE = struct.Struct("<4xQ")
_VERSION = 1
_TAG_BYTES = 16
SEAL_BYTES = _HEADER.size + _TAG_BYTES
WINDOW = 1024
_SENDERS = 8192
_CIPHERS = 1024


class Refusal(StrEnum):
    """Why a datagram was dropped before its content was read."""

    MALFORMED = "malformed"
    OWN = "own"
    UNAUTHENTIC = "unauthentic"
    OLD_EPOCH = "old_epoch"
    REPLAYED = "replayed"


@dataclass(slots=True)
class _Window:
    epoch: int
    highest: int
    seen: int  # bit i: counter highest - i was accepted


class Seal:
    """Seals for one life, opens for everybody. `refusals` are counted by reason. Raises ConfigError."""

    def __init__(self, gossip_key: bytes, cluster_id: str, life: Life, *, first_counter: int) -> None:
        if len(gossip_key) != 32:
            raise ConfigError(
                f"the gossip key has {len(gossip_key)} bytes, needed are 32",
                hint="use the cluster file's key",
            )
        cluster = blake2b(cluster_id.encode(), digest_size=16).digest()
        self._master = blake2b(b"swactor/membership/1", key=gossip_key, salt=cluster, digest_size=32).digest()
        self._life = life
        self._salt = os.urandom(8)
        self._next = first_counter
        self._own = self._cipher_of(life.node_id, life.epoch, self._salt)
        self._ciphers: OrderedDict[tuple[int, int, bytes], ChaCha20Poly1305] = OrderedDict()
        self._windows: OrderedDict[NodeId, _Window] = OrderedDict()
        self.refusals: Counter[Refusal] = Counter()

    def _cipher_of(self, node_id: int, epoch: int, salt: bytes) -> ChaCha20Poly1305:
        context = struct.pack("<QQ8s", node_id, epoch, salt)
        return ChaCha20Poly1305(blake2b(context, key=self._master, digest_size=32).digest())

    def seal(self, packet: bytes) -> bytes:
        """The datagram of a packet; `SEAL_BYTES` longer."""
        header = _HEADER.pack(_VERSION, self._life.node_id, self._life.epoch, self._salt, self._next)
        sealed = self._own.encrypt(_NONCE.pack(self._next), packet, header)
        self._next += 1
        return header + sealed

    def open(self, datagram: bytes) -> tuple[Life, bytes] | Refusal:
        """The sender and its packet, or why not. Costs at most one decryption; nothing is remembered of a
        datagram that is not authentic."""
        result = self._open(datagram)
        if isinstance(result, Refusal):
            self.refusals[result] += 1
        return result

    def outlived(self, datagram: bytes) -> tuple[Life, bytes, int] | None:
        """Of a datagram refused for its epoch: sender, packet and the later epoch held; None when it is not
        authentic. It may be a recording. Costs one decryption and remembers nothing."""
        _, node_id, epoch, salt, counter = _HEADER.unpack_from(datagram)
        window = self._windows.get(node_id)
        if window is None:
            return None
        cipher = self._cipher_of(node_id, epoch, salt)
        try:
            packet = cipher.decrypt(_NONCE.pack(counter), datagram[_HEADER.size :], datagram[: _HEADER.size])
        except InvalidTag:
            return None
        return Life(NodeId(node_id), epoch), packet, window.epoch

    def _open(self, datagram: bytes) -> tuple[Life, bytes] | Refusal:
        if len(datagram) < SEAL_BYTES or datagram[0] != _VERSION:
            return Refusal.MALFORMED
        _, node_id, epoch, salt, counter = _HEADER.unpack_from(datagram)
        life = Life(NodeId(node_id), epoch)
        if life == self._life and salt == self._salt:
            return Refusal.OWN
        refusal = self._refuse_counter(life, counter)
        if refusal is not None:
            return refusal
        key = (node_id, epoch, salt)
        cipher = self._ciphers.get(key)
        known = cipher is not None
        if cipher is None:
            cipher = self._cipher_of(*key)
        try:
            packet = cipher.decrypt(_NONCE.pack(counter), datagram[_HEADER.size :], datagram[: _HEADER.size])
        except InvalidTag:
            return Refusal.UNAUTHENTIC
        if not known:
            self._ciphers[key] = cipher
            if len(self._ciphers) > _CIPHERS:
                self._ciphers.popitem(last=False)
        self._accept(life, counter)
        return life, packet

    def _refuse_counter(self, life: Life, counter: int) -> Refusal | None:
        window = self._windows.get(life.node_id)
        if window is None or life.epoch > window.epoch:
            return None
        if life.epoch < window.epoch:
            return Refusal.OLD_EPOCH
        age = window.highest - counter
        if age >= WINDOW or (age >= 0 and window.seen >> age & 1):
            return Refusal.REPLAYED
        return None

    def _accept(self, life: Life, counter: int) -> None:
        window = self._windows.get(life.node_id)
        if window is None or life.epoch > window.epoch:
            self._windows[life.node_id] = _Window(life.epoch, counter, 1)
            if len(self._windows) > _SENDERS:
                self._windows.popitem(last=False)
        elif counter > window.highest:
            shift = min(counter - window.highest, WINDOW)
            window.seen = (window.seen << shift | 1) & ((1 << WINDOW) - 1)
            window.highest = counter
        else:
            window.seen |= 1 << (window.highest - counter)
        self._windows.move_to_end(life.node_id)
