"""The ends of a few edges, for whoever waits for all of them (spec section 38): a stage, the token endpoint.

A ledger, no machine: its owner enters what each edge says of its end, in its time or after it, and reads
whether all have said so and what has no proof.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swactor_core.ids import EdgeId
from swactor_core.messages import EdgeStopped


@dataclass(slots=True)
class EdgeEnds:
    """Of `edges`, which are waited for."""

    edges: frozenset[EdgeId] = frozenset()
    _stopped: set[EdgeId] = field(default_factory=set)
    _unproven: dict[EdgeId, str] = field(default_factory=dict)

    def note(self, event: EdgeStopped) -> None:
        """An edge has stopped; said again when a proof comes after its time. What is proved stays proved."""
        if event.edge_id not in self.edges:
            return
        proved = event.edge_id in self._stopped and event.edge_id not in self._unproven
        self._stopped.add(event.edge_id)
        if not event.unproven:
            self._unproven.pop(event.edge_id, None)
        elif not proved:
            self._unproven[event.edge_id] = event.unproven

    @property
    def complete(self) -> bool:
        return self._stopped == self.edges

    @property
    def unproven(self) -> tuple[str, ...]:
        """What has no proof now."""
        return tuple(self._unproven.values())

    def said(self, edge_id: EdgeId) -> EdgeStopped | None:
        """What that edge has said of its end, if it has."""
        return EdgeStopped(edge_id, self._unproven.get(edge_id, "")) if edge_id in self._stopped else None

    def give_up(self, bound: str, *, kind: str = "edge") -> tuple[str, ...]:
        """The bound has passed: what is still missing is unproven; these are its names."""
        waiting = sorted(self.edges - self._stopped)
        missing = {edge_id: f"{kind} {edge_id} did not stop {bound}" for edge_id in waiting}
        self._unproven |= missing
        return tuple(missing.values())
