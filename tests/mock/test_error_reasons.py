"""The error taxonomy (spec section 37) and the fault sources (spec section 36): each reason, produced.

Every member of every enum of `swactor_core.faults` has its scenario here, ring faults, object failures, step
failures, worker fatal reasons and other control reasons; one without fails. A reason of a
run reaches its one recorded failure, in result and event alike, with the component that saw it, as one line
that names the place and with a remedy. Almost all are made end to end, on the mocks; where a part of this
system cannot be brought to say something, its word is put into the node's ear (`worker_says`), as another
worker plug-in might say it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from unittest import mock

import pytest
from fault_sources import (
    cut_short,
    end_worker,
    mislead_worker,
)
from mock_run import MOCKS, MockRun
from reason_means import (
    _OBJECTS,
    _SMALL_ARENA,
    LAST,
    PLANNED,
    READY,
    C,
    OtherAbi,
    Produced,
    R,
    UnmappableArenas,
    aborts_step,
    arena_plugin,
    cursor_moves,
    fails_at_node,
    installs_no_ring,
    member_dies,
    model_fails,
    never_opens_model,
    other_handle,
    other_ring,
    other_run_is_here,
    pump_fails,
    raises,
    refuses_rings,
    release,
    resets_role_first,
    ring_header,
    role_fails,
    says_ring_fault,
    says_step_failed,
    short_output,
    step_with,
    stops_worker_that_hangs,
    tell_node,
    worker_plugin,
)
from reasons_beside_runs import SEEN
from swactor_core import faults
from swactor_core.faults import (
    REMEDIES,
    REMEDIES_OF_CAUSES,
    Component,
    EstablishmentFailure,
    FaultReason,
    InternalCause,
    LeaseRejection,
    ModelFailure,
    ObjectFailure,
    ReleaseFailure,
    RingFaultReason,
    RoleFailure,
    StepFailure,
    StreamFaultReason,
    WorkerFatalReason,
)
from swactor_core.ids import DeviceObjectHandle, NodeId, WorkerGeneration
from swactor_core.machines.run import RunOutcome
from swactor_core.messages import (
    Shutdown,
)
from swactor_core.plan import EdgePlan
from swactor_core.plugins import Plugins
from swactor_core.specs import RingSpec
from swactor_testing.memory.hub import HUB

ENUMS: tuple[type[StrEnum], ...] = tuple(
    enum
    for enum in vars(faults).values()
    if isinstance(enum, type) and issubclass(enum, StrEnum) and enum not in (StrEnum, Component)
)
MEMBERS = [member for enum in ENUMS for member in enum]

# --- one scenario for each reason ---

OF_RUNS: dict[FaultReason, Produced] = {
    R.NODE_UNAVAILABLE: Produced(
        R.NODE_UNAVAILABLE, C.NODE, READY, lambda run: HUB.vanish(run.ids[LAST]), stage=LAST, gone=True
    ),
    R.MEMBERSHIP_LOST: Produced(
        R.MEMBERSHIP_LOST, C.MEMBERSHIP, READY, member_dies, stage=LAST, said="node-1 is Dead", gone=True
    ),
    R.POOL_TIMEOUT: Produced(
        R.POOL_TIMEOUT, C.POOL, "-1", lambda run: HUB.refuse("not today"), said="waiting for node-0"
    ),
    R.PROVISIONING_REJECTED: Produced(
        R.PROVISIONING_REJECTED, C.NODE, PLANNED, other_run_is_here, stage=LAST, said="run 99 is active"
    ),
    R.PLAN_INVALID: Produced(R.PLAN_INVALID, C.PLANNER, options={"nodes": 13}, said="at most 12 nodes"),
    R.ARENA_BOOT_FAILED: Produced(
        R.ARENA_BOOT_FAILED, C.ARENA_MANAGER, session={"arena_ceiling": 1 << 60}, said="on node"
    ),
    R.RING_REQUEST_TOO_LARGE: Produced(
        R.RING_REQUEST_TOO_LARGE,
        C.ARENA_MANAGER,
        session=_SMALL_ARENA,
        options={"ring_capacity": 1 << 20},
        said="of edge",
    ),
    R.ARENA_PRESSURE_TIMEOUT: Produced(
        R.ARENA_PRESSURE_TIMEOUT,
        C.EDGE_ESTABLISHER,
        session=_SMALL_ARENA,
        options={"ring_capacity": 640 << 10},
        said="within 20 s",
    ),
    R.WEIGHT_LOAD_FAILED: Produced(
        R.WEIGHT_LOAD_FAILED, C.STAGE_CONTROLLER, options={"digest": "0" * 64}, said="another file"
    ),
    R.EDGE_ESTABLISHMENT_FAILED: Produced(
        R.EDGE_ESTABLISHMENT_FAILED,
        C.DRIVER,
        PLANNED,
        lambda run: HUB.refuse("no way", acceptor=run.ids[LAST]),
        stage=0,
        said="no way",
    ),
    R.MALFORMED_OBJECT_HEADER: _OBJECTS[ObjectFailure.HEADER_MALFORMED],
    R.EOF_MID_OBJECT: Produced(
        R.EOF_MID_OBJECT,
        C.WORKER,
        PLANNED,
        lambda run: cut_short(run, edge=1, sequence=1, after=50),
        stage=LAST,
        said="10 of 64 payload bytes",
    ),
    R.STREAM_FAULT: Produced(
        R.STREAM_FAULT, C.DRIVER, PLANNED, lambda run: HUB.break_edge(after=7), said="by script"
    ),
    R.PUMP_FAILURE: Produced(
        R.PUMP_FAILURE, C.DRIVER, READY, pump_fails, stage=LAST, said="a defect of the pump"
    ),
    R.RING_FAULT: Produced(R.RING_FAULT, C.DRIVER, READY, cursor_moves, stage=LAST, said="ring"),
    R.WORKER_FATAL: Produced(
        R.WORKER_FATAL, C.WORKER, READY, lambda run: mislead_worker(run, LAST), stage=LAST, said="not allowed"
    ),
    R.WORKER_CRASHED: Produced(
        R.WORKER_CRASHED,
        C.GPU_WORKER_CTL,
        READY,
        lambda run: end_worker(run, LAST),
        stage=LAST,
        said="killed",
    ),
    R.DEVICE_OUT_OF_MEMORY: Produced(R.DEVICE_OUT_OF_MEMORY, C.WORKER, stage=0, worker={"memory_bytes": 3}),
    R.DEVICE_COPY_FAILED: Produced(R.DEVICE_COPY_FAILED, C.WORKER, worker={"fail_copy": 1}, said="copy 1"),
    R.SEQUENCE_VIOLATION: _OBJECTS[ObjectFailure.SEQUENCE_VIOLATION],
    R.STEP_FAILED: Produced(R.STEP_FAILED, C.WORKER, worker={"fail_at": 1, "fault_layer": 11}, stage=LAST),
    R.READINESS_TIMEOUT: Produced(
        R.READINESS_TIMEOUT, C.RUN, PLANNED, never_opens_model, said="stages [1] not ready within 900 s"
    ),
    R.EXECUTION_TIMEOUT: Produced(
        R.EXECUTION_TIMEOUT,
        C.RUN,
        READY,
        lambda run: HUB.hold(sender=run.ids[LAST]),
        said="no token of sequence 0 within 300 s",
        gone=True,
    ),
    R.INTERNAL: Produced(
        R.INTERNAL,
        C.STAGE_CONTROLLER,
        READY,
        tell_node(C.STAGE_CONTROLLER, object()),
        said="cannot take object",
        gone=True,
    ),
}

OF_ACTORS: dict[InternalCause, Produced] = {
    InternalCause.MACHINE_LACKS: Produced(
        R.INTERNAL,
        C.STAGE_CONTROLLER,
        READY,
        fails_at_node(C.STAGE_CONTROLLER, RuntimeError("can't start new thread")),
        said="allow this user more processes and threads",
        gone=True,
    ),
}

OF_OBJECTS: dict[ObjectFailure, Produced] = {
    **_OBJECTS,
    ObjectFailure.DEVICE_ALLOCATION_FAILED: Produced(
        R.DEVICE_OUT_OF_MEMORY, C.WORKER, stage=0, worker={"memory_bytes": 3}, said="3 bytes left"
    ),
    ObjectFailure.DEVICE_COPY_FAILED: Produced(R.DEVICE_COPY_FAILED, C.WORKER, worker={"fail_copy": 1}),
    ObjectFailure.EOF_MID_OBJECT: Produced(
        R.EOF_MID_OBJECT,
        C.WORKER,
        PLANNED,
        lambda run: cut_short(run, edge=1, sequence=0, after=7),
        stage=LAST,
        said="7 of 40 header bytes",
    ),
}

# version, layout and state are found by the worker that opens the ring
OF_RINGS: dict[RingFaultReason, Produced] = {
    RingFaultReason.UNSUPPORTED_RING_VERSION: Produced(
        R.RING_FAULT, C.WORKER, PLANNED, ring_header(4, 2 | 64 << 16), stage=LAST, said="version 2"
    ),
    RingFaultReason.RING_LAYOUT_INVALID: Produced(
        R.RING_FAULT, C.WORKER, PLANNED, ring_header(0, 0), stage=LAST, said="no ring header"
    ),
    RingFaultReason.RING_STATE_INVALID: Produced(
        R.RING_FAULT, C.WORKER, PLANNED, ring_header(28, 1 << 20), stage=LAST, said="contradict each other"
    ),
    RingFaultReason.WORKER_SHUTTING_DOWN: Produced(
        R.RING_FAULT, C.WORKER, PLANNED, stops_worker_that_hangs, stage=LAST, said="Stopping", gone=True
    ),
    RingFaultReason.WORKER_PROCESS_EXITED: Produced(
        R.WORKER_CRASHED,
        C.WORKER,
        READY,
        says_ring_fault(RingFaultReason.WORKER_PROCESS_EXITED),
        stage=LAST,
    ),
    RingFaultReason.WORKER_INTERNAL: Produced(
        R.WORKER_CRASHED, C.WORKER, READY, says_ring_fault(RingFaultReason.WORKER_INTERNAL), stage=LAST
    ),
    # this system's worker says these of the object instead: another's may say them of the ring
    RingFaultReason.DEVICE_OUT_OF_MEMORY: Produced(
        R.DEVICE_OUT_OF_MEMORY,
        C.WORKER,
        READY,
        says_ring_fault(RingFaultReason.DEVICE_OUT_OF_MEMORY),
        stage=LAST,
    ),
    RingFaultReason.DEVICE_COPY_FAILED: Produced(
        R.DEVICE_COPY_FAILED, C.WORKER, READY, says_ring_fault(RingFaultReason.DEVICE_COPY_FAILED), stage=LAST
    ),
    RingFaultReason.SEQUENCE_VIOLATION: Produced(
        R.SEQUENCE_VIOLATION, C.WORKER, READY, says_ring_fault(RingFaultReason.SEQUENCE_VIOLATION), stage=LAST
    ),
    RingFaultReason.HEADER_MALFORMED: Produced(
        R.MALFORMED_OBJECT_HEADER,
        C.WORKER,
        READY,
        says_ring_fault(RingFaultReason.HEADER_MALFORMED),
        stage=LAST,
    ),
}

OF_STEPS: dict[StepFailure, Produced] = {
    StepFailure.ROLE_UNAVAILABLE: Produced(
        R.STEP_FAILED, C.WORKER, READY, resets_role_first, stage=LAST, said="is not configured"
    ),
    StepFailure.INVALID_INPUT_HANDLE: Produced(
        R.STEP_FAILED, C.WORKER, READY, step_with(other_handle), stage=LAST, said="no device object 999"
    ),
    StepFailure.INVALID_OUTPUT_RING: Produced(
        R.STEP_FAILED, C.WORKER, READY, step_with(other_ring), stage=LAST, said="ring 999"
    ),
    StepFailure.TINYGRAD_ERROR: Produced(R.STEP_FAILED, C.WORKER, stage=0, worker={"fail_at": 0}),
    StepFailure.DEVICE_OUT_OF_MEMORY: Produced(
        R.DEVICE_OUT_OF_MEMORY, C.WORKER, stage=0, said="no room", **raises(MemoryError("no room"))
    ),
    StepFailure.OUTPUT_EXTENT_INVALID: Produced(
        R.STEP_FAILED, C.WORKER, stage=0, **worker_plugin(short_output)
    ),
    StepFailure.OUTPUT_COPY_FAILED: Produced(
        R.DEVICE_COPY_FAILED, C.WORKER, stage=0, worker={"fail_copy": 2}, said="copy 2 failed"
    ),
    StepFailure.WORKER_SHUTTING_DOWN: Produced(
        R.STEP_FAILED, C.WORKER, READY, aborts_step, stage=LAST, said="aborted"
    ),
    StepFailure.WORKER_PROCESS_EXITED: Produced(
        R.WORKER_CRASHED,
        C.WORKER,
        READY,
        says_step_failed(StepFailure.WORKER_PROCESS_EXITED),
        stage=LAST,
    ),
}

OF_WORKERS: dict[WorkerFatalReason, Produced] = {
    WorkerFatalReason.ARENA_MAP_FAILED: Produced(
        R.WORKER_FATAL, C.GPU_WORKER_CTL, said="cannot be mapped", **arena_plugin(UnmappableArenas)
    ),
    WorkerFatalReason.RING_HELPER_ABI_MISMATCH: Produced(
        R.WORKER_FATAL, C.GPU_WORKER_CTL, said="ABI", **arena_plugin(OtherAbi)
    ),
    WorkerFatalReason.BACKEND_INIT_FAILED: Produced(
        R.WORKER_FATAL, C.GPU_WORKER_CTL, worker={"colour": "red"}, said="colour"
    ),
    WorkerFatalReason.MALFORMED_CONTROL_MESSAGE: Produced(
        R.WORKER_FATAL, C.WORKER, READY, lambda run: mislead_worker(run, LAST), stage=LAST, said="not allowed"
    ),
    WorkerFatalReason.UNHANDLED_EXCEPTION: Produced(
        R.WORKER_FATAL, C.WORKER, stage=0, said="ZeroDivisionError", **raises(ZeroDivisionError("a defect"))
    ),
}

OF_ROLES: dict[RoleFailure, Produced] = {
    **{
        reason: Produced(
            R.DEVICE_OUT_OF_MEMORY if reason is RoleFailure.DEVICE_OUT_OF_MEMORY else R.WEIGHT_LOAD_FAILED,
            C.WORKER,
            said="by script",
            **role_fails(reason),
        )
        for reason in RoleFailure
    },
}

OF_MODELS: dict[ModelFailure, Produced] = {
    cause: Produced(R.WEIGHT_LOAD_FAILED, C.STAGE_CONTROLLER, said="(mend it)", **model_fails(cause))
    for cause in ModelFailure
}

# what a stage asks to be released
OF_RELEASES: dict[ReleaseFailure, Produced] = {
    ReleaseFailure.UNKNOWN_HANDLE: Produced(
        R.STEP_FAILED,
        C.STAGE_CONTROLLER,
        READY,
        release(DeviceObjectHandle(WorkerGeneration(1), 999)),
        stage=LAST,
    ),
    ReleaseFailure.STALE_GENERATION: Produced(
        R.STEP_FAILED,
        C.STAGE_CONTROLLER,
        READY,
        release(DeviceObjectHandle(WorkerGeneration(7), 1)),
        stage=LAST,
    ),
}

OF_STREAMS: dict[StreamFaultReason, Produced] = {
    StreamFaultReason.PEER_UNREACHABLE: Produced(
        R.EDGE_ESTABLISHMENT_FAILED,
        C.DRIVER,
        PLANNED,
        lambda run: HUB.refuse("no way", acceptor=run.ids[LAST]),
        stage=0,
    ),
    StreamFaultReason.STREAM_BROKEN: Produced(
        R.STREAM_FAULT, C.DRIVER, PLANNED, lambda run: HUB.break_edge(after=7)
    ),
    StreamFaultReason.RING_FAULT: Produced(R.RING_FAULT, C.DRIVER, READY, cursor_moves, stage=LAST),
    StreamFaultReason.PUMP_FAILED: Produced(R.PUMP_FAILURE, C.DRIVER, READY, pump_fails, stage=LAST),
}

OF_LEASES: dict[LeaseRejection, Produced] = {
    LeaseRejection.EXCEEDS_CEILING: Produced(
        R.RING_REQUEST_TOO_LARGE,
        C.ARENA_MANAGER,
        session=_SMALL_ARENA,
        options={"ring_capacity": 1 << 20},
    ),
    LeaseRejection.INVALID_SPEC: Produced(
        R.EDGE_ESTABLISHMENT_FAILED, C.ARENA_MANAGER, options={"ring_alignment": 3}, said="alignment=3"
    ),
    LeaseRejection.NO_MEMORY: Produced(
        R.EDGE_ESTABLISHMENT_FAILED, C.ARENA_MANAGER, PLANNED, refuses_rings, stage=LAST, said="no page"
    ),
    LeaseRejection.SHUTTING_DOWN: Produced(
        R.EDGE_ESTABLISHMENT_FAILED,
        C.ARENA_MANAGER,
        PLANNED,
        tell_node(C.ARENA_MANAGER, Shutdown()),
        stage=LAST,
        said="its node is ending",
    ),
}

OF_ESTABLISHMENT: dict[EstablishmentFailure, Produced] = {
    EstablishmentFailure.RING_NOT_INSTALLED: Produced(
        R.EDGE_ESTABLISHMENT_FAILED, C.EDGE_ESTABLISHER, PLANNED, installs_no_ring, stage=LAST, said="within"
    ),
}

# Members of two enums may be equal: they are texts.
SCENARIOS: list[tuple[StrEnum, Produced]] = [
    pair
    for scenarios in (
        OF_RUNS,
        OF_ACTORS,
        OF_OBJECTS,
        OF_RINGS,
        OF_STEPS,
        OF_WORKERS,
        OF_ROLES,
        OF_MODELS,
        OF_RELEASES,
        OF_STREAMS,
        OF_LEASES,
        OF_ESTABLISHMENT,
    )
    for pair in scenarios.items()  # type: ignore[attr-defined]
]


@pytest.mark.parametrize(
    ("member", "produced"), SCENARIOS, ids=[f"{type(member).__name__}.{member}" for member, _ in SCENARIOS]
)
def test_a_reason_reaches_the_one_recorded_failure(
    member: StrEnum, produced: Produced, plugins: Plugins
) -> None:
    options = dict(produced.options)
    alignment = options.pop("ring_alignment", None)
    run = MockRun(
        produced.plugins() if produced.plugins else plugins,
        **{"nodes": 2, "max_tokens": 4, **options},
        choice=MOCKS.model_copy(update=produced.choice),
        at_event=int(produced.at) if produced.at == "-1" else produced.at or None,
        act=produced.act,
        session_options={"worker": produced.worker, **produced.session},
    )
    if alignment is not None:
        spec = lambda plan, direction: RingSpec(plan.ring_capacity, direction, alignment=alignment)  # noqa: E731
        with mock.patch.object(EdgePlan, "ring_spec", spec):
            run.play()
    else:
        run.play()
    fault = run.result.fault
    assert run.result.outcome is RunOutcome.FAULTED
    assert fault is not None
    line = fault.line()
    print(line, fault.remedy, sep="\n")
    assert fault.reason is produced.reason, line
    assert fault.component is produced.component, line
    if not isinstance(member, FaultReason):
        assert fault.cause == str(member), line
        assert f"({member})" in line
    [event] = [event for event in run.events if event["event"] == "run_faulted"]
    assert event | fault.fields() == event, "result and event say the same"
    assert event.get("edge_id") == fault.edge_id
    assert event.get("ring_id") == fault.ring_id
    if produced.component in (C.TX_EDGE, C.RX_EDGE, C.EDGE_ESTABLISHER, C.DRIVER):
        assert fault.edge_id is not None, line
    if produced.stage is not None:
        assert fault.stage_index == produced.stage, line
        assert f"at stage {produced.stage}" in line
        [planned] = [event for event in run.events if event["event"] == "run_planned"]
        assert event["fault_node_id"] == planned["stages"][produced.stage]["node_id"]
        assert event["fault_node_name"] == f"node-{produced.stage}"
        assert f"on node {event['fault_node_name']} ({event['fault_node_id']})" in line
    assert produced.said in line
    assert "\n" not in line
    assert fault.detail, f"{line}: says nothing of what happened"
    assert fault.remedy == REMEDIES_OF_CAUSES.get((fault.reason, fault.cause), REMEDIES[fault.reason])
    killed: tuple[NodeId, ...] = (run.ids[LAST],) if produced.gone and run.pool else ()
    run.check(killed=killed, unproven=produced.gone)


# --- what is no run's reason: a teardown's, a refusal's, an order's ---


@pytest.mark.parametrize("see", list(SEEN), ids=lambda see: see.__name__)
def test_a_reason_that_no_run_records_is_seen_where_it_belongs(
    see: Callable[[Plugins], set[str]], plugins: Plugins
) -> None:
    assert see(plugins) >= {str(member) for member in SEEN[see]}


# --- completeness ---


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: f"{type(member).__name__}.{member}")
def test_every_reason_has_its_scenario(member: StrEnum) -> None:
    elsewhere = [seen for members in SEEN.values() for seen in members if type(seen) is type(member)]
    same_kind = [made for made, _ in SCENARIOS if type(made) is type(member)]
    assert str(member) in [str(key) for key in (*same_kind, *elsewhere)], "no scenario produces it"


def test_every_reason_has_its_remedy_in_one_line() -> None:
    assert set(REMEDIES) == set(FaultReason)
    for remedy in (*REMEDIES.values(), *REMEDIES_OF_CAUSES.values()):
        assert remedy
        assert "\n" not in remedy


def test_every_component_but_gates_is_seen_to_detect() -> None:
    """Gates pass on what others saw; the token endpoint is tested in its own file."""
    detecting = {produced.component for _, produced in SCENARIOS}
    assert set(Component) - detecting <= {C.TX_EDGE, C.RX_EDGE, C.TOKEN_ENDPOINT}
