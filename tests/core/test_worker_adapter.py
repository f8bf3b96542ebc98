"""Command lines in and event lines out (spec section 28), over pipes of this process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.codec import MAX_LINE, MessageCodec
from swactor_core.faults import WorkerFatalReason
from swactor_core.ids import RingId, RoleId
from swactor_core.machines.worker_effects import ControlClosed, MalformedCommand
from swactor_core.messages import (
    WORKER_COMMANDS,
    WORKER_EVENTS,
    ObjectLoaded,
    ResetRole,
    RingReadable,
    RingWritable,
    RoleReset,
    ShutdownMode,
    ShutdownWorker,
    WorkerFatal,
)
from swactor_core.worker.adapter import CommandReader, EventWriter

CODEC = MessageCodec(WORKER_COMMANDS)
COMMANDS = [RingReadable(RingId(1)), RingReadable(RingId(2)), RingWritable(RingId(3))]
RESET = ResetRole(RoleId(2))
GRACEFUL = ShutdownWorker(ShutdownMode.GRACEFUL)
ABORT = ShutdownWorker(ShutdownMode.ABORT_IN_FLIGHT)


def lines(*commands: object) -> bytes:
    return b"".join(CODEC.encode(command) + b"\n" for command in commands)


class Pipe:
    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self._open = {self.read_fd, self.write_fd}

    def write(self, data: bytes) -> None:
        os.write(self.write_fd, data)

    def close(self, fd: int) -> None:
        self._open.discard(fd)
        os.close(fd)

    def end(self) -> None:
        for fd in self._open:
            os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    opened = Pipe()
    yield opened
    opened.end()


def everything(reader: CommandReader) -> list[object]:
    taken = []
    while (command := reader.take()) is not None:
        taken.append(command)
    return taken


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_commands_survive_any_chunking(sizes: list[int]) -> None:
    pipe = Pipe()
    reader = CommandReader(pipe.read_fd)
    data, taken, turn = lines(*COMMANDS * 3), [], 0
    while data:
        size = sizes[turn % len(sizes)]
        turn += 1
        pipe.write(data[:size])
        data = data[size:]
        reader.fill(None)
        taken += everything(reader)
    pipe.end()
    assert taken == COMMANDS * 3


def test_all_complete_lines_of_a_turn_are_queued_and_a_part_waits(pipe: Pipe) -> None:
    reader = CommandReader(pipe.read_fd)
    pipe.write(lines(*COMMANDS) + b'{"type":"Ri')
    reader.fill(None)
    assert everything(reader) == COMMANDS
    pipe.write(b'ngReadable","ring_id":9}\n')
    reader.fill(None)
    assert everything(reader) == [RingReadable(RingId(9))]


def test_nothing_to_read_returns_within_the_bound(pipe: Pipe) -> None:
    reader = CommandReader(pipe.read_fd)
    reader.fill(0)
    reader.fill(1)
    assert reader.take() is None


def test_the_end_drops_commands_that_nobody_will_hear_answered(pipe: Pipe) -> None:
    reader = CommandReader(pipe.read_fd)
    pipe.write(lines(*COMMANDS))
    pipe.close(pipe.write_fd)
    reader.fill(None)
    assert reader.should_abort()
    assert everything(reader) == [ControlClosed()]
    reader.fill(None)
    assert reader.take() is None


def test_the_end_after_a_shutdown_keeps_it(pipe: Pipe) -> None:
    reader = CommandReader(pipe.read_fd)
    pipe.write(lines(*COMMANDS, GRACEFUL))
    pipe.close(pipe.write_fd)
    assert reader.should_abort() or reader.should_abort()
    assert everything(reader) == [*COMMANDS, GRACEFUL, ControlClosed()]


def test_only_an_abort_asks_to_abort_and_commands_stay_queued(pipe: Pipe) -> None:
    reader = CommandReader(pipe.read_fd)
    assert not reader.should_abort()
    pipe.write(lines(*COMMANDS, GRACEFUL))
    assert not reader.should_abort()
    pipe.write(lines(ABORT))
    assert reader.should_abort()
    assert everything(reader) == [*COMMANDS, GRACEFUL, ABORT]


def test_a_reset_ends_a_long_call_only_while_it_is_queued(pipe: Pipe) -> None:
    reader = CommandReader(pipe.read_fd)
    pipe.write(lines(COMMANDS[0], RESET))
    assert reader.should_abort()
    assert everything(reader) == [COMMANDS[0], RESET]
    assert not reader.should_abort()


def test_a_malformed_line_is_the_last_thing_heard(pipe: Pipe) -> None:
    reader = CommandReader(pipe.read_fd)
    pipe.write(lines(COMMANDS[0]) + b"nonsense\n" + lines(COMMANDS[1]))
    reader.fill(None)
    first, second = everything(reader)
    assert first == COMMANDS[0]
    assert isinstance(second, MalformedCommand)
    assert reader.should_abort()
    pipe.write(lines(COMMANDS[2]))
    reader.fill(None)
    assert reader.take() is None


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b"", "not JSON"),
        (b"[]", "unknown message type None"),
        (b'{"type":"Ping"}', "unknown message type 'Ping'"),
        (b'{"type":["RingReadable"]}', "unknown message type"),
        (b'{"type":"RingReadable"}', "RingReadable.ring_id"),
        (b'{"type":"RingReadable","ring_id":1,"bytes":2}', "RingReadable.bytes"),
        (b'{"type":"ShutdownWorker","mode":"Later"}', "ShutdownWorker.mode"),
        (b"\xff\xfe", "not JSON"),
        (b'{"type":"RingReadable","ring_id":' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=range(10),
)
def test_a_malformed_line_says_why(pipe: Pipe, line: bytes, detail: str) -> None:
    reader = CommandReader(pipe.read_fd)
    for start in range(0, len(line), 1 << 15):
        pipe.write(line[start : start + (1 << 15)])
        reader.fill(0)
    pipe.write(b"\n")
    reader.fill(None)
    command = reader.take()
    assert isinstance(command, MalformedCommand)
    assert detail in command.detail


def test_a_reset_socket_counts_as_the_end() -> None:
    node, worker = socket.socketpair()
    with node, worker:
        reader = CommandReader(worker.fileno())
        worker.send(b"never read by the node")
        node.close()
        reader.fill(None)
        assert everything(reader) == [ControlClosed()]


def test_a_descriptor_that_was_left_non_blocking_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_fd, False)
    writer = EventWriter(pipe.write_fd)
    event = WorkerFatal(WorkerFatalReason.UNHANDLED_EXCEPTION, "x" * (1 << 20))
    writer.emit(event)
    received = bytearray()

    def read() -> None:
        while not received.endswith(b"\n"):
            received.extend(os.read(pipe.read_fd, 1 << 16))

    reading = threading.Thread(target=read)
    reading.start()
    writer.flush()
    reading.join()
    assert not writer.lost
    assert MessageCodec(WORKER_EVENTS).decode(bytes(received[:-1])) == event


def test_an_event_is_no_command(pipe: Pipe) -> None:
    reader = CommandReader(pipe.read_fd)
    pipe.write(MessageCodec([RoleReset]).encode(RoleReset(RoleId(1))) + b"\n")
    reader.fill(None)
    assert isinstance(reader.take(), MalformedCommand)


def test_a_line_may_be_as_long_as_the_codec_allows_and_no_longer(pipe: Pipe) -> None:
    reader = CommandReader(pipe.read_fd)
    start = lines(COMMANDS[0])[:-1]
    length, piece = len(start), b" " * (1 << 15)
    pipe.write(start)
    while length + len(piece) <= MAX_LINE:
        pipe.write(piece)
        reader.fill(None)
        length += len(piece)
    pipe.write(b" " * (MAX_LINE - length) + b"\n")
    reader.fill(None)
    assert everything(reader) == [COMMANDS[0]]
    written = 0
    while (command := reader.take()) is None:
        pipe.write(piece)
        reader.fill(None)
        written += len(piece)
    assert isinstance(command, MalformedCommand)
    assert MAX_LINE < written <= MAX_LINE + len(piece)


def test_events_of_a_turn_leave_in_one_write(pipe: Pipe) -> None:
    writer = EventWriter(pipe.write_fd)
    events = [RingReadable(RingId(1)), RoleReset(RoleId(2))]
    for event in events:
        writer.emit(event)
    os.set_blocking(pipe.read_fd, False)
    with pytest.raises(BlockingIOError):
        os.read(pipe.read_fd, 1)
    writer.flush()
    data = os.read(pipe.read_fd, 1 << 16)
    codec = MessageCodec(WORKER_EVENTS)
    assert [codec.decode(line) for line in data.splitlines()] == events
    assert data.endswith(b"\n")


def test_a_node_that_is_gone_is_noted_and_nothing_is_raised(pipe: Pipe) -> None:
    writer = EventWriter(pipe.write_fd)
    pipe.close(pipe.read_fd)
    writer.emit(RoleReset(RoleId(1)))
    assert not writer.lost
    writer.flush()
    assert writer.lost
    writer.emit(RoleReset(RoleId(1)))
    writer.flush()


def test_payload_bytes_have_no_place_in_an_event() -> None:
    fields = {f for event in WORKER_EVENTS for f in event.__dataclass_fields__.values() if f.type == "bytes"}
    assert fields == set()
    assert "device_handle" in ObjectLoaded.__dataclass_fields__
