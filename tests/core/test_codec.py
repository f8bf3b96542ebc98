"""Messages to JSON and back: every type of every border, and nothing but CodecError for anything else."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swactor_core.codec import MAX_LINE, CodecError, MessageCodec
from swactor_core.faults import UninstallReason
from swactor_core.ids import NodeId, RingId, RoleId, RunId, StepId
from swactor_core.messages import (
    CONTROL_MESSAGES,
    WORKER_COMMANDS,
    WORKER_EVENTS,
    ConfigureRole,
    InstallRing,
    RingReadable,
    ShutdownNode,
    StepCompleted,
    StopRun,
    UninstallRing,
    WatchRefused,
)
from swactor_testing.values import plainest, values, wide

BORDERS = {"commands": WORKER_COMMANDS, "events": WORKER_EVENTS, "control": CONTROL_MESSAGES}
CODECS = {name: MessageCodec(types) for name, types in BORDERS.items()}
EVERY = [(name, message) for name, types in BORDERS.items() for message in types]
LEAVES = wide()
STRATEGIES = {message: values(message, LEAVES) for _, message in EVERY}
COMMANDS = CODECS["commands"]


@pytest.mark.parametrize(("border", "message"), EVERY)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_message_comes_back_on_one_line(border: str, message: type[Any], data: st.DataObject) -> None:
    codec = CODECS[border]
    sent = data.draw(STRATEGIES[message])
    line = codec.encode(sent)
    assert b"\n" not in line
    assert json.loads(line)["type"] == message.__name__
    received = codec.decode(line)
    assert received == sent
    assert type(received) is type(sent)


def test_the_form_is_flat_and_plain() -> None:
    uninstall = UninstallRing(RingId(9), UninstallReason.EDGE_STOPPED)
    assert COMMANDS.encode(uninstall) == b'{"type":"UninstallRing","ring_id":9,"reason":"EdgeStopped"}'
    assert CODECS["control"].encode(ShutdownNode()) == b'{"type":"ShutdownNode"}'


def test_a_line_break_in_a_text_stays_inside_the_line() -> None:
    sent = ConfigureRole(RoleId(1), {"template": "a\nb\u2028c\x00"})
    assert b"\n" not in COMMANDS.encode(sent)
    assert COMMANDS.decode(COMMANDS.encode(sent)) == sent


def test_a_message_of_another_border_is_not_encoded_and_not_decoded() -> None:
    with pytest.raises(CodecError, match="StopRun does not cross this border"):
        COMMANDS.encode(StopRun(RunId(1)))
    with pytest.raises(CodecError, match="unknown message type 'StopRun'"):
        COMMANDS.decode(CODECS["control"].encode(StopRun(RunId(1))))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"null", "unknown message type None"),
        (b"[]", "unknown message type None"),
        (b"{}", "unknown message type None"),
        (b'{"type":null}', "unknown message type None"),
        (b'{"type":["RingReadable"],"ring_id":1}', "unknown message type"),
        (b'{"type":{},"ring_id":1}', "unknown message type"),
        (b'{"type":"Nothing"}', "unknown message type 'Nothing'"),
        (b'{"type":"ShutdownWorker",}', "not JSON"),
        (b'{"type":"RingReadable","ring_id":1,}', "not JSON"),
        (b'{"type":"RingReadable","ring_id":1}}', "not JSON"),
        (b'{"type":"RingReadable","ring_id":1,"type":"Nothing"}', "unknown message type 'Nothing'"),
        (b'{"type":"RingReadable"}', "RingReadable.ring_id"),
        (b'{"type":"RingReadable","ring_id":null}', "RingReadable.ring_id"),
        (b'{"type":"RingReadable","ring_id":"nine"}', "RingReadable.ring_id"),
        (b'{"type":"RingReadable","ring_id":1.5}', "RingReadable.ring_id"),
        (b'{"type":"RingReadable","ring_id":1,"count":7}', "RingReadable.count"),
        (b'{"type":"UninstallRing","ring_id":1,"reason":"Boredom"}', "UninstallRing.reason"),
    ],
)
def test_what_is_not_a_message_of_this_border_says_why(line: bytes, complaint: str) -> None:
    with pytest.raises(CodecError, match=complaint.replace(".", r"\.")):
        COMMANDS.decode(line)


def test_an_unknown_member_is_refused_inside_a_nested_object_too() -> None:
    fields = json.loads(COMMANDS.encode(plainest(InstallRing)))
    fields["layout"]["pointer"] = 4096
    with pytest.raises(CodecError, match=r"InstallRing\.layout\.pointer"):
        COMMANDS.decode(json.dumps(fields).encode())


def test_a_line_over_the_limit_is_refused_by_size() -> None:
    with pytest.raises(CodecError, match=f"at most {MAX_LINE}"):
        COMMANDS.decode(b" " * (MAX_LINE + 1))


def test_what_the_other_side_would_refuse_is_not_written() -> None:
    role = ConfigureRole(RoleId(1), {"text": "x" * MAX_LINE})
    with pytest.raises(CodecError, match=f"ConfigureRole of .* bytes, at most {MAX_LINE}"):
        COMMANDS.encode(role)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = [message.__name__ for _, message in EVERY]


@given(st.sampled_from(list(CODECS)), st.dictionaries(st.text(max_size=6), JSON), st.sampled_from(NAMES))
def test_any_json_is_a_message_or_a_codec_error(border: str, fields: dict[str, Any], name: str) -> None:
    with suppress(CodecError):
        CODECS[border].decode(json.dumps({**fields, "type": name}).encode())


@given(st.data())
def test_any_damage_to_a_line_is_a_message_or_a_codec_error(data: st.DataObject) -> None:
    line = bytearray(COMMANDS.encode(plainest(InstallRing)))
    for _ in range(data.draw(st.integers(1, 3))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    with suppress(CodecError):
        COMMANDS.decode(bytes(line))


def outcome(line: bytes) -> object:
    try:
        return COMMANDS.decode(line)
    except CodecError as error:
        return re.sub(r" column \d+", "", str(error))


@given(st.data())
def test_a_damaged_line_means_the_same_wherever_its_type_stands(data: st.DataObject) -> None:
    line = bytearray(COMMANDS.encode(plainest(data.draw(st.sampled_from(WORKER_COMMANDS)))))
    start = len(b'{"type":"')
    for _ in range(data.draw(st.integers(0, 3))):
        line[data.draw(st.integers(start, len(line) - 1))] = data.draw(st.sampled_from(b'"{},:1 '))
    # One more blank, and the line is not as this side writes it.
    assert outcome(bytes(line)) == outcome(b"{ " + line[1:])


def test_numbers_that_json_does_not_have_do_not_pass_silently() -> None:
    events = CODECS["events"]
    for seconds in (float("nan"), float("inf")):
        line = events.encode(StepCompleted(RoleId(1), StepId(1), seconds))
        with pytest.raises(CodecError, match=r"StepCompleted\.compute_seconds"):
            events.decode(line)


def test_a_hint_of_a_64_bit_ring_keeps_every_bit() -> None:
    sent = RingReadable(RingId(2**64 - 1))
    assert COMMANDS.decode(COMMANDS.encode(sent)) == sent


def test_text_that_no_json_holds_is_said_where_it_is_written() -> None:
    with pytest.raises(CodecError, match=r"WatchRefused cannot be written: .*surrogates"):
        MessageCodec(CONTROL_MESSAGES).encode(WatchRefused(NodeId(1), "\udcff", final=True))
