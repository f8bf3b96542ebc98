"""Orchestrator teardown (spec section 38): the stages and token endpoints that a run must get back.

A ledger, no machine: `run.py` enters what it provisioned, what stopped and which node is gone, and reads who
is still to be told, who is waited for, and what the end cannot prove.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from swactor_core.faults import Component, Fault, FaultReason, named_node
from swactor_core.ids import EdgeId, NodeId, StageIndex, node_hex
from swactor_core.messages import StageStats, StageStopped
from swactor_core.plan import RunPlan


@dataclass(slots=True)
class RunTeardown:
    """`names` of the nodes are for people, and may become more while the run lasts."""

    names: dict[NodeId, str] = field(default_factory=dict)
    nodes: dict[StageIndex, NodeId] = field(default_factory=dict)
    ends: dict[EdgeId, tuple[NodeId, ...]] = field(default_factory=dict)
    endpoints_opened: bool = False
    endpoints_stopped: bool = False
    _gone: set[NodeId] = field(default_factory=set)
    _stopped: dict[StageIndex, StageStopped] = field(default_factory=dict)
    _of_endpoints: tuple[str, ...] = ()
    _unproven: tuple[str, ...] = ()

    def begin(self, plan: RunPlan) -> None:
        """From here on the plan's stages, and the orchestrator's own ends, have to be got back."""
        self.nodes = {stage.stage_index: stage.node_id for stage in plan.stages}
        for edge in plan.edges:
            ends = edge.producer, edge.consumer
            self.ends[edge.edge_id] = tuple(end.node_id for end in ends if end.stage_index is not None)
        self.endpoints_opened = True

    def placed(self, fault: Fault) -> Fault:
        """With the stage of its node, or the node of its stage, where only one of them was known, and by
        name; of a stream that broke, with the node at its other end too: that may be the one that is gone."""
        stage, node = fault.stage_index, fault.node_id
        if stage is None and node is not None:
            stage = next((index for index, of in self.nodes.items() if of == node), None)
        elif node is None and stage is not None:
            node = self.nodes.get(stage)
        ends = self.ends.get(fault.edge_id, ()) if fault.edge_id is not None else ()
        others = [end for end in ends if end != node] if fault.component is Component.DRIVER else []
        detail = "; ".join((fault.detail, *(f"its other end is at {node_hex(end)}" for end in others[:1])))
        return replace(fault, stage_index=stage, node_id=node, detail=detail).named(self.names)

    def waited_for(self, fault: Fault | None, tokens: int) -> str:
        """Of a token that did not come in time, after that many: the first stage that has not done its step,
        as the steps tell that each had done by its end; they take it one after the other. The last one where
        all have. Else nothing."""
        late = fault is not None and fault.reason is FaultReason.EXECUTION_TIMEOUT
        if not late or not self.nodes or self._stopped.keys() != self.nodes.keys():
            return ""
        stages = sorted(self.nodes)
        steps = [self._stopped[index].stats.steps for index in stages]
        at = next((at for at, done in enumerate(steps) if done <= tokens), len(steps) - 1)
        node = named_node(self.nodes[stages[at]], self.names)
        if steps[at] > tokens:
            return f"stage {stages[at]} on node {node}, which had done its step by its end"
        before = f", the one before it {steps[at - 1]}" if at else ""
        return f"stage {stages[at]} on node {node}, which has done {steps[at]} steps{before}"

    def note_stopped(self, event: StageStopped) -> None:
        self._stopped[event.stage_index] = event

    def note_lost(self, node_id: NodeId) -> None:
        self._gone.add(node_id)

    def note_endpoints(self, unproven: tuple[str, ...]) -> None:
        """Said again when a proof comes after its time: the last word counts."""
        self.endpoints_stopped, self._of_endpoints = True, unproven

    def missing(self) -> dict[StageIndex, NodeId]:
        """Stages that have not stopped, on nodes that can still say so."""
        return {
            index: node
            for index, node in self.nodes.items()
            if index not in self._stopped and node not in self._gone
        }

    @property
    def complete(self) -> bool:
        return not self.missing() and (self.endpoints_stopped or not self.endpoints_opened)

    def give_up(self, seconds: float) -> tuple[str, ...]:
        """The bound has passed: what is still missing is unproven; these are its names."""
        missing = tuple(f"stage {i} did not say StageStopped within {seconds:g} s" for i in self.missing())
        if self.endpoints_opened and not self.endpoints_stopped:
            missing += (f"the token endpoints did not stop within {seconds:g} s",)
        self._unproven += missing
        return missing

    def unproven(self) -> tuple[str, ...]:
        """All that teardown could not prove, of this process first, then as the stages reported it."""
        of_stages = tuple(what for stopped in self._stopped.values() for what in stopped.unproven)
        with_nodes = tuple(
            f"stage {index} went with its node"
            for index, node in self.nodes.items()
            if node in self._gone and index not in self._stopped
        )
        return self._of_endpoints + self._unproven + of_stages + with_nodes

    def stats(self) -> tuple[tuple[StageIndex, StageStats], ...]:
        return tuple((index, stopped.stats) for index, stopped in sorted(self._stopped.items()))
