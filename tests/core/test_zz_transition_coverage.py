"""The gate over all machines: every row of every table, to every target it names, is taken by a scenario.

Plays the scenarios of this folder's test modules itself, so that it holds alone and in any order. A row that
no scenario can take is wrong: mend the table or write the scenario.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from swactor_core.diagram import all_machines
from swactor_core.fsm import Machine
from swactor_testing.scripts import Script
from swactor_testing.transitions import Transition, declared, recorded


def taken_by(module: ModuleType, machine: type[Machine[Any]]) -> set[Transition]:
    """By the module's `Script`s of this machine, or by its `play` of each of its `SCENARIOS`."""
    scripts = [value for value in vars(module).values() if isinstance(value, Script)]
    if scripts:
        return {t for script in scripts if script.machine is machine for t in script.taken()}
    with recorded(machine) as taken:
        for name in getattr(module, "SCENARIOS", ()):
            module.play(name)
    return taken


@pytest.mark.parametrize("machine", all_machines(), ids=lambda machine: machine.NAME)
def test_every_row_is_taken_to_every_target(
    machine: type[Machine[Any]], scenario_modules: list[ModuleType]
) -> None:
    taken = {t for module in scenario_modules for t in taken_by(module, machine)}
    missing = sorted(" -- ".join(map(str, transition)) for transition in declared(machine) - taken)
    assert not missing, f"{machine.NAME}: no scenario takes\n" + "\n".join(missing)


def test_the_gate_sees_the_machines_of_the_specification() -> None:
    names = {machine.NAME for machine in all_machines()}
    assert names >= {
        "ArenaManager",
        "EdgeRecord",
        "GpuWorkerCtl",
        "Node",
        "Pool",
        "RecvPump",
        "Rendezvous",
        "Run",
        "RxEdge",
        "SendPump",
        "StageController",
        "TokenEndpoint",
        "TxEdge",
    }
