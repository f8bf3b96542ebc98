"""`swactor-cli cache`: which models were fetched to this machine, what they take, and how they go again."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from swactor_core.config import PluginChoice, choose_plugins
from swactor_core.errors import UsageError
from swactor_core.plugins import load_plugins
from swactor_core.spi.loader import CachedModel, ModelCache
from swactor_core.spi.provider import Kind

from swactor_cli.errors import ExitCode
from swactor_cli.output import Output
from swactor_cli.sizes import bytes_text

_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True)
class ClearOptions:
    """The command's options, as given. Without a model, and without an age, all are meant."""

    models: tuple[str, ...]
    older_than: str | None
    everything: bool
    dry_run: bool
    plugins: dict[str, str | None]


def list_cache(plugins: dict[str, str | None], output: Output) -> ExitCode:
    """Raises UsageError for a loader that keeps nothing."""
    cache, now = _cache(plugins), time.time()
    models = cache.models()
    if output.json_lines:
        for model in models:
            output.record(_record("model", model))
        return ExitCode.COMPLETED
    output.text(f"{cache.folder}: {_sum(models)}\n")
    if models:
        output.table(
            "models",
            ["key", "file", "on disk", "of", "last used", "now"],
            [
                [
                    model.key,
                    model.name,
                    bytes_text(model.nbytes),
                    bytes_text(model.file_bytes),
                    _ago(now - model.used),
                    "in use" if model.in_use else "",
                ]
                for model in models
            ],
        )
    return ExitCode.COMPLETED


def clear_cache(options: ClearOptions, output: Output) -> ExitCode:
    """Removes what is meant and not in use. Exit 1 when something that is meant stays. Raises UsageError for
    nothing meant, for a name that no model has, and for an age that is none."""
    if not (options.models or options.older_than or options.everything):
        raise UsageError(
            "nothing says what to remove", hint="name models, or give --older-than 30d, or --all"
        )
    if options.everything and (options.models or options.older_than):
        raise UsageError("--all was given beside a narrower choice", hint="leave one of them out")
    least = _age(options.older_than) if options.older_than else 0.0
    cache, now = _cache(options.plugins), time.time()
    models = cache.models()
    for name in options.models:
        if not any(name in (model.key, model.name) for model in models):
            raise UsageError(
                f"the cache {cache.folder} has no model {name!r}", hint="see `swactor-cli cache list`"
            )
    meant = [
        model
        for model in models
        if (not options.models or model.key in options.models or model.name in options.models)
        and now - model.used >= least
    ]
    removed: list[CachedModel] = []
    kept: list[CachedModel] = []
    for model in meant:
        gone = not model.in_use if options.dry_run else cache.remove(model)
        (removed if gone else kept).append(model)
        if output.json_lines:
            output.record(_record("removed" if gone else "kept", model))
        elif not gone:
            output.warning(f"{model.name} ({model.key}) is in use and stays")
    if not output.json_lines:
        output.text(f"{'would remove' if options.dry_run else 'removed'} {_sum(removed)}\n")
    return ExitCode.FAULTED if kept else ExitCode.COMPLETED


def _cache(plugins: dict[str, str | None]) -> ModelCache:
    choice = choose_plugins(PluginChoice(), plugins)
    provider = load_plugins(blocked=choice.blocked).select(Kind.LOADER, choice.loader)
    if provider.cache is None:
        raise UsageError(f"the loader {choice.loader!r} keeps no models", hint="there is nothing to clear")
    return provider.cache()


def _record(kind: str, model: CachedModel) -> dict[str, Any]:
    return {
        "type": kind,
        "key": model.key,
        "name": model.name,
        "path": model.path,
        "disk_bytes": model.nbytes,
        "file_bytes": model.file_bytes,
        "used": round(model.used, 3),
        "in_use": model.in_use,
    }


def _sum(models: list[CachedModel]) -> str:
    plural = "" if len(models) == 1 else "s"
    return f"{len(models)} model{plural}, {bytes_text(sum(model.nbytes for model in models))}"


def _age(text: str) -> float:
    """`30d`, `12h`, `90m` or `2w` in seconds. Raises UsageError."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([mhdw])", text.strip())
    if match is None:
        raise UsageError(f"--older-than {text!r} is no age", hint="write it like 30d, 12h or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def _ago(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{int(seconds / _SECONDS[unit])} {unit} ago"
    return "just now"
