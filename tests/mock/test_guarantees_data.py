"""System guarantees (spec section 39) of the data path and of ends: payload isolation, compute visibility,
backpressure (spec section 35), terminal outcome, quiescence, worker restart. One test for each, which quotes
it; `test_guarantees_control.py` has the others, and holds all quotations against the spec."""

from __future__ import annotations

import base64
import json
import logging
import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints
from unittest import mock

import event_checker
import pytest
from fault_sources import SOURCES, command_worker, end_worker, malform, ring_of, worker_says
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_run import MockRun
from swactor_core.codec import MessageCodec
from swactor_core.faults import Component, ReleaseFailure, RingFaultReason, RoleFailure, StepFailure
from swactor_core.ids import (
    INPUT_PORT,
    DeviceObjectHandle,
    RingId,
    Sequence,
    StageIndex,
    StepId,
    WorkerGeneration,
)
from swactor_core.machines.arena import DiscardRange
from swactor_core.machines.endpoint import OpenTokenEdges
from swactor_core.machines.run import RunOutcome
from swactor_core.machines.run_effects import PlanBuilt
from swactor_core.machines.stage_effects import ModelOpened
from swactor_core.messages import (
    CONTROL_MESSAGES,
    WORKER_COMMANDS,
    WORKER_EVENTS,
    Address,
    ConfigureRole,
    ExecuteStep,
    InitializeWorker,
    InjectTokens,
    InstallRing,
    ObjectLoaded,
    ProvisionStage,
    PumpProof,
    QuiescenceProof,
    ReleaseDeviceObject,
    ReleaseFailed,
    ReleaseRing,
    RingFault,
    RingProof,
    RoleFailed,
    StageFault,
    StageReady,
    StepFailed,
    StopEndpoints,
    TokenReceived,
)
from swactor_core.node.data_plane import ArenaAdapter
from swactor_core.plugins import Plugins
from swactor_core.specs import OBJECT_HEADER_BYTES, RingLayout
from swactor_core.spi.worker import StepInput
from swactor_core.worker.rings import IngressEnd
from swactor_testing.echo import EchoRole, LateBridge
from swactor_testing.heap import HeapArenas
from witness import Witness, harness_of, watching


@pytest.fixture(scope="module")
def canonical(plugins: Plugins) -> tuple[MockRun, Witness, str]:
    """The canonical scenario, watched, and all that was logged."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, root = Keep(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with watching() as seen:
            run = MockRun(plugins, nodes=3, max_tokens=6, ring_capacity=128, seed=1)
            assert run.play().outcome is RunOutcome.COMPLETED
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return run, seen, "\n".join(lines)


def kinds(annotation: Any) -> set[Any]:
    """All types that a value of this annotation is made of."""
    found = {annotation}
    for inner in get_args(annotation):
        found |= kinds(inner)
    if isinstance(annotation, type) and is_dataclass(annotation):
        for inner in get_type_hints(annotation).values():
            found |= kinds(inner)
    return found


# --- payload isolation ---


def test_payload_is_nowhere_but_on_edges(canonical: tuple[MockRun, Witness, str]) -> None:
    """Payload isolation (spec section 39): payload bytes never travel in actor messages, process control
    messages, logs, or JSON command/event lines"""
    run, seen, logged = canonical
    for message in (*CONTROL_MESSAGES, *WORKER_COMMANDS, *WORKER_EVENTS):
        assert not kinds(message) & {bytes, bytearray, memoryview}, f"{message.__name__} could carry payload"
    commands, events = MessageCodec(WORKER_COMMANDS), MessageCodec(WORKER_EVENTS)
    texts = [
        logged,
        *(json.dumps(event) for event in run.events),
        *(repr(message) for _, _, message in seen.told),
        *(repr(message) for _, message in seen.frames),
        *(commands.encode(command).decode() for _, command in seen.commands),
        *(events.encode(event).decode() for event in seen.worker_events if type(event) in WORKER_EVENTS),
    ]
    plan = run.result.plan
    assert plan is not None
    searched = 0
    for edge in plan.edges[1:-1]:
        row = bytes(seen.written[edge.edge_id][OBJECT_HEADER_BYTES : OBJECT_HEADER_BYTES + 64])
        values = list(memoryview(row).cast("f"))
        shapes = (repr(row)[2:-1], row.hex(), base64.b64encode(row)[:-4].decode(), str(values)[1:-1])
        for text in texts:
            assert not any(shape in text for shape in shapes)
            searched += 1
    assert searched > 500


def test_actors_carry_names_and_handles_only(canonical: tuple[MockRun, Witness, str]) -> None:
    """Payload isolation (spec section 39): actors carry identities, lifecycle events, wake hints, and opaque
    handles"""
    _, seen, _ = canonical
    told = {type(message) for _, _, message in seen.told}
    assert len(told) > 40
    for message in told:
        assert is_dataclass(message), f"{message.__name__} is no plain message"
        assert not kinds(message) & {bytearray, memoryview}
    assert [f.name for f in fields(DeviceObjectHandle)] == ["worker_generation", "id"], "opaque: no pointer"
    of_the_plan = (PlanBuilt, OpenTokenEdges, ProvisionStage, ModelOpened, ConfigureRole)  # once a run
    longest = max(len(repr(message)) for _, _, message in seen.told if not isinstance(message, of_the_plan))
    assert longest < 1000, "no message grows with the payload"


# --- compute visibility ---


@pytest.mark.parametrize("polls", [0, 3])
def test_compute_sees_whole_objects(plugins: Plugins, polls: int) -> None:
    """Compute visibility (spec section 39): compute receives only complete logical objects"""
    given_to_roles: list[tuple[int, bytes]] = []
    execute = EchoRole.execute

    def record(role: EchoRole, step: StepInput, should_abort: Any) -> Any:
        given_to_roles.append((step.extent, bytes(step.allocation)))
        return execute(role, step, should_abort)

    with mock.patch.object(EchoRole, "execute", record), watching() as seen:
        run = MockRun(
            plugins,
            nodes=2,
            max_tokens=4,
            prompt="a prompt much longer than its ring",
            ring_capacity=64,
            session_options={"worker": {"copy_polls": polls}},
        )
        assert run.play().outcome is RunOutcome.COMPLETED
    payloads: list[bytes] = []
    plan = run.result.plan
    assert plan is not None
    for edge in plan.edges[:-1]:
        stream, at = bytes(seen.written[edge.edge_id]), 0
        while at < len(stream):
            extent = int.from_bytes(stream[at + 24 : at + 32], "little")
            payloads.append(stream[at + OBJECT_HEADER_BYTES : at + OBJECT_HEADER_BYTES + extent])
            at += OBJECT_HEADER_BYTES + extent
    assert sorted(given_to_roles) == sorted((len(payload), payload) for payload in payloads)
    assert max(extent for extent, _ in given_to_roles) > 10 * 64, "larger than its ring, many times"


def test_loaded_is_said_of_whole_objects(plugins: Plugins) -> None:
    """Compute visibility (spec section 39): ObjectLoaded is emitted only after valid header, exact extent
    copy, copy completion, and device handle creation"""
    checked: list[int] = []
    perform = IngressEnd._perform

    def check(end: IngressEnd, action: Any) -> Any:
        loaded = getattr(action, "message", None)
        if isinstance(loaded, ObjectLoaded):
            bridge = end._bridge
            allocation = end._objects.allocation(loaded.device_handle)  # it is there
            assert len(allocation) == loaded.extent
            if isinstance(bridge, LateBridge):
                mine = memoryview(allocation)
                assert not any(copy.target.obj is mine.obj for copy in bridge.in_flight)
            checked.append(loaded.sequence)
        return perform(end, action)

    with mock.patch.object(IngressEnd, "_perform", check):
        for polls in (0, 2):
            run = MockRun(
                plugins,
                nodes=2,
                max_tokens=4,
                ring_capacity=64,
                session_options={"worker": {"copy_polls": polls}},
            )
            assert run.play().outcome is RunOutcome.COMPLETED
    assert sorted(checked) == sorted([*range(4)] * 3 * 2)
    with watching() as seen:
        run = MockRun(plugins, nodes=2, at_event="run_planned", max_tokens=4)
        run.act = lambda run: malform(run, edge=1, sequence=1, cause="ExtentExceedsMax")
        run.play()
    run.check_fault("MalformedObjectHeader")
    plan = run.result.plan
    assert plan is not None
    loaded = [e.sequence for e in seen.worker_events if isinstance(e, ObjectLoaded)
              and e.edge_id == plan.edges[1].edge_id]  # fmt: skip
    assert loaded == [0], "nothing of the record whose header was refused"


# --- backpressure ---


def test_a_stall_reaches_the_sender(plugins: Plugins) -> None:
    """Backpressure (spec section 39): slow worker, slow network, or downstream stall propagates by ring and
    QUIC flow control"""
    ring, written = 64, []

    def stalled(run: MockRun) -> None:
        """Stage 1 reads nothing while the prompt comes: how far do those before it get?"""
        worker: Any = run.pool[1]._worker
        held, worker._hosted.commands = worker._hosted.commands, _Held()

        def look() -> None:
            plan = next(e["edges"] for e in run.events if e["event"] == "run_planned")
            written.append({edge: len(seen.written.get(edge, b"")) for edge in plan})
            held.extend(worker._hosted.commands.kept)
            worker._hosted.commands = held
            worker._hosted.woken.set()

        run.session.orchestrator.system._loop.call_later(50.0, look)

    with watching() as seen:
        run = MockRun(
            plugins,
            nodes=2,
            prompt="p" * 400,
            ring_capacity=ring,
            max_tokens=2,
            at_event="readiness_barrier_passed",
            act=stalled,
        )
        result = run.play()
    assert result.outcome is RunOutcome.COMPLETED
    assert list(result.token_ids) == run.reference, "nothing was lost meanwhile"
    [[_, activations, _]] = [list(counts.values()) for counts in written]
    whole = OBJECT_HEADER_BYTES + 401 * 64
    assert activations <= 2 * ring, (
        f"{activations} of {whole} bytes left the stage before the one that stalled"
    )
    run.check()


class _Held(list[Any]):
    """A worker's commands, none of which it sees until they are handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def append(self, command: Any) -> None:
        self.kept.append(command)


@settings(deadline=None)
@given(st.data())
def test_unread_bytes_stay(data: st.DataObject) -> None:
    """Backpressure (spec section 39): unread bytes are not overwritten"""
    arena = HeapArenas().create(4096)
    layout = RingLayout(RingId(1), 0, 64 + 192, 0, 64, 192, 64)
    producer, consumer = arena.create_ring(layout), arena.open_ring(layout)
    sent, received, count = bytearray(), bytearray(), 0
    for _ in range(data.draw(st.integers(1, 60))):
        if data.draw(st.booleans()):
            span = producer.writable_span()
            assert len(sent) - len(received) + len(span) <= 192
            size = data.draw(st.integers(0, len(span)))
            piece = bytes((count + i) % 251 for i in range(size))
            count += size
            span[:size] = piece
            producer.advance_commit(size)
            sent += piece
        else:
            ready = consumer.readable_span()
            size = data.draw(st.integers(0, len(ready)))
            received += ready[:size]
            consumer.advance_consume(size)
    while len(received) < len(sent):
        ready = consumer.readable_span()
        received += ready
        consumer.advance_consume(len(ready))
    assert received == sent


# --- terminal outcome ---


@pytest.mark.parametrize("seed", range(12))
def test_one_outcome_whatever_comes_together(plugins: Plugins, seed: int) -> None:
    """Terminal outcome (spec section 39): each run records exactly one terminal outcome"""
    chance = random.Random(seed)
    names = chance.sample([name for name, source in sorted(SOURCES.items()) if not source.at], 3)
    token = chance.randrange(1, 6)

    def act(run: MockRun) -> None:
        run.session.stop_run()
        for name in names:
            SOURCES[name].act(run, chance.randrange(3), chance)
        run.session.stop_run()

    print(seed, names, token)
    run = MockRun(plugins, at_event="execute_step_started" if token == 1 else None, seed=seed, max_tokens=9)
    run.at, run.act = (None if token == 1 else token), act
    result = run.play()
    outcomes = [event["event"] for event in run.events if event["event"] in event_checker.OUTCOMES]
    said = {"run_completed": "completed", "run_faulted": "faulted", "run_stopped": "operator-stopped"}
    assert [said[name] for name in outcomes] == [str(result.outcome)]
    assert (result.fault is not None) == (result.outcome is RunOutcome.FAULTED)


@pytest.mark.parametrize("end", ["run_completed", "run_faulted", "run_stopped"])
def test_nothing_new_begins_after_the_outcome(plugins: Plugins, end: str) -> None:
    """Terminal outcome (spec section 39): after terminal outcome begins, no new run work is accepted except
    teardown"""
    worker = {"fail_at": 3, "fault_layer": 11} if end == "run_faulted" else {}
    run = MockRun(plugins, max_tokens=6, session_options={"worker": worker})
    if end == "run_stopped":
        run.at, run.act = 2, lambda run: run.session.stop_run()

    def tempt(event: dict[str, Any]) -> None:
        """Whatever would have made it go on, right when it has ended."""
        if event["event"] == end:
            system, tokens = run.session.orchestrator.system, run.names().count("token_received")
            for message in (StageReady(event["run_id"], StageIndex(0)), TokenReceived(Sequence(tokens), 5)):
                system.tell(Address(Component.RUN), message)

    run.watch = tempt
    with watching() as seen:
        run.play()
    assert end in run.names()
    order = [what for kind, what in seen.order if kind in ("told", "frame", "command")]
    ended = next(i for i, what in enumerate(order) if isinstance(what, StopEndpoints))
    assert not [what for what in order[ended:] if isinstance(what, ProvisionStage | InjectTokens)]
    faulted = [i for i, what in enumerate(order) if isinstance(what, StageFault)]
    if end == "run_faulted":
        late = [what for what in order[faulted[0] :] if isinstance(what, ExecuteStep)]
        assert not late, "a stage that faulted executes nothing more, and nothing comes after it"
    run.check()


# --- quiescence ---


@pytest.mark.parametrize("seed", range(16))
def test_no_range_is_reused_while_it_is_used(plugins: Plugins, seed: int) -> None:
    """Quiescence (spec section 39): arena memory cannot be reused under a live pump, worker ring, or copy
    operation"""
    chance = random.Random(seed)
    given_back: list[RingId] = []
    parts: dict[ArenaAdapter, Any] = {}
    perform = ArenaAdapter._perform

    def check(adapter: ArenaAdapter, effect: Any) -> None:
        if isinstance(effect, DiscardRange) and adapter in parts:
            node, ring_id = parts[adapter], effect.layout.ring_id
            driver, worker = node.data_plane.driver, node._worker._hosted
            assert driver is None or ring_id not in driver._pumps, "a pump is at it"
            if worker is not None and not worker.killed and worker.harness.exit_code is None:
                assert ring_id not in worker.harness._ends, "the worker has it"
                for copy in getattr(worker.harness._objects.bridge, "in_flight", ()):
                    for view in (copy.source, copy.target):
                        assert view.obj is not node.data_plane.arena.arena.memory or not _within(
                            view, node, effect.layout
                        ), "a copy is at it"
            given_back.append(ring_id)
        perform(adapter, effect)

    source = SOURCES[chance.choice(("worker ends", "connection lost", "orchestrator's connection lost"))]
    index = chance.randrange(2)

    def act(run: MockRun) -> None:
        parts.update({node.data_plane.arena: node for node in run.pool})
        if seed % 2:
            source.act(run, index, chance)
        else:
            run.session.stop_run()

    with mock.patch.object(ArenaAdapter, "_perform", check):
        run = MockRun(
            plugins,
            nodes=2,
            max_tokens=5,
            ring_capacity=64,
            seed=seed,
            at_event=chance.randrange(15, 75),
            act=act,
            session_options={"worker": {"copy_polls": chance.choice((1, 3))}},
        )
        run.play()
    assert given_back


def _within(view: memoryview, node: Any, layout: RingLayout) -> bool:
    """Whether a copy's view of arena memory lies in this range: it is told by writing to it."""
    memory = node.data_plane.arena.arena.memory
    if not len(view):
        return False
    before = bytes(view[:1])
    inside = memory[layout.arena_offset : layout.arena_offset + layout.total_len]
    view[:1] = bytes((before[0] ^ 0xFF,))
    moved = memory[layout.arena_offset : layout.arena_offset + layout.total_len] != inside
    view[:1] = before
    return moved


def test_a_release_takes_a_proof(canonical: tuple[MockRun, Witness, str]) -> None:
    """Quiescence (spec section 39): release requires teardown proof"""
    run, seen, _ = canonical
    assert get_type_hints(ReleaseRing)["proof"] is QuiescenceProof
    with pytest.raises(TypeError):
        ReleaseRing(RingId(1))  # type: ignore[call-arg]
    releases = seen.of(ReleaseRing)
    assert len(releases) == 2 * 4
    for release in releases:
        assert release.proof == QuiescenceProof(PumpProof.STOPPED, RingProof.QUIESCED)
    told = [what for kind, what in seen.order if kind == "told"]
    for release in releases:
        before = told[: told.index(release)]
        names = [type(m).__name__ for m in before if getattr(m, "ring_id", None) == release.ring_id]
        assert {"PumpStopped", "RingQuiesced"} <= set(names), "the proof is what was said"
    run.check()


# --- worker restart ---


def restarted(plugins: Plugins, then: Callable[[MockRun], None], *, at: str) -> tuple[MockRun, Witness]:
    """A run whose worker on node 1 died before it, so that it is made with its second life; `then` happens
    `at` an event of it."""
    run = MockRun(plugins, nodes=2, max_tokens=4, at_event="node_available")
    run.act = lambda run: end_worker(run, 1)
    run.watch = lambda event: then(run) if event["event"] == at else None
    with watching() as seen:
        run.play()
    return run, seen


def test_a_restart_is_a_new_generation(plugins: Plugins) -> None:
    """Worker restart (spec section 39): restart creates a new generation"""
    run, _ = restarted(plugins, lambda run: None, at="run_planned")
    assert run.result.outcome is RunOutcome.COMPLETED
    assert list(run.result.token_ids) == run.reference
    lives = [e["worker_generation"] for e in run.events if e["event"] == "worker_started"
             and e["node_id"] == f"{run.ids[1]:016x}"]  # fmt: skip
    assert lives == [1, 2]
    run.check()


def test_nothing_of_a_former_generation_is_valid(plugins: Plugins) -> None:
    """Worker restart (spec section 39): old device handles, roles, rings, and steps are invalid"""
    machines: list[Any] = []

    def former_life_speaks(run: MockRun) -> None:
        machines.append(run.pool[1].system._mailboxes[Address(Component.GPU_WORKER_CTL)].actor.machine)
        edge_id, ring_id = ring_of(run, 1, inbound=True)
        plan = run.pool[1].stages._provision
        assert plan is not None
        role, step = plan.runtime.role_id, StepId(1)
        broken = RingFaultReason.RING_STATE_INVALID
        for word in (
            RoleFailed(role, RoleFailure.BACKEND_ERROR),
            RingFault(ring_id, edge_id, INPUT_PORT, broken),
            StepFailed(role, step, StepFailure.TINYGRAD_ERROR),
        ):
            worker_says(run, 1, word, generation=1)

    run, _ = restarted(plugins, former_life_speaks, at="readiness_barrier_passed")
    assert run.result.outcome is RunOutcome.COMPLETED, "its words are heard by nobody"
    assert machines[0].stale_events == 3
    run.check()

    def handle_is_used(run: MockRun) -> None:
        command_worker(run, 1, ReleaseDeviceObject(DeviceObjectHandle(WorkerGeneration(1), 1)))

    run, seen = restarted(plugins, handle_is_used, at="readiness_barrier_passed")
    run.check_fault("StepFailed")
    [failed] = [event for event in seen.worker_events if isinstance(event, ReleaseFailed)]
    assert failed.reason is ReleaseFailure.STALE_GENERATION


def test_roles_and_rings_come_again(plugins: Plugins) -> None:
    """Worker restart (spec section 39): roles and rings must be reinstalled"""
    empty: list[bool] = []

    def look(run: MockRun) -> None:
        harness: Any = harness_of(run, 1)
        empty.append(
            not harness._machine._held.rings and harness._machine._held.role is None and not harness._ends
        )

    run, seen = restarted(plugins, look, at="run_planned")
    assert run.result.outcome is RunOutcome.COMPLETED
    assert empty == [True], "a new life begins without any"
    commands = [type(command) for worker, command in seen.commands if worker is run.pool[1]._worker]
    of_second = commands[len(commands) - commands[::-1].index(InitializeWorker) :]
    assert of_second.count(ConfigureRole) == 1
    assert of_second.count(InstallRing) == 2
    assert of_second.index(ConfigureRole) < of_second.index(ExecuteStep)
