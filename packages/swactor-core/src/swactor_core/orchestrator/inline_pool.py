"""A local pool inside this process: for transports and memberships that do not leave it.

The same nodes as `python -m swactor_core.node` runs, on this event loop and with the same settings; a node's
end is evidence for the run as a process's end is. Knows nodes, no run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swactor_core.config import NodeSettings
from swactor_core.ids import NodeId
from swactor_core.node.node import Node
from swactor_core.plugins import Plugins

log = logging.getLogger(__name__)

STOP_BOUND = 15.0
KILL_BOUND = 7.0


class InProcessPool:
    """Before `stop`, `on_report(node_id, message)` gets a faulted node's last words, then `on_exit(node_id,
    detail)` hears of its end."""

    def __init__(
        self,
        plugins: Plugins,
        on_report: Callable[[NodeId, object], None],
        on_exit: Callable[[NodeId, str], None],
    ) -> None:
        self._plugins = plugins
        self._on_report = on_report
        self._on_exit = on_exit
        self._lives: list[asyncio.Task[None]] = []
        self._stopping = False
        self.nodes: list[Node] = []

    async def start(self, settings: NodeSettings, node_id: NodeId) -> None:
        """Starts one node. Raises PluginError, ConfigError or UsageError for what no node can be built of."""
        node = Node(settings, self._plugins)
        self.nodes.append(node)
        self._lives.append(asyncio.ensure_future(self._live(node, node_id)))

    async def _live(self, node: Node, node_id: NodeId) -> None:
        try:
            fault = await node.run()
        except Exception as error:  # a node's defect ends that node, as it would end its process
            log.exception("node %s failed", node.settings.name)
            words: tuple[object, ...] = ()
            what = f"{type(error).__name__}: {error}"
        else:
            words = () if fault is None else node.last_words(fault)
            what = "it ended" if fault is None else fault.line()
        if not self._stopping:
            for message in words:
                self._on_report(node_id, message)
            self._on_exit(node_id, f"{node.settings.name}: {what}")

    async def stop(self) -> None:
        """Stops the nodes in order, within bounds; cancels what does not end."""
        self._stopping = True
        for node in self.nodes:
            node.stop()
        if self._lives:
            await asyncio.wait(self._lives, timeout=STOP_BOUND)
        left = [life for life in self._lives if not life.done()]
        self.kill()
        if left:
            await asyncio.wait(left, timeout=KILL_BOUND)

    def kill(self) -> None:
        """Ends every node without its ordered stop; their workers end with them."""
        for life in self._lives:
            life.cancel()

    @property
    def pids(self) -> tuple[int, ...]:
        """There is no process but this one."""
        return ()
