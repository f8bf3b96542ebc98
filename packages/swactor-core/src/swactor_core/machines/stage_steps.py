"""A stage's steps (spec section 16): which sequence comes next, at which position, and what it is told to do.

A ledger, no machine: `stage.py` enters what loaded, was produced and completed, and sends what is made here.
Sequence s goes in and s comes out; rows of a prefill move the position on by their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swactor_core.events import EventName
from swactor_core.faults import FaultReason, StepFailure
from swactor_core.fsm import Emit
from swactor_core.ids import ObjectId, RingId, Sequence, StepId
from swactor_core.messages import (
    ExecuteStep,
    InputBinding,
    ObjectLoaded,
    ObjectProduced,
    OutputBinding,
    ProvisionStage,
    RoleConfigured,
    StageStats,
    StepCompleted,
    StepRuntime,
)
from swactor_core.plan import EdgeKind

STEP_FAULTS = {
    StepFailure.DEVICE_OUT_OF_MEMORY: FaultReason.DEVICE_OUT_OF_MEMORY,
    StepFailure.OUTPUT_COPY_FAILED: FaultReason.DEVICE_COPY_FAILED,
    StepFailure.WORKER_PROCESS_EXITED: FaultReason.WORKER_CRASHED,
}
_FIRST = Sequence(0)
_NONE = StepId(0)


@dataclass(slots=True)
class StageSteps:
    """`expected` is the sequence of the next input; `input` the object of the step in flight, or of the one
    that failed. `completion` waits here for the gate's word of the output, or the output for it."""

    expected: Sequence = _FIRST
    step_id: StepId = _NONE
    input: ObjectLoaded | None = None
    produced: bool = False
    completion: StepCompleted | None = None
    _done: int = 0
    _prefill_seconds: float = 0.0
    _decode_seconds: float = 0.0
    _facts: dict[str, str] = field(default_factory=dict)
    _position: int = 0
    _rows: int = 0

    @property
    def stats(self) -> StageStats:
        return StageStats(self._done, self._prefill_seconds, self._decode_seconds, self._facts)

    def configured(self, role: RoleConfigured) -> None:
        """What the role says of itself goes into the stage's figures."""
        self._facts = role.facts

    def begin(self, plan: ProvisionStage, loaded: ObjectLoaded, output_ring: RingId) -> ExecuteStep:
        """The one step for this object, whose sequence is the expected one."""
        self.input, self.produced, self.completion = loaded, False, None
        self.step_id = StepId(self.step_id + 1)
        self._rows = loaded.extent // plan.inbound.object_spec.row_bytes
        rows_out = 1 if plan.outbound.kind is EdgeKind.TOKEN_OUT else self._rows
        runtime = plan.runtime
        return ExecuteStep(
            role_id=runtime.role_id,
            step_id=self.step_id,
            inputs=(
                InputBinding(runtime.input_port, loaded.object_id, loaded.sequence, loaded.device_handle),
            ),
            outputs=(
                OutputBinding(
                    port_id=runtime.output_port,
                    ring_id=output_ring,
                    object_id=ObjectId(loaded.object_id),
                    sequence=loaded.sequence,
                    extent=rows_out * plan.outbound.object_spec.row_bytes,
                ),
            ),
            runtime=StepRuntime(self._position),
            release_inputs_after=True,
        )

    def begun(self, loaded: ObjectLoaded) -> tuple[Emit, Emit]:
        """What there is to tell of a step that begins."""
        place = {"edge_id": loaded.edge_id, "ring_id": loaded.ring_id, "object_id": loaded.object_id}
        return (
            Emit(EventName.OBJECT_LOADED, {**place, "sequence": loaded.sequence}),
            Emit(EventName.EXECUTE_STEP_STARTED, {"sequence": loaded.sequence, "step_id": self.step_id}),
        )

    def is_output(self, produced: ObjectProduced) -> bool:
        """Whether it is that of the step in flight: a worker invents no object and no sequence."""
        step = self.input
        of_step = step is not None and (produced.object_id, produced.sequence) == (
            step.object_id,
            step.sequence,
        )
        return of_step and not self.produced

    def output(self, produced: ObjectProduced) -> Emit:
        """The step's output is in its ring."""
        self.produced = True
        place = {"edge_id": produced.edge_id, "ring_id": produced.ring_id, "object_id": produced.object_id}
        return Emit(EventName.OBJECT_PRODUCED, {**place, "sequence": produced.sequence})

    def end(self, completed: StepCompleted) -> Emit:
        """The step is through."""
        sequence = self.expected
        self._done += 1
        if sequence == _FIRST:
            self._prefill_seconds += completed.compute_seconds
        else:
            self._decode_seconds += completed.compute_seconds
        self.expected = Sequence(sequence + 1)
        self._position += self._rows
        self.input = self.completion = None
        return Emit(EventName.STEP_COMPLETED, {"sequence": sequence, "step_id": completed.step_id})

    def late_output(self, produced: ObjectProduced) -> tuple[Emit, ...]:
        """As `output`, when the stage is stopping; nothing where no step is in flight for it."""
        if not self.is_output(produced):
            return ()
        output, completion = self.output(produced), self.completion
        return (output,) if completion is None else (output, self.end(completion))

    def late_end(self, completed: StepCompleted) -> tuple[Emit, ...]:
        """As `end`, when the stage is stopping; it waits for the output's word as ever."""
        if self.input is None:
            return ()
        if not self.produced:
            self.completion = completed
            return ()
        return (self.end(completed),)
