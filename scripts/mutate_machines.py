"""Spoils each row of each machine's table in turn, and says whether a test of that machine notices.

    scripts/mutate_machines.py [--machine NAME ...] [--narrow]

A mutant is a machine class without one row, or one that ignores the row's event; it lives in this process
only, no file is touched. It is killed when a test of the machine's contract module fails that states
behaviour: a scenario with its exact actions, an event that a state expects late, a broken host. Not asked,
because they would notice any removal or none: the tests that count rows, and the random walks. What outlives
its contract module is shown to all of tests/core, each survivor in a process of its own (not with --narrow).

Exits with 1 when fewer than 95 % of the mutants are killed, when one outlives every test and is not listed
with its reason in `mutate_machines.toml` beside this file, and when one that is listed there is killed.
"""

# ruff: noqa: T201 -- a tool that prints its findings

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from swactor_core.diagram import all_machines
from swactor_core.fsm import Machine, Row

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "core"
LISTED = Path(__file__).with_suffix(".toml")
NEEDED = 0.95
WIDE_BOUND = 600.0
# The module that a reader lays beside the machine's section of the specification.
CONTRACTS = {
    "ArenaManager": "test_machine_arena.py",
    "EdgeRecord": "test_machine_edge.py",
    "Egress": "test_worker_egress_machine.py",
    "GpuWorkerCtl": "test_machine_worker_ctl.py",
    "Ingress": "test_worker_ingress_machine.py",
    "Node": "test_machine_node.py",
    "Pool": "test_machine_pool.py",
    "RecvPump": "test_machine_pumps.py",
    "Rendezvous": "test_machine_rendezvous.py",
    "Run": "test_machine_run.py",
    "RxEdge": "test_machine_gates.py",
    "SendPump": "test_machine_pumps.py",
    "StageController": "test_machine_stage.py",
    "TokenEndpoint": "test_machine_endpoint.py",
    "TxEdge": "test_machine_gates.py",
    "Worker": "test_worker_machine.py",
}
COUNTS_ROWS = "test_every_transition_of_the_table_is_taken"
COUNTING_MODULES = ("test_zz_transition_coverage.py", "test_diagram.py", "test_row_mutants.py")
Check = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`instead` stands where the row was; None when nothing does."""

    machine: type[Machine[Any]]
    row: Row
    instead: Row | None

    def __str__(self) -> str:
        what = "removed" if self.instead is None else "ignored"
        return f"{self.machine.NAME}:{self.row.source}:{self.row.event.__name__}:{what}"


def mutants(machine: type[Machine[Any]]) -> list[Mutant]:
    found = []
    for row in machine.TABLE:
        found.append(Mutant(machine, row, None))
        deaf = Row(row.source, row.event, None, (row.source,))
        if deaf != row:
            found.append(Mutant(machine, row, deaf))
    return found


@contextmanager
def living(mutant: Mutant) -> Iterator[None]:
    """Inside the block the machine's table and index are the mutant's."""
    machine = mutant.machine
    table, index = machine.TABLE, machine._INDEX
    rows = (mutant.instead if row is mutant.row else row for row in table)
    machine.TABLE = tuple(row for row in rows if row is not None)
    machine._INDEX = machine._index()
    try:
        yield
    finally:
        machine.TABLE, machine._INDEX = table, index


def killer(mutant: Mutant, checks: list[tuple[str, Check]]) -> str:
    """The name of the first check that fails with the mutant, or an empty one."""
    with living(mutant):
        for name, check in checks:
            try:
                check()
            except Exception:
                return name
    return ""


class _Collected:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


def contract_checks(names: list[str]) -> dict[str, list[tuple[str, Check]]]:
    """By module: its tests that state behaviour, as calls. They must be plain functions without fixtures."""
    collected = _Collected()
    modules = sorted({CONTRACTS[name] for name in names})
    quiet = ["-p", "no:terminal", "-o", "addopts=--import-mode=importlib"]
    options = ["--collect-only", *quiet, f"--rootdir={ROOT}"]
    status = pytest.main([*options, *(str(TESTS / module) for module in modules)], plugins=[collected])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the contract modules cannot be collected: {status!r}")
    checks: dict[str, list[tuple[str, Check]]] = {module: [] for module in modules}
    for item in collected.items:
        assert isinstance(item, pytest.Function)
        if item.originalname == COUNTS_ROWS or getattr(item.obj, "is_hypothesis_test", False):
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        wanted = set(item.fixturenames) - set(parameters)
        if wanted - {"request", "event_loop_policy"}:
            raise SystemExit(f"{item.nodeid} wants the fixtures {sorted(wanted)}; a contract test takes none")
        checks[item.path.name].append((item.name, lambda run=item.obj, given=parameters: run(**given)))
    return checks


class _Mutated:
    """For a process of its own: the mutant lives from the moment when the tests have been imported."""

    def __init__(self, mutant: Mutant) -> None:
        self._living = living(mutant)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._living.__enter__()


def wide(name: str) -> int:
    """All of tests/core against one mutant: the exit status of pytest."""
    mutant = next(m for machine in all_machines() for m in mutants(machine) if str(m) == name)
    left_out = [f"--ignore={TESTS / module}" for module in COUNTING_MODULES]
    options = ["-x", "-q", f"--rootdir={ROOT}", "-k", f"not {COUNTS_ROWS}", *left_out]
    return int(pytest.main([*options, str(TESTS)], plugins=[_Mutated(mutant)]))


def outlives_everything(mutant: Mutant) -> bool:
    command = [sys.executable, __file__, "--wide", str(mutant)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WIDE_BOUND, check=False)
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"tests/core could not be run against {mutant}:\n{done.stdout}{done.stderr}")
    return done.returncode == pytest.ExitCode.OK


def listed() -> dict[str, str]:
    """Reason by name of the mutant that may live."""
    entries = tomllib.loads(LISTED.read_text(encoding="utf-8")).get("survivor", [])
    return {entry["mutant"]: entry["reason"] for entry in entries}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--machine", action="append", choices=sorted(CONTRACTS), help="only this one")
    parser.add_argument("--narrow", action="store_true", help="do not show survivors to all of tests/core")
    parser.add_argument("--wide", metavar="MUTANT", help=argparse.SUPPRESS)
    choice = parser.parse_args(arguments)
    if choice.wide:
        return wide(choice.wide)
    machines = [m for m in all_machines() if not choice.machine or m.NAME in choice.machine]
    unknown = {machine.NAME for machine in all_machines()} ^ set(CONTRACTS)
    if unknown:
        raise SystemExit(f"machines without a contract module, or modules without a machine: {unknown}")
    checks = contract_checks([machine.NAME for machine in machines])
    for module, tests in checks.items():
        for name, test in tests:
            try:
                test()
            except Exception as error:
                raise SystemExit(f"{module}::{name} fails without any mutant: {error}") from error
    total, survivors = 0, []
    for machine in machines:
        tried = mutants(machine)
        alive = [mutant for mutant in tried if not killer(mutant, checks[CONTRACTS[machine.NAME]])]
        killed = len(tried) - len(alive)
        print(f"{machine.NAME:16} {len(machine.TABLE):4} rows, {killed:4} of {len(tried):4} killed")
        total += len(tried)
        survivors += alive
    if not choice.narrow:
        survivors = [mutant for mutant in survivors if outlives_everything(mutant)]
    return report(total, survivors, excused=listed(), complete=not choice.machine)


def report(total: int, survivors: list[Mutant], *, excused: dict[str, str], complete: bool) -> int:
    """Prints what lives and why, and judges it; `complete` when every row was tried."""
    share = (total - len(survivors)) / total
    print(f"{total - len(survivors)} of {total} killed, {share:.1%}")
    names = {str(mutant) for mutant in survivors}
    for name in sorted(names):
        print(f"survived: {name}: {excused.get(name, 'NOT LISTED')}")
    stale = sorted(set(excused) - names) if complete else []
    for name in stale:
        print(f"listed in {LISTED.name}, but killed or gone: {name}")
    return int(share < NEEDED or bool(names - set(excused)) or bool(stale))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
