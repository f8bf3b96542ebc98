"""`swactor-cli node`: one node of a cluster file, until it is told to stop.

Knows how options, cluster file and key become one node's settings. Must not know what a node is made of.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from swactor_core.config import ClusterFile, NodeSettings, choose_plugins, load_cluster_file, validated
from swactor_core.errors import UsageError, did_you_mean
from swactor_core.events import EventName
from swactor_core.hosting import refuse_separate_processes, refuse_wrong_settings
from swactor_core.node.addresses import advertised_host
from swactor_core.node.identity import key_in_use, load_or_create_seed
from swactor_core.node.node import Node
from swactor_core.node.serve import serve
from swactor_core.plugins import load_plugins
from swactor_core.unwaited import EventLoop
from swactor_core.values import frozen

from swactor_cli.errors import ExitCode
from swactor_cli.interrupts import STOP_SIGNALS, over
from swactor_cli.keys import node_key_file, public_key_of
from swactor_cli.output import Output, pending, wait_for_nobody
from swactor_cli.sizes import parse_bytes
from swactor_cli.worker_options import worker_settings


@frozen
class NodeOptions:
    """The command's options, as given; None leaves the cluster file's word."""

    cluster: str
    name: str
    bind: str | None
    port: int | None
    membership_port: int | None
    advertise: str | None
    memory: str | None
    device: str | None
    worker_options: tuple[str, ...]
    key_file: str | None
    plugins: dict[str, str | None]


def run_node(options: NodeOptions, output: Output) -> ExitCode:
    """Serves until a signal stops it in order (exit 0) or a fault ends it (exit 1, one typed line).

    Raises UsageError when the cluster file does not name this node with this key.
    """
    file = load_cluster_file(options.cluster)
    entry = next((node for node in file.cluster.nodes if node.name == options.name), None)
    key_file = Path(options.key_file) if options.key_file else node_key_file(options.name)
    seed = load_or_create_seed(key_file)
    choice = choose_plugins(file.plugins, options.plugins)
    plugins = load_plugins(blocked=choice.blocked)
    refuse_separate_processes(plugins, choice)
    public_key = public_key_of(seed, plugins, choice)
    if entry is None:
        names = [node.name for node in file.cluster.nodes]
        raise UsageError(
            f"cluster file {options.cluster!r} has no node {options.name!r}",
            hint=f"{did_you_mean(options.name, names)}its nodes: {', '.join(names) or 'none'}; "
            f'or add these lines:\n[[cluster.nodes]]\nname = "{options.name}"\npublic_key = "{public_key}"',
        )
    if entry.public_key != public_key:
        raise UsageError(
            f"the key of node {options.name!r} in {str(key_file)!r} is not the one in cluster file "
            f"{options.cluster!r}",
            hint=f'its line there must be:\npublic_key = "{public_key}"',
        )
    memory = parse_bytes(options.memory, option="--memory") if options.memory else entry.memory_bytes
    settings = node_settings(
        file,
        {
            "name": options.name,
            "key": seed.hex(),
            "plugins": choice.model_dump(),
            "bind_host": options.bind,
            "bind_port": options.port,
            "membership_port": options.membership_port,
            "advertise_host": options.advertise,
            "memory_bytes": memory,
        },
        worker=worker_settings(options.device, options.worker_options),
    )
    refuse_wrong_settings(plugins, choice, settings.worker)
    output.note(f"node {options.name}, public key {public_key}")
    with key_in_use(key_file), asyncio.Runner(loop_factory=EventLoop) as runner:
        wait_for_nobody()
        try:
            fault = runner.run(
                serve(settings, plugins, stop_on=STOP_SIGNALS, on_built=lambda node: _tell(node, output))
            )
        finally:
            over(runner.get_loop(), pending)
    if fault is not None:
        output.error(fault.line(), fault.remedy)
        return ExitCode.FAULTED
    output.note(f"node {options.name} has stopped")
    return ExitCode.COMPLETED


def node_settings(file: ClusterFile, given: dict[str, Any], *, worker: dict[str, Any]) -> NodeSettings:
    """The `[node]` table, and its `worker` table, with what was given over it. Raises ConfigError."""
    merged = file.node.model_dump() | {key: value for key, value in given.items() if value is not None}
    merged["worker"] = {**merged["worker"], **worker}
    host = advertised_host(merged["bind_host"], merged["advertise_host"], file.cluster.seeds)
    merged |= {"cluster": file.cluster.model_dump(), "advertise_host": host}
    return validated(NodeSettings, merged, origin="node settings")


def _tell(node: Node, output: Output) -> None:
    """The node's own events as JSON lines on stdout, or its milestones as talk."""

    def sink(event: dict[str, Any]) -> None:
        if output.json_lines:
            output.record({"type": "event", **event})
        elif event["event"] == EventName.NODE_AVAILABLE:
            output.note(f"available: {_where(node)}")
        elif event["event"] in _MILESTONES:
            facts = [f"{key} {event[key]}" for key in ("run_id", "stage_index", "reason") if key in event]
            output.note(f"{event['event'].replace('_', ' ')}: {', '.join(facts)}")

    node.bus.add_sink(sink)


_MILESTONES = frozenset(
    {
        EventName.NODE_FAULTED,
        EventName.STAGE_PROVISION_STARTED,
        EventName.STAGE_READY,
        EventName.STAGE_FAULTED,
        EventName.STAGE_STOPPED,
        EventName.PROVISIONING_REFUSED,
        EventName.EDGE_REFUSED,
    }
)


def _where(node: Node) -> str:
    parts = []
    if node.transport is not None:
        parts.append(f"data {node.settings.advertise_host or node.transport.host}:{node.transport.port}")
    if node.membership is not None:
        host, port = node.membership.address
        parts.append(f"membership {host}:{port}")
    return ", ".join(parts)
