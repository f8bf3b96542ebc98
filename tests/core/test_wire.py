"""Byte layouts (spec sections 17 and 23): object header, preamble, control frames at every split."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.faults import ObjectFailure
from swactor_core.ids import EdgeId, ObjectId, Sequence
from swactor_core.specs import OBJECT_HEADER_BYTES, DTypeFamily, ObjectKind, ObjectSpec
from swactor_core.wire import (
    PREAMBLE_BYTES,
    FrameDecoder,
    FrameError,
    HeaderRejected,
    ObjectHeader,
    check_object_header,
    decode_object_header,
    decode_preamble,
    encode_frame,
    encode_preamble,
)

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
HEADERS = st.builds(ObjectHeader, U64.map(ObjectId), U64.map(Sequence), U64, U32)
SPEC = ObjectSpec(ObjectKind.ACTIVATION, 96, DTypeFamily.FLOAT, 4, row_width=3, alignment=8)


# --- object header ---


def test_the_header_is_forty_bytes_in_the_specification_s_order() -> None:
    header = ObjectHeader(ObjectId(0x0102030405060708), Sequence(9), 24, flags=5)
    assert header.encode() == (
        b"SWOB"
        + b"\x01\x00"
        + b"\x28\x00"
        + b"\x08\x07\x06\x05\x04\x03\x02\x01"
        + struct.pack("<QQII", 9, 24, 5, 0)
    )
    assert len(header.encode()) == OBJECT_HEADER_BYTES == 40


@given(HEADERS)
def test_a_header_comes_back(header: ObjectHeader) -> None:
    assert decode_object_header(header.encode()) == header
    assert decode_object_header(memoryview(header.encode())) == header


@pytest.mark.parametrize(
    ("at", "with_", "reason", "detail"),
    [
        (0, b"BOWS", ObjectFailure.HEADER_MALFORMED, "magic 0x53574f42, expected 0x424f5753"),
        (4, b"\x02\x00", ObjectFailure.UNSUPPORTED_OBJECT_VERSION, "version 2, expected 1"),
        (6, b"\x29\x00", ObjectFailure.HEADER_MALFORMED, "header length 41, reserved 0"),
        (36, b"\x01\x00\x00\x00", ObjectFailure.HEADER_MALFORMED, "header length 40, reserved 1"),
    ],
)
def test_a_malformed_header_is_rejected_with_its_reason(
    at: int, with_: bytes, reason: ObjectFailure, detail: str
) -> None:
    data = bytearray(ObjectHeader(ObjectId(1), Sequence(0), 24).encode())
    data[at : at + len(with_)] = with_
    with pytest.raises(HeaderRejected, match=detail) as rejected:
        decode_object_header(bytes(data))
    assert rejected.value.reason is reason
    assert rejected.value.header is None


@given(st.binary(min_size=OBJECT_HEADER_BYTES, max_size=OBJECT_HEADER_BYTES))
def test_any_forty_bytes_are_a_header_or_rejected(data: bytes) -> None:
    try:
        header = decode_object_header(data)
    except HeaderRejected:
        return
    assert header.encode() == data


@pytest.mark.parametrize("extent", [24, 48, 96])
def test_an_extent_of_whole_aligned_rows_is_accepted(extent: int) -> None:
    check_object_header(ObjectHeader(ObjectId(1), Sequence(7), extent), SPEC, Sequence(7))


@pytest.mark.parametrize(
    ("extent", "sequence", "reason"),
    [
        (97, 7, ObjectFailure.EXTENT_EXCEEDS_MAX),
        (120, 7, ObjectFailure.EXTENT_EXCEEDS_MAX),
        (0, 7, ObjectFailure.EXTENT_ALIGNMENT_INVALID),
        (12, 7, ObjectFailure.EXTENT_ALIGNMENT_INVALID),  # a whole row, not aligned
        (16, 7, ObjectFailure.EXTENT_ALIGNMENT_INVALID),  # aligned, not a whole row
        (24, 6, ObjectFailure.SEQUENCE_VIOLATION),
        (24, 8, ObjectFailure.SEQUENCE_VIOLATION),
    ],
)
def test_what_breaks_the_edge_s_spec_is_rejected_with_its_reason(
    extent: int, sequence: int, reason: ObjectFailure
) -> None:
    header = ObjectHeader(ObjectId(1), Sequence(sequence), extent)
    with pytest.raises(HeaderRejected) as rejected:
        check_object_header(header, SPEC, Sequence(7))
    assert rejected.value.reason is reason
    assert rejected.value.header == header


@given(U64)
def test_a_preamble_comes_back(edge: int) -> None:
    data = encode_preamble(EdgeId(edge))
    assert len(data) == PREAMBLE_BYTES == 8
    assert data == edge.to_bytes(8, "little")
    assert decode_preamble(memoryview(data)) == edge


# --- control frames ---

PAYLOADS = st.lists(st.binary(min_size=1, max_size=9), max_size=4)


def test_every_split_of_three_frames_gives_the_same_frames() -> None:
    frames = [b"a", b"bcd", b"\x00" * 6]
    stream = b"".join(encode_frame(f, 8) for f in frames)
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            decoder = FrameDecoder(8)
            parts = (stream[:first], stream[first:second], stream[second:])
            got = [frame for part in parts for frame in decoder.feed(part)]
            assert got == frames, (first, second)
            assert not decoder.mid_frame


@given(PAYLOADS, st.data())
def test_frames_come_as_soon_as_their_last_byte_does(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(frame, 9) for frame in frames)
    decoder = FrameDecoder(9)
    got: list[bytes] = []
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        got += decoder.feed(stream[at : at + size])
        at += size
        complete, end = 0, 0
        for frame in frames:
            end += 4 + len(frame)
            complete += end <= at
        assert got == frames[:complete]
        assert decoder.mid_frame == (at not in {sum(4 + len(f) for f in frames[:n]) for n in range(5)})
    assert got == frames


@given(st.integers(1, 50), st.binary(max_size=40))
def test_any_bytes_give_frames_within_the_limit_or_an_error_that_stays(limit: int, data: bytes) -> None:
    decoder = FrameDecoder(limit)
    for byte in data:
        try:
            frames = decoder.feed(bytes([byte]))
        except FrameError:
            with pytest.raises(FrameError, match=f"allowed 1..{limit}"):
                decoder.feed(b"")
            return
        assert all(1 <= len(frame) <= limit for frame in frames)


@pytest.mark.parametrize("length", [0, 11, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused_before_its_payload(length: int) -> None:
    decoder = FrameDecoder(10)
    with pytest.raises(FrameError, match=f"control frame of {length} bytes announced, allowed 1..10"):
        decoder.feed(struct.pack("<I", length))


@pytest.mark.parametrize("size", [0, 11])
def test_a_payload_out_of_bounds_is_not_sent(size: int) -> None:
    with pytest.raises(FrameError, match=f"control frame of {size} bytes, allowed 1..10"):
        encode_frame(b"x" * size, 10)
