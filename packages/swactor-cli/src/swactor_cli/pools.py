"""The pool that a run is asked to be on: nodes of this machine, or those of a cluster file; and their parts.

Knows what speaks against it before a model is opened or anything started. Must not know the prompt, nor what
becomes of the run.
"""

from __future__ import annotations

from typing import Any

from swactor_core.config import ClusterFile, PluginChoice, choose_plugins, load_cluster_file
from swactor_core.hosting import (
    local_names,
    nodes_in_process,
    refuse_separate_processes,
    refuse_this_machine,
    refuse_wrong_settings,
    uses_udp,
    worker_in_process,
)
from swactor_core.plugins import Plugins, load_plugins
from swactor_core.spi.provider import Kind
from swactor_core.values import frozen

from swactor_cli.sizes import parse_bytes
from swactor_cli.worker_options import worker_settings


@frozen
class ChosenPool:
    """`file` is None for local nodes. `names` are of the nodes in the order of their stages; of local ones
    `worker` are the worker plug-in's settings, and `memory_bytes` is what each declares, None for nothing."""

    file: ClusterFile | None
    choice: PluginChoice
    plugins: Plugins
    names: tuple[str, ...]
    worker: dict[str, Any]
    memory_bytes: int | None

    @property
    def local(self) -> bool:
        return self.file is None

    @property
    def starts_processes(self) -> bool:
        """Whether its nodes are children of this process."""
        return self.local and not nodes_in_process(self.plugins, self.choice)

    @property
    def uses_udp(self) -> bool:
        return uses_udp(self.plugins, self.choice)

    def refuse_this_machine(self) -> None:
        """Raises ResourceError for what local workers would miss here."""
        if self.local:
            refuse_this_machine(self.plugins, self.choice, self.worker)


def choose_pool(
    cluster: str | None,
    parts: dict[str, str | None],
    *,
    nodes: int | None,
    memory: str | None,
    device: str | None,
    worker_options: tuple[str, ...],
) -> ChosenPool:
    """What the options and the file `cluster` say; `parts` are plug-ins by kind. Raises ConfigError,
    UsageError or PluginError for what no pool can be made of."""
    memory_bytes = None if memory is None else parse_bytes(memory, option="--memory")
    file = load_cluster_file(cluster) if cluster is not None else None
    choice = choose_plugins(file.plugins if file is not None else PluginChoice(), parts)
    plugins = load_plugins(blocked=choice.blocked)
    for kind in (Kind.ARENA, Kind.TRANSPORT, Kind.MEMBERSHIP, Kind.WORKER):
        plugins.select(kind, getattr(choice, kind))
    worker = worker_settings(device, worker_options)
    if file is None:
        worker_in_process(plugins, choice)
        refuse_wrong_settings(plugins, choice, worker)
        names = local_names(2 if nodes is None else nodes)
    else:
        refuse_separate_processes(plugins, choice)
        names = tuple(node.name for node in file.cluster.nodes)
    return ChosenPool(file, choice, plugins, names, worker, memory_bytes)
