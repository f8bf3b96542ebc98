"""Stage teardown (spec section 38): what must end before it has stopped, its edges and the worker's role.

A ledger, no machine: `stage.py` enters what stopped, and reads what is waited for and what the end cannot
prove; a proof that comes after its time is entered too. A role that no ConfigureRole ever named is not waited
for, nor is one whose worker is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swactor_core.machines.edge_ends import EdgeEnds
from swactor_core.messages import EdgeStopped, RoleReset, WorkerCrashed


@dataclass(slots=True)
class StageTeardown:
    role_touched: bool = False
    role_gone: bool = False
    ends: EdgeEnds = field(default_factory=EdgeEnds)
    _role_unproven: str = ""

    def note(self, event: EdgeStopped | RoleReset | WorkerCrashed) -> None:
        """An edge has stopped, proved or not, in its time or after it; or the role is gone."""
        if isinstance(event, EdgeStopped):
            self.ends.note(event)
        else:
            self.role_gone = True

    @property
    def unproven(self) -> tuple[str, ...]:
        """What has no proof now."""
        role = () if self.role_gone or not self._role_unproven else (self._role_unproven,)
        return (*self.ends.unproven, *role)

    @property
    def waits_for_role(self) -> bool:
        return self.role_touched and not self.role_gone

    @property
    def complete(self) -> bool:
        return self.ends.complete and not self.waits_for_role

    def give_up(self, seconds: float) -> tuple[str, ...]:
        """The bound has passed: what is still missing is unproven; these are its names."""
        bound = f"within {seconds:g} s"
        missing = self.ends.give_up(bound)
        if self.waits_for_role:
            self._role_unproven = f"the worker did not reset its role {bound}"
            return (*missing, self._role_unproven)
        return missing
