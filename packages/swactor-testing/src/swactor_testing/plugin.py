"""Hook implementations of this plug-in. Each mock is imported only when it is selected."""

from __future__ import annotations

from collections.abc import Mapping

from swactor_core.hookspecs import hookimpl
from swactor_core.spi.arena import ArenaPlugin
from swactor_core.spi.provider import Kind, Provider
from swactor_core.spi.worker import WorkerBackend


def _heap_arenas() -> ArenaPlugin:
    from swactor_testing.heap import HeapArenas

    return HeapArenas()


def _echo_backend(settings: Mapping[str, object]) -> WorkerBackend:
    from swactor_testing.echo import EchoBackend

    return EchoBackend(settings)


@hookimpl
def swactor_register_arenas() -> list[Provider]:
    """The heap arena: rings of one process, for tests."""
    summary = "rings on this process's heap, for tests without a worker process"
    return [Provider(Kind.ARENA, "heap", summary, _heap_arenas)]


@hookimpl
def swactor_register_workers() -> list[Provider]:
    """The echo backend: deterministic tokens without a model."""
    return [Provider(Kind.WORKER, "echo", "deterministic tokens without a model, for tests", _echo_backend)]
