"""People know nodes by name: a fault says name and id, wherever it names one."""

from __future__ import annotations

from swactor_core.faults import Component, Fault, FaultReason, RoleFailure
from swactor_core.ids import EdgeId, NodeId, StageIndex
from swactor_core.machines.pool import PoolAborted
from swactor_core.machines.run import Run, RunBounds

A, B, UNKNOWN = NodeId(0x47), NodeId(0xFEDCBA9876543210), NodeId(5)
NAMES = {A: "kitchen", B: "attic"}


def lost(detail: str, node_id: NodeId | None = A) -> Fault:
    return Fault(
        FaultReason.NODE_UNAVAILABLE, Component.POOL, detail, node_id=node_id, stage_index=StageIndex(1)
    )


def test_a_named_fault_says_the_name_beside_the_id():
    fault = lost("it ended").named(NAMES)
    assert fault.line() == (
        "NodeUnavailable seen by Pool at stage 1 on node kitchen (0000000000000047): it ended"
    )
    assert fault.fields()["fault_node_id"] == "0000000000000047"
    assert fault.fields()["fault_node_name"] == "kitchen"


def test_an_edge_is_said_once() -> None:
    fault = Fault(FaultReason.STREAM_FAULT, Component.DRIVER, "edge 3: it broke", edge_id=EdgeId(3))
    assert fault.line() == "StreamFault seen by Driver of edge 3: it broke"


def test_a_node_without_a_name_is_its_id_alone():
    fault = lost("it ended", UNKNOWN).named(NAMES)
    assert "on node 0000000000000005: it ended" in fault.line()
    assert "fault_node_name" not in fault.fields()
    assert "fault_node_name" not in lost("it ended").fields()


def test_ids_of_nodes_in_the_detail_get_their_names_and_other_numbers_do_not():
    fault = lost(
        "peer fedcba9876543210 is gone; node 0000000000000005 and digest fedcba9876543210ab stay"
    ).named(NAMES)
    assert fault.detail == (
        "peer attic (fedcba9876543210) is gone; node 0000000000000005 and digest fedcba9876543210ab stay"
    )
    assert fault.named(NAMES) == fault, "a name is said once"


def test_a_run_records_its_fault_with_the_name():
    run = Run(run_id=7, bounds=RunBounds(), prefill_chunk=8, names=NAMES)
    actions = run.step(PoolAborted(lost("it ended", B)), 1.0)
    assert run.fault is not None
    assert run.fault.node_name == "attic"
    [event] = [action for action in actions if type(action).__name__ == "Emit"]
    assert event.fields["fault_node_name"] == "attic"


def test_a_stage_that_its_backend_cannot_make_has_a_remedy_about_the_node_and_not_about_the_file() -> None:
    def remedy(cause: str) -> str:
        return Fault(FaultReason.WEIGHT_LOAD_FAILED, Component.WORKER, "x", cause=cause).remedy

    assert "doctor" in remedy(RoleFailure.BACKEND_ERROR)
    assert "model file" in remedy("")
