"""Where the nodes and workers of a plug-in choice can live, decided from capabilities and never from names.

A part whose `crosses_processes` is False binds what uses it together to one process: transport and membership
bind the nodes to the orchestrator's, an arena binds a worker to its node's. Also whether the worker would
take a model at all, and what it would hold of it. Knows providers, starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from swactor_core.config import PluginChoice
from swactor_core.errors import ConfigError, ModelError, UsageError
from swactor_core.plugins import Plugins
from swactor_core.spi.loader import StageManifest
from swactor_core.spi.provider import Kind, Provider, WorkerMemory
from swactor_core.spi.worker import RoleError

#: from the facts of a node's worker to what it takes of a run's model
WorkersSay = Callable[[Mapping[str, Any]], WorkerMemory | None]

_TIES_NODES = (Kind.TRANSPORT, Kind.MEMBERSHIP)


def local_names(nodes: int) -> tuple[str, ...]:
    """What the nodes of a local pool are called, in stage order."""
    return tuple(f"node-{index}" for index in range(nodes))


def nodes_in_process(plugins: Plugins, choice: PluginChoice) -> bool:
    """Whether the nodes of a local pool must be hosted by the orchestrator's own process.

    Raises PluginError for a part that is not there.
    """
    return any(not provider.crosses_processes for provider in _tying(plugins, choice))


def worker_in_process(plugins: Plugins, choice: PluginChoice) -> bool:
    """Whether a node must host its worker itself. Raises PluginError for a part that is not there, and
    UsageError when the arena asks for it and the worker plug-in cannot."""
    arena = plugins.select(Kind.ARENA, choice.arena)
    worker = plugins.select(Kind.WORKER, choice.worker)
    if arena.crosses_processes:
        return False
    if not worker.capabilities.get("in_process", False):
        raise UsageError(
            f"the arena {arena.name!r} does not leave the node's process, and the worker {worker.name!r} "
            "runs only in a process of its own",
            hint=f"take another arena, such as memfd, or a worker that runs in the node's process: "
            f"{_names(plugins, 'in_process')}",
        )
    return True


def uses_udp(plugins: Plugins, choice: PluginChoice) -> bool:
    """Whether nodes of this choice need datagrams to meet: the chosen transport or membership says `udp`."""
    kinds = ((Kind.TRANSPORT, choice.transport), (Kind.MEMBERSHIP, choice.membership))
    return any(plugins.select(kind, name).capabilities.get("udp", False) for kind, name in kinds)


def refuse_separate_processes(plugins: Plugins, choice: PluginChoice) -> None:
    """Raises UsageError when nodes in processes of their own cannot meet over this choice."""
    for provider in _tying(plugins, choice):
        if not provider.crosses_processes:
            raise UsageError(
                f"the {provider.kind} {provider.name!r} does not leave its process, and the nodes of a "
                "cluster are other processes",
                hint=f"take another {provider.kind}, or run on a local pool, without --cluster",
            )


def refuse_unfit_model(
    plugins: Plugins, choice: PluginChoice, manifest: StageManifest, *, positions: int
) -> None:
    """Raises ModelError when the chosen worker says of the whole model that no stage of it would be computed,
    in a run of `positions`. Nothing is started for that; a worker that cannot tell beforehand is believed."""
    check = plugins.select(Kind.WORKER, choice.worker).check_model
    if check is None:
        return
    try:
        check(manifest, positions)
    except RoleError as error:
        raise ModelError(error.message, hint=error.hint) from error


def refuse_wrong_settings(plugins: Plugins, choice: PluginChoice, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings that the chosen worker would refuse on any machine."""
    check = plugins.select(Kind.WORKER, choice.worker).check_settings
    if check is not None:
        check(settings)


def refuse_this_machine(plugins: Plugins, choice: PluginChoice, settings: Mapping[str, Any]) -> None:
    """Raises ResourceError for what the chosen worker would miss on this machine: a model that is not here
    need not be fetched for it."""
    check = plugins.select(Kind.WORKER, choice.worker).check_machine
    if check is not None:
        check(settings)


def memory_of_workers(
    plugins: Plugins, choice: PluginChoice, manifest: StageManifest, *, positions: int, prefill_chunk: int
) -> WorkersSay:
    """What the chosen worker takes of the whole model's stages in such a run, by the facts of a node whose
    worker it is: they hold the settings that it has. None where nobody knows: another worker, a model that
    this one refuses, or one that says nothing."""
    worker = plugins.select(Kind.WORKER, choice.worker)

    def say(facts: Mapping[str, Any]) -> WorkerMemory | None:
        settings = facts.get("settings")
        if worker.memory is None or facts.get("worker") != worker.name or not isinstance(settings, dict):
            return None
        try:
            return worker.memory(manifest, positions, prefill_chunk=prefill_chunk, settings=settings)
        except (ConfigError, RoleError):
            return None  # the node's worker refuses it in its own words

    return say


def _tying(plugins: Plugins, choice: PluginChoice) -> list[Provider]:
    return [plugins.select(kind, getattr(choice, kind)) for kind in _TIES_NODES]


def _names(plugins: Plugins, capability: str) -> str:
    able = [p.name for p in plugins.providers(Kind.WORKER) if p.capabilities.get(capability, False)]
    return ", ".join(able) or "none is installed"
