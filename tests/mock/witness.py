"""Everything that parts of a run say to each other, recorded: for tests that ask what never happens.

Knows the places where words pass: mailboxes, control channels, the worker's commands and events, streams of
edges. Judges nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

from mock_run import MockRun
from swactor_core.actors import ActorSystem
from swactor_core.ids import EdgeId, NodeId
from swactor_core.machines.worker_process import FromWorker, WriteWorker
from swactor_core.messages import Address
from swactor_core.node.control import CONTROL
from swactor_core.node.worker_inline import InProcessWorker
from swactor_core.worker.harness import Harness
from swactor_testing.memory.control import MemoryControlChannel
from swactor_testing.memory.edges import MemorySendEdge
from swactor_testing.memory.transport import MemoryTransport

T = TypeVar("T")


@dataclass
class Witness:
    """In order of time; `told` are (actor system, address, message), `steps` what role code was given."""

    told: list[tuple[ActorSystem, Address, object]] = field(default_factory=list)
    frames: list[tuple[NodeId, object]] = field(default_factory=list)
    """(who is spoken to, message) of control channels, as they cross the border."""
    commands: list[tuple[object, object]] = field(default_factory=list)
    """(worker adapter, command)."""
    worker_events: list[object] = field(default_factory=list)
    opened: list[tuple[NodeId, NodeId, EdgeId]] = field(default_factory=list)
    """(sender, receiver, edge) of streams."""
    written: dict[EdgeId, bytearray] = field(default_factory=dict)
    order: list[tuple[str, object]] = field(default_factory=list)
    """Everything of the above as (kind, what)."""

    def of(self, kind: type[T]) -> list[T]:
        """All messages of this type that actors were told."""
        return [message for _, _, message in self.told if isinstance(message, kind)]


@contextlib.contextmanager
def watching() -> Iterator[Witness]:
    """Records all runs inside the block."""
    seen = Witness()
    tell, send = ActorSystem.tell, MemoryControlChannel.send
    perform, said = InProcessWorker.perform, FromWorker.__init__
    open_edge, offer = MemoryTransport.open_edge, MemorySendEdge.offer

    def on_tell(system: ActorSystem, address: Address, message: object) -> None:
        seen.told.append((system, address, message))
        seen.order.append(("told", message))
        tell(system, address, message)

    async def on_send(channel: MemoryControlChannel, frame: bytes) -> None:
        message = CONTROL.decode(frame)
        seen.frames.append((channel.peer, message))
        seen.order.append(("frame", message))
        await send(channel, frame)

    def on_perform(worker: InProcessWorker, effect: Any) -> None:
        if isinstance(effect, WriteWorker):
            seen.commands.append((worker, effect.command))
            seen.order.append(("command", effect.command))
        perform(worker, effect)

    def on_said(event: FromWorker, generation: Any, inner: object) -> None:
        seen.worker_events.append(inner)
        seen.order.append(("event", inner))
        said(event, generation, inner)

    async def on_open(transport: MemoryTransport, peer: NodeId, edge_id: EdgeId, *, deadline: float) -> Any:
        seen.opened.append((transport.node_id, peer, edge_id))
        return await open_edge(transport, peer, edge_id, deadline=deadline)

    def on_offer(edge: MemorySendEdge, view: memoryview) -> int:
        count = offer(edge, view)
        seen.written.setdefault(edge.edge_id, bytearray()).extend(view[:count])
        if count:
            seen.order.append(("written", edge.edge_id))
        return count

    with (
        mock.patch.object(ActorSystem, "tell", on_tell),
        mock.patch.object(MemoryControlChannel, "send", on_send),
        mock.patch.object(InProcessWorker, "perform", on_perform),
        mock.patch.object(FromWorker, "__init__", on_said),
        mock.patch.object(MemoryTransport, "open_edge", on_open),
        mock.patch.object(MemorySendEdge, "offer", on_offer),
    ):
        yield seen


def harness_of(run: MockRun, index: int) -> Harness:
    """The harness of the worker that lives on that node now."""
    worker: Any = run.pool[index]._worker
    harness = worker._hosted.harness
    assert isinstance(harness, Harness)
    return harness
