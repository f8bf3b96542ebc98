"""Plug-ins that break their word: the run or its start ends with one typed error, and nothing is left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from mock_run import MOCKS, MockRun
from swactor_core.errors import ResourceError
from swactor_core.plugins import REGISTRATION_HOOKS, Plugins, load_plugins
from swactor_core.spi.provider import Kind, Provider
from swactor_testing.echo import EchoBackend
from swactor_testing.heap import HeapArenas
from swactor_testing.memory.transport import MemoryPlugin, MemoryTransport


def with_plugin(kind: Kind, name: str, factory: Any, **capabilities: Any) -> Plugins:
    """All installed plug-ins, and one more of this kind."""
    plugins = load_plugins()
    provider = Provider(kind, name, "of a test", factory, capabilities=capabilities)
    hook = {REGISTRATION_HOOKS[kind]: lambda: [provider]}
    plugins.register(SimpleNamespace(__name__="defective", **hook), name="defective")
    return plugins


class NoArena(HeapArenas):
    def create(self, ceiling: int) -> Any:
        raise RuntimeError("a defect of the arena")


async def test_an_arena_that_raises_what_it_must_not_ends_the_start() -> None:
    plugins = with_plugin(Kind.ARENA, "broken", NoArena, crosses_processes=False)
    run = MockRun(plugins, choice=MOCKS.model_copy(update={"arena": "broken"}))
    with pytest.raises(ResourceError, match="RuntimeError: a defect of the arena"):
        async with asyncio.timeout(5):
            await run.go()


class NoStart(MemoryTransport):
    """An endpoint that cannot be bound, but for the first one: the orchestrator's."""

    made = 0

    async def start(self) -> None:
        NoStart.made += 1
        if NoStart.made > 2:
            raise ResourceError("no port is free", hint="wait")
        await super().start()


class NoStartPlugin(MemoryPlugin):
    def create(self, context: Any) -> NoStart:
        return NoStart(context)


async def test_a_node_whose_transport_cannot_start_is_unavailable() -> None:
    NoStart.made = 0
    plugins = with_plugin(Kind.TRANSPORT, "unbound", NoStartPlugin, crosses_processes=False)
    run = MockRun(plugins, choice=MOCKS.model_copy(update={"transport": "unbound"}))
    await run.go()
    run.check_fault("NodeUnavailable")
    assert run.result.fault is not None
    assert "no port is free (wait)" in run.result.fault.detail


class Raises(EchoBackend):
    """Raises what no interface names, in the middle of a run."""

    def configure(self, *arguments: Any, **options: Any) -> Any:
        role = super().configure(*arguments, **options)
        role._misbehave = self._defect
        return role

    @staticmethod
    def _defect(sequence: int) -> None:
        if sequence == 2:
            raise ZeroDivisionError("a defect of the worker")


async def test_a_worker_that_raises_what_it_must_not_is_fatal() -> None:
    plugins = with_plugin(Kind.WORKER, "raises", Raises, in_process=True)
    run = MockRun(plugins, choice=MOCKS.model_copy(update={"worker": "raises"}))
    await run.go()
    run.check_fault("WorkerFatal", "WorkerCrashed")
    assert run.result.fault is not None
    assert "a defect of the worker" in run.result.fault.detail
    assert len(run.result.token_ids) == 2
