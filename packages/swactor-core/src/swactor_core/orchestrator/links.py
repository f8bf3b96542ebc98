"""Control links to candidate nodes (spec sections 5 and 9): watch, command, and evidence that one is gone.

One link per candidate: dials while membership shows it alive, asks to watch, hands every report on, and tells
`NodeLost` when an established link breaks. A refusal is told, and asked again where that can help, and so is
why a node cannot be reached; meanwhile nodes are given back in one order for all, so that no two
orchestrators wait for each other. Knows messages, no run policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from swactor_core.actors import ActorSystem
from swactor_core.codec import CodecError
from swactor_core.errors import TransportError
from swactor_core.events import EventName
from swactor_core.faults import Component
from swactor_core.ids import NodeId
from swactor_core.messages import Address, EventReport, NodeLost, Watch, WatchRefused
from swactor_core.node.control import CONTROL
from swactor_core.spi.transport import ControlChannel, Transport

log = logging.getLogger(__name__)

POOL = Address(Component.POOL)
DIAL_DEADLINE = 3.0
REDIAL_SECONDS = 0.1
ASK_AGAIN_SECONDS = 0.5
CLOSE_BOUND = 1.0
GIVEN_BACK = "given back to others until the busy ones are free"


class NodeLink:
    def __init__(
        self,
        system: ActorSystem,
        transport: Transport,
        node_id: NodeId,
        *,
        objects: bool,
        on_report: Callable[[NodeId, object], None],
    ) -> None:
        self.node_id = node_id
        self._system = system
        self._transport = transport
        self._objects = objects
        self._on_report = on_report
        self._alive = asyncio.Event()
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._channel: ControlChannel | None = None
        self._taken = False
        """Whether the node has taken the watch of this channel."""
        self._closed = False
        self._life = self._told = 0
        """When the node started, and the number of its latest event."""
        self._task = system.start_task(self._run(), owner=Address(Component.NODE, node_id))

    @property
    def alive(self) -> bool:
        """As membership has shown it."""
        return self._alive.is_set()

    def seen(self, *, alive: bool) -> None:
        """Membership's view of the node has changed."""
        (self._alive.set if alive else self._alive.clear)()

    def want(self, *, wanted: bool) -> None:
        """Unwanted, the node is given back, and not asked for before it is wanted again. The pool hears of it
        at once, and nothing more of that channel, however long its end takes."""
        if wanted:
            self._wanted.set()
        elif self._wanted.is_set():
            self._wanted.clear()
            channel, self._channel = self._channel, None
            if channel is not None:
                self._system.start_task(channel.close(), owner=Address(Component.NODE, self.node_id))
                if self._taken:
                    self._system.tell(POOL, WatchRefused(self.node_id, GIVEN_BACK, final=False))

    def send(self, message: object) -> None:
        """Raises CodecError here, where somebody hears of it, and not in the task that sends."""
        self._outgoing.put_nowait(CONTROL.encode(message))

    async def close(self) -> None:
        """Ends the dialling, or the channel in order; waits CLOSE_BOUND seconds for it at most."""
        self._closed = True
        self._task.cancel()
        await asyncio.wait((self._task,), timeout=CLOSE_BOUND)

    async def _run(self) -> None:
        while not self._closed:
            await self._alive.wait()
            await self._wanted.wait()
            try:
                channel = await self._transport.open_control(self.node_id, deadline=DIAL_DEADLINE)
            except TransportError as error:
                log.info("cannot reach node %016x yet: %s", self.node_id, error.message)
                # Whoever waits for the pool hears why, as of a node that does not want to be watched yet.
                self._system.tell(POOL, WatchRefused(self.node_id, error.message, final=False))
                await asyncio.sleep(REDIAL_SECONDS)
                continue
            if not self._wanted.is_set():  # since it was dialled
                await channel.close()
                continue
            refusal = await self._serve(channel)
            if refusal is not None and refusal.final:
                return
            await asyncio.sleep(REDIAL_SECONDS if refusal is None else ASK_AGAIN_SECONDS)

    async def _serve(self, channel: ControlChannel) -> WatchRefused | None:
        """One channel's life; the refusal that ended it, if one did."""
        self._channel, self._taken = channel, False
        refusal: WatchRefused | None = None
        why = "it closed its control channel"
        sender = self._system.start_task(self._send(channel), owner=Address(Component.NODE, self.node_id))
        try:
            await channel.send(CONTROL.encode(Watch(self._objects)))
            while (frame := await channel.receive()) is not None and self._channel is channel:
                message = CONTROL.decode(frame)
                if isinstance(message, WatchRefused):
                    refusal = message
                    break
                self._taken = True
                if isinstance(message, EventReport):
                    message = self._without_retold(message)
                self._on_report(self.node_id, message)
        except TransportError as error:
            why = error.message
        except CodecError as error:
            why = f"it sent a bad report: run the same version of swactor everywhere ({error})"
        finally:
            sender.cancel()
            given_back, self._channel = self._channel is not channel, None
            await channel.close()
        if refusal is not None:
            self._on_report(self.node_id, refusal)
        elif not given_back:
            detail = f"control link lost: {why}"
            self._system.tell(POOL, NodeLost(self.node_id, by_membership=False, detail=detail))
        return refusal

    def _without_retold(self, report: EventReport) -> EventReport:
        """Every watch begins with the events of the node's boot: without those that an earlier watch of the
        same life was told. Raises CodecError for what is no event."""
        fresh = []
        for event in report.events:
            match event:
                case {"event": str(name), "time": int(time), "number": int(number)}:
                    if name == EventName.NODE_STARTED and time != self._life:
                        self._life, self._told = time, 0
                    if number > self._told:
                        self._told = number
                        fresh.append(event)
                case _:
                    raise CodecError("EventReport.events: an event without name, time or number")
        return replace(report, events=tuple(fresh))

    async def _send(self, channel: ControlChannel) -> None:
        try:
            while True:
                await channel.send(await self._outgoing.get())
        except TransportError as error:
            log.info("cannot command node %016x: %s", self.node_id, error.message)


class NodeLinks:
    """The links of one orchestrator. Until its plan is made, it holds no node behind one that is busy, in the
    order of node ids: of two that begin at once, each would else hold what the other waits for."""

    def __init__(
        self,
        system: ActorSystem,
        *,
        objects: bool,
        on_report: Callable[[NodeId, object], None],
    ) -> None:
        self._system = system
        self._objects = objects
        self._on_report = on_report
        self._links: dict[NodeId, NodeLink] = {}
        self._busy: set[NodeId] = set()
        self._settled = False

    def begin(self, transport: Transport, candidates: Iterable[NodeId]) -> None:
        """A run is to have all of these."""
        self._settled = False
        for node_id in candidates:
            if node_id not in self._links:
                self._links[node_id] = NodeLink(
                    self._system, transport, node_id, objects=self._objects, on_report=self._hear
                )
        self._give_back()

    def settle(self) -> None:
        """The run has its nodes: from here on none is given back but by the run's end."""
        self._settled = True

    def seen(self, node_id: NodeId, *, alive: bool) -> None:
        """Membership's view of the node has changed. For one that is gone nobody waits in turn."""
        if not alive:
            self._free(node_id)
        if node_id in self._links:
            self._links[node_id].seen(alive=alive)

    def send(self, node_id: NodeId, message: object) -> None:
        """To one node, where it is linked."""
        if node_id in self._links:
            self._links[node_id].send(message)

    def send_all(self, message: object) -> None:
        for link in self._links.values():
            link.send(message)

    async def close(self) -> None:
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close() for link in links.values()))

    def _hear(self, node_id: NodeId, message: object) -> None:
        link = self._links.get(node_id)
        if isinstance(message, WatchRefused) and not message.final and link is not None and link.alive:
            self._busy.add(node_id)
            self._give_back()
        else:
            self._free(node_id)
        self._on_report(node_id, message)

    def _free(self, node_id: NodeId) -> None:
        if node_id in self._busy:
            self._busy.remove(node_id)
            self._give_back()

    def _give_back(self) -> None:
        if not self._settled:
            first = min(self._busy, default=None)
            for node_id, link in self._links.items():
                link.want(wanted=first is None or node_id <= first)
