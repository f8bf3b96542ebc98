"""The worker in the node's process: the same effects and news as of a worker process, in bounded turns."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from swactor_core.actors import ActorSystem
from swactor_core.ids import INPUT_PORT, EdgeId, RingId, WorkerGeneration
from swactor_core.machines.worker_ctl import ME, FromWorker, KillWorker, SpawnWorker, WriteWorker
from swactor_core.messages import (
    InitializeWorker,
    InstallRing,
    ProcessNotification,
    ProcessNotificationKind,
    RingInstalled,
    RingQuiesced,
    RoleConfigured,
    ShutdownMode,
    ShutdownWorker,
    WorkerFatal,
    WorkerReady,
    WorkerStopped,
)
from swactor_core.node.worker_inline import COMMANDS_PER_TURN, InProcessWorker
from swactor_core.specs import RingDirection
from swactor_testing.echo import EchoBackend
from swactor_testing.heap import HeapArenas
from swactor_testing.worker_kit import configure, ring_layout, stage_config, token_spec

CEILING = 1 << 20
FIRST, SECOND = WorkerGeneration(1), WorkerGeneration(2)
STARTED, EXITED = ProcessNotificationKind.STARTED, ProcessNotificationKind.EXITED


class Rig:
    """The adapter, and what GpuWorkerCtl would be told."""

    def __init__(self, backend: Callable[..., Any] = EchoBackend) -> None:
        self.failures: list[Exception] = []
        self.system = ActorSystem(lambda address, error: self.failures.append(error))
        self.told: list[Any] = []
        self.system.spawn(ME, self)
        self.arenas = HeapArenas()
        self.arena = self.arenas.create(CEILING)
        self.worker = InProcessWorker(
            self.system, arena=self.arenas, descriptor=lambda: (-1, CEILING), backend=backend
        )

    def receive(self, message: object) -> None:
        self.told.append(message)

    def write(self, command: object, generation: WorkerGeneration = FIRST) -> None:
        self.worker.perform(WriteWorker(generation, command))

    async def settle(self) -> None:
        """Every turn that can be taken has been taken."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def start(self, generation: WorkerGeneration = FIRST, **settings: Any) -> None:
        self.worker.perform(SpawnWorker(generation))
        await self.settle()
        self.write(InitializeWorker(generation, CEILING, self.arenas.abi, settings), generation)
        await self.settle()

    def said(self) -> list[Any]:
        return [message.event for message in self.told if isinstance(message, FromWorker)]

    def news(self) -> list[tuple[ProcessNotificationKind, str]]:
        return [(m.kind, m.detail) for m in self.told if isinstance(m, ProcessNotification)]


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.system.shutdown()
    assert not made.failures


def install(rig: Rig, ring_id: int = 1) -> InstallRing:
    layout = ring_layout(RingId(ring_id), 256, offset=(ring_id - 1) * 4096)
    rig.arena.create_ring(layout)
    return InstallRing(
        layout.ring_id, EdgeId(ring_id), INPUT_PORT, RingDirection.INGRESS, layout, token_spec(8)
    )


async def test_it_starts_serves_and_stops_in_order(rig: Rig) -> None:
    await rig.start()
    rig.write(install(rig))
    rig.write(configure(stage_config(0, 4)))
    await rig.settle()
    rig.write(ShutdownWorker(ShutdownMode.GRACEFUL))
    await rig.settle()
    kinds = [type(event) for event in rig.said()]
    expected = (WorkerReady, RingInstalled, RoleConfigured, RingQuiesced, WorkerStopped)
    assert [kind for kind in kinds if kind in expected] == list(expected)
    assert rig.news() == [(STARTED, ""), (EXITED, "the worker in the node's process exited with 0")]
    assert isinstance(rig.told[0], ProcessNotification)
    assert isinstance(rig.told[-1], ProcessNotification)
    assert rig.told[0].pid == os.getpid()


async def test_a_kill_is_the_end_without_another_word(rig: Rig) -> None:
    await rig.start()
    rig.write(install(rig))
    await rig.settle()
    words = len(rig.said())
    rig.write(configure(stage_config(0, 4)))
    rig.worker.perform(KillWorker(FIRST))
    await rig.settle()
    assert len(rig.said()) == words
    assert rig.news()[1:] == [(EXITED, "the worker in the node's process was killed")]
    rig.write(configure(stage_config(0, 4)))
    await rig.settle()
    assert len(rig.said()) == words


async def test_commands_and_kills_of_a_former_generation_touch_nothing(rig: Rig) -> None:
    await rig.start()
    rig.worker.perform(KillWorker(FIRST))
    await rig.settle()
    await rig.start(SECOND)
    rig.write(install(rig), FIRST)
    rig.worker.perform(KillWorker(FIRST))
    await rig.settle()
    of_second = [m.event for m in rig.told if isinstance(m, FromWorker) and m.generation == SECOND]
    assert [type(event) for event in of_second] == [WorkerReady]
    assert [kind for kind, _ in rig.news()] == [STARTED, EXITED, STARTED]


async def test_a_fatal_worker_exits_with_its_code(rig: Rig) -> None:
    await rig.start(colour="red")
    [fatal] = rig.said()
    assert isinstance(fatal, WorkerFatal)
    assert "colour" in fatal.detail
    assert rig.news()[-1][1] == "the worker in the node's process exited with 3"


async def test_a_command_that_is_not_allowed_ends_it(rig: Rig) -> None:
    rig.worker.perform(SpawnWorker(FIRST))
    await rig.settle()
    rig.write(configure(stage_config(0, 4)))
    await rig.settle()
    assert isinstance(rig.said()[-1], WorkerFatal)
    assert rig.news()[-1][0] is EXITED


class Leaves(EchoBackend):
    """A backend that ends the process it believes to be its own."""

    def configure(self, *arguments: Any, **options: Any) -> Any:
        raise SystemExit(9)


async def test_a_backend_that_exits_ends_the_worker_and_not_the_node() -> None:
    rig = Rig(Leaves)
    await rig.start()
    rig.write(configure(stage_config(0, 4)))
    await rig.settle()
    assert rig.news()[-1] == (EXITED, "the worker in the node's process exited with 9")
    assert not [event for event in rig.said() if isinstance(event, WorkerFatal)]
    await rig.system.shutdown()
    assert not rig.failures


async def test_many_commands_leave_the_loop_its_turns(rig: Rig) -> None:
    await rig.start()
    for ring_id in range(1, 200):
        rig.write(install(rig, ring_id))
    turns = []
    for _ in range(30):
        await asyncio.sleep(0)
        turns.append(sum(isinstance(event, RingInstalled) for event in rig.said()))
    assert turns[-1] == 199
    steps = [later - earlier for earlier, later in zip([0, *turns], turns, strict=False)]
    assert max(steps) <= COMMANDS_PER_TURN


class Hooked(EchoBackend):
    """Asks whether to abort from inside a long call."""

    asked: list[bool] = []  # noqa: RUF012 - read by the one test that uses it

    def configure(self, config: Any, *, progress: Any, should_abort: Any) -> Any:
        Hooked.asked.append(should_abort())
        return super().configure(config, progress=progress, should_abort=lambda: False)


@pytest.mark.parametrize(
    ("following", "aborted"),
    [
        (None, False),
        (ShutdownWorker(ShutdownMode.GRACEFUL), False),
        (ShutdownWorker(ShutdownMode.ABORT_IN_FLIGHT), True),
    ],
)
async def test_a_long_call_sees_what_waits_behind_it(following: object, aborted: bool) -> None:
    Hooked.asked.clear()
    rig = Rig(Hooked)
    await rig.start()
    rig.write(configure(stage_config(0, 4)))
    if following is not None:
        rig.write(following)
    await rig.settle()
    assert Hooked.asked == [aborted]
    await rig.system.shutdown()


async def test_the_end_of_the_node_is_the_end_of_the_worker(rig: Rig) -> None:
    await rig.start()
    await rig.system.shutdown()
    assert not rig.system._tasks
