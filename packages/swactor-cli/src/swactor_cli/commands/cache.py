"""`swactor-cli cache`: what was fetched to this machine or made on it, what it takes, and how it goes again.

Models come first: they cost a fetch. What else plug-ins keep (`spi/storage.py`) costs less or nothing.
"""

from __future__ import annotations

import re
import time
from typing import Any

from swactor_core.config import PluginChoice, choose_plugins
from swactor_core.errors import UsageError
from swactor_core.plugins import Plugins, load_plugins
from swactor_core.spi.loader import CachedModel, ModelCache
from swactor_core.spi.provider import Kind
from swactor_core.spi.storage import Storage, Stored, StoredKind
from swactor_core.values import frozen

from swactor_cli.errors import ExitCode
from swactor_cli.output import Output
from swactor_cli.sizes import bytes_text

_SAID = {StoredKind.TEMPORARY: "temporary files", StoredKind.KERNELS: "compiled kernels"}
_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@frozen
class ClearOptions:
    """The command's options, as given. `kinds` are meant beside the named models; where neither is given, all
    is meant that is old enough."""

    models: tuple[str, ...]
    kinds: frozenset[StoredKind]
    older_than: str | None
    everything: bool
    dry_run: bool
    plugins: dict[str, str | None]

    @property
    def narrow(self) -> bool:
        """Whether models or kinds are named."""
        return bool(self.models or self.kinds)


def list_cache(plugins: dict[str, str | None], output: Output) -> ExitCode:
    """Raises UsageError for a loader that keeps nothing."""
    found, chosen = _found(plugins)
    cache, now = _cache(found, chosen), time.time()
    models = cache.models()
    others = [stored for storage in _storages(found, chosen) for stored in storage.stored()]
    if output.json_lines:
        for model in models:
            output.record(_record("model", model))
        for stored in others:
            output.record(_stored_record(str(stored.kind), stored))
        return ExitCode.COMPLETED
    output.text(f"{cache.folder}: {_sum(models)}\n")
    if models:
        output.table(
            "models",
            ["key", "file", "on disk", "of", "last used", "now", "from"],
            [
                [
                    model.key,
                    model.name,
                    bytes_text(model.nbytes),
                    bytes_text(model.file_bytes),
                    _ago(now - model.used),
                    "in use" if model.in_use else "",
                    ", ".join(source.address for source in model.sources),
                ]
                for model in models
            ],
        )
    if others:
        output.table(
            "besides models",
            ["what", "on disk", "last used", "now", "where"],
            [
                [
                    _SAID[stored.kind],
                    bytes_text(stored.nbytes),
                    _ago(now - stored.used),
                    stored.user and "in use",
                    stored.path,
                ]
                for stored in others
            ],
        )
    return ExitCode.COMPLETED


def clear_cache(options: ClearOptions, output: Output) -> ExitCode:
    """Removes what is meant and not in use. Exit 1 when something that is meant stays. Raises UsageError for
    nothing meant, for a name that no model has, and for an age that is none."""
    least = _least_age(options)
    found, chosen = _found(options.plugins)
    cache, now = _cache(found, chosen), time.time()
    meant = [model for model in _meant(options, cache) if now - model.used >= least]
    removed, kept = _clear_models(meant, cache, options, output)
    sums = [_sum(removed)] if removed or options.models or not options.narrow else []
    whole = not kept
    for kind in StoredKind:
        if kind in options.kinds or not options.narrow:
            nbytes, all_gone = _clear_others(kind, least, _storages(found, chosen), options, output)
            whole = whole and all_gone
            sums += [f"{_SAID[kind]}, {bytes_text(nbytes)}"] if nbytes else []
    if not output.json_lines:
        said = "; ".join(sums) or "nothing"
        output.text(f"{'would remove' if options.dry_run else 'removed'} {said}\n")
    return ExitCode.COMPLETED if whole else ExitCode.FAULTED


def _least_age(options: ClearOptions) -> float:
    """Seconds since their last use of what is meant. Raises UsageError where nothing is meant, or two things
    at once."""
    if not (options.narrow or options.older_than or options.everything):
        raise UsageError(
            "nothing says what to remove",
            hint="name models, or give --older-than 30d, --temporary, --kernels or --all",
        )
    if options.everything and (options.narrow or options.older_than):
        raise UsageError("--all was given beside a narrower choice", hint="leave one of them out")
    return _age(options.older_than) if options.older_than else 0.0


def _meant(options: ClearOptions, cache: ModelCache) -> list[CachedModel]:
    """The models that are named, or all where nothing narrower is. Raises UsageError for a name that none
    has."""
    models = cache.models()
    for name in options.models:
        if not any(name in (model.key, model.name) for model in models):
            raise UsageError(
                f"the cache {cache.folder} has no model {name!r}", hint="see `swactor-cli cache list`"
            )
    named = frozenset(options.models)
    return [model for model in models if not options.narrow or named & {model.key, model.name}]


def _clear_models(
    meant: list[CachedModel], cache: ModelCache, options: ClearOptions, output: Output
) -> tuple[list[CachedModel], list[CachedModel]]:
    """Those that are gone or would go, and those that stay."""
    removed: list[CachedModel] = []
    kept: list[CachedModel] = []
    for model in meant:
        gone = not model.in_use if options.dry_run else cache.remove(model)
        (removed if gone else kept).append(model)
        if output.json_lines:
            output.record(_record("removed" if gone else "kept", model))
        elif not gone:
            output.warning(f"{model.name} ({model.key}) is in use and stays")
    return removed, kept


def _clear_others(
    kind: StoredKind, least: float, storages: list[Storage], options: ClearOptions, output: Output
) -> tuple[int, bool]:
    """Bytes of that kind that are gone or would go, and whether nothing that is meant stays."""
    removed, all_gone, now = 0, True, time.time()
    for storage in storages:
        for stored in storage.stored():
            if stored.kind is not kind or now - stored.used < least:
                continue
            gone = not stored.user if options.dry_run else storage.remove(stored)
            removed += stored.nbytes if gone else 0
            all_gone = all_gone and gone
            if output.json_lines:
                output.record(_stored_record("removed" if gone else "kept", stored))
            elif not gone:
                why = stored.user or "somebody has just begun to use it"
                output.warning(f"{_SAID[kind]} in {stored.path}: {why}, and so it stays")
    return removed, all_gone


def _found(names: dict[str, str | None]) -> tuple[Plugins, PluginChoice]:
    choice = choose_plugins(PluginChoice(), names)
    return load_plugins(blocked=choice.blocked), choice


def _cache(plugins: Plugins, choice: PluginChoice) -> ModelCache:
    provider = plugins.select(Kind.LOADER, choice.loader)
    if provider.cache is None:
        raise UsageError(f"the loader {choice.loader!r} keeps no models", hint="there is nothing to clear")
    return provider.cache()


def _storages(plugins: Plugins, choice: PluginChoice) -> list[Storage]:
    """Of the chosen loader and of all workers: who made it need not be who is chosen now."""
    providers = [plugins.select(Kind.LOADER, choice.loader), *plugins.providers(Kind.WORKER)]
    return [provider.storage() for provider in providers if provider.storage is not None]


def _stored_record(kind: str, stored: Stored) -> dict[str, Any]:
    return {
        "type": kind,
        "what": str(stored.kind),
        "path": stored.path,
        "disk_bytes": stored.nbytes,
        "used": round(stored.used, 3),
        "in_use": bool(stored.user),
    }


def _record(kind: str, model: CachedModel) -> dict[str, Any]:
    return {
        "type": kind,
        "what": "model",
        "key": model.key,
        "name": model.name,
        "path": model.path,
        "disk_bytes": model.nbytes,
        "file_bytes": model.file_bytes,
        "used": round(model.used, 3),
        "in_use": model.in_use,
        "sources": [{"address": source.address, "asked": round(source.asked, 3)} for source in model.sources],
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
