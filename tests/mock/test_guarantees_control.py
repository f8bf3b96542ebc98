"""System guarantees (spec section 39) of the control path: authority, readiness, weight use, edge identity,
sequence. One test for each, which quotes it; another test holds all quotations against the spec."""

from __future__ import annotations

import ast
import asyncio
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from fault_sources import command_worker, silence_worker
from mock_run import MockRun
from swactor_core.faults import Component, RoleFailure, StepFailure
from swactor_core.ids import NodeId, RoleId, RunId, Sequence, StepId
from swactor_core.machines.run import RunOutcome
from swactor_core.messages import (
    Address,
    ExecuteStep,
    InjectTokens,
    InstallRing,
    ObjectLoaded,
    ObjectProduced,
    ProvisionRx,
    ProvisionStage,
    ProvisionTx,
    StageFault,
    StageReady,
    StepFailed,
    StepRuntime,
    TokenReceived,
)
from swactor_core.plan import GgufSource
from swactor_core.planner import EdgeIdAllocator, NodeCapacity, RuntimeChoices, plan_run
from swactor_core.plugins import Plugins
from swactor_core.specs import OBJECT_HEADER_BYTES
from swactor_core.wire import decode_object_header
from swactor_testing.memory.hub import HUB
from swactor_testing.synthetic import SyntheticModel
from test_error_reasons import role_fails
from witness import Witness, watching

FROM_NODES = (  # what a node may say: evidence and reports, none of which assigns anything
    "EventReport", "NodeAvailable", "NodeFaulted", "StageFault", "StageProgress", "StageReady",
    "StageStopped", "WatchRefused",
)  # fmt: skip


@pytest.fixture(scope="module")
def canonical(plugins: Plugins) -> tuple[MockRun, Witness]:
    """The canonical scenario, watched."""
    with watching() as seen:
        run = MockRun(plugins, nodes=3, max_tokens=6, ring_capacity=128, seed=1)
        assert run.play().outcome is RunOutcome.COMPLETED
    run.check()
    assert list(run.result.token_ids) == run.reference
    return run, seen


def plan_of(run: MockRun) -> Any:
    assert run.result.plan is not None
    return run.result.plan


def steps_of(run: MockRun, name: str, stage: int) -> list[int]:
    return [e["sequence"] for e in run.events if e["event"] == name and e["stage_index"] == stage]


# --- authority ---


def test_only_the_orchestrator_assigns(canonical: tuple[MockRun, Witness]) -> None:
    """Authority (spec section 39): orchestrator is the only component that assigns topology, stages, layer
    ranges, edge ids, and object specs"""
    run, seen = canonical
    plan = plan_of(run)
    for peer, message in seen.frames:
        if peer == run.home:
            assert type(message).__name__ in FROM_NODES
    told = {stage.node_id: m for stage in plan.stages for p, m in seen.frames
            if isinstance(m, ProvisionStage) and p == stage.node_id}  # fmt: skip
    specs = {edge.edge_id: edge.object_spec for edge in plan.edges}
    for stage in plan.stages:
        message = told[stage.node_id]
        assert (message.stage_index, message.layer_start, message.layer_end_exclusive) == (
            stage.stage_index, stage.layer_start, stage.layer_end_exclusive)  # fmt: skip
        assert (message.inbound.edge_id, message.outbound.edge_id) == (
            stage.inbound_edge, stage.outbound_edge)  # fmt: skip
    used = [m for kind in (InstallRing, ProvisionTx, ProvisionRx) for m in seen.of(kind)]
    assert len(used) == 3 * 2 * len(plan.edges), "at each end: to establisher, to its record, and installed"
    for message in used:
        assert message.object_spec == specs[message.edge_id], "made up on the way"


def test_nodes_reject_what_is_not_of_the_active_plan(plugins: Plugins) -> None:
    """Authority (spec section 39): nodes reject provisioning and edge data that do not match active run
    plan"""
    sent: list[ProvisionStage] = []

    def act(run: MockRun) -> None:
        node, stranger = run.pool[0], run.pool[2]
        provision = node.stages._provision
        assert provision is not None
        wrong = (
            replace(provision, run_id=RunId(5)),
            replace(provision, run_id=RunId(5), stage_index=provision.stage_count),
            replace(provision, run_id=RunId(5), layer_end_exclusive=99),
        )
        for message in wrong:
            node.stages.provision(message)
            sent.append(message)
        transport = stranger.transport
        assert transport is not None

        async def disturb() -> None:
            stream = await transport.open_edge(run.ids[0], provision.inbound.edge_id, deadline=1)
            await stream.write(memoryview(b"nonsense")) if stream.room() else None

        node.system.start_task(disturb(), owner=Address(Component.DRIVER))

    run = MockRun(plugins, at_event="readiness_barrier_passed", act=act, max_tokens=30)
    HUB.delay(0.01)
    assert run.play().outcome is RunOutcome.COMPLETED, "the run does not even notice"
    assert list(run.result.token_ids) == run.reference
    assert run.names().count("provisioning_refused") == len(sent) == 3
    assert run.names().count("edge_refused") == 1
    assert not any(part.data_plane.leased for part in (run.session.orchestrator, *run.pool))


# --- readiness ---


@pytest.mark.parametrize("late", [0, 1, 2])
def test_no_prompt_before_the_barrier(plugins: Plugins, late: int) -> None:
    """Readiness (spec section 39): orchestrator does not inject prompt before global readiness barrier"""

    def act(run: MockRun) -> None:
        stages: Any = run.pool[late].stages
        opened = stages._open_model

        async def slowly(provision: object) -> None:
            await asyncio.sleep(100)
            await opened(provision)

        stages._open_model = slowly

    with watching() as seen:
        run = MockRun(plugins, at_event="run_planned", act=act)
        assert run.play().outcome is RunOutcome.COMPLETED
    names = run.names()
    barrier = names.index("readiness_barrier_passed")
    assert run.moments[barrier] > 1100
    assert max(i for i, name in enumerate(names) if name == "stage_ready") < barrier
    assert barrier < names.index("prompt_injected")
    kinds = [what if kind == "told" else kind for kind, what in seen.order]
    injected = next(i for i, what in enumerate(kinds) if isinstance(what, InjectTokens))
    assert sum(isinstance(what, StageReady) for what in kinds[:injected]) == 3
    assert "written" not in kinds[:injected], "a byte of the prompt was sent"


def _no_weights(run: MockRun) -> None:
    async def wait(provision: object) -> None:
        await asyncio.sleep(1e6)

    stages: Any = run.pool[1].stages
    stages._open_model = wait


def _no_inbound(run: MockRun) -> None:
    arena: Any = run.pool[1].data_plane.arena.arena
    create = arena.create_ring

    def only_outbound(layout: Any) -> Any:
        ring = create(layout)
        if layout.ring_id == 1:
            arena.memory[layout.header_offset] ^= 1
        return ring

    arena.create_ring = only_outbound


def _no_controller(run: MockRun) -> None:
    run.pool[1].system.stop(Address(Component.STAGE_CONTROLLER))


@pytest.mark.parametrize(
    ("at", "lacking"),
    [
        pytest.param("run_planned", lambda run: silence_worker(run, 1), id="worker"),
        pytest.param("run_planned", _no_weights, id="weights"),
        pytest.param("run_planned", _no_inbound, id="inbound edge"),
        pytest.param("run_planned", lambda run: HUB.refuse("no", dialler=run.ids[1]), id="outbound edge"),
        pytest.param("stage_provision_started", _no_controller, id="StageController"),
    ],
)
def test_no_stage_is_ready_without_all_of_it(plugins: Plugins, at: str, lacking: Any) -> None:
    """Readiness (spec section 39): a stage does not report StageReady before worker, weights, inbound edge,
    outbound edge, and StageController are ready"""
    run = MockRun(plugins, at_event=at, act=lacking)
    run.play()
    assert run.result.outcome is RunOutcome.FAULTED
    ready = {event["stage_index"] for event in run.events if event["event"] == "stage_ready"}
    assert 1 not in ready
    assert "prompt_injected" not in run.names()


# --- weight use ---


def test_no_step_before_the_weights(plugins: Plugins) -> None:
    """Weight use (spec section 39): a stage cannot execute before assigned weights are loaded and bound"""

    def act(run: MockRun) -> None:
        step = ExecuteStep(RoleId(1), StepId(1), (), (), StepRuntime(0), release_inputs_after=True)
        command_worker(run, 1, step)

    with watching() as seen:
        run = MockRun(plugins, nodes=2, at_event="pool_ready", act=act, max_tokens=3)
        run.play()
    refused = [e.reason for e in seen.worker_events if isinstance(e, StepFailed)]
    assert refused == [StepFailure.ROLE_UNAVAILABLE], "a worker without a role executes nothing"
    run = MockRun(plugins, max_tokens=3)
    run.play()
    for stage in range(3):
        of_stage = [e["event"] for e in run.events if e.get("stage_index") == stage]
        assert of_stage.index("weights_loaded") < of_stage.index("execute_step_started")


@pytest.mark.parametrize("reason", list(RoleFailure))
def test_weights_that_fail_fault_their_stage(reason: RoleFailure) -> None:
    """Weight use (spec section 39): weight loading failures become stage faults"""
    scripted = role_fails(reason)
    with watching() as seen:
        run = MockRun(scripted["plugins"](), nodes=2)
        run.choice = run.choice.model_copy(update=scripted["choice"])
        run.play()
    faults = [message.fault for _, message in seen.frames if isinstance(message, StageFault)]
    assert faults
    assert {(fault.cause, fault.component) for fault in faults} == {(str(reason), Component.WORKER)}
    assert "stage_faulted" in run.names()
    run.check_fault("WeightLoadFailed", "DeviceOutOfMemory")


# --- edge identity ---


def plans(count: int) -> list[Any]:
    """Plans of one orchestrator, for pools of every size."""
    facts, allocator, chance = SyntheticModel("demo").facts, EdgeIdAllocator(7), random.Random(1)
    return [
        plan_run(
            tuple(NodeCapacity(NodeId(100 + i)) for i in range(1 + number % facts.num_layers)),
            facts,
            source=GgufSource("demo"),
            choices=RuntimeChoices(tuple(range(chance.randint(1, 9))), chance.randint(1, 9)),
            run_id=RunId(number),
            orchestrator=NodeId(1),
            edge_ids=allocator,
        )
        for number in range(count)
    ]


def test_edge_ids_are_unique() -> None:
    """Edge identity (spec section 39): every edge id is unique within run"""
    ids = [edge.edge_id for plan in plans(48) for edge in plan.edges]
    assert len(ids) == len(set(ids)), "over all runs of an orchestrator, even"


def test_an_edge_has_two_ends(canonical: tuple[MockRun, Witness]) -> None:
    """Edge identity (spec section 39): every edge has one producer and one consumer"""
    for plan in plans(24):
        for before, after in pairwise(plan.edges):
            assert before.consumer == after.producer, "a line, from the orchestrator and back to it"
        assert plan.edges[0].producer == plan.edges[-1].consumer
    run, seen = canonical
    edges = [edge.edge_id for edge in plan_of(run).edges]
    assert sorted(m.edge_id for m in seen.of(ProvisionTx)) == sorted(edges * 2), "to establisher and record"
    assert sorted(m.edge_id for m in seen.of(ProvisionRx)) == sorted(edges * 2)
    assert sorted(edge_id for _, _, edge_id in seen.opened) == sorted(edges)


def test_data_goes_by_node_and_edge(canonical: tuple[MockRun, Witness]) -> None:
    """Edge identity (spec section 39): data plane is addressed by (node_id, edge_id)"""
    run, seen = canonical
    planned = {(e.producer.node_id, e.consumer.node_id, e.edge_id) for e in plan_of(run).edges}
    assert set(seen.opened) == planned


def test_no_actor_address_leaves_its_process(canonical: tuple[MockRun, Witness]) -> None:
    """Edge identity (spec section 39): remote actor addresses are not needed for data flow"""
    _, seen = canonical

    def kinds(annotation: Any) -> set[Any]:
        found = {annotation}
        for inner in get_args(annotation):
            found |= kinds(inner)
        if hasattr(annotation, "__dataclass_fields__"):
            for inner in get_type_hints(annotation).values():
                found |= kinds(inner)
        return found

    messages = {type(message) for _, message in seen.frames}
    assert {ProvisionStage, StageReady} <= messages
    for message in messages:
        assert Address not in kinds(message), f"{message.__name__} carries an actor's address"


# --- sequence ---


def test_the_prompt_is_sequence_0(canonical: tuple[MockRun, Witness]) -> None:
    """Sequence (spec section 39): prefill is sequence 0"""
    run, seen = canonical
    first = seen.of(InjectTokens)[0]
    assert (first.sequence, first.token_ids) == (0, plan_of(run).runtime.prompt)
    for worker in {worker for worker, _ in seen.commands}:
        steps = [c for w, c in seen.commands if w is worker and isinstance(c, ExecuteStep)]
        assert [c.runtime.position for c in steps] == [
            0,
            *range(len(first.token_ids), len(first.token_ids) + 5),
        ]
        assert steps[0].inputs[0].sequence == 0


def test_decode_sequences_grow(canonical: tuple[MockRun, Witness]) -> None:
    """Sequence (spec section 39): decode sequences are strictly increasing"""
    run, _ = canonical
    for stage in range(3):
        for name in ("object_loaded", "execute_step_started", "object_produced", "step_completed"):
            assert steps_of(run, name, stage) == list(range(6))


def test_a_step_follows_its_object(canonical: tuple[MockRun, Witness]) -> None:
    """Sequence (spec section 39): a stage executes sequence s only after loading inbound object sequence s"""
    _, seen = canonical
    loaded: set[tuple[int, Any]] = set()
    executed = 0
    for kind, what in seen.order:
        if kind == "event" and isinstance(what, ObjectLoaded):
            loaded.add((what.sequence, what.device_handle))
        if kind == "command" and isinstance(what, ExecuteStep):
            [bound] = what.inputs
            assert (bound.sequence, bound.device_handle) in loaded
            executed += 1
    assert executed == 3 * 6


def test_output_has_its_inputs_sequence(canonical: tuple[MockRun, Witness]) -> None:
    """Sequence (spec section 39): stage output object uses sequence s"""
    run, seen = canonical
    for _, command in seen.commands:
        if isinstance(command, ExecuteStep):
            assert command.outputs[0].sequence == command.inputs[0].sequence
    for edge in plan_of(run).edges:
        assert sequences(seen.written[edge.edge_id]) == list(range(6))


def sequences(stream: bytes) -> list[int]:
    """Of the records on a stream, as they were written."""
    found, position = [], 0
    while position < len(stream):
        header = decode_object_header(bytes(stream[position : position + OBJECT_HEADER_BYTES]))
        found.append(int(header.sequence))
        position += OBJECT_HEADER_BYTES + header.extent
    assert position == len(stream)
    return found


def test_injection_follows_consumption(canonical: tuple[MockRun, Witness]) -> None:
    """Sequence (spec section 39): orchestrator injects s + 1 only after consuming output token sequence s"""
    _, seen = canonical
    consumed = -1
    for kind, what in seen.order:
        if kind == "told" and isinstance(what, TokenReceived):
            assert what.sequence == consumed + 1
            consumed = what.sequence
        if kind == "told" and isinstance(what, InjectTokens):
            assert what.sequence == consumed + 1
    assert consumed == 5


def test_workers_name_nothing_themselves(canonical: tuple[MockRun, Witness]) -> None:
    """Sequence (spec section 39): workers do not invent graph-visible object ids or sequence numbers"""
    _, seen = canonical
    given = {(c.outputs[0].ring_id, c.outputs[0].object_id, c.outputs[0].sequence)
             for _, c in seen.commands if isinstance(c, ExecuteStep)}  # fmt: skip
    injected = {Sequence(message.sequence) for message in seen.of(InjectTokens)}
    produced = [e for e in seen.worker_events if isinstance(e, ObjectProduced)]
    assert len(produced) == 3 * 6
    for event in produced:
        assert (event.ring_id, event.object_id, event.sequence) in given
        assert event.sequence in injected
    loaded = {(e.object_id, e.sequence) for e in seen.worker_events if isinstance(e, ObjectLoaded)}
    assert loaded == {(sequence, sequence) for sequence in injected}, "what the orchestrator named, all along"


# --- completeness ---


def test_every_guarantee_has_its_test() -> None:
    """Each line of spec section 39 is quoted by the docstring of one test, and by one only."""
    spec = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()
    section = spec.split("\n39. System Guarantees\n")[1].split("\n40. ")[0]
    wanted = [line for line in section.splitlines() if line and not line.endswith(":")]
    quoted: list[str] = []
    for file in sorted(Path(__file__).parent.glob("test_guarantees_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                said = " ".join((ast.get_docstring(node) or "").split())
                _, found, quotation = said.partition(" (spec section 39): ")
                quoted += [quotation] if found else []
    assert len(wanted) == 29
    assert sorted(quoted) == sorted(wanted)
