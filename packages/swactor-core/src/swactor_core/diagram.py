"""Machines as pictures: a transition table becomes a Mermaid state diagram, all of them one Markdown page.

Knows tables (`fsm.py`) and the package of machines; writes no file. Rows that change nothing are listed below
the picture, not drawn.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import swactor_core.machines
from swactor_core.fsm import Machine, Row

HEAD = """\
# Machines

Drawn from the transition tables by `scripts/draw_machines.py`; a test keeps this page true. An arrow carries
the events that take it; an event with a question mark has several targets, and its handler decides. The list
below a picture names the events that a state expects and ignores, late ones mostly. Any other event in a
state is an `InvalidTransition`, which changes nothing.
"""


def all_machines() -> tuple[type[Machine[Any]], ...]:
    """Every machine of `swactor_core.machines`, in order of name."""
    found: dict[str, type[Machine[Any]]] = {}
    for info in pkgutil.iter_modules(swactor_core.machines.__path__):
        module = importlib.import_module(f"swactor_core.machines.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Machine) and hasattr(value, "TABLE"):
                found[value.NAME] = value
    return tuple(found[name] for name in sorted(found))


def mermaid(machine: type[Machine[Any]]) -> str:
    """The state diagram of one machine, arrows in the order of its table."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for row in machine.TABLE:
        for target in row.targets:
            if target is not row.source or not _ignores(row):
                label = row.event.__name__ + ("?" if len(row.targets) > 1 else "")
                arrows.setdefault((row.source, target), []).append(label)
    lines = ["stateDiagram-v2", f"    [*] --> {machine.INITIAL}"]
    lines += [
        f"    {source} --> {target}: {', '.join(labels)}" for (source, target), labels in arrows.items()
    ]
    left = {source for source, target in arrows if source != target}
    ends = dict.fromkeys(target for _, target in arrows if target not in left)
    lines += [f"    {end} --> [*]" for end in ends]
    return "\n".join(lines)


def ignored(machine: type[Machine[Any]]) -> dict[str, list[str]]:
    """By state: the events that it takes and that change nothing."""
    states: dict[str, list[str]] = {}
    for row in machine.TABLE:
        if _ignores(row):
            states.setdefault(row.source, []).append(row.event.__name__)
    return states


def page() -> str:
    """The Markdown page of all machines."""
    parts = [HEAD]
    for machine in all_machines():
        title = (sys.modules[machine.__module__].__doc__ or "").strip().splitlines()[0]
        module = machine.__module__.rpartition(".")[2]
        parts.append(f"## {machine.NAME}\n\n{title} (`machines/{module}.py`)\n")
        parts.append(f"```mermaid\n{mermaid(machine)}\n```\n")
        rows = [f"- {state}: {', '.join(events)}" for state, events in ignored(machine).items()]
        if rows:
            parts.append("Expected and ignored:\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _ignores(row: Row) -> bool:
    return row.handler is None and row.targets == (row.source,)
