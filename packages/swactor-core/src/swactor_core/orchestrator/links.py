"""Control links to candidate nodes (spec sections 5 and 9): watch, command, and evidence that one is gone.

One link per candidate: dials while membership shows it alive, asks to watch, hands every report on, and tells
`NodeLost` when an established link breaks. A refusal is told, and asked again where that can help, and so is
why a node cannot be reached. Knows messages, no run policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swactor_core.actors import ActorSystem
from swactor_core.codec import CodecError
from swactor_core.errors import TransportError
from swactor_core.faults import Component
from swactor_core.ids import NodeId
from swactor_core.messages import Address, NodeLost, Watch, WatchRefused
from swactor_core.node.control import CONTROL
from swactor_core.spi.transport import ControlChannel, Transport

log = logging.getLogger(__name__)

POOL = Address(Component.POOL)
DIAL_DEADLINE = 3.0
REDIAL_SECONDS = 0.1
ASK_AGAIN_SECONDS = 0.5


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
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._channel: ControlChannel | None = None
        self._closed = False
        self._task = system.start_task(self._run(), owner=Address(Component.NODE, node_id))

    def seen(self, *, alive: bool) -> None:
        """Membership's view of the node has changed."""
        (self._alive.set if alive else self._alive.clear)()

    def send(self, message: object) -> None:
        """Raises CodecError here, where somebody hears of it, and not in the task that sends."""
        self._outgoing.put_nowait(CONTROL.encode(message))

    async def close(self) -> None:
        self._closed = True
        self._task.cancel()
        await asyncio.wait((self._task,), timeout=1.0)
        if self._channel is not None:
            await self._channel.close()

    async def _run(self) -> None:
        while not self._closed:
            await self._alive.wait()
            try:
                channel = await self._transport.open_control(self.node_id, deadline=DIAL_DEADLINE)
            except TransportError as error:
                log.info("cannot reach node %016x yet: %s", self.node_id, error.message)
                # Whoever waits for the pool hears why, as of a node that does not want to be watched yet.
                self._system.tell(POOL, WatchRefused(self.node_id, error.message, final=False))
                await asyncio.sleep(REDIAL_SECONDS)
                continue
            refusal = await self._serve(channel)
            if refusal is not None and refusal.final:
                return
            await asyncio.sleep(REDIAL_SECONDS if refusal is None else ASK_AGAIN_SECONDS)

    async def _serve(self, channel: ControlChannel) -> WatchRefused | None:
        """One channel's life; the refusal that ended it, if one did."""
        self._channel = channel
        refusal: WatchRefused | None = None
        why = "it closed its control channel"
        sender = self._system.start_task(self._send(channel), owner=Address(Component.NODE, self.node_id))
        try:
            await channel.send(CONTROL.encode(Watch(self._objects)))
            while (frame := await channel.receive()) is not None:
                message = CONTROL.decode(frame)
                if isinstance(message, WatchRefused):
                    refusal = message
                    break
                self._on_report(self.node_id, message)
        except TransportError as error:
            why = error.message
        except CodecError as error:
            why = f"it sent a bad report: {error}"
        finally:
            sender.cancel()
            self._channel = None
        await channel.close()
        lost = NodeLost(self.node_id, by_membership=False, detail=f"control link lost: {why}")
        self._system.tell(POOL, lost if refusal is None else refusal)
        return refusal

    async def _send(self, channel: ControlChannel) -> None:
        try:
            while True:
                await channel.send(await self._outgoing.get())
        except TransportError as error:
            log.info("cannot command node %016x: %s", self.node_id, error.message)
