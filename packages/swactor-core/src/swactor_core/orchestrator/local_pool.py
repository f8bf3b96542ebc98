"""A local pool: managed node processes on loopback, owned by this process and gone with it.

Each node is the same `python -m swactor_core.node` that a container would run, with its settings, its key
included, sent over its standard input: nothing is written to disk, and nothing is left when anyone is killed.
Every child is watched; its end is evidence for the run within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Container
from dataclasses import dataclass, field

from swactor_core.codec import MAX_LINE, CodecError
from swactor_core.config import ClusterConfig, NodeSettings
from swactor_core.errors import ResourceError, remedy_of_lack
from swactor_core.ids import NodeId
from swactor_core.node.control import CONTROL
from swactor_core.node.process import born_deaf
from swactor_core.node.process_end import close_pipes, exited
from swactor_core.node.worker_process import exit_text

log = logging.getLogger(__name__)

STOP_BOUND = 15.0
KILL_BOUND = 3.0
STDERR_LINES = 60
LAST_WORDS = 4  # lines that are kept: a node has at most two


@dataclass(slots=True)
class _Child:
    name: str
    node_id: NodeId
    process: asyncio.subprocess.Process
    talk: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_LINES))
    words: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_WORDS))


async def _spawn() -> asyncio.subprocess.Process:
    """A node process that waits for its settings. Raises OSError."""
    with born_deaf():
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "swactor_core.node",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "SWACTOR_PARENT": str(os.getpid())},
            limit=MAX_LINE,
        )


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[bytes]:
    """What a child writes, until it closes that; a line over the stream's limit is left out."""
    assert stream is not None
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        yield line


async def _await_ends(processes: list[asyncio.subprocess.Process], seconds: float) -> None:
    """Until all have ended, at most `seconds`."""
    waits = [asyncio.ensure_future(exited(process)) for process in processes]
    try:
        if waits:
            await asyncio.wait(waits, timeout=seconds)
    finally:
        for wait in waits:
            wait.cancel()


class NodesAhead:
    """Node processes of a pool to come, started before anybody knows what they are to do: they import what
    they need while the caller opens the model. A pool takes them; `close` ends those that none took."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.subprocess.Process] = []

    async def start(self, nodes: int) -> None:
        """As many as the pool will have nodes, but no more than there are cores: more would keep the caller
        from its own work. One that cannot be started is left to the pool to try, and to report."""
        with contextlib.suppress(OSError):
            for _ in range(min(nodes, len(os.sched_getaffinity(0)))):
                self._waiting.append(await _spawn())

    def take(self) -> asyncio.subprocess.Process | None:
        while self._waiting:
            process = self._waiting.pop(0)
            if process.returncode is None:
                return process
        return None

    async def close(self) -> None:
        """Ends what still waits; there is nothing in it to be lost."""
        left, self._waiting = self._waiting, []
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await _await_ends(left, KILL_BOUND)
        for process in left:
            close_pipes(process)


class LocalPool:
    """Before `stop`, `on_report(node_id, message)` gets a faulted child's last words, then `on_exit(node_id,
    detail)` hears of its end. Processes of `ahead` are used first."""

    def __init__(
        self,
        on_report: Callable[[NodeId, object], None],
        on_exit: Callable[[NodeId, str], None],
        *,
        ahead: NodesAhead | None = None,
    ) -> None:
        self._ahead = ahead or NodesAhead()
        self._on_report = on_report
        self._on_exit = on_exit
        self._children: list[_Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self, settings: NodeSettings, node_id: NodeId) -> None:
        """Starts one node process. Raises ResourceError."""
        try:
            process = self._ahead.take() or await _spawn()
        except OSError as error:
            raise ResourceError(
                f"cannot start node {settings.name!r}: {error}",
                hint=remedy_of_lack(error) or "this user must be able to run that Python",
            ) from None
        assert process.stdin is not None
        process.stdin.write(settings.model_dump_json().encode() + b"\n")
        child = _Child(settings.name, node_id, process)
        self._children.append(child)
        self._watchers.append(asyncio.ensure_future(self._watch(child)))

    async def _watch(self, child: _Child) -> None:
        readers = [asyncio.ensure_future(read(child)) for read in (self._hear_talk, self._hear_words)]
        try:
            with contextlib.suppress(TimeoutError):  # it has ended, only how is not known
                await exited(child.process)
            # A grandchild may hold the pipes open; what the node itself wrote is there at once.
            await asyncio.wait(readers, timeout=0.5)
        finally:
            for reader in readers:
                reader.cancel()
        if not self._stopping:
            self._tell_end(child)

    async def _hear_talk(self, child: _Child) -> None:
        async for line in _lines(child.process.stderr):
            text = line.decode(errors="replace").rstrip()
            child.talk.append(text)
            log.info("%s: %s", child.name, text)

    async def _hear_words(self, child: _Child) -> None:
        async for line in _lines(child.process.stdout):
            child.words.append(line)

    def _tell_end(self, child: _Child) -> None:
        for line in child.words:
            try:
                self._on_report(child.node_id, CONTROL.decode(line.rstrip(b"\n")))
            except CodecError as error:
                log.warning("%s: bad last words: %s", child.name, error)
        said = next((line for line in reversed(child.talk) if line.startswith("error: ")), "")
        code = child.process.returncode
        ended = f"its process {'ended' if code is None else exit_text(code)}"
        self._on_exit(child.node_id, f"{child.name}: {said.removeprefix('error: ') or ended}")

    async def stop(self) -> None:
        """Ends the lifelines, waits for the nodes to end in order, kills what does not."""
        self._stopping = True
        for child in self._children:
            if child.process.stdin is not None:
                child.process.stdin.close()
        processes = [child.process for child in self._children]
        await _await_ends(processes, STOP_BOUND)
        self.kill()
        await _await_ends(processes, KILL_BOUND)
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=1.0)
        for watcher in self._watchers:
            watcher.cancel()
        for process in processes:
            close_pipes(process)

    def kill(self, nodes: Container[NodeId] | None = None) -> None:
        """Ends these nodes at once, or all; their workers die with them."""
        for child in self._children:
            if child.process.returncode is None and (nodes is None or child.node_id in nodes):
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(child.process.pid for child in self._children)


def new_cluster(orchestrator_key: bytes, seeds: tuple[str, ...] = ()) -> ClusterConfig:
    """A fresh cluster of one run: random id and gossip key, one authorised orchestrator."""
    return ClusterConfig(
        id=f"local-{secrets.token_hex(6)}",
        gossip_key=secrets.token_hex(32),
        orchestrators=(orchestrator_key.hex(),),
        seeds=seeds,
    )
