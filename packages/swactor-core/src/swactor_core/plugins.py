"""Plug-in discovery and selection: one guarded load and one record per entry point.

A broken plug-in never stops the program: its record says what happened. Selecting one that is not usable is
an error that quotes its record. There is no global manager; `load_plugins` returns an object that owns one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any

import pluggy

from swactor_core.errors import PluginError, did_you_mean
from swactor_core.hookspecs import ALL_SPECS, PROJECT
from swactor_core.spi.provider import API_LEVEL, Kind, Provider

REGISTRATION_HOOKS: Mapping[Kind, str] = {
    Kind.ARENA: "swactor_register_arenas",
    Kind.TRANSPORT: "swactor_register_transports",
    Kind.MEMBERSHIP: "swactor_register_memberships",
    Kind.WORKER: "swactor_register_workers",
    Kind.LOADER: "swactor_register_loaders",
    Kind.SINK: "swactor_register_sinks",
}


class PluginState(StrEnum):
    LOADED = "loaded"
    BLOCKED = "blocked"
    INCOMPATIBLE = "incompatible"
    FAILED = "failed"


@dataclass(slots=True)
class PluginRecord:
    """What became of one entry point. `reason` is empty when it loaded."""

    name: str
    distribution: str
    version: str
    module: str
    state: PluginState
    reason: str = ""
    providers: list[Provider] = field(default_factory=list)


class Plugins:
    """The loaded plug-ins of one process and the providers they registered."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        for specs in ALL_SPECS:
            self.manager.add_hookspecs(specs)
        self.records: list[PluginRecord] = []
        self._owners: dict[tuple[Kind, str], list[PluginRecord]] = {}

    def register(
        self, plugin: object, *, name: str, distribution: str = "(given)", version: str = ""
    ) -> PluginRecord:
        """Registers one plug-in object and collects its providers; never raises for a plug-in's fault."""
        module = getattr(plugin, "__name__", type(plugin).__name__)
        record = PluginRecord(name, distribution, version, module, PluginState.LOADED)
        self.records.append(record)
        if self.manager.is_registered(plugin):
            record.state, record.reason = PluginState.FAILED, "this plug-in is registered already"
            return record
        try:
            self.manager.register(plugin, name=name)
            self._refuse_unknown_hooks(plugin)
            for kind, hook in REGISTRATION_HOOKS.items():
                implementation = getattr(plugin, hook, None)
                if implementation is not None:
                    record.providers.extend(self._checked(kind, implementation()))
        except _Incompatible as error:
            self._fail(record, plugin, PluginState.INCOMPATIBLE, str(error))
        except Exception as error:  # a plug-in may raise anything; its record tells what
            self._fail(record, plugin, PluginState.FAILED, f"{type(error).__name__}: {error}")
        else:
            for provider in record.providers:
                self._owners.setdefault((provider.kind, provider.name), []).append(record)
        return record

    def _refuse_unknown_hooks(self, plugin: object) -> None:
        known = {name for specs in ALL_SPECS for name in vars(specs) if name.startswith("swactor_")}
        unknown = sorted(
            n
            for n in dir(plugin)
            if n.startswith("swactor_") and callable(getattr(plugin, n)) and n not in known
        )
        if unknown:
            raise PluginError(f"unknown hook {unknown[0]!r}", hint=f"known hooks: {', '.join(sorted(known))}")

    def _checked(self, kind: Kind, providers: Iterable[Any] | None) -> list[Provider]:
        result = []
        for provider in providers or ():
            if not isinstance(provider, Provider) or provider.kind is not kind:
                raise PluginError(f"{provider!r} is not a provider of kind {kind}")
            if provider.api_level != API_LEVEL:
                raise _Incompatible(
                    f"written for API level {provider.api_level}, this swactor has {API_LEVEL}"
                )
            result.append(provider)
        return result

    def _fail(self, record: PluginRecord, plugin: object, state: PluginState, reason: str) -> None:
        record.state, record.reason, record.providers = state, reason, []
        if self.manager.is_registered(plugin):
            self.manager.unregister(plugin)

    def select(self, kind: Kind, name: str) -> Provider:
        """The provider of that kind and name. Raises PluginError: absent, ambiguous or broken."""
        owners = self._owners.get((kind, name), [])
        if len(owners) > 1:
            names = " and ".join(f"{o.distribution} {o.version}".strip() for o in owners)
            raise PluginError(
                f"two plug-ins provide {kind} {name!r}: {names}", hint="uninstall or block one of them"
            )
        if not owners:
            broken = [r for r in self.records if r.state is not PluginState.LOADED]
            why = "; ".join(f"{r.distribution} {r.state}: {r.reason}" for r in broken)
            have = sorted(n for k, n in self._owners if k is kind)
            install = "`pip install 'swactor[all]'` brings one of each kind"
            raise PluginError(
                f"no {kind} plug-in named {name!r} (have: {', '.join(have) or 'none'})"
                + (f"; {why}" if why else ""),
                hint=f"{did_you_mean(name, have)}choose one of those; {install}" if have else install,
            )
        return next(p for p in owners[0].providers if p.kind is kind and p.name == name)

    def module_of(self, kind: Kind, name: str) -> str:
        """The module of the plug-in that has that provider, for `load_modules` in another process; empty
        where the plug-in is no module of its own. Raises PluginError as `select` does."""
        self.select(kind, name)
        record = self._owners[kind, name][0]
        known = sys.modules.get(record.module)
        return record.module if known is not None and known is self.manager.get_plugin(record.name) else ""

    def providers(self, kind: Kind) -> list[Provider]:
        return [p for r in self.records for p in r.providers if p.kind is kind]

    def call_lifecycle(self, hook: str, **arguments: Any) -> list[str]:
        """Calls a life-event hook on each plug-in in its own guard; returns what failed, a line each."""
        failures = []
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            wanted = {name: arguments[name] for name in implementation.argnames}  # it may take fewer
            try:
                implementation.function(**wanted)
            except Exception as error:
                failures.append(f"{implementation.plugin_name}: {hook}: {type(error).__name__}: {error}")
        return failures


class _Incompatible(Exception):
    pass


def load_modules(modules: Iterable[str]) -> Plugins:
    """Only these plug-ins, each in its own guard, without looking at what is installed: for a process whose
    parent has looked (`Plugins.module_of`)."""
    plugins = Plugins()
    for name in dict.fromkeys(modules):
        try:
            module = import_module(name)
        except (Exception, SystemExit) as error:  # as in `load_plugins`
            reason = f"{type(error).__name__}: {error}"
            plugins.records.append(PluginRecord(name, name, "", name, PluginState.FAILED, reason))
            continue
        plugins.register(module, name=name, distribution=name)
    return plugins


def load_plugins(*, blocked: Iterable[str] = (), only: Iterable[str] | None = None) -> Plugins:
    """Loads every entry point of group `swactor`, each in its own guard.

    `blocked` and `only` hold entry-point or distribution names; `only` empty loads none.
    """
    from importlib import metadata  # which reads what is installed, and takes long to import itself

    plugins = Plugins()
    refused = set(blocked)
    allowed = None if only is None else set(only)
    for entry in sorted(metadata.entry_points(group=PROJECT), key=lambda e: e.name):
        distribution = entry.dist.name if entry.dist is not None else "(unknown)"
        version = entry.dist.version if entry.dist is not None else ""
        names = {entry.name, distribution}
        record = PluginRecord(entry.name, distribution, version, entry.value, PluginState.BLOCKED)
        if names & refused or (allowed is not None and not names & allowed):
            record.reason = "blocked by configuration"
            plugins.records.append(record)
            continue
        try:
            module = entry.load()
        except (Exception, SystemExit) as error:  # an import may raise anything; its record tells what
            record.state, record.reason = PluginState.FAILED, f"{type(error).__name__}: {error}"
            plugins.records.append(record)
            continue
        plugins.register(module, name=entry.name, distribution=distribution, version=version)
    return plugins
