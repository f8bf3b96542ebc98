"""What passes between the worker machine and its harness: results that are events, and effects.

Data only. The events that are not here are the worker commands (`messages/worker_commands.py`) and what the
ring machines of `ingress.py` and `egress.py` report.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from typing import Any

from swactor_core.faults import RingFaultReason, RoleFailure, StepFailure, WorkerFatalReason
from swactor_core.fsm import Effect
from swactor_core.ids import DeviceObjectHandle, RingId, RoleId, Sequence, WorkerGeneration
from swactor_core.messages import InstallRing, UninstallRing
from swactor_core.values import frozen, value
from swactor_core.wire import ObjectHeader


class ExitCode(IntEnum):
    """Exit status of the worker process; 2 is a wrong command line, a negative one a signal."""

    STOPPED = 0
    FATAL = 3
    CONTROL_LOST = 4


# --- events ---


@frozen
class ArenaSelected:
    """Result of SelectArena: the ring helper's ABI number."""

    abi: int


@frozen
class ArenaAttached:
    pass


@frozen
class BackendCreated:
    facts: dict[str, Any]


@frozen
class InitializeFailed:
    reason: WorkerFatalReason
    detail: str


@frozen
class RoleBuilt:
    """`facts` as in `StageRole.facts`."""

    role_id: RoleId
    facts: dict[str, str] = field(default_factory=dict)


@frozen
class RoleRejected:
    role_id: RoleId
    reason: RoleFailure
    detail: str


@frozen
class RingOpened:
    ring_id: RingId


@frozen
class RingRefused:
    ring_id: RingId
    reason: RingFaultReason
    detail: str


@value
class StepComputed:
    """The role code returned `extent` bytes of output after `compute_seconds`."""

    extent: int
    compute_seconds: float


@frozen
class StepRaised:
    reason: StepFailure
    detail: str


@frozen
class OutputBlocked:
    """Answer to FinishOutput: the ring has no room and no copy is in flight."""

    ring_id: RingId


@frozen
class MalformedCommand:
    """A line that is no command, or a command that this state forbids."""

    detail: str


@frozen
class Crashed:
    """An exception that no rule expects."""

    detail: str


@frozen
class ControlClosed:
    """The node closed the command stream, or is gone."""


# --- effects ---


@frozen
class SelectArena(Effect):
    """Answer ArenaSelected or InitializeFailed."""


@frozen
class AttachArena(Effect):
    """Map the inherited arena; answer ArenaAttached or InitializeFailed."""

    ceiling: int


@frozen
class CreateBackend(Effect):
    """Answer BackendCreated or InitializeFailed."""

    generation: WorkerGeneration
    settings: dict[str, Any]


@frozen
class BuildRole(Effect):
    """Validate the config and bind the stage; answer RoleBuilt or RoleRejected."""

    role_id: RoleId
    config: dict[str, Any]


@frozen
class CloseRole(Effect):
    pass


@frozen
class OpenRing(Effect):
    """Answer RingOpened or RingRefused."""

    command: InstallRing


@value
class WakeRing(Effect):
    """Acknowledge the hint, then move every byte that can be moved."""

    ring_id: RingId


@frozen
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


@frozen
class FinishOutput(Effect):
    """Move what can be moved without waiting for the consumer; answer OutputBlocked when that is not all."""

    ring_id: RingId


@value
class FreeDeviceObject(Effect):
    handle: DeviceObjectHandle


@frozen
class CloseBackend(Effect):
    pass


@frozen
class Exit(Effect):
    code: ExitCode
