"""What a node takes as its stage and what it refuses (spec sections 4, 12, 14): each refusal typed and told.

The orchestrator's authority is the control service's to check; here it has been.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from swactor_core.actors import ActorSystem
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.ids import INPUT_PORT, OUTPUT_PORT, EdgeId, NodeId, RoleId, RunId, StageIndex
from swactor_core.machines.provisioning import impossible
from swactor_core.machines.stage import StageState
from swactor_core.messages import (
    Address,
    ConfigureRole,
    ConstructArena,
    InboundEdgeProvision,
    InstallRing,
    OutboundEdgeProvision,
    ProvisionStage,
    RingQuiesced,
    StageFault,
    StageModelFacts,
    StageRuntimeFacts,
    StageStopped,
    StopRun,
)
from swactor_core.node.data_plane import ARENA, ESTABLISHER, DataPlane
from swactor_core.node.stage_host import STAGE, StageHost
from swactor_core.observe.bus import EventBus
from swactor_core.plan import EdgeKind, GgufSource, SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingSpec
from swactor_testing import virtual_time
from swactor_testing.heap import HeapArenas
from swactor_testing.synthetic import LAYERS, SyntheticLoader

ME = NodeId(7)
WORKER, NODE = Address(Component.GPU_WORKER_CTL), Address(Component.NODE)
ACTIVATION = ObjectSpec(ObjectKind.ACTIVATION, 1024, DTypeFamily.FLOAT, 4, 2)
IN, OUT = RingSpec(4096, RingDirection.INGRESS), RingSpec(4096, RingDirection.EGRESS)
PROVISION = ProvisionStage(
    run_id=RunId(5),
    stage_index=StageIndex(1),
    stage_count=3,
    gguf_source=GgufSource("demo"),
    layer_start=4,
    layer_end_exclusive=8,
    inbound=InboundEdgeProvision(EdgeId(1), EdgeKind.ACTIVATION, NodeId(70), ACTIVATION, IN),
    outbound=OutboundEdgeProvision(EdgeId(2), EdgeKind.ACTIVATION, NodeId(71), ACTIVATION, OUT),
    model=StageModelFacts("demo", LAYERS, 2, DTypeFamily.FLOAT, 4, 128),
    runtime=StageRuntimeFacts(
        RoleId(5), INPUT_PORT, OUTPUT_PORT, SamplingPolicy(), TokenOutputPolicy.TOKEN_IDS, 32
    ),
)


def inbound(**changes: Any) -> dict[str, Any]:
    return {"inbound": replace(PROVISION.inbound, **changes)}


def outbound(**changes: Any) -> dict[str, Any]:
    return {"outbound": replace(PROVISION.outbound, **changes)}


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "a stage after the last": ({"stage_index": StageIndex(3)}, "stage 3 of 3"),
    "a stage before the first": ({"stage_index": StageIndex(-1)}, "stage -1 of 3"),
    "no layers": ({"layer_end_exclusive": 4}, f"layers 4..4 of {LAYERS}"),
    "layers before the first": ({"layer_start": -1}, f"layers -1..8 of {LAYERS}"),
    "layers after the model's": ({"layer_end_exclusive": LAYERS + 1}, f"layers 4..13 of {LAYERS}"),
    "tokens into the middle": (
        inbound(kind=EdgeKind.TOKEN_IN),
        "stage 1 of 3 with TokenIn in and Activation out, not Activation and Activation",
    ),
    "tokens out of the middle": (
        outbound(kind=EdgeKind.TOKEN_OUT),
        "stage 1 of 3 with Activation in and TokenOut out, not Activation and Activation",
    ),
    "activations into the first": (
        {"stage_index": StageIndex(0)},
        "stage 0 of 3 with Activation in and Activation out, not TokenIn and Activation",
    ),
    "activations out of the last": (
        {"stage_index": StageIndex(2)},
        "stage 2 of 3 with Activation in and Activation out, not Activation and TokenOut",
    ),
    "an edge that is none": (outbound(edge_id=EdgeId(0)), f"edge id 0, not of 1..{(1 << 64) - 1}"),
    "an edge beyond the wire": (
        outbound(edge_id=EdgeId(1 << 64)),
        f"edge id {1 << 64}, not of 1..{(1 << 64) - 1}",
    ),
    "a run that is none": ({"run_id": RunId(-1)}, "run -1, not of 64 bits"),
    "a run beyond the wire": ({"run_id": RunId(1 << 64)}, f"run {1 << 64}, not of 64 bits"),
    "rows of no width": (
        inbound(object_spec=replace(ACTIVATION, row_width=0)),
        "objects of at most 1024 bytes in rows of 0 bytes, aligned to 4 on edge 1",
    ),
    "rows without alignment": (
        outbound(object_spec=replace(ACTIVATION, alignment=0)),
        "objects of at most 1024 bytes in rows of 8 bytes, aligned to 0 on edge 2",
    ),
    "objects of less than a row": (
        outbound(object_spec=replace(ACTIVATION, max_extent=7)),
        "objects of at most 7 bytes in rows of 8 bytes, aligned to 4 on edge 2",
    ),
    "one edge for both ends": (outbound(edge_id=EdgeId(1)), "edge 1 both in and out"),
    "rings the wrong way round": (
        inbound(ring_spec=OUT) | outbound(ring_spec=IN),
        "rings for Egress in and Ingress out",
    ),
}


class Hearer:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()

    def receive(self, message: object) -> None:
        self.heard.put_nowait(message)


@dataclass
class Rig:
    system: ActorSystem
    host: StageHost
    worker: Hearer
    said: asyncio.Queue[Any]
    events: list[dict[str, Any]]
    data_plane: DataPlane

    async def says(self, kind: type) -> Any:
        """The next of this kind that the orchestrator hears."""
        async with asyncio.timeout(10):
            while not isinstance(message := await self.said.get(), kind):
                pass
            return message

    async def works(self, kind: type) -> Any:
        async with asyncio.timeout(10):
            while not isinstance(message := await self.worker.heard.get(), kind):
                pass
            return message


@asynccontextmanager
async def living_rig() -> AsyncIterator[Rig]:
    failures: list[Exception] = []
    system = ActorSystem(lambda address, error: failures.append(error))
    bus = EventBus(ME)
    events: list[dict[str, Any]] = []
    bus.add_sink(events.append)
    said: asyncio.Queue[Any] = asyncio.Queue()
    worker = Hearer()
    system.spawn(WORKER, worker)
    system.spawn(NODE, Hearer())
    data_plane = DataPlane(
        system, bus, arena=HeapArenas(), ring_host=WORKER, gate_owner=STAGE, arena_owner=NODE
    )
    system.tell(ARENA, ConstructArena(1 << 20))
    host = StageHost(
        system,
        bus,
        node_id=ME,
        data_plane=data_plane,
        loader=SyntheticLoader(),
        to_orchestrator=said.put_nowait,
        on_stopped=lambda: None,
    )
    yield Rig(system, host, worker, said, events, data_plane)
    await system.shutdown()
    data_plane.arena.close()
    assert failures == []


def refusal(provision: ProvisionStage, why: str) -> list[object]:
    fault = Fault(
        FaultReason.PROVISIONING_REJECTED,
        Component.NODE,
        why,
        node_id=ME,
        stage_index=provision.stage_index,
    )
    return [
        StageFault(provision.run_id, provision.stage_index, fault),
        StageStopped(provision.run_id, provision.stage_index),
    ]


def drained(queue: asyncio.Queue[Any]) -> list[Any]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with living_rig() as living:
        yield living


def test_a_possible_assignment_has_no_complaint() -> None:
    assert impossible(PROVISION) == ""
    alone = replace(PROVISION, stage_index=StageIndex(0), stage_count=1, **inbound(kind=EdgeKind.TOKEN_IN))
    alone = replace(alone, outbound=replace(PROVISION.outbound, kind=EdgeKind.TOKEN_OUT))
    assert impossible(alone) == ""
    assert impossible(replace(PROVISION, layer_start=0, layer_end_exclusive=LAYERS)) == ""


@pytest.mark.parametrize("name", IMPOSSIBLE)
async def test_an_impossible_assignment_is_refused_and_nothing_of_it_begins(rig: Rig, name: str) -> None:
    changes, why = IMPOSSIBLE[name]
    provision = replace(PROVISION, **changes)
    assert impossible(provision) == why
    rig.host.provision(provision)
    assert drained(rig.said) == refusal(provision, why)
    told = [(e["event"], e["run_id"], e["detail"]) for e in rig.events]
    assert told == [("provisioning_refused", provision.run_id, why)]
    assert rig.host.refused == 1
    assert not rig.host.active
    assert rig.data_plane.leased == 0


async def test_a_second_run_is_refused_while_one_is_active_which_goes_on(rig: Rig) -> None:
    rig.host.provision(PROVISION)
    other = replace(PROVISION, run_id=RunId(6))
    rig.host.provision(other)
    assert drained(rig.said) == refusal(other, "run 5 is active here as stage 1")
    rig.host.provision(PROVISION)  # nor is the same one taken twice
    assert drained(rig.said) == refusal(PROVISION, "run 5 is active here as stage 1")
    assert (await rig.works(ConfigureRole)).role_id == RoleId(5)
    assert rig.host.active


async def test_a_stop_of_another_run_stops_nothing(rig: Rig) -> None:
    rig.host.stop_run(StopRun(RunId(5)))  # before there is one
    rig.host.provision(PROVISION)
    await rig.works(ConfigureRole)
    rig.host.stop_run(StopRun(RunId(6)))
    assert await rig.system.ask(STAGE, lambda actor: None) is None
    assert rig.host.controller is not None
    assert rig.host.controller.state is StageState.PREPARING


async def test_layers_that_the_file_here_does_not_hold_are_refused(rig: Rig) -> None:
    """The plan's model has more layers than this node's file of that name."""
    larger = replace(PROVISION.model, num_layers=LAYERS + 4)
    provision = replace(PROVISION, model=larger, layer_start=LAYERS - 1, layer_end_exclusive=LAYERS + 3)
    rig.host.provision(provision)
    fault = (await rig.says(StageFault)).fault
    assert (fault.reason, fault.cause) == (FaultReason.WEIGHT_LOAD_FAILED, "ModelRefused")
    assert fault.detail == f"layers [11, 15) of a model of {LAYERS}"


async def test_another_file_of_the_same_name_is_refused(rig: Rig) -> None:
    rig.host.provision(replace(PROVISION, gguf_source=GgufSource("demo", "0" * 64)))
    fault = (await rig.says(StageFault)).fault
    assert fault.reason is FaultReason.WEIGHT_LOAD_FAILED
    assert "is another file" in fault.detail
    assert "put the same file on every node" in fault.detail


def other_run(number: int) -> ProvisionStage:
    """The same stage in another run, over edges of its own."""
    edges = EdgeId(10 * number), EdgeId(10 * number + 1)
    changes = inbound(edge_id=edges[0]) | outbound(edge_id=edges[1])
    return replace(PROVISION, run_id=RunId(number), **changes)


async def test_a_model_that_opens_as_the_next_run_arrives_is_nobodys(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It outlived its run, and what it found comes before the next run's controller had its first turn."""
    opened: asyncio.Future[tuple[dict[str, Any], tuple[()]]] = asyncio.get_running_loop().create_future()

    async def slow(*_: object) -> tuple[dict[str, Any], tuple[()]]:
        return await opened

    with monkeypatch.context() as slowly:
        slowly.setattr(asyncio, "to_thread", slow)
        rig.host.provision(other_run(1))
        rings = [(await rig.works(InstallRing)).ring_id for _ in range(2)]
        rig.host.stop_run(StopRun(RunId(1)))
        for ring_id in rings:
            rig.system.tell(ESTABLISHER, RingQuiesced(ring_id))
        await rig.says(StageStopped)
    opened.set_result(({}, ()))
    rig.host.provision(other_run(2))
    assert (await rig.works(ConfigureRole)).config != {}
    assert rig.host.controller is not None
    assert rig.host.controller.state is StageState.PREPARING


def test_ranges_of_a_forgotten_run_come_back_with_their_proof() -> None:
    """The worker takes its rings out of use when the next run is there already."""

    async def runs() -> None:
        async with living_rig() as rig:
            rig.host.provision(other_run(1))
            late = [(await rig.works(InstallRing)).ring_id for _ in range(2)]
            rig.host.stop_run(StopRun(RunId(1)))
            stopped = await rig.says(StageStopped)
            assert sum("its ring did not quiesce within 5 s" in what for what in stopped.unproven) == 2
            rig.host.provision(other_run(2))
            there = [(await rig.works(InstallRing)).ring_id for _ in range(2)]
            assert rig.data_plane.leased == 4
            assert set(rig.data_plane.establisher.records) == {10, 11, 20, 21}
            for ring_id in late:
                rig.system.tell(ESTABLISHER, RingQuiesced(ring_id))
            rig.host.stop_run(StopRun(RunId(2)))
            for ring_id in there:
                rig.system.tell(ESTABLISHER, RingQuiesced(ring_id))
            await rig.says(StageStopped)
            assert rig.data_plane.leased == 0
            released = [event["edge_id"] for event in rig.events if event["event"] == "ring_released"]
            assert sorted(released) == [10, 11, 20, 21]
            rig.host.provision(other_run(3))
            assert set(rig.data_plane.establisher.records) == set()
            assert len([(await rig.works(InstallRing)).ring_id for _ in range(2)]) == 2

    virtual_time.run(runs(), bound=100.0)
