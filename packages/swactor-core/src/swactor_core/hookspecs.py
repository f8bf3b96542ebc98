"""Hook specifications: how a plug-in announces its parts. Project name and entry-point group: `swactor`.

All hooks are synchronous and called at start-up or on rare life events, never on the hot path. A hook that
returns None is taken as an empty list. Since API level 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from swactor_core.checks import DoctorCheck
    from swactor_core.spi.provider import Provider

PROJECT = "swactor"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RegistrationSpecs:
    """Called once each, at load, in the main thread."""

    @hookspec
    def swactor_register_arenas(self) -> Iterable[Provider]:
        """Providers of kind `arena`."""
        return ()

    @hookspec
    def swactor_register_transports(self) -> Iterable[Provider]:
        """Providers of kind `transport`."""
        return ()

    @hookspec
    def swactor_register_memberships(self) -> Iterable[Provider]:
        """Providers of kind `membership`."""
        return ()

    @hookspec
    def swactor_register_workers(self) -> Iterable[Provider]:
        """Providers of kind `worker`."""
        return ()

    @hookspec
    def swactor_register_loaders(self) -> Iterable[Provider]:
        """Providers of kind `loader`."""
        return ()

    @hookspec
    def swactor_register_sinks(self) -> Iterable[Provider]:
        """Providers of kind `sink`: their factory gives a callable that takes one event (`observe.bus.Sink`).
        Reserved: registered and listed, not yet chosen by any command."""
        return ()


class CliSpecs:
    @hookspec
    def swactor_add_commands(self, app: Any) -> None:
        """Adds `typer.Typer` sub-apps to `app`; called only when the CLI starts."""


class DoctorSpecs:
    @hookspec
    def swactor_doctor_checks(self) -> Iterable[DoctorCheck]:
        """Checks that `swactor-cli doctor` runs; called only by it."""
        return ()


class LifecycleSpecs:
    """Rare, after the fact; an exception is logged and never stops the node."""

    @hookspec
    def swactor_node_started(self, node_id: int) -> None:
        """The node has become available."""

    @hookspec
    def swactor_node_stopping(self, node_id: int) -> None:
        """The node begins its shutdown."""


ALL_SPECS = (RegistrationSpecs, CliSpecs, DoctorSpecs, LifecycleSpecs)
