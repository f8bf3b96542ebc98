"""The node's end of a worker's events: every split of the bytes, in order, and every way it can end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from swactor_core.codec import MessageCodec
from swactor_core.ids import RingId, RoleId
from swactor_core.messages import WORKER_EVENTS, RingReadable, RingWritable, RoleReset
from swactor_core.node import event_pipe
from swactor_core.node.event_pipe import MAX_EVENT_LINE, EventPipe

ENCODE = MessageCodec(WORKER_EVENTS).encode
EVENTS = [RingWritable(RingId(1)), RoleReset(RoleId(2)), RingWritable(RingId(3))]


class Heard:
    def __init__(self) -> None:
        self.log: list[object] = []
        self.errors: list[str] = []
        self.closes_at: object = None
        self.pipe = EventPipe(self._event, self.errors.append)
        self.writer = os.dup(self.pipe.writer)
        self.pipe.close_writer()

    def _event(self, event: object) -> None:
        self.log.append(event)
        if event == self.closes_at:
            self.pipe.close()

    def end(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1


@pytest.fixture
async def heard() -> Iterator[Heard]:
    made = Heard()
    yield made
    made.end()
    made.pipe.close()


def lines(*events: object) -> bytes:
    return b"".join(ENCODE(event) + b"\n" for event in events)


async def test_events_come_whole_however_the_bytes_are_split(heard: Heard) -> None:
    for byte in lines(*EVENTS):
        os.write(heard.writer, bytes((byte,)))
        await asyncio.sleep(0)
    heard.end()
    await asyncio.wait_for(heard.pipe.ended, 5)
    assert heard.log == EVENTS
    assert heard.errors == []


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"{\n", "not JSON"),
        (lines(EVENTS[0])[:-5], "no end"),
        (b"x" * (MAX_EVENT_LINE + 1), "over the limit"),
        (b"x" * (MAX_EVENT_LINE + 1) + b"\n", "over the limit"),
    ],
)
async def test_what_is_no_event_ends_the_pipe_by_name(heard: Heard, data: bytes, named: str) -> None:
    def feed() -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(heard.writer, view) :]
        except BrokenPipeError:
            pass  # the pipe ended at the fault, before all of it was written
        heard.end()

    await asyncio.gather(asyncio.to_thread(feed), asyncio.wait_for(heard.pipe.ended, 20))
    assert heard.log == []
    assert len(heard.errors) == 1
    assert named in heard.errors[0]


async def test_a_line_that_stops_in_its_middle_ends_the_pipe(heard: Heard, monkeypatch) -> None:
    """Whoever writes half a line and hangs would be found by the bound of a token only."""
    monkeypatch.setattr(event_pipe, "LINE_BOUND", 0.05)
    whole = lines(*EVENTS)
    os.write(heard.writer, whole + whole[:7])
    await asyncio.wait_for(heard.pipe.ended, 20)
    assert heard.log == EVENTS
    assert heard.errors == ["an event line stopped after 7 bytes, for 0.05 s"]


async def test_the_rest_of_a_line_is_read_before_its_bound_is_judged(heard: Heard, monkeypatch) -> None:
    """As after a stop of the node, by a signal or a debugger: the bound is over, and all is there."""
    loop, stood_still = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + stood_still)
    whole = lines(*EVENTS)
    for part in (whole[:7], whole[7:9], whole[9:]):
        os.write(heard.writer, part)
        await asyncio.sleep(0)
        while heard.pipe._unfinished is None and heard.log != EVENTS:  # noqa: ASYNC110 - no other sign
            await asyncio.sleep(0)
        stood_still += 10 * event_pipe.LINE_BOUND
    heard.end()
    await asyncio.wait_for(heard.pipe.ended, 20)
    assert heard.log == EVENTS
    assert heard.errors == []


async def test_a_finished_line_has_no_bound(heard: Heard) -> None:
    os.write(heard.writer, lines(*EVENTS)[:-1])
    while heard.pipe._unfinished is None:  # noqa: ASYNC110 - no other sign
        await asyncio.sleep(0)
    os.write(heard.writer, b"\n")
    while len(heard.log) < len(EVENTS):  # noqa: ASYNC110 - no other sign
        await asyncio.sleep(0)
    assert heard.pipe._unfinished is None
    os.write(heard.writer, b"{")
    while heard.pipe._unfinished is None:  # noqa: ASYNC110 - no other sign
        await asyncio.sleep(0)
    waits = heard.pipe._unfinished
    heard.pipe.close()
    assert waits.cancelled()


async def test_closing_at_an_event_drops_what_follows_and_frees_the_descriptor(heard: Heard) -> None:
    heard.closes_at = EVENTS[0]
    os.write(heard.writer, lines(*EVENTS) + b"{")
    await asyncio.wait_for(heard.pipe.ended, 5)
    heard.pipe.close()
    await asyncio.sleep(0)
    assert heard.log == EVENTS[:1]
    assert heard.errors == []
    assert heard.pipe._unfinished is None
    with pytest.raises(BrokenPipeError):
        os.write(heard.writer, b"x")


async def test_hints_without_end_leave_turns_to_others(heard: Heard) -> None:
    """Who writes without end fills its pipe, and then waits."""
    hint, count = RingReadable(RingId(9)), 30_000
    most = before = 0
    data = memoryview(lines(hint) * count)

    def feed() -> None:
        view = data
        while view:
            view = view[os.write(heard.writer, view) :]
        heard.end()

    feeding = asyncio.ensure_future(asyncio.to_thread(feed))
    while not heard.pipe.ended.done():
        most, before = max(most, len(heard.log) - before), len(heard.log)
        await asyncio.sleep(0)
    await feeding
    assert heard.log == [hint] * count
    assert heard.errors == []
    assert most < 1_000, f"{most} events in one turn"
