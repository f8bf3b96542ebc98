"""Stage teardown (spec section 38): what must end before it has stopped, its edges and the worker's role.

A ledger, no machine: `stage.py` enters what stopped, and reads what is waited for and what the end cannot
prove; a proof that comes after its time is entered too. A role that no ConfigureRole ever named is not waited
for, nor is one whose worker is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swactor_core.ids import EdgeId
from swactor_core.messages import EdgeStopped, RoleReset, WorkerCrashed


@dataclass(slots=True)
class StageTeardown:
    role_touched: bool = False
    role_gone: bool = False
    edges: set[EdgeId] = field(default_factory=set)
    _stopped: set[EdgeId] = field(default_factory=set)
    _unproven: dict[EdgeId, str] = field(default_factory=dict)
    _role_unproven: str = ""

    def note(self, event: EdgeStopped | RoleReset | WorkerCrashed) -> None:
        """An edge has stopped, proved or not, in its time or after it; or the role is gone."""
        if not isinstance(event, EdgeStopped):
            self.role_gone = True
            return
        self._stopped.add(event.edge_id)
        if event.unproven:
            self._unproven[event.edge_id] = event.unproven
        else:
            self._unproven.pop(event.edge_id, None)

    @property
    def unproven(self) -> tuple[str, ...]:
        """What has no proof now."""
        role = () if self.role_gone or not self._role_unproven else (self._role_unproven,)
        return (*self._unproven.values(), *role)

    @property
    def waits_for_role(self) -> bool:
        return self.role_touched and not self.role_gone

    @property
    def complete(self) -> bool:
        return self._stopped == self.edges and not self.waits_for_role

    def stopped(self, edge_id: EdgeId) -> EdgeStopped | None:
        """What that edge has said of its end, if it has."""
        return EdgeStopped(edge_id, self._unproven.get(edge_id, "")) if edge_id in self._stopped else None

    def give_up(self, seconds: float) -> tuple[str, ...]:
        """The bound has passed: what is still missing is unproven; these are its names."""
        bound = f"within {seconds:g} s"
        missing = {edge: f"edge {edge} did not stop {bound}" for edge in sorted(self.edges - self._stopped)}
        self._unproven |= missing
        if self.waits_for_role:
            self._role_unproven = f"the worker did not reset its role {bound}"
            return (*missing.values(), self._role_unproven)
        return tuple(missing.values())
