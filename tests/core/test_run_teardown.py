"""Which stage kept a token that did not come in time, as the steps tell that each stage has done."""

from __future__ import annotations

import pytest
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.ids import NodeId, RunId, StageIndex
from swactor_core.machines.run_teardown import RunTeardown
from swactor_core.messages import StageStats, StageStopped

LATE = Fault(FaultReason.EXECUTION_TIMEOUT, Component.RUN, "no token of sequence 5 within 3 s")


def torn_down(*steps: int | None) -> RunTeardown:
    ledger = RunTeardown(
        names={NodeId(2): "b"}, nodes={StageIndex(i): NodeId(i + 1) for i in range(len(steps))}
    )
    for index, done in enumerate(steps):
        if done is not None:
            ledger.note_stopped(StageStopped(RunId(1), StageIndex(index), StageStats(done)))
    return ledger


@pytest.mark.parametrize(
    ("steps", "tokens", "named"),
    [
        ((6, 5, 5), 5, "stage 1 on node b (0000000000000002), which has done 5 steps, the one before it 6"),
        ((6, 6, 5), 5, "stage 2 on node 0000000000000003, which has done 5 steps, the one before it 6"),
        ((5, 5, 5), 5, "stage 0 on node 0000000000000001, which has done 5 steps"),
        ((6, 6, 6), 5, "stage 2 on node 0000000000000003, which had done its step by its end"),
        ((1, 0, 0), 0, "stage 1 on node b (0000000000000002), which has done 0 steps, the one before it 1"),
        ((6, None, 5), 5, ""),
    ],
)
def test_the_first_stage_without_its_step_is_named(
    steps: tuple[int | None, ...], tokens: int, named: str
) -> None:
    assert torn_down(*steps).waited_for(LATE, tokens) == named


@pytest.mark.parametrize("fault", [None, Fault(FaultReason.STREAM_FAULT, Component.DRIVER, "reset")])
def test_of_any_other_end_nothing_is_said(fault: Fault | None) -> None:
    assert torn_down(6, 5, 5).waited_for(fault, 5) == ""
