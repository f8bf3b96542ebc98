"""Byte layouts that cross a process or network border: object header, edge preamble, control frame.

Pure codecs, little-endian. Knows no socket, ring or actor. A decoder never reads past the bytes it was given
and never allocates more than they hold.
"""

from __future__ import annotations

import struct

from swactor_core.faults import ObjectFailure
from swactor_core.ids import EdgeId, ObjectId, Sequence
from swactor_core.specs import OBJECT_HEADER_BYTES, ObjectSpec
from swactor_core.values import value

OBJECT_MAGIC = 0x424F5753  # "SWOB" in file order
OBJECT_VERSION = 1
_OBJECT_HEADER = struct.Struct("<IHHQQQII")
assert _OBJECT_HEADER.size == OBJECT_HEADER_BYTES

_PREAMBLE = struct.Struct("<Q")
PREAMBLE_BYTES = _PREAMBLE.size

_FRAME = struct.Struct("<I")
FRAME_HEADER_BYTES = _FRAME.size


@value
class ObjectHeader:
    """Runtime facts of one object record (spec section 17)."""

    object_id: ObjectId
    sequence: Sequence
    extent: int
    flags: int = 0

    def encode(self) -> bytes:
        return _OBJECT_HEADER.pack(
            OBJECT_MAGIC,
            OBJECT_VERSION,
            OBJECT_HEADER_BYTES,
            self.object_id,
            self.sequence,
            self.extent,
            self.flags,
            0,
        )


class HeaderRejected(Exception):
    """The record must be rejected before a device object exists; `reason` says why."""

    def __init__(self, reason: ObjectFailure, detail: str, header: ObjectHeader | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.header = header


def decode_object_header(data: bytes | memoryview) -> ObjectHeader:
    """Decodes exactly 40 bytes. Raises HeaderRejected for magic, version, header length or reserved bits."""
    magic, version, header_len, object_id, sequence, extent, flags, reserved = _OBJECT_HEADER.unpack(data)
    if magic != OBJECT_MAGIC:
        raise HeaderRejected(
            ObjectFailure.HEADER_MALFORMED, f"magic {magic:#010x}, expected {OBJECT_MAGIC:#010x}"
        )
    if version != OBJECT_VERSION:
        raise HeaderRejected(
            ObjectFailure.UNSUPPORTED_OBJECT_VERSION, f"version {version}, expected {OBJECT_VERSION}"
        )
    if header_len != OBJECT_HEADER_BYTES or reserved != 0:
        raise HeaderRejected(
            ObjectFailure.HEADER_MALFORMED, f"header length {header_len}, reserved {reserved}"
        )
    return ObjectHeader(ObjectId(object_id), Sequence(sequence), extent, flags)


def check_object_header(header: ObjectHeader, spec: ObjectSpec, expected: Sequence) -> None:
    """Raises HeaderRejected when extent or sequence break the edge's ObjectSpec (spec section 17)."""
    if header.extent > spec.max_extent:
        detail = f"extent {header.extent} above {spec.max_extent}"
        raise HeaderRejected(ObjectFailure.EXTENT_EXCEEDS_MAX, detail, header)
    if header.extent == 0 or header.extent % spec.row_bytes or header.extent % spec.alignment:
        detail = f"extent {header.extent} is not a positive multiple of {spec.row_bytes} and {spec.alignment}"
        raise HeaderRejected(ObjectFailure.EXTENT_ALIGNMENT_INVALID, detail, header)
    if header.sequence != expected:
        detail = f"sequence {header.sequence}, expected {expected}"
        raise HeaderRejected(ObjectFailure.SEQUENCE_VIOLATION, detail, header)


def encode_preamble(edge_id: EdgeId) -> bytes:
    """The fixed-width edge_id that opens every edge stream (spec section 23)."""
    return _PREAMBLE.pack(edge_id)


def decode_preamble(data: bytes | memoryview) -> EdgeId:
    """The edge id of exactly PREAMBLE_BYTES; whether any plan has such an edge is not asked."""
    return EdgeId(_PREAMBLE.unpack(data)[0])


class FrameError(ValueError):
    """A control frame's length is out of bounds; the channel must be closed."""


def encode_frame(payload: bytes, limit: int) -> bytes:
    """A control frame: 32-bit length, then the payload of 1..limit bytes. Raises FrameError for others."""
    if not 1 <= len(payload) <= limit:
        raise FrameError(f"control frame of {len(payload)} bytes, allowed 1..{limit}")
    return _FRAME.pack(len(payload)) + payload


class FrameDecoder:
    """Reassembles control frames from stream bytes; memory is bounded by what was received."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames completed by `data`. Raises FrameError at the first length out of bounds."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= FRAME_HEADER_BYTES:
            (length,) = _FRAME.unpack_from(self._buffer)
            if not 1 <= length <= self._limit:
                raise FrameError(f"control frame of {length} bytes announced, allowed 1..{self._limit}")
            end = FRAME_HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[FRAME_HEADER_BYTES:end]))
            del self._buffer[:end]
        return frames

    @property
    def mid_frame(self) -> bool:
        return bool(self._buffer)
