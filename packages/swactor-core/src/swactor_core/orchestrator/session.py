"""Sessions: everything one run needs, up and down again in the right order.

`LocalSession` is a pool of managed nodes on this machine (in this process, where the plug-ins do not leave
it), `ClusterSession` joins nodes that run elsewhere; both give `run()`. The public way to run a pipeline from
Python; the command line and the benchmarks use it.
"""

from __future__ import annotations

import secrets
from types import TracebackType
from typing import Any, Self

from swactor_core.config import ClusterConfig, ClusterFile, NodeSettings, PluginChoice
from swactor_core.errors import UsageError
from swactor_core.hosting import local_names, nodes_in_process, refuse_separate_processes, worker_in_process
from swactor_core.ids import NodeId, node_hex, node_id_of
from swactor_core.node.addresses import advertised_host
from swactor_core.observe.bus import Sink
from swactor_core.orchestrator.endpoint import LogitsSink
from swactor_core.orchestrator.inline_pool import InProcessPool
from swactor_core.orchestrator.local_pool import LocalPool, NodesAhead, new_cluster
from swactor_core.orchestrator.orchestrator import (
    Orchestrator,
    PoolBounds,
    RunListener,
    RunRequest,
    RunResult,
)
from swactor_core.plugins import Plugins
from swactor_core.spi.provider import Kind

# All nodes are this session's own processes: a short look suffices to see that the view is stable.
LOCAL_POOL = PoolBounds(convergence_window=0.05)
# A local node's death is known from its process at once; membership and transport need not be quick to accuse
# a process that kernel compilers on the same cores keep from running. Their probes are all that a waiting run
# does: at this pace all its processes together stay below a hundredth of a core.
LOCAL_SWIM = {"profile": "local", "probe_interval": 2.0, "suspicion_min": 2.0, "suspicion_max": 3.0}
# Ctrl-Z stops all processes of a local run together: it must go on when it is continued.
LOCAL_QUIC = {"idle_timeout": 600.0, "probe_interval": 4.0}


class _Session:
    """What both kinds share: an orchestrator, candidates, sinks, and an orderly end."""

    orchestrator: Orchestrator

    def __init__(self, sinks: tuple[Sink, ...]) -> None:
        self._sinks = sinks
        self._candidates: tuple[NodeId, ...] = ()
        self._pool = PoolBounds()

    def _connect_sinks(self) -> None:
        """Events end with `run_torn_down`: what the processes say of their own end is not the run's."""
        self.orchestrator.on_finished = self.orchestrator.bus.drop_sinks
        for sink in self._sinks:
            self.orchestrator.bus.add_sink(sink)

    async def run(
        self, request: RunRequest, *, listener: RunListener | None = None, on_logits: LogitsSink | None = None
    ) -> RunResult:
        """One run to its outcome. A session serves one run."""
        return await self.orchestrator.run(
            request,
            self._candidates,
            pool=self._pool,
            listener=listener or RunListener(),
            on_logits=on_logits,
        )

    def stop_run(self) -> None:
        self.orchestrator.stop_run()


class LocalSession(_Session):
    """`async with LocalSession(plugins, choice, nodes=2) as session: await session.run(request)`."""

    def __init__(
        self,
        plugins: Plugins,
        choice: PluginChoice,
        *,
        nodes: int,
        worker: dict[str, Any] | None = None,
        arena_ceiling: int = 1 << 30,
        memory_bytes: int | None = None,
        objects: bool = False,
        sinks: tuple[Sink, ...] = (),
        ahead: NodesAhead | None = None,
    ) -> None:
        """`ahead` may hold node processes that were started before; closing it is the caller's."""
        super().__init__(sinks)
        self._pool = LOCAL_POOL
        if nodes < 1:
            raise UsageError(f"{nodes} nodes", hint="a pipeline needs at least one")
        self._plugins = plugins
        self._choice = choice
        self._nodes = nodes
        self._worker = worker or {}
        self._arena_ceiling = arena_ceiling
        self._memory_bytes = memory_bytes
        self._objects = objects
        worker_in_process(plugins, choice)  # a combination that cannot be is refused before anything starts
        self.pool: LocalPool | InProcessPool = (
            InProcessPool(plugins, self._child_said, self._child_ended)
            if nodes_in_process(plugins, choice)
            else LocalPool(self._child_said, self._child_ended, ahead=ahead)
        )

    def _child_said(self, node_id: NodeId, message: object) -> None:
        self.orchestrator.node_said(node_id, message)

    def _child_ended(self, node_id: NodeId, detail: str) -> None:
        self.orchestrator.node_lost(node_id, detail)

    async def __aenter__(self) -> Self:
        seed = secrets.token_bytes(32)
        public_key_of = self._plugins.select(Kind.TRANSPORT, self._choice.transport).make().public_key
        cluster = new_cluster(public_key_of(seed))
        self.orchestrator = Orchestrator(
            self._plugins,
            self._choice,
            cluster=cluster,
            seed=seed,
            name="orchestrator",
            membership_settings=self._membership_settings(),
            transport_settings=self._transport_settings(),
            objects=self._objects,
        )
        self._connect_sinks()
        try:
            await self.orchestrator.start()
            host, port = self.orchestrator.membership_address
            cluster = cluster.model_copy(update={"seeds": (f"{host}:{port}",)})
            candidates = []
            for name in local_names(self._nodes):
                key = secrets.token_bytes(32)
                candidates.append(node_id_of(public_key_of(key)))
                self.orchestrator.names[candidates[-1]] = name
                await self.pool.start(self._settings(name, key, cluster), candidates[-1])
            self._candidates = tuple(candidates)
        except BaseException:
            await self._end()
            raise
        return self

    def _membership_settings(self) -> dict[str, Any]:
        return dict(LOCAL_SWIM) if self._choice.membership == "swim" else {}

    def _transport_settings(self) -> dict[str, Any]:
        return dict(LOCAL_QUIC) if self._choice.transport == "quic" else {}

    def _settings(self, name: str, key: bytes, cluster: ClusterConfig) -> NodeSettings:
        return NodeSettings(
            name=name,
            cluster=cluster,
            key=key.hex(),
            plugins=self._choice,
            arena_ceiling=self._arena_ceiling,
            memory_bytes=self._memory_bytes,
            worker=self._worker,
            membership=self._membership_settings(),
            transport=self._transport_settings(),
            managed=True,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        self.orchestrator.shutdown_nodes()
        if isinstance(self.pool, LocalPool):
            self.pool.kill(self.orchestrator.dead_nodes())  # who does not hear would be waited for in vain
        try:
            await self.pool.stop()
        finally:
            await self.orchestrator.close()


class ClusterSession(_Session):
    """Joins the cluster of a file as an authorised orchestrator; the nodes stay up afterwards."""

    def __init__(
        self,
        plugins: Plugins,
        file: ClusterFile,
        choice: PluginChoice,
        *,
        seed: bytes,
        nodes: tuple[str, ...] = (),
        pool_deadline: float = 60.0,
        objects: bool = False,
        sinks: tuple[Sink, ...] = (),
        epoch: int | None = None,
    ) -> None:
        """`nodes` are names of the file, all of it when empty. `pool_deadline` in seconds, for all of them to
        be there and free. `epoch` is later than that of any session with this seed before."""
        super().__init__(sinks)
        refuse_separate_processes(plugins, choice)
        known = {node.name: node for node in file.cluster.nodes}
        unknown = [name for name in nodes if name not in known]
        if unknown:
            raise UsageError(
                f"node {unknown[0]!r} is not in the cluster file", hint=f"it has {', '.join(known)}"
            )
        chosen = [known[name] for name in nodes] or list(known.values())
        if not chosen:
            raise UsageError(
                "the cluster file names no nodes", hint="add [[cluster.nodes]] with name and public_key"
            )
        self._candidates = tuple(node_id_of(bytes.fromhex(node.public_key)) for node in chosen)
        self._pool = PoolBounds(convergence_window=1.0, deadline=pool_deadline, wait_for_lost=True)
        key: bytes = plugins.select(Kind.TRANSPORT, choice.transport).make().public_key(seed)
        if key.hex() not in file.cluster.orchestrators:
            raise UsageError(
                f"this machine's key {key.hex()} is not an authorised orchestrator of the cluster",
                hint="add it to orchestrators in the cluster file, on every machine",
            )
        table = file.orchestrator
        self.orchestrator = Orchestrator(
            plugins,
            choice,
            cluster=file.cluster,
            seed=seed,
            name=f"orchestrator-{node_hex(node_id_of(key))[:8]}",  # two of them may be there at once
            bind_host=table.bind_host,
            bind_port=table.bind_port,
            advertise_host=advertised_host(table.bind_host, table.advertise_host, file.cluster.seeds),
            membership_port=table.membership_port,
            membership_settings=table.membership,
            transport_settings=table.transport,
            objects=objects,
            epoch=epoch,
        )
        self._connect_sinks()

    async def __aenter__(self) -> Self:
        try:
            await self.orchestrator.start()
        except BaseException:
            await self.orchestrator.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.orchestrator.close()
