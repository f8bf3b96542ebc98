"""Hook implementations of this plug-in. Each mock is imported only when it is selected."""

from __future__ import annotations

from collections.abc import Mapping

from swactor_core.hookspecs import hookimpl
from swactor_core.spi.arena import ArenaPlugin
from swactor_core.spi.loader import Loader
from swactor_core.spi.membership import MembershipPlugin
from swactor_core.spi.provider import Kind, Provider
from swactor_core.spi.transport import TransportPlugin
from swactor_core.spi.worker import WorkerBackend

_STAYS = {"crosses_processes": False}


def _heap_arenas() -> ArenaPlugin:
    from swactor_testing.heap import HeapArenas

    return HeapArenas()


def _echo_backend(settings: Mapping[str, object]) -> WorkerBackend:
    from swactor_testing.echo import EchoBackend

    return EchoBackend(settings)


def _memory_transports() -> TransportPlugin:
    from swactor_testing.memory.transport import MemoryPlugin

    return MemoryPlugin()


def _static_memberships() -> MembershipPlugin:
    from swactor_testing.static import StaticPlugin

    return StaticPlugin()


def _synthetic_loader() -> Loader:
    from swactor_testing.synthetic import SyntheticLoader

    return SyntheticLoader()


@hookimpl
def swactor_register_arenas() -> list[Provider]:
    """The heap arena: rings of one process."""
    summary = "rings on this process's heap, for tests without a worker process"
    return [Provider(Kind.ARENA, "heap", summary, _heap_arenas, capabilities=_STAYS)]


@hookimpl
def swactor_register_transports() -> list[Provider]:
    """The memory transport: edges and control between endpoints of one process, faults by script."""
    summary = "endpoints of this process, exact credit, faults by script, for tests"
    capabilities = {**_STAYS, "ordered": True, "backpressure": "exact", "max_edges_per_connection": 1024}
    return [Provider(Kind.TRANSPORT, "memory", summary, _memory_transports, capabilities=capabilities)]


@hookimpl
def swactor_register_memberships() -> list[Provider]:
    """The static membership: everybody alive at once, verdicts by script."""
    summary = "participants of this process, verdicts by script, for tests"
    return [
        Provider(
            Kind.MEMBERSHIP, "static", summary, _static_memberships, capabilities={**_STAYS, "leave": True}
        )
    ]


@hookimpl
def swactor_register_loaders() -> list[Provider]:
    """The synthetic loader: any name is a tiny model without weights."""
    summary = "a tiny model without weights from any name, for workers that need none"
    return [Provider(Kind.LOADER, "synthetic", summary, _synthetic_loader)]


@hookimpl
def swactor_register_workers() -> list[Provider]:
    """The echo backend: deterministic tokens without a model."""
    summary = "deterministic tokens without a model, for tests"
    return [Provider(Kind.WORKER, "echo", summary, _echo_backend, capabilities={"in_process": True})]
