"""Fault sources of spec section 36 that the mocks can be told to make: each one outcome, with its reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from mock_run import MockRun
from swactor_core.ids import NodeId
from swactor_core.machines.run import RunBounds, RunOutcome, RunState
from swactor_core.machines.stage import StageController
from swactor_core.node.node import TOLD_TO_STOP
from swactor_core.orchestrator.links import DIAL_DEADLINE
from swactor_core.plugins import Plugins
from swactor_core.spi.membership import MemberState
from swactor_testing.memory.hub import HUB

QUICK = RunBounds(readiness=30.0, execution=30.0, teardown=10.0)
LONG = 300

# --- membership and nodes ---


@pytest.mark.parametrize("state", [MemberState.DEAD, MemberState.LEFT])
@pytest.mark.parametrize("at", [RunState.PROVISIONING, RunState.RUNNING, 3])
def test_membership_loss(plugins: Plugins, state: MemberState, at: Any) -> None:
    """For all others at once: links to it end as well, and may be seen first."""

    def act(run: MockRun) -> None:
        run.cluster.judge(run.ids[1], state, observer=run.home)

    run = MockRun(plugins, at=at, act=act, max_tokens=LONG)
    run.play()
    run.check_fault("MembershipLost", killed=(run.ids[1],))
    assert "node-1" in run.result.fault.detail


def test_a_suspicion_is_no_loss(plugins: Plugins) -> None:
    def act(run: MockRun) -> None:
        run.cluster.judge(run.ids[1], MemberState.SUSPECT)

    run = MockRun(plugins, at=2, act=act)
    assert run.play().outcome is RunOutcome.COMPLETED
    assert list(run.result.token_ids) == run.reference
    run.check()


def test_a_node_is_not_there_in_time(plugins: Plugins) -> None:
    """Nobody reaches a node that refuses every dial: the pool's bound ends the wait, and says why."""
    HUB.refuse("not today")
    run = MockRun(plugins, pool_deadline=DIAL_DEADLINE + 0.5)
    run.play()
    run.check_fault("PoolTimeout")
    for node_id in run.ids:
        assert f"({node_id:016x})" in run.result.fault.detail
    assert run.result.fault.detail.count("not today") == len(run.ids)
    assert run.names().count("run_planned") == 0


@pytest.mark.parametrize("at", [RunState.PROVISIONING, 3])
def test_another_life_stands_in_a_nodes_place(plugins: Plugins, at: Any) -> None:
    """It can serve no more, and ends with the reason instead of staying where nobody asks it."""

    def act(run: MockRun) -> None:
        node = run.pool[1]
        assert node.membership is not None
        me = next(m for m in node.membership.members() if m.node_id == node.node_id)
        node._replaced(replace(me, node_id=NodeId(1), epoch=me.epoch + 1))

    run = MockRun(plugins, at=at, act=act, max_tokens=LONG)
    run.play()
    run.check_fault("NodeUnavailable", killed=(run.ids[1],))
    assert "under its name 'node-1': give every node its own" in run.result.fault.detail


@pytest.mark.parametrize("at", [RunState.PLANNING, RunState.PROVISIONING, 3])
def test_another_life_stands_in_the_orchestrators_place(plugins: Plugins, at: Any) -> None:
    def act(run: MockRun) -> None:
        orchestrator = run.session.orchestrator
        assert orchestrator._membership is not None
        me = next(m for m in orchestrator._membership.members() if m.node_id == run.home)
        orchestrator._replaced(replace(me, epoch=me.epoch + 1, state=MemberState.DEAD))

    at_event = -1 if at is RunState.PLANNING else None
    run = MockRun(plugins, at=None if at_event else at, at_event=at_event, act=act, max_tokens=LONG)
    run.play()
    run.check_fault("MembershipLost")
    assert "set this machine's clock" in run.result.fault.detail


@pytest.mark.parametrize("at", [RunState.PROVISIONING, 3])
def test_a_node_vanishes(plugins: Plugins, at: Any) -> None:
    """Its endpoint ends as a killed process's does: whoever was linked to it hears."""
    run = MockRun(plugins, at=at, act=lambda run: HUB.vanish(run.ids[1]), max_tokens=LONG)
    run.play()
    run.check_fault("NodeUnavailable", "StreamFault", "EofMidObject", killed=(run.ids[1],))


def test_a_node_ends_by_itself(plugins: Plugins) -> None:
    """Its worker and its edges end with it, which is no cause."""
    run = MockRun(plugins, at=3, act=lambda run: run.pool[2].stop(), max_tokens=LONG)
    fault = run.play().fault
    run.check_fault("NodeUnavailable", killed=(run.ids[2],))
    assert fault is not None
    assert (fault.detail, fault.node_id) == (TOLD_TO_STOP, run.ids[2])


# --- transport ---


@pytest.mark.parametrize("left", [0, 1])
def test_the_connection_between_two_stages_is_lost(plugins: Plugins, left: int) -> None:
    def act(run: MockRun) -> None:
        HUB.lose(run.ids[left], run.ids[left + 1])

    run = MockRun(plugins, at=3, act=act, max_tokens=LONG)
    run.play()
    run.check_fault("StreamFault", "EofMidObject")


def test_both_sides_of_a_lost_connection_tell_membership(plugins: Plugins) -> None:
    told: list[tuple[int, int]] = []

    def act(run: MockRun) -> None:
        HUB.lose(run.ids[0], run.ids[1])
        told.extend((s.observer, s.suspect) for s in run.cluster.suspicions)

    run = MockRun(plugins, at=3, act=act, max_tokens=LONG)
    run.play()
    assert set(told) == {(run.ids[0], run.ids[1]), (run.ids[1], run.ids[0])}


def test_the_orchestrators_connection_is_lost(plugins: Plugins) -> None:
    def act(run: MockRun) -> None:
        HUB.lose(run.home, run.ids[0])

    run = MockRun(plugins, at=3, act=act, max_tokens=LONG)
    run.play()
    run.check_fault("NodeUnavailable", "StreamFault", killed=(run.ids[0],))


@pytest.mark.parametrize("after", [0, 7, 40, 50])
def test_a_stream_breaks_inside_an_object(plugins: Plugins, after: int) -> None:
    """Bytes 0 to 39 are an object's header: before, inside, at the end of it, and inside its payload."""
    HUB.break_edge(after=after)
    run = MockRun(plugins)
    run.play()
    run.check_fault("StreamFault", "EofMidObject")
    assert run.result.token_ids == ()


def test_an_edge_cannot_be_established(plugins: Plugins) -> None:
    """Stage 0 cannot reach stage 1: the readiness bound ends the run, and no prompt was injected."""

    def act(run: MockRun) -> None:
        HUB.refuse("no way", dialler=run.ids[0], acceptor=run.ids[1])

    run = MockRun(plugins, at=RunState.PROVISIONING, act=act, bounds=QUICK)
    run.play()
    run.check_fault("ReadinessTimeout", "EdgeEstablishmentFailed")
    assert "prompt_injected" not in run.names()


def test_a_stage_is_silent(plugins: Plugins) -> None:
    """Everything that stage 1 sends to the others is held back: only the bound of a token ends it."""

    def act(run: MockRun) -> None:
        HUB.hold(sender=run.ids[1])

    run = MockRun(plugins, at=3, act=act, bounds=QUICK, max_tokens=LONG)
    result = run.play()
    assert result.outcome is RunOutcome.FAULTED
    assert str(result.fault.reason) == "ExecutionTimeout"
    assert run.names().count("run_faulted") == 1
    # What was held back cannot prove itself: the teardown names it.
    assert result.unproven
    for node in run.pool:
        assert node.data_plane.leased == 0


def test_latency_changes_nothing_but_the_time(plugins: Plugins) -> None:
    HUB.delay(0.002)
    run = MockRun(plugins)
    assert run.play().outcome is RunOutcome.COMPLETED
    assert list(run.result.token_ids) == run.reference
    run.check()


# --- provisioning, memory, model ---


def test_provisioning_is_refused(plugins: Plugins) -> None:
    """A node that has another run, as it says, takes no second one."""

    def act(run: MockRun) -> None:
        stages: Any = run.pool[1].stages
        stages.controller = StageController(teardown_bound=1.0)
        stages._provision = SimpleNamespace(run_id=99, stage_index=4)

    run = MockRun(plugins, at=RunState.PROVISIONING, act=act)
    run.play()
    run.check_fault("ProvisioningRejected")
    assert run.result.fault.stage_index == 1
    assert "run 99 is active" in run.result.fault.detail
    assert run.names().count("provisioning_refused") == 1


def test_a_ring_is_larger_than_the_arena(plugins: Plugins) -> None:
    run = MockRun(plugins, ring_capacity=1 << 20, session_options={"arena_ceiling": 1 << 20})
    run.play()
    run.check_fault("RingRequestTooLarge")


def test_an_arena_cannot_be_reserved(plugins: Plugins) -> None:
    run = MockRun(plugins, session_options={"arena_ceiling": 1 << 60})
    run.play()
    run.check_fault("ArenaBootFailed")
    assert str(1 << 60) in run.result.fault.detail


def test_the_model_of_a_node_is_another_one(plugins: Plugins) -> None:
    run = MockRun(plugins, digest="0" * 64)
    run.play()
    run.check_fault("WeightLoadFailed")
    assert "another file" in run.result.fault.detail


# --- worker ---


@pytest.mark.parametrize("layer", [0, 5, 11])
@pytest.mark.parametrize("sequence", [0, 4])
def test_a_worker_ends(plugins: Plugins, layer: int, sequence: int) -> None:
    settings = {"exit_at": sequence, "fault_layer": layer}
    run = MockRun(plugins, session_options={"worker": settings})
    run.play()
    run.check_fault("WorkerCrashed")
    assert run.result.fault.stage_index == layer // 4
    assert "exited with 7" in run.result.fault.detail
    assert len(run.result.token_ids) == sequence
    proofs = {e["proof"]["ring"] for e in run.events if e["event"] == "ring_released"}
    assert "ProcessReaped" in proofs


@pytest.mark.parametrize("layer", [0, 5, 11])
def test_a_step_fails(plugins: Plugins, layer: int) -> None:
    run = MockRun(plugins, session_options={"worker": {"fail_at": 2, "fault_layer": layer}})
    run.play()
    run.check_fault("StepFailed")
    assert run.result.fault.stage_index == layer // 4
    assert len(run.result.token_ids) == 2


def test_the_device_is_out_of_memory(plugins: Plugins) -> None:
    run = MockRun(plugins, session_options={"worker": {"memory_bytes": 8}})
    run.play()
    run.check_fault("DeviceOutOfMemory")
    assert run.result.fault.stage_index == 0


@pytest.mark.parametrize("polls", [0, 2])
def test_a_device_copy_fails(plugins: Plugins, polls: int) -> None:
    run = MockRun(plugins, session_options={"worker": {"fail_copy": 5, "copy_polls": polls}})
    run.play()
    run.check_fault("DeviceCopyFailed")


def test_a_worker_cannot_start(plugins: Plugins) -> None:
    run = MockRun(plugins, session_options={"worker": {"colour": "red"}})
    run.play()
    run.check_fault("WorkerFatal")
    assert "colour" in run.result.fault.detail
