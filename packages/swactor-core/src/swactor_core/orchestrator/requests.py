"""What is asked of an orchestrator and what it answers: a run's request, bounds, listener and result.

Data, and the shape of a listener. Knows no actor and no machine but the names of outcomes.
"""

from __future__ import annotations

from dataclasses import field

from swactor_core.faults import Fault
from swactor_core.hosting import WorkersSay
from swactor_core.ids import StageIndex
from swactor_core.machines.pool import ReportPool
from swactor_core.machines.run import RunBounds
from swactor_core.machines.run_effects import FinishReason, RunOutcome, RunState
from swactor_core.messages import StageProgress, StageStats
from swactor_core.plan import GgufSource, RunPlan, SamplingPolicy, TokenOutputPolicy
from swactor_core.planner import RuntimeChoices
from swactor_core.specs import PREFILL_CHUNK
from swactor_core.spi.loader import ModelFacts
from swactor_core.values import frozen


@frozen
class PoolBounds:
    """Seconds that the view must be stable, and that the pool may take; `wait_for_lost` as in PoolGate."""

    convergence_window: float = 0.3
    deadline: float = 120.0
    wait_for_lost: bool = False


@frozen
class RunRequest:
    """One run: the model as every node can resolve it, the prompt as ids, and the operator's choices.
    `ring_capacity` in bytes, of every edge; None for a default by object size. `worker_memory` says what a
    node's worker takes beside what the model's facts tell; None: nothing of that is counted."""

    source: GgufSource
    facts: ModelFacts
    prompt: tuple[int, ...]
    max_tokens: int
    end_of_generation: tuple[int, ...] = ()
    sampling: SamplingPolicy = field(default_factory=SamplingPolicy)
    token_output_policy: TokenOutputPolicy = TokenOutputPolicy.TOKEN_IDS
    token_count: int = 0
    prefill_chunk: int = PREFILL_CHUNK
    bounds: RunBounds = field(default_factory=RunBounds)
    ring_capacity: int | None = None
    worker_memory: WorkersSay | None = None

    def choices(self) -> RuntimeChoices:
        """What the planner needs of it."""
        return RuntimeChoices(
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            end_of_generation=self.end_of_generation,
            sampling=self.sampling,
            token_output_policy=self.token_output_policy,
            ring_capacity=self.ring_capacity,
            prefill_chunk=self.prefill_chunk,
        )


@frozen
class RunResult:
    """The one outcome. `unproven` lists what teardown could not prove; `token_times` are monotonic seconds of
    each token, `injected` of the prompt's injection; `finish_reason` is of a completed run, `waited_for` says
    for people which stage kept the token that did not come in time."""

    outcome: RunOutcome
    fault: Fault | None
    token_ids: tuple[int, ...]
    plan: RunPlan | None
    stages: tuple[tuple[StageIndex, StageStats], ...]
    unproven: tuple[str, ...]
    injected: float
    token_times: tuple[float, ...]
    finish_reason: FinishReason | None = None
    waited_for: str = ""


class RunListener:
    """What people are shown; every method is called on the event loop and must not block."""

    def pool(self, report: ReportPool) -> None:
        """Which candidates are still waited for."""

    def state(self, state: RunState) -> None:
        """The run has entered this state."""

    def progress(self, progress: StageProgress) -> None:
        """A stage's preparation has moved."""

    def enough(self, token_id: int) -> bool:
        """Whether the answer is whole with this token: a stop text. Asked once a token, before `token`."""
        return False

    def token(self, sequence: int, token_id: int) -> None:
        """One more token."""
