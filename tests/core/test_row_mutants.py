"""Tests of the machines are tested: a row that is spoiled is noticed, and the tool that says so can doubt.

With `--long`, what outlives the tests of its machine is shown to all others: `scripts/mutate_machines.py`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from swactor_core.diagram import all_machines
from swactor_core.fsm import InvalidTransition, Row
from swactor_core.machines.pumps import Paired, ReadStream, RecvPump, RecvPumpState
from swactor_core.messages import StopEdge

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "mutate_machines.py"
EDGE: Any = 6


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate_machines", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def mutate(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_mutant_is_killed_by_the_contract_of_its_machine_or_listed() -> None:
    said = mutate("--narrow")
    for machine in all_machines():
        assert machine.NAME in said


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_outlives_that_is_listed_with_its_reason() -> None:
    mutate()


def paired(tool: ModuleType, kind: str) -> Any:
    return next(
        m for m in tool.mutants(RecvPump) if str(m) == f"RecvPump:WaitingForSpecAndStream:Paired:{kind}"
    )


def reads() -> None:
    assert RecvPump(EDGE).step(Paired(), 0.0) == (ReadStream(),)


def stops() -> None:
    RecvPump(EDGE).step(StopEdge(EDGE), 0.0)


@pytest.mark.parametrize("kind", ["removed", "ignored"])
def test_a_mutant_dies_of_a_test_of_its_row_and_of_no_other(tool: ModuleType, kind: str) -> None:
    mutant = paired(tool, kind)
    assert tool.killer(mutant, [("stops", stops), ("reads", reads)]) == "reads"
    assert tool.killer(mutant, [("stops", stops)]) == ""
    reads()


def test_a_mutant_s_table_and_its_steps_agree_and_end_with_it(tool: ModuleType) -> None:
    table = RecvPump.TABLE
    with tool.living(paired(tool, "removed")):
        assert len(RecvPump.TABLE) == len(table) - 1
        with pytest.raises(InvalidTransition):
            RecvPump(EDGE).step(Paired(), 0.0)
    with tool.living(paired(tool, "ignored")):
        assert len(RecvPump.TABLE) == len(table)
        assert RecvPump(EDGE).step(Paired(), 0.0) == ()
    assert RecvPump.TABLE is table
    reads()


def test_a_row_that_already_ignores_its_event_has_one_mutant_only(tool: ModuleType) -> None:
    ignoring = Row(RecvPumpState.CLOSED, StopEdge, None, (RecvPumpState.CLOSED,))
    assert [str(m) for m in tool.mutants(RecvPump) if m.row == ignoring] == [
        "RecvPump:Closed:StopEdge:removed"
    ]


def test_the_verdict(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    mutant, name = paired(tool, "removed"), "RecvPump:WaitingForSpecAndStream:Paired:removed"

    def verdict(total: int, alive: list[Any], *, excused: dict[str, str], complete: bool = True) -> int:
        status: int = tool.report(total, alive, excused=excused, complete=complete)
        return status

    assert verdict(100, [], excused={}) == 0
    assert verdict(100, [mutant], excused={}) == 1, "not listed"
    assert verdict(100, [mutant], excused={name: "it is the first"}) == 0
    assert verdict(10, [mutant], excused={name: "it is the first"}) == 1, "too many live"
    assert verdict(100, [], excused={name: "it is the first"}) == 1, "listed, but killed"
    assert verdict(100, [], excused={name: "it is the first"}, complete=False) == 0
    said = capsys.readouterr().out
    assert f"survived: {name}: NOT LISTED" in said
    assert f"survived: {name}: it is the first" in said
