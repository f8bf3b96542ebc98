"""An actor that fails for what its machine lacks is no defect: the operator is told what to give."""

from __future__ import annotations

import errno
import os

import pytest
from swactor_core.broken_actors import fault_of
from swactor_core.faults import REMEDIES, Component, FaultReason, InternalCause
from swactor_core.ids import NodeId


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
        (MemoryError(), "ulimit -v"),
    ],
)
def test_what_a_machine_lacks_is_told_with_its_remedy_and_is_no_defect(error: Exception, word: str) -> None:
    fault = fault_of(Component.NODE, error, node_id=NodeId(7))
    assert (fault.reason, fault.cause, fault.node_id) == (
        FaultReason.INTERNAL,
        InternalCause.MACHINE_LACKS,
        7,
    )
    assert word in fault.detail
    assert "defect" not in fault.remedy


def test_any_other_failure_is_a_defect() -> None:
    fault = fault_of(Component.NODE, KeyError("x"))
    assert (fault.detail, fault.cause) == ("Node: KeyError: 'x'", "")
    assert fault.remedy == REMEDIES[FaultReason.INTERNAL]
    assert "defect" in fault.remedy
