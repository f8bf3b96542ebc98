"""What passes between the run and its adapter: its states and outcomes, results that are events, effects.

Data only. The other events of the run are messages of nodes, the pool and the token endpoint.
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.faults import Fault
from swactor_core.fsm import Effect
from swactor_core.ids import Sequence, StageIndex
from swactor_core.messages import NodeAvailable, ProvisionRx, ProvisionTx, StageProgress, StageStats
from swactor_core.plan import RunPlan
from swactor_core.values import frozen, value


class RunState(StrEnum):
    PLANNING = "Planning"
    PROVISIONING = "Provisioning"
    WAITING_READY = "WaitingReady"
    RUNNING = "Running"
    COMPLETED = "Completed"
    FAULTED = "Faulted"
    OPERATOR_STOPPED = "OperatorStopped"
    TEARING_DOWN = "TearingDown"
    DONE = "Done"


class FinishReason(StrEnum):
    """Why a completed run has no further token."""

    END_OF_GENERATION = "eog"
    STOP_TEXT = "stop"
    LENGTH = "length"
    CONTEXT = "context"


class RunOutcome(StrEnum):
    COMPLETED = "completed"
    FAULTED = "faulted"
    OPERATOR_STOPPED = "operator-stopped"


# --- events ---


@frozen
class PlanBuilt:
    plan: RunPlan


@frozen
class PlanFailed:
    detail: str


@frozen
class Continue:
    """Self-sent: leaves a state that is only passed through."""


# --- effects ---


@frozen
class BuildPlan(Effect):
    nodes: tuple[NodeAvailable, ...]


@frozen
class OpenEndpoints(Effect):
    """Provision the orchestrator's two token edges."""

    token_in: ProvisionTx
    token_out: ProvisionRx


@value
class DeliverToken(Effect):
    """A token for whoever asked for the run."""

    sequence: Sequence
    token_id: int


@frozen
class ReportProgress(Effect):
    """For people: what a stage is doing before the barrier."""

    progress: StageProgress


@frozen
class RunMoved(Effect):
    """For people: the run has entered this state."""

    state: RunState


@frozen
class FinishRun(Effect):
    """The run is Done; this is its one outcome."""

    outcome: RunOutcome
    fault: Fault | None
    stats: tuple[tuple[StageIndex, StageStats], ...]
    unproven: tuple[str, ...]
    waited_for: str = ""
