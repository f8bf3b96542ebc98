"""A worker in its node's own process, for arenas that do not leave it: the role of `worker_process.py`.

The same harness as in a worker process, on the event loop in bounded turns: what the backend computes, the
whole process waits for. Knows no machine: it performs GpuWorkerCtl's effects and tells it what happened.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from swactor_core.actors import ActorSystem
from swactor_core.fsm import Effect
from swactor_core.ids import WorkerGeneration
from swactor_core.machines.worker_ctl import ME
from swactor_core.machines.worker_effects import ControlClosed
from swactor_core.machines.worker_process import FromWorker, KillWorker, SpawnWorker, WriteWorker
from swactor_core.messages import (
    ProcessNotification,
    ProcessNotificationKind,
    ResetRole,
    ShutdownMode,
    ShutdownWorker,
)
from swactor_core.spi.arena import ArenaPlugin
from swactor_core.spi.worker import WorkerBackend
from swactor_core.worker.harness import Harness, Surroundings

COMMANDS_PER_TURN = 64
COPY_POLL_SECONDS = 0.001


class _Hosted:
    """One generation: its harness, the commands that wait, and whether it was killed."""

    def __init__(self, surroundings: Callable[[_Hosted], Surroundings]) -> None:
        self.commands: deque[object] = deque()
        self.killed = False
        self.woken = asyncio.Event()
        self.harness = Harness(surroundings(self))

    def should_abort(self) -> bool:
        """What ends a long call, of what has arrived before it (`worker/adapter.py`)."""
        return self.killed or any(
            isinstance(command, ResetRole)
            or (isinstance(command, ShutdownWorker) and command.mode is ShutdownMode.ABORT_IN_FLIGHT)
            for command in self.commands
        )

    async def serve(self) -> str:
        """Commands in, events out, until it ends; says how."""
        harness = self.harness
        while harness.exit_code is None and not self.killed:
            if not self.commands:
                await self._sleep()
            try:
                self._turn()
            except SystemExit as end:  # the backend ended what is, for all it knows, its own process
                self.killed = True
                return f"exited with {end.code}"
            await asyncio.sleep(0)
        return "was killed" if harness.exit_code is None else f"exited with {int(harness.exit_code)}"

    def _turn(self) -> None:
        for _ in range(COMMANDS_PER_TURN):
            if not self.commands or self.killed or self.harness.exit_code is not None:
                break
            self.harness.take(self.commands.popleft())
        if self.harness.copying:
            self.harness.progress()

    async def _sleep(self) -> None:
        if self.harness.copying:
            await asyncio.sleep(COPY_POLL_SECONDS)
            return
        self.woken.clear()
        await self.woken.wait()

    def close(self) -> None:
        """Gives back what a process's end would have given back, without another word."""
        self.killed = True
        if self.harness.exit_code is None:
            try:
                self.harness.take(ControlClosed())
            except SystemExit:  # it is being ended already
                return


class InProcessWorker:
    """At most one live worker. `arena` is the node's own plug-in object, `descriptor` gives (fd, ceiling)
    once the arena stands, `backend` is the worker provider's factory."""

    def __init__(
        self,
        system: ActorSystem,
        *,
        arena: ArenaPlugin,
        descriptor: Callable[[], tuple[int, int]],
        backend: Callable[..., WorkerBackend],
    ) -> None:
        self._system = system
        self._arena = arena
        self._descriptor = descriptor
        self._backend = backend
        self._hosted: _Hosted | None = None
        self._generation = WorkerGeneration(0)

    def perform(self, effect: Effect) -> None:
        hosted = self._hosted
        match effect:
            case SpawnWorker(generation):
                self._generation = generation
                self._system.start_task(self._live(generation), owner=ME)
            case WriteWorker(generation, command):
                if hosted is not None and generation == self._generation:
                    hosted.commands.append(command)
                    hosted.woken.set()
            case KillWorker(generation):
                if hosted is not None and generation == self._generation:
                    hosted.killed = True
                    hosted.woken.set()

    async def _live(self, generation: WorkerGeneration) -> None:
        hosted = _Hosted(lambda hosted: self._surroundings(generation, hosted))
        self._hosted = hosted
        self._notify(generation, ProcessNotificationKind.STARTED, "")
        try:
            end = await hosted.serve()
        finally:
            hosted.close()
            if self._hosted is hosted:
                self._hosted = None
        self._notify(generation, ProcessNotificationKind.EXITED, f"the worker in the node's process {end}")

    def _surroundings(self, generation: WorkerGeneration, hosted: _Hosted) -> Surroundings:
        def emit(event: object) -> None:
            if not hosted.killed:
                self._system.tell(ME, FromWorker(generation, event))

        return Surroundings(
            pid=os.getpid(),
            arena=lambda: self._arena,
            attach=lambda plugin, ceiling: plugin.attach(self._descriptor()[0], ceiling),
            backend=lambda settings: self._backend(settings=settings),
            emit=emit,
            flush=lambda: None,
            should_abort=hosted.should_abort,
        )

    def _notify(self, generation: WorkerGeneration, kind: ProcessNotificationKind, detail: str) -> None:
        self._system.tell(ME, ProcessNotification(generation, kind, os.getpid(), detail))
