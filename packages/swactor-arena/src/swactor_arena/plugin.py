"""Hook implementations of this plug-in. Imports the compiled helper only when asked for an arena."""

from __future__ import annotations

from swactor_core.checks import DoctorCheck
from swactor_core.hookspecs import hookimpl
from swactor_core.spi.arena import ArenaPlugin
from swactor_core.spi.provider import Kind, Provider


def _memfd_arenas() -> ArenaPlugin:
    from swactor_arena.arena import MemfdArenas

    return MemfdArenas()


@hookimpl
def swactor_register_arenas() -> list[Provider]:
    """The memfd arena: shared with a worker process by descriptor."""
    return [
        Provider(
            Kind.ARENA,
            "memfd",
            "host memory shared with the worker process, rings in native code",
            _memfd_arenas,
            capabilities={"crosses_processes": True},
        )
    ]


@hookimpl
def swactor_doctor_checks() -> list[DoctorCheck]:
    """What the arena needs of this machine."""
    from swactor_arena.checks import CHECKS

    return list(CHECKS)
