"""From the worker's pipe to the stage, through real actors: events of one read never fault a good step.

The worker says ObjectProduced, then StepCompleted, then the next ObjectLoaded. The first and last go through
a gate and are one hop longer on the way; the stage must not mind.
"""

from __future__ import annotations

from typing import Any

import pytest
from swactor_core.actors import ActorSystem, MachineActor
from swactor_core.faults import Component
from swactor_core.fsm import Effect, Machine
from swactor_core.ids import (
    INPUT_PORT,
    OUTPUT_PORT,
    DeviceObjectHandle,
    EdgeId,
    NodeId,
    ObjectId,
    RingId,
    RoleId,
    RunId,
    Sequence,
    StageIndex,
    StepId,
    WorkerGeneration,
)
from swactor_core.machines.gates import RxEdge, TxEdge
from swactor_core.machines.stage import ModelOpened, StageController, StageState
from swactor_core.machines.worker_ctl import FromWorker, GpuWorkerCtl, WorkerPolicy, WriteWorker
from swactor_core.messages import (
    Address,
    DeviceObjectReleased,
    EdgeReady,
    ExecuteStep,
    InboundEdgeProvision,
    InstallRing,
    ObjectLoaded,
    ObjectProduced,
    OutboundEdgeProvision,
    ProcessNotification,
    ProcessNotificationKind,
    ProvisionStage,
    RoleConfigured,
    StageFault,
    StageModelFacts,
    StageReady,
    StageRuntimeFacts,
    StartWorker,
    StepCompleted,
    WorkerReady,
)
from swactor_core.observe.bus import EventBus
from swactor_core.plan import EdgeKind, GgufSource, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingLayout, RingSpec

IN, OUT, IN_RING, OUT_RING, ROLE = EdgeId(1), EdgeId(2), RingId(8), RingId(9), RoleId(5)
GENERATION = WorkerGeneration(1)
SPEC = ObjectSpec(ObjectKind.ACTIVATION, 1024, DTypeFamily.FLOAT, 4, 2)
STAGE, WORKER = Address(Component.STAGE_CONTROLLER), Address(Component.GPU_WORKER_CTL)
PROVISION = ProvisionStage(
    run_id=RunId(5),
    stage_index=StageIndex(0),
    stage_count=1,
    gguf_source=GgufSource("model.gguf"),
    layer_start=0,
    layer_end_exclusive=1,
    inbound=InboundEdgeProvision(
        IN, EdgeKind.ACTIVATION, NodeId(7), SPEC, RingSpec(4096, RingDirection.INGRESS)
    ),
    outbound=OutboundEdgeProvision(
        OUT, EdgeKind.ACTIVATION, NodeId(7), SPEC, RingSpec(4096, RingDirection.EGRESS)
    ),
    model=StageModelFacts("tiny", 1, 2, DTypeFamily.FLOAT, 4, 128),
    runtime=StageRuntimeFacts(ROLE, INPUT_PORT, OUTPUT_PORT, None, TokenOutputPolicy.TOKEN_IDS, 32),
)


class Sink:
    def __init__(self) -> None:
        self.received: list[Any] = []

    def receive(self, message: object) -> None:
        self.received.append(message)


class Rig:
    """A stage that is ready, with its gates and its worker's control; `steps` is what the worker was told."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.steps: list[ExecuteStep] = []
        self.system = ActorSystem(lambda address, error: self.failures.append(error))
        self.bus = EventBus(NodeId(7))
        self.run = Sink()
        self.stage = StageController(teardown_bound=1.0)
        self.system.spawn(Address(Component.RUN), self.run)
        for component in (Component.EDGE_ESTABLISHER, Component.NODE, Component.DRIVER):
            self.system.spawn(Address(component), Sink())
        ctl = GpuWorkerCtl(WorkerPolicy(), arena_ceiling=0, ring_helper_abi=1, backend={})
        self.host(WORKER, ctl)
        self.host(STAGE, self.stage)
        self.host(Address(Component.RX_EDGE, IN), RxEdge(IN, STAGE))
        self.host(Address(Component.TX_EDGE, OUT), TxEdge(OUT, STAGE))

    def host(self, address: Address, machine: Machine[Any]) -> None:
        actor = MachineActor(self.system, address, machine=machine, bus=self.bus, perform=self.perform)
        self.system.spawn(address, actor)

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, WriteWorker) and isinstance(effect.command, ExecuteStep):
            self.steps.append(effect.command)

    def say(self, *events: object) -> None:
        """The worker's lines, all read at once."""
        for event in events:
            self.system.tell(WORKER, FromWorker(GENERATION, event))

    async def quiet(self) -> None:
        for _ in range(8):
            await self.system.ask(STAGE, lambda actor: None)

    async def make_ready(self) -> None:
        tell = self.system.tell
        tell(WORKER, StartWorker())
        tell(WORKER, ProcessNotification(GENERATION, ProcessNotificationKind.STARTED, 1))
        self.say(WorkerReady(1, GENERATION, 1, {}))
        tell(WORKER, install(IN_RING, IN, RingDirection.INGRESS))
        tell(WORKER, install(OUT_RING, OUT, RingDirection.EGRESS))
        tell(STAGE, PROVISION)
        tell(STAGE, ModelOpened({}))
        tell(Address(Component.RX_EDGE, IN), EdgeReady(IN, IN_RING))
        tell(Address(Component.TX_EDGE, OUT), EdgeReady(OUT, OUT_RING))
        self.say(RoleConfigured(ROLE))
        await self.quiet()
        assert self.run.received == [StageReady(RunId(5), StageIndex(0))]


def install(ring_id: RingId, edge_id: EdgeId, direction: RingDirection) -> InstallRing:
    port = INPUT_PORT if direction is RingDirection.INGRESS else OUTPUT_PORT
    return InstallRing(ring_id, edge_id, port, direction, RingLayout(ring_id, 0, 4096, 0, 64, 4032, 64), SPEC)


def loaded(sequence: int) -> ObjectLoaded:
    identity = (ObjectId(sequence), Sequence(sequence))
    return ObjectLoaded(IN_RING, IN, INPUT_PORT, *identity, 8, DeviceObjectHandle(GENERATION, sequence))


def step_out(sequence: int) -> tuple[object, ...]:
    """What the worker says when the output of a step is out."""
    identity = (ObjectId(sequence), Sequence(sequence))
    return (
        ObjectProduced(OUT_RING, OUT, OUTPUT_PORT, *identity, 8),
        StepCompleted(ROLE, StepId(sequence + 1), 0.001),
        DeviceObjectReleased(DeviceObjectHandle(GENERATION, sequence)),
    )


@pytest.mark.parametrize("at_once", [set(), {0, 1, 2, 3}, {0, 2}, {1, 2}], ids=str)
async def test_events_of_one_read_keep_the_pipeline_going(at_once: set[int]) -> None:
    """After the steps in `at_once`, the next object is in the same read as the end of the step."""
    rig = Rig()
    await rig.make_ready()
    rig.say(loaded(0))
    await rig.quiet()
    for sequence in range(4):
        together = (loaded(sequence + 1),) if sequence in at_once else ()
        rig.say(*step_out(sequence), *together)
        await rig.quiet()
        if not together:
            rig.say(loaded(sequence + 1))
            await rig.quiet()
    assert rig.failures == []
    assert not [m for m in rig.run.received if isinstance(m, StageFault)]
    assert [step.inputs[0].sequence for step in rig.steps] == [0, 1, 2, 3, 4]
    assert rig.stage.state is StageState.EXECUTING
    assert rig.stage.stats.steps == 4
    await rig.system.shutdown()
