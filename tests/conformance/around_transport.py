"""The memory transport inside of classes that a wrong one overrides in part."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from swactor_core.spi.transport import TransportContext
from swactor_testing.conformance import TransportCapabilities, TransportContract
from swactor_testing.conformance.transport_rig import Endpoint
from swactor_testing.memory.hub import HUB
from swactor_testing.memory.transport import MemoryPlugin, MemoryTransport
from wrong_kit import Around

_background: set[asyncio.Task[Any]] = set()


def later(work: Any) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task


class AroundTransport(Around):
    """`parts` are the classes around each end of a stream."""

    def __init__(self, inner: MemoryTransport, context: TransportContext, parts: Any) -> None:
        super().__init__(inner)
        self.context = context
        self.parts = parts
        self.lock = asyncio.Lock()
        self.waiting: set[Any] = set()

    def _part(self, kind: str, inner: Any) -> Any:
        part = getattr(self.parts, kind)(inner)
        part.transport = self
        return part

    async def open_edge(self, *args: Any, **options: Any) -> Any:
        return self._part("send_edge", await self._inner.open_edge(*args, **options))

    async def accept_edge(self) -> Any:
        who, edge_id, edge = await self._inner.accept_edge()
        return who, edge_id, self._part("recv_edge", edge)

    async def open_control(self, *args: Any, **options: Any) -> Any:
        return self._part("channel", await self._inner.open_control(*args, **options))

    async def accept_control(self) -> Any:
        return self._part("channel", await self._inner.accept_control())


class AroundPlugin:
    def __init__(self, parts: Any) -> None:
        self._parts = parts

    def public_key(self, seed: bytes) -> bytes:
        return MemoryPlugin().public_key(seed)

    def create(self, context: TransportContext) -> Any:
        inner = MemoryPlugin().create(self._parts.changed(context))
        return self._parts.around(inner, context, self._parts)


class WrongTransport(TransportContract):
    capabilities = TransportCapabilities(
        provider="memory",
        crosses_processes=False,
        patience=0.5,
        loss_within=0.5,
        edges=4,
        large_payload=300_000,
    )
    around: ClassVar[type] = AroundTransport
    send_edge: ClassVar[type] = Around
    recv_edge: ClassVar[type] = Around
    channel: ClassVar[type] = Around

    @classmethod
    def changed(cls, context: TransportContext) -> TransportContext:
        return context

    @pytest.fixture
    def plugin(self) -> Any:
        return AroundPlugin(type(self))

    def vanish(self, endpoint: Endpoint) -> None:
        HUB.vanish(endpoint.node_id)

    def silence(self, endpoint: Endpoint) -> None:
        HUB.hold(sender=endpoint.node_id)

    def resume(self, endpoint: Endpoint) -> None:
        HUB.release()
