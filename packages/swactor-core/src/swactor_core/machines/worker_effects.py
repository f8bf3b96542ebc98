"""What passes between the worker machine and its harness: results that are events, and effects.

Data only. The events that are not here are the worker commands (`messages/worker_commands.py`) and what the
ring machines of `ingress.py` and `egress.py` report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from swactor_core.faults import RingFaultReason, RoleFailure, StepFailure, WorkerFatalReason
from swactor_core.fsm import Effect
from swactor_core.ids import DeviceObjectHandle, RingId, RoleId, Sequence, WorkerGeneration
from swactor_core.messages import InstallRing, UninstallRing
from swactor_core.values import value
from swactor_core.wire import ObjectHeader


class ExitCode(IntEnum):
    """Exit status of the worker process; 2 is a wrong command line, a negative one a signal."""

    STOPPED = 0
    FATAL = 3
    CONTROL_LOST = 4


# --- events ---


@dataclass(frozen=True, slots=True)
class ArenaSelected:
    """Result of SelectArena: the ring helper's ABI number."""

    abi: int


@dataclass(frozen=True, slots=True)
class ArenaAttached:
    pass


@dataclass(frozen=True, slots=True)
class BackendCreated:
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class InitializeFailed:
    reason: WorkerFatalReason
    detail: str


@dataclass(frozen=True, slots=True)
class RoleBuilt:
    """`facts` as in `StageRole.facts`."""

    role_id: RoleId
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoleRejected:
    role_id: RoleId
    reason: RoleFailure
    detail: str


@dataclass(frozen=True, slots=True)
class RingOpened:
    ring_id: RingId


@dataclass(frozen=True, slots=True)
class RingRefused:
    ring_id: RingId
    reason: RingFaultReason
    detail: str


@value
class StepComputed:
    """The role code returned `extent` bytes of output after `compute_seconds`."""

    extent: int
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class StepRaised:
    reason: StepFailure
    detail: str


@dataclass(frozen=True, slots=True)
class OutputBlocked:
    """Answer to FinishOutput: the ring has no room and no copy is in flight."""

    ring_id: RingId


@dataclass(frozen=True, slots=True)
class MalformedCommand:
    """A line that is no command, or a command that this state forbids."""

    detail: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """An exception that no rule expects."""

    detail: str


@dataclass(frozen=True, slots=True)
class ControlClosed:
    """The node closed the command stream, or is gone."""


# --- effects ---


@dataclass(frozen=True, slots=True)
class SelectArena(Effect):
    """Answer ArenaSelected or InitializeFailed."""


@dataclass(frozen=True, slots=True)
class AttachArena(Effect):
    """Map the inherited arena; answer ArenaAttached or InitializeFailed."""

    ceiling: int


@dataclass(frozen=True, slots=True)
class CreateBackend(Effect):
    """Answer BackendCreated or InitializeFailed."""

    generation: WorkerGeneration
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BuildRole(Effect):
    """Validate the config and bind the stage; answer RoleBuilt or RoleRejected."""

    role_id: RoleId
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CloseRole(Effect):
    pass


@dataclass(frozen=True, slots=True)
class OpenRing(Effect):
    """Answer RingOpened or RingRefused."""

    command: InstallRing


@value
class WakeRing(Effect):
    """Acknowledge the hint, then move every byte that can be moved."""

    ring_id: RingId


@dataclass(frozen=True, slots=True)
class QuiesceRing(Effect):
    """Hand the command to the ring's machine, which reports RingQuiesced when no copy touches the ring."""

    command: UninstallRing


@value
class RunStep(Effect):
    """Run role code on one loaded object; answer StepComputed or StepRaised."""

    handle: DeviceObjectHandle
    extent: int
    sequence: Sequence
    position: int


@value
class BeginOutput(Effect):
    """Stream the last step's output allocation into the ring, behind this header."""

    ring_id: RingId
    header: ObjectHeader


@dataclass(frozen=True, slots=True)
class FinishOutput(Effect):
    """Move what can be moved without waiting for the consumer; answer OutputBlocked when that is not all."""

    ring_id: RingId


@value
class FreeDeviceObject(Effect):
    handle: DeviceObjectHandle


@dataclass(frozen=True, slots=True)
class CloseBackend(Effect):
    pass


@dataclass(frozen=True, slots=True)
class Exit(Effect):
    code: ExitCode
