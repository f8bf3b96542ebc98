"""Packets as bytes: one body, then claims. Pure codec, little-endian, bounded by the bytes it is given.

The sender's identity is not in here: the seal proves it (`seal.py`). Any malformed input raises PacketError
and nothing else. Layout: kind u8, body, then claims until the end; strings carry a length byte.
"""

from __future__ import annotations

import struct

from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member, MemberState
from swactor_core.values import frozen

from swactor_membership_swim.members import MAX_INCARNATION, Claim, Life

NAME_LIMIT, HOST_LIMIT, ROLE_LIMIT, KEY_LIMIT = 64, 100, 16, 64
CLAIM_LIMIT = 46 + 1 + NAME_LIMIT + 2 * (1 + HOST_LIMIT) + 1 + ROLE_LIMIT + 1 + KEY_LIMIT
"""Bytes of the largest legal claim: it fits into the smallest packet beside any body."""
BODY_LIMIT = 1 + 20 + 2 + 1 + HOST_LIMIT

_CLAIM = struct.Struct("<BBQQQQQHH")
assert _CLAIM.size == 46
_LIFE_AND_SEQUENCE = struct.Struct("<IQQ")
_PORT = struct.Struct("<H")
_STATES = (MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT)
_CODES = {state: code for code, state in enumerate(_STATES)}


class PacketError(ValueError):
    """The bytes are no packet of this protocol."""


@frozen
class Ping:
    """Asks that one life to answer with an Ack of the same sequence."""

    sequence: int
    target: Life


@frozen
class Ack:
    """`subject` has answered; the sender is the subject itself or the relay that asked it."""

    sequence: int
    subject: Life


@frozen
class PingRequest:
    """Asks the receiver to ping `target` and to pass its answer on."""

    sequence: int
    target: Life
    host: str
    port: int


@frozen
class Gossip:
    """Claims only."""


@frozen
class Sync:
    """Claims that are the sender's table, or a part of it: nobody's evidence."""

    reply_wanted: bool


Body = Ping | Ack | PingRequest | Gossip | Sync


@frozen
class Packet:
    body: Body
    claims: tuple[Claim, ...] = ()


def _text(value: str, limit: int) -> bytes:
    data = value.encode()
    if len(data) > limit:
        raise PacketError(f"{value!r} has {len(data)} bytes, allowed are {limit}")
    return bytes((len(data),)) + data


def encode_claim(claim: Claim) -> bytes:
    """Raises PacketError for a record that is too large; check own records before use."""
    member, accuser = claim.member, claim.accuser
    if not 0 <= member.incarnation <= MAX_INCARNATION:
        raise PacketError(f"incarnation {member.incarnation} is out of range")
    if len(member.public_key) > KEY_LIMIT:
        raise PacketError(f"a public key of {len(member.public_key)} bytes, allowed are {KEY_LIMIT}")
    try:
        fixed = _CLAIM.pack(
            _CODES[member.state],
            accuser is not None,
            member.node_id,
            member.epoch,
            member.incarnation,
            0 if accuser is None else accuser.node_id,
            0 if accuser is None else accuser.epoch,
            member.port,
            member.gossip_port,
        )
    except struct.error as error:
        raise PacketError(f"member {member.name!r}: {error}") from error
    key = bytes((len(member.public_key),)) + member.public_key
    texts = (
        _text(member.name, NAME_LIMIT),
        _text(member.host, HOST_LIMIT),
        _text(member.gossip_host, HOST_LIMIT),
        _text(member.role, ROLE_LIMIT),
    )
    return b"".join((fixed, *texts, key))


def encode_body(body: Body) -> bytes:
    match body:
        case Ping(sequence, target):
            return b"\x01" + _LIFE_AND_SEQUENCE.pack(sequence, target.node_id, target.epoch)
        case Ack(sequence, subject):
            return b"\x02" + _LIFE_AND_SEQUENCE.pack(sequence, subject.node_id, subject.epoch)
        case PingRequest(sequence, target, host, port):
            fixed = _LIFE_AND_SEQUENCE.pack(sequence, target.node_id, target.epoch)
            return b"\x03" + fixed + _PORT.pack(port) + _text(host, HOST_LIMIT)
        case Gossip():
            return b"\x04"
        case Sync(reply_wanted):
            return b"\x05" + bytes((reply_wanted,))


def encode(packet: Packet) -> bytes:
    return encode_body(packet.body) + b"".join(encode_claim(claim) for claim in packet.claims)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def exhausted(self) -> bool:
        return self._at == len(self._data)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise PacketError(f"{len(self._data)} bytes, {end} were announced")
        part = self._data[self._at : end]
        self._at = end
        return part

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def flag(self) -> bool:
        (value,) = self.take(1)
        if value > 1:
            raise PacketError(f"flag {value}")
        return value == 1

    def blob(self, limit: int) -> bytes:
        (length,) = self.take(1)
        if length > limit:
            raise PacketError(f"a field of {length} bytes, allowed are {limit}")
        return self.take(length)

    def text(self, limit: int) -> str:
        try:
            return self.blob(limit).decode()
        except UnicodeDecodeError as error:
            raise PacketError(str(error)) from error


def decode(data: bytes) -> Packet:
    """Raises PacketError."""
    reader = _Reader(data)
    body = _decode_body(reader)
    claims = []
    while not reader.exhausted:
        claims.append(_decode_claim(reader))
    return Packet(body, tuple(claims))


def _decode_body(reader: _Reader) -> Body:
    (kind,) = reader.take(1)
    if kind == 4:
        return Gossip()
    if kind == 5:
        return Sync(reader.flag())
    if kind not in (1, 2, 3):
        raise PacketError(f"packet kind {kind}")
    sequence, node_id, epoch = reader.unpack(_LIFE_AND_SEQUENCE)
    life = Life(NodeId(node_id), epoch)
    if kind == 1:
        return Ping(sequence, life)
    if kind == 2:
        return Ack(sequence, life)
    (port,) = reader.unpack(_PORT)
    return PingRequest(sequence, life, reader.text(HOST_LIMIT), port)


def _decode_claim(reader: _Reader) -> Claim:
    state, accused, node_id, epoch, incarnation, by_node, by_epoch, port, gossip_port = reader.unpack(_CLAIM)
    if state >= len(_STATES) or accused > 1:
        raise PacketError(f"state {state}, accuser flag {accused}")
    if incarnation > MAX_INCARNATION:
        raise PacketError(f"incarnation {incarnation}")
    name = reader.text(NAME_LIMIT)
    if not name:
        raise PacketError("a member without a name")
    member = Member(
        name=name,
        node_id=NodeId(node_id),
        epoch=epoch,
        incarnation=incarnation,
        state=_STATES[state],
        host=reader.text(HOST_LIMIT),
        port=port,
        gossip_host=reader.text(HOST_LIMIT),
        gossip_port=gossip_port,
        role=reader.text(ROLE_LIMIT),
        public_key=reader.blob(KEY_LIMIT),
    )
    return Claim(member, Life(NodeId(by_node), by_epoch) if accused else None)
