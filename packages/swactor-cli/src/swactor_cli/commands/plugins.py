"""`swactor-cli plugins`: what became of every installed plug-in."""

from __future__ import annotations

from typing import Any

from swactor_core.config import PluginChoice, choose_plugins, load_cluster_file
from swactor_core.errors import PluginError
from swactor_core.plugins import PluginRecord, Plugins, PluginState, load_plugins
from swactor_core.spi.provider import API_LEVEL, Kind
from swactor_core.values import frozen

from swactor_cli.errors import ExitCode
from swactor_cli.output import Output

CHOSEN_KINDS = (Kind.ARENA, Kind.TRANSPORT, Kind.MEMBERSHIP, Kind.WORKER, Kind.LOADER)


@frozen
class PluginOptions:
    """Where the choice of plug-ins comes from, as given."""

    cluster: str | None
    plugins: dict[str, str | None]


def chosen_plugins(options: PluginOptions) -> tuple[PluginChoice, Plugins]:
    """The choice by options, environment and cluster file, and all plug-ins. Raises ConfigError."""
    file = load_cluster_file(options.cluster) if options.cluster is not None else None
    choice = choose_plugins(file.plugins if file is not None else PluginChoice(), options.plugins)
    return choice, load_plugins(blocked=choice.blocked)


def unusable(choice: PluginChoice, plugins: Plugins) -> list[PluginError]:
    """Why a chosen provider cannot be used, one error a kind."""
    errors = []
    for kind in CHOSEN_KINDS:
        try:
            plugins.select(kind, getattr(choice, kind))
        except PluginError as error:
            errors.append(error)
    return errors


def list_plugins(options: PluginOptions, output: Output) -> ExitCode:
    """Exit 2 only when a plug-in that is chosen cannot be used."""
    choice, plugins = chosen_plugins(options)
    records = [_record(record, choice) for record in plugins.records]
    if output.json_lines:
        for record in records:
            output.record({"type": "plugin", **record})
    else:
        _show(records, output)
        for plugin in plugins.records:
            if plugin.state in (PluginState.FAILED, PluginState.INCOMPATIBLE):
                output.warning(f"{plugin.distribution} {plugin.version}: {plugin.state}: {plugin.reason}")
    errors = unusable(choice, plugins)
    for error in errors:
        output.error(error.message, error.hint)
    return ExitCode.USAGE if errors else ExitCode.COMPLETED


def _record(record: PluginRecord, choice: PluginChoice) -> dict[str, Any]:
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "module": record.module,
        "api_level": API_LEVEL if record.state is PluginState.LOADED else None,
        "state": str(record.state),
        "reason": record.reason,
        "providers": [
            {
                "kind": str(provider.kind),
                "name": provider.name,
                "summary": provider.summary,
                "api_level": provider.api_level,
                "capabilities": dict(provider.capabilities),
                "selected": getattr(choice, provider.kind, None) == provider.name,
            }
            for provider in record.providers
        ],
    }


def _show(records: list[dict[str, Any]], output: Output) -> None:
    rows = [
        [
            record["name"],
            ", ".join(f"{p['kind']} {p['name']}{'*' if p['selected'] else ''}" for p in record["providers"]),
            record["distribution"],
            record["version"],
            "" if record["api_level"] is None else str(record["api_level"]),
            record["state"],
            record["reason"],
        ]
        for record in records
    ]
    output.table("", ["plug-in", "provides", "distribution", "version", "API", "state", "reason"], rows)
    output.note("* is selected")
