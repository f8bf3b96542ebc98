"""The drawn machines: one picture as it must be, and the page of all of them up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from swactor_core.diagram import all_machines, ignored, mermaid, page
from swactor_core.machines.rendezvous import Rendezvous

PAGE = Path(__file__).resolve().parents[2] / "docs" / "machines.md"

RENDEZVOUS = """\
stateDiagram-v2
    [*] --> Empty
    Empty --> RecvSpec: EstablishRecv
    Empty --> PendingStream: StreamArrived
    PendingStream --> Paired: EstablishRecv?
    PendingStream --> RecvSpec: EstablishRecv?
    PendingStream --> PendingStream: StreamArrived
    PendingStream --> Closed: StopEdge, TimerFired
    RecvSpec --> Paired: StreamArrived?
    RecvSpec --> RecvSpec: StreamArrived?
    RecvSpec --> Closed: StopEdge
    Paired --> Paired: StreamArrived
    Paired --> Closed: StopEdge
    Closed --> RecvSpec: EstablishRecv
    Closed --> Closed: StreamArrived"""


def test_a_machine_is_drawn_in_the_order_of_its_table() -> None:
    assert mermaid(Rendezvous) == RENDEZVOUS
    assert ignored(Rendezvous) == {"Empty": ["StopEdge"], "Closed": ["StopEdge"]}


def test_a_state_that_nothing_leaves_is_an_end() -> None:
    run = next(machine for machine in all_machines() if machine.NAME == "Run")
    assert mermaid(run).endswith("Done --> [*]")


@pytest.mark.parametrize("machine", all_machines(), ids=lambda machine: machine.NAME)
def test_every_row_is_drawn_or_listed(machine: type) -> None:
    drawn = mermaid(machine)
    for row in machine.TABLE:
        name = row.event.__name__
        if name not in ignored(machine).get(row.source, ()):
            arrows = [line for line in drawn.splitlines() if line.startswith(f"    {row.source} --> ")]
            assert any(name in line for line in arrows), f"{row.source} on {name}"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run scripts/draw_machines.py"
