"""Transition coverage: which rows of a machine's table a set of steps has taken.

Knows `Machine.observers` and `Machine.TABLE` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from swactor_core.fsm import Machine

Transition = tuple[str, str, str]


@contextmanager
def recorded(machine: type[Machine[Any]]) -> Iterator[set[Transition]]:
    """The set of (source, event, target) that machines of this class take inside the block."""
    taken: set[Transition] = set()

    def observe(name: str, source: StrEnum, event: type[Any], target: StrEnum) -> None:
        if name == machine.NAME:
            taken.add((source, event.__name__, target))

    Machine.observers.append(observe)
    try:
        yield taken
    finally:
        Machine.observers.remove(observe)


def declared(machine: type[Machine[Any]]) -> set[Transition]:
    """Every (source, event, target) that the machine's table allows."""
    return {(row.source, row.event.__name__, target) for row in machine.TABLE for target in row.targets}
