"""A node's reports (spec sections 12 and 40): in frames that the other side takes, or said to be lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swactor_core.actors import ActorSystem
from swactor_core.codec import MAX_LINE
from swactor_core.errors import EdgeBroken
from swactor_core.faults import FaultReason
from swactor_core.ids import NodeId, RunId, StageIndex
from swactor_core.messages import Address, EventReport, NodeFaulted, NodeLost, StageReady, StageStopped
from swactor_core.node import control
from swactor_core.node.control import CONTROL, BootHistory, ControlService, ReportQueue
from swactor_core.node.worker_process import STDERR_CHARACTERS, _read_talk
from swactor_core.observe.bus import EventBus
from swactor_core.orchestrator.links import POOL, NodeLink
from swactor_core.orchestrator.orchestrator import Orchestrator
from swactor_core.spi.transport import MAX_CONTROL_FRAME

READY = StageReady(RunId(1), StageIndex(0))
STOPPED = StageStopped(RunId(1), StageIndex(0))


class Channel:
    """Keeps what is sent; `refuses` is raised by every sending."""

    peer, peer_key = NodeId(7), b"k"

    def __init__(self, refuses: Exception | None = None) -> None:
        self.refuses = refuses
        self.sent: list[Any] = []
        self.closed = asyncio.Event()
        self.arriving: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send(self, frame: bytes) -> None:
        assert 1 <= len(frame) <= MAX_CONTROL_FRAME
        if self.refuses is not None:
            raise self.refuses
        self.sent.append(CONTROL.decode(frame))

    async def receive(self) -> bytes | None:
        return await self.arriving.get()

    async def close(self) -> None:
        self.closed.set()
        self.arriving.put_nowait(None)


class Rig:
    def __init__(self) -> None:
        self.failures: list[tuple[Address, Exception]] = []
        self.system = ActorSystem(lambda address, error: self.failures.append((address, error)))
        self.arriving: asyncio.Queue[Channel] = asyncio.Queue()
        self.service = ControlService(
            self.system,
            EventBus(NodeId(1)),
            SimpleNamespace(accept_control=self.arriving.get),  # type: ignore[arg-type] # all it asks for
            node_id=NodeId(1),
            history=BootHistory(),
            authorised=lambda key: True,
            handle=lambda message: None,
            on_lost=lambda: None,
        )
        self.service.start()

    async def watched_by(self, channel: Channel) -> Channel:
        await self.arriving.put(channel)
        async with asyncio.timeout(5):
            while not self.service.watched:  # noqa: ASYNC110 - a turn or two of this loop
                await asyncio.sleep(0)
        return channel


@pytest.fixture
async def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    await made.system.shutdown()


async def settled(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - a turn or two of this loop
            await asyncio.sleep(0)


async def test_events_leave_in_order_and_in_frames_that_the_other_side_takes() -> None:
    queue = ReportQueue()
    events = [{"event": "x", "number": number} for number in range(2 * control.EVENTS_PER_REPORT + 1)]
    for event in events:
        queue.put_event(event)
    queue.put(READY)
    queue.put_event(events[0])
    *reports, ready, last = await queue.take()
    assert [len(report.events) for report in reports] == [*[control.EVENTS_PER_REPORT] * 2, 1]
    assert [event for report in reports for event in report.events] == events
    assert ready == READY
    assert last == EventReport((events[0],), 0)


async def test_a_report_that_no_frame_holds_ends_the_channel_and_is_not_left_out(rig: Rig) -> None:
    channel = await rig.watched_by(Channel())
    rig.service.report(READY)
    rig.service.report(EventReport(({"event": "x", "detail": "y" * MAX_LINE},), 0))
    rig.service.report(STOPPED)
    await settled(channel.closed.is_set)
    assert channel.sent == [READY]
    assert rig.failures == []


@pytest.mark.parametrize("refuses", [None, EdgeBroken("gone")])
async def test_an_orchestrator_of_another_version_is_told_so(rig: Rig, refuses: Exception | None) -> None:
    """Its command has a field more: a channel that ends says nothing of that to its operator."""
    channel = await rig.watched_by(Channel(refuses=refuses))
    channel.arriving.put_nowait(b'{"type":"StopRun","run_id":1,"new":2}')
    await settled(channel.closed.is_set)
    assert rig.failures == []
    if refuses is None:
        (said,) = channel.sent
        assert isinstance(said, NodeFaulted)
        assert (said.fault.reason, said.fault.node_id) == (FaultReason.PROVISIONING_REJECTED, NodeId(1))
        assert "run the same version of swactor everywhere (StopRun.new: " in said.fault.detail


async def test_who_waits_for_a_turn_is_told_of_once_also_when_several_wait(rig: Rig, caplog) -> None:
    """Each asks twice a second, for as long as its operator wants."""
    await rig.watched_by(Channel())
    for count in range(1, 4):
        for peer in (NodeId(8), NodeId(9)):
            waiting = Channel()
            waiting.peer = peer
            waiting.arriving.put_nowait(b"Watch")
            await rig.arriving.put(waiting)
            await settled(lambda waiting=waiting: waiting.sent)
            await waiting.close()
        assert rig.service.refused == 2 * count
    assert caplog.text.count("refused the orchestrator") == 2


async def test_strangers_with_ever_fresh_keys_take_bounded_memory(rig: Rig) -> None:
    await rig.watched_by(Channel())
    for number in range(control.REFUSALS_KEPT + 9):
        stranger = Channel()
        stranger.peer = NodeId(100 + number)
        for frame in (b"Watch", None):
            stranger.arriving.put_nowait(frame)
        await rig.arriving.put(stranger)
        await settled(stranger.closed.is_set)
    assert len(rig.service._told) == control.REFUSALS_KEPT


async def test_a_sender_that_fails_is_heard_of_and_not_silent(rig: Rig) -> None:
    await rig.watched_by(Channel(refuses=ValueError("no frame")))
    rig.service.report(READY)
    await settled(lambda: rig.failures)
    assert [str(error) for _, error in rig.failures] == ["no frame"]


async def test_a_command_that_cannot_be_sent_is_heard_of_too() -> None:
    failures: list[Exception] = []
    system = ActorSystem(lambda address, error: failures.append(error))
    channels = [Channel(refuses=ValueError("no frame"))]

    async def open_control(node_id: NodeId, *, deadline: float) -> Channel:
        return channels[0]

    transport: Any = SimpleNamespace(open_control=open_control)
    link = NodeLink(system, transport, NodeId(2), objects=False, on_report=lambda node_id, message: None)
    link.seen(alive=True)
    link.send(READY)
    await settled(lambda: failures)
    assert "no frame" in str(failures[0])
    await link.close()
    await system.shutdown()


async def test_a_link_that_is_closed_ends_its_channel_in_order() -> None:
    system = ActorSystem(lambda address, error: None)
    channel = Channel()

    async def open_control(node_id: NodeId, *, deadline: float) -> Channel:
        return channel

    transport: Any = SimpleNamespace(open_control=open_control)
    link = NodeLink(system, transport, NodeId(2), objects=False, on_report=lambda node_id, message: None)
    link.seen(alive=True)
    await settled(lambda: channel.sent)
    assert not channel.closed.is_set()
    await link.close()
    assert channel.closed.is_set()
    await system.shutdown()


async def test_what_every_watch_begins_with_is_heard_once_of_each_life() -> None:
    """After a link that broke, or a node that was given back to others."""

    def boot(time: int) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"event": name, "time": time + number, "number": number, "node_id": "2"}
            for number, name in enumerate(("node_started", "worker_started", "node_available"), 1)
        )

    later = {"event": "worker_ended", "time": 90, "number": 9, "node_id": "2"}
    watches = [boot(10), (*boot(10), later), (*boot(10), later), boot(100)]
    heard: list[dict[str, Any]] = []
    system = ActorSystem(lambda address, error: pytest.fail(str(error)))
    system.spawn(POOL, SimpleNamespace(receive=lambda message: None))

    async def open_control(node_id: NodeId, *, deadline: float) -> Channel:
        channel = Channel()
        if watches:
            channel.arriving.put_nowait(CONTROL.encode(EventReport(watches.pop(0))))
            channel.arriving.put_nowait(None)
        return channel

    transport: Any = SimpleNamespace(open_control=open_control)
    link = NodeLink(
        system, transport, NodeId(2), objects=False, on_report=lambda _, report: heard.extend(report.events)
    )
    link.seen(alive=True)
    await settled(lambda: not watches and len(heard) == 7)
    assert heard == [*boot(10), later, *boot(100)]
    await link.close()
    await system.shutdown()


async def test_what_is_no_event_ends_the_link_and_says_why() -> None:
    heard: list[object] = []
    system = ActorSystem(lambda address, error: pytest.fail(str(error)))
    system.spawn(POOL, SimpleNamespace(receive=heard.append))

    async def open_control(node_id: NodeId, *, deadline: float) -> Channel:
        channel = Channel()
        channel.arriving.put_nowait(CONTROL.encode(EventReport(({"event": "node_started", "time": 1},))))
        return channel

    transport: Any = SimpleNamespace(open_control=open_control)
    link = NodeLink(system, transport, NodeId(2), objects=False, on_report=lambda _, said: heard.append(said))
    link.seen(alive=True)
    await settled(lambda: heard)
    assert isinstance(heard[0], NodeLost)
    assert "run the same version of swactor everywhere (EventReport.events: an event" in heard[0].detail
    await link.close()
    await system.shutdown()


async def test_last_words_of_a_worker_without_end_are_kept_short() -> None:
    """They become part of a fault, which has to reach the orchestrator."""
    stderr = asyncio.StreamReader(limit=4 * MAX_LINE)
    stderr.feed_data(b"first\n" + b"y" * (3 * MAX_LINE) + b"\n")
    stderr.feed_eof()
    talk: deque[str] = deque(maxlen=3)
    await _read_talk(stderr, talk)
    assert list(talk) == ["first", "y" * STDERR_CHARACTERS]


def test_events_of_a_run_of_another_orchestrator_are_not_forwarded() -> None:
    """A node that tears it down is watched by the next already; that it refused one is news of this run."""
    forwarded: list[dict[str, Any]] = []
    bus = SimpleNamespace(forward=forwarded.append)
    mine = cast(Any, SimpleNamespace(bus=bus, _first_run=5, _run_ids=7))
    mine._ours = lambda event: Orchestrator._ours(mine, event)
    events = [
        {"event": "node_started"},
        {"event": "provisioning_refused", "run_id": 5},
        *({"event": "stage_stopped", "run_id": run} for run in (5, 6, 7, 8)),
    ]
    Orchestrator._report_from(mine, NodeId(1), EventReport(tuple(events), 0))
    assert [event.get("run_id") for event in forwarded] == [None, 5, 6, 7]
