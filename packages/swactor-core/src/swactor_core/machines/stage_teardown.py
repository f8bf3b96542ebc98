"""Stage teardown (spec section 38): what must end before it has stopped, its edges and the worker's role.

A ledger, no machine: `stage.py` enters what stopped, and reads what is waited for and what the end cannot
prove. A role that no ConfigureRole ever named is not waited for, nor is one whose worker is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swactor_core.ids import EdgeId
from swactor_core.messages import EdgeStopped


@dataclass(slots=True)
class StageTeardown:
    role_touched: bool = False
    role_gone: bool = False
    edges: set[EdgeId] = field(default_factory=set)
    _stopped: set[EdgeId] = field(default_factory=set)
    unproven: tuple[str, ...] = ()

    def note_edge(self, event: EdgeStopped) -> None:
        self._stopped.add(event.edge_id)
        if event.unproven:
            self.unproven += (event.unproven,)

    @property
    def waits_for_role(self) -> bool:
        return self.role_touched and not self.role_gone

    @property
    def complete(self) -> bool:
        return self._stopped == self.edges and not self.waits_for_role

    def stopped(self, edge_id: EdgeId) -> bool:
        return edge_id in self._stopped

    def give_up(self, seconds: float) -> tuple[str, ...]:
        """The bound has passed: what is still missing is unproven; these are its names."""
        waiting = sorted(self.edges - self._stopped)
        missing = tuple(f"edge {edge} did not stop within {seconds:g} s" for edge in waiting)
        if self.waits_for_role:
            missing += (f"the worker did not reset its role within {seconds:g} s",)
        self.unproven += missing
        return missing
