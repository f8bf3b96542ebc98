"""Control service of a node: who may command it, and how its reports leave (spec sections 4 and 5).

Takes channels from authorised orchestrators only; anything else is refused with the reason, counted and
logged. Reports go out in order, one at a time; lifecycle events are batched, and dropped and counted when
too many wait. Losing the orchestrator that owns the active run is told to `on_lost`. Knows frames and
messages, no stage and no worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from swactor_core.actors import ActorSystem
from swactor_core.codec import CodecError, MessageCodec
from swactor_core.errors import EdgeClosed, TransportError
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.ids import NodeId, node_hex
from swactor_core.messages import CONTROL_MESSAGES, Address, EventReport, NodeFaulted, WatchRefused
from swactor_core.observe.bus import EventBus
from swactor_core.spi.transport import ControlChannel, Transport

log = logging.getLogger(__name__)

CONTROL = MessageCodec(CONTROL_MESSAGES)
MAX_QUEUED_REPORTS = 10_000
EVENTS_PER_REPORT = 1_000
NODE = Address(Component.NODE)
HISTORY = 64
REFUSAL_BOUND = 5.0
REFUSALS_KEPT = 64
# An orchestrator begins to watch after the node has booted: what it missed of the boot is told first.
_BOOT_EVENTS = frozenset(
    {
        EventName.NODE_STARTED,
        EventName.NODE_AVAILABLE,
        EventName.NODE_FAULTED,
        EventName.WORKER_STARTED,
        EventName.WORKER_ENDED,
    }
)


class BootHistory:
    """A sink that keeps the latest events of the node's own life, without any run's."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=HISTORY)

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] in _BOOT_EVENTS:
            self.events.append(event)


class ReportQueue:
    """Reports for one channel, in order. Events gather until the sender is free, then leave as one frame."""

    def __init__(self) -> None:
        self._items: list[object] = []
        self._ready = asyncio.Event()
        self._dropped = 0

    def put(self, message: object) -> None:
        self._items.append(message)
        self._ready.set()

    def put_event(self, event: dict[str, Any]) -> None:
        if len(self._items) >= MAX_QUEUED_REPORTS:
            self._dropped += 1
            return
        self.put(event)

    async def take(self) -> list[object]:
        """Everything queued, events grouped into EventReports that fit a frame; waits for at least one."""
        await self._ready.wait()
        self._ready.clear()
        items, self._items = self._items, []
        grouped: list[object] = []
        events: list[dict[str, Any]] = []
        for item in items:
            if events and (not isinstance(item, dict) or len(events) == EVENTS_PER_REPORT):
                grouped.append(self._report(events))
                events = []
            if isinstance(item, dict):
                events.append(item)
            else:
                grouped.append(item)
        if events:
            grouped.append(self._report(events))
        return grouped

    def _report(self, events: list[dict[str, Any]]) -> EventReport:
        dropped, self._dropped = self._dropped, 0
        return EventReport(tuple(events), dropped)


class ControlService:
    """`handle(message)` gets each command of the watching orchestrator."""

    def __init__(
        self,
        system: ActorSystem,
        bus: EventBus,
        transport: Transport,
        *,
        node_id: NodeId,
        history: BootHistory,
        authorised: Callable[[bytes], bool],
        handle: Callable[[object], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._system = system
        self._transport = transport
        self._node_id = node_id
        self._authorised = authorised
        self._handle = handle
        self._on_lost = on_lost
        self._reports: ReportQueue | None = None
        self._channel: ControlChannel | None = None
        self.refused = 0
        self._told: dict[NodeId, str] = {}
        self.watched = False
        self._history = history
        bus.add_sink(self._event)

    def start(self) -> None:
        self._system.start_task(self._accept(), owner=NODE)

    def report(self, message: object) -> None:
        """Queues a report for the watching orchestrator; without one it is dropped."""
        if self._reports is not None:
            self._reports.put(message)

    def _event(self, event: dict[str, Any]) -> None:
        if self._reports is not None:
            self._reports.put_event(event)

    async def _accept(self) -> None:
        while True:
            try:
                channel = await self._transport.accept_control()
            except EdgeClosed:  # the transport was closed: the node ends
                return
            if not self._authorised(channel.peer_key):
                why = (
                    f"the key {channel.peer_key.hex()} is not one of the cluster's orchestrators "
                    "(add it to orchestrators in this node's cluster file)"
                )
                self._system.start_task(self._refuse(channel, why, final=True), owner=NODE)
            elif self._channel is not None:
                why = f"busy with another orchestrator, {node_hex(self._channel.peer)}"
                self._system.start_task(self._refuse(channel, why, final=False), owner=NODE)
            else:
                self._channel = channel
                self._told.pop(channel.peer, None)
                self._system.start_task(self._serve(channel), owner=NODE)

    async def _refuse(self, channel: ControlChannel, why: str, *, final: bool) -> None:
        """Answers its first word with the reason, and gives it time to read that."""
        self.refused += 1
        again, self._told[channel.peer] = self._told.get(channel.peer) == why, why
        if len(self._told) > REFUSALS_KEPT:  # a stranger may come with a fresh key each time
            del self._told[next(iter(self._told))]
        level = logging.DEBUG if again else logging.WARNING  # who waits for its turn asks twice a second
        log.log(level, "refused the orchestrator %s: %s", node_hex(channel.peer), why)
        try:
            async with asyncio.timeout(REFUSAL_BOUND):
                await channel.receive()
                await channel.send(CONTROL.encode(WatchRefused(self._node_id, why, final)))
                while await channel.receive() is not None:
                    pass
        except (TransportError, TimeoutError) as error:
            log.info("a refused control channel ended: %s", error)
        await channel.close()

    async def _serve(self, channel: ControlChannel) -> None:
        self.watched = True
        self._reports = reports = ReportQueue()
        for event in self._history.events:
            reports.put_event(event)
        sender = self._system.start_task(self._send(channel, reports), owner=NODE)
        try:
            while (frame := await channel.receive()) is not None:
                self._handle(CONTROL.decode(frame))
        except TransportError as error:
            log.info("control channel ended: %s", error.message)
        except CodecError as error:
            log.warning("control channel closed: %s", error)
            await self._not_understood(channel, error)
        finally:
            self._channel = self._reports = None
            sender.cancel()
            self._on_lost()
            await channel.close()

    async def _not_understood(self, channel: ControlChannel, error: CodecError) -> None:
        """Another version of swactor speaks there: its operator hears of it, and not of a lost link."""
        detail = (
            f"it cannot read the orchestrator's words: run the same version of swactor everywhere ({error})"
        )
        fault = Fault(FaultReason.PROVISIONING_REJECTED, Component.NODE, detail, node_id=self._node_id)
        try:
            async with asyncio.timeout(REFUSAL_BOUND):
                await channel.send(CONTROL.encode(NodeFaulted(self._node_id, fault)))
        except (TransportError, TimeoutError, CodecError) as failed:
            log.info("nor could that be said: %s", failed)

    async def _send(self, channel: ControlChannel, reports: ReportQueue) -> None:
        try:
            while True:
                for message in await reports.take():
                    await channel.send(CONTROL.encode(message))
        except TransportError as error:
            log.info("control channel cannot be written: %s", error.message)
        except CodecError as error:  # nothing that follows may be left out: the other side has to know
            log.error("control channel closed: %s", error)
            await channel.close()
