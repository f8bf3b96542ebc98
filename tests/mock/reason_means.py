"""Means by which a mock run of two nodes is brought to fail, each for a reason of the error taxonomy."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from fault_sources import (
    MALFORMED,
    alter_commands,
    command_worker,
    malform,
    ring_of,
    silence_worker,
    worker_says,
)
from mock_run import MockRun
from swactor_core.errors import ModelError, ResourceError
from swactor_core.faults import (
    Component,
    FaultReason,
    ModelFailure,
    ObjectFailure,
    RingFaultReason,
    RoleFailure,
    StepFailure,
)
from swactor_core.ids import INPUT_PORT, DeviceObjectHandle, RingId, RoleId
from swactor_core.messages import (
    Address,
    ExecuteStep,
    InstallRing,
    ReleaseDeviceObject,
    ResetRole,
    RingFault,
    ShutdownMode,
    ShutdownWorker,
    StepFailed,
)
from swactor_core.plugins import REGISTRATION_HOOKS, Plugins, load_plugins
from swactor_core.spi.membership import MemberState
from swactor_core.spi.provider import Kind, Provider
from swactor_core.spi.worker import RoleError
from swactor_testing.echo import EchoBackend, EchoRole
from swactor_testing.heap import HeapArenas
from swactor_testing.synthetic import SyntheticLoader

LAST = 1  # stage and node: a run of two
Act = Callable[[MockRun], Any]


@dataclass(frozen=True)
class Produced:
    """A run of two nodes in which `act` happens `at` an event; it records `reason`, with the member as its
    cause where that is a finer enum's, as `component` saw it, at `stage` and with `said` in its line."""

    reason: FaultReason
    component: Component
    at: str = ""
    act: Act = lambda run: None
    stage: int | None = None
    said: str = ""
    worker: dict[str, object] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    plugins: Callable[[], Plugins] | None = None
    choice: dict[str, str] = field(default_factory=dict)
    gone: bool = False
    """Node LAST cannot be asked for its teardown."""


R, C = FaultReason, Component
ABORT = ShutdownWorker(ShutdownMode.ABORT_IN_FLIGHT)

# --- means ---


def with_plugin(kind: Kind, factory: Any, **capabilities: Any) -> Callable[[], Plugins]:
    def build() -> Plugins:
        plugins = load_plugins()
        provider = Provider(kind, "scripted", "of a test", factory, capabilities=capabilities)
        hook = {REGISTRATION_HOOKS[kind]: lambda: [provider]}
        plugins.register(SimpleNamespace(__name__="scripted", **hook), name="scripted")
        return plugins

    return build


def worker_plugin(configure: Callable[[EchoRole], None]) -> dict[str, Any]:
    """The echo worker, with something done to each role before it is used."""

    class Scripted(EchoBackend):
        def configure(self, *arguments: Any, **options: Any) -> EchoRole:
            role = super().configure(*arguments, **options)
            configure(role)
            return role

    plugins = with_plugin(Kind.WORKER, Scripted, in_process=True)
    return {"plugins": plugins, "choice": {"worker": "scripted"}}


def arena_plugin(arenas: type[HeapArenas]) -> dict[str, Any]:
    return {
        "plugins": with_plugin(Kind.ARENA, arenas, crosses_processes=False),
        "choice": {"arena": "scripted"},
    }


class UnmappableArenas(HeapArenas):
    def attach(self, fd: int, ceiling: int) -> Any:
        raise ResourceError("it cannot be mapped here")


class OtherAbi(HeapArenas):
    """Its helper is of one ABI where the node looks, and of another where the worker does."""

    asked = 0

    @property
    def abi(self) -> int:
        self.asked += 1
        return 1 if self.asked == 1 else 2


def raises(error: BaseException) -> dict[str, Any]:
    def configure(role: EchoRole) -> None:
        def misbehave(sequence: int) -> None:
            raise error

        role._misbehave = misbehave

    return worker_plugin(configure)


def role_fails(reason: RoleFailure) -> dict[str, Any]:
    def configure(role: EchoRole) -> None:
        raise RoleError(reason, f"{reason}, by script")

    return worker_plugin(configure)


def short_output(role: EchoRole) -> None:
    execute = role.execute
    role.execute = lambda *step: (bytearray(4), execute(*step)[1] + 4)  # type: ignore[method-assign]


def model_fails(cause: ModelFailure) -> dict[str, Any]:
    """The loader of the nodes; the orchestrator has read the model's facts before."""

    class Failing(SyntheticLoader):
        def resolve(self, name: str, progress: Any = None) -> str:
            raise ModelError(f"{cause}, by script", hint="mend it", cause=cause)

    return {"plugins": with_plugin(Kind.LOADER, Failing), "choice": {"loader": "scripted"}}


def ring_header(offset: int, word: int) -> Act:
    """Of every ring that is made on the last node from here on, these header bytes are overwritten."""

    def act(run: MockRun) -> None:
        arena: Any = run.pool[LAST].data_plane.arena.arena
        create = arena.create_ring

        def spoilt(layout: Any) -> Any:
            ring = create(layout)
            struct.pack_into("<I", arena.memory, layout.header_offset + offset, word)
            return ring

        arena.create_ring = spoilt

    return act


def node_ring(run: MockRun, *, inbound: bool) -> Any:
    return run.pool[LAST].data_plane.arena.rings[ring_of(run, LAST, inbound=inbound)[1]]


def pump_fails(run: MockRun) -> None:
    def defect() -> memoryview:
        raise ZeroDivisionError("a defect of the pump")

    node_ring(run, inbound=False).readable_span = defect


def cursor_moves(run: MockRun) -> None:
    """Somebody else writes into the ring's header: the pump finds its own cursor moved."""
    arena: Any = run.pool[LAST].data_plane.arena.arena
    layout = node_ring(run, inbound=True).layout
    struct.pack_into("<Q", arena.memory, layout.header_offset + 24, 1 << 40)


def says_ring_fault(reason: RingFaultReason) -> Act:
    def act(run: MockRun) -> None:
        edge_id, ring_id = ring_of(run, LAST, inbound=True)
        worker_says(run, LAST, RingFault(ring_id, edge_id, INPUT_PORT, reason, f"{reason}, by script"))

    return act


def says_step_failed(reason: StepFailure) -> Act:
    """Its answer to the first step, before it has any."""

    def act(run: MockRun) -> None:
        def answer(step: ExecuteStep) -> ExecuteStep:
            worker_says(run, LAST, StepFailed(step.role_id, step.step_id, reason, f"{reason}, by script"))
            return step

        step_with(answer)(run)

    return act


def aborts_step(run: MockRun) -> None:
    """The order to abort is there when the step begins."""
    alter_commands(run, LAST, lambda c: (c, ABORT) if isinstance(c, ExecuteStep) else c)


def stops_worker_that_hangs(run: MockRun) -> None:
    silence_worker(run, LAST)
    run.pool[LAST].system.tell(Address(Component.GPU_WORKER_CTL), ShutdownWorker(ShutdownMode.GRACEFUL))


def installs_no_ring(run: MockRun) -> None:
    alter_commands(run, LAST, lambda c: () if isinstance(c, InstallRing) else c)


def step_with(alter: Callable[[ExecuteStep], object]) -> Act:
    def act(run: MockRun) -> None:
        alter_commands(run, LAST, lambda c: alter(c) if isinstance(c, ExecuteStep) else c)

    return act


def other_handle(step: ExecuteStep) -> ExecuteStep:
    [bound] = step.inputs
    handle = DeviceObjectHandle(bound.device_handle.worker_generation, 999)
    return replace(step, inputs=(replace(bound, device_handle=handle),))


def other_ring(step: ExecuteStep) -> ExecuteStep:
    return replace(step, outputs=(replace(step.outputs[0], ring_id=RingId(999)),))


def resets_role_first(run: MockRun) -> None:
    plan = run.pool[LAST].stages._provision
    assert plan is not None
    command_worker(run, LAST, ResetRole(RoleId(plan.runtime.role_id)))


def drains_worker(run: MockRun) -> None:
    command_worker(run, LAST, ShutdownWorker(ShutdownMode.GRACEFUL))


def release(handle: DeviceObjectHandle) -> Act:
    return lambda run: command_worker(run, LAST, ReleaseDeviceObject(handle))


def never_opens_model(run: MockRun) -> None:
    async def wait(provision: object) -> None:
        await asyncio.sleep(1e6)

    stages: Any = run.pool[LAST].stages
    stages._open_model = wait


def other_run_is_here(run: MockRun) -> None:
    stages: Any = run.pool[LAST].stages
    stages.controller = SimpleNamespace(state="Ready")
    stages._provision = SimpleNamespace(run_id=99, stage_index=4)


def refuses_rings(run: MockRun) -> None:
    arena: Any = run.pool[LAST].data_plane.arena.arena

    def refuse(layout: object) -> Any:
        raise ResourceError("no page is free")

    arena.create_ring = refuse


def member_dies(run: MockRun) -> None:
    run.cluster.judge(run.ids[LAST], MemberState.DEAD, observer=run.home)


def tell_node(component: Component, message: object) -> Act:
    return lambda run: run.pool[LAST].system.tell(Address(component), message)


def fails_at_node(component: Component, error: Exception) -> Act:
    """As when `component` has raised `error` over a message."""
    return lambda run: run.pool[LAST].system._on_failure(Address(component), error)


PLANNED, READY, FIRST_TOKEN = "run_planned", "readiness_barrier_passed", "token_received"
_SMALL_ARENA = {"arena_ceiling": 1 << 20}
_OBJECTS = {
    reason: Produced(
        R.SEQUENCE_VIOLATION if reason is ObjectFailure.SEQUENCE_VIOLATION else R.MALFORMED_OBJECT_HEADER,
        C.WORKER,
        PLANNED,
        lambda run, cause=str(reason): malform(run, edge=1, sequence=1, cause=cause),
        stage=LAST,
        said="of edge",
    )
    for reason in ObjectFailure
    if str(reason) in MALFORMED
}
