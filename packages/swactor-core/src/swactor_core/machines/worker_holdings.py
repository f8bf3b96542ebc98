"""What a worker process holds for its node: one role, rings, device objects, and the step in flight.

A ledger, no machine: `worker.py` enters what was built, opened and loaded, `worker_refusals.py` asks what is
there. Nothing is given back while the step in flight reads it. What an earlier generation handed out is never
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swactor_core.faults import Component, RingFaultReason, StepFailure
from swactor_core.fsm import Action, Send
from swactor_core.ids import DeviceObjectHandle, RingId, RoleId, Sequence, WorkerGeneration
from swactor_core.machines.worker_effects import CloseBackend, CloseRole, FreeDeviceObject
from swactor_core.messages import (
    Address,
    DeviceObjectReleased,
    ExecuteStep,
    InstallRing,
    ObjectLoaded,
    RingFault,
    RingInstalled,
    RoleReset,
    StepFailed,
)
from swactor_core.specs import RingDirection
from swactor_core.wire import ObjectHeader

CTL = Address(Component.GPU_WORKER_CTL)
_FIRST = Sequence(0)


@dataclass(slots=True)
class HeldRing:
    """`next_sequence` is that of the next output of an egress ring."""

    command: InstallRing
    open: bool = False
    faulted: bool = False
    next_sequence: Sequence = _FIRST

    def installed(self) -> RingInstalled:
        return RingInstalled(self.command.ring_id, self.command.edge_id, self.command.port_id)

    def fault(self, reason: RingFaultReason, detail: str) -> RingFault:
        command = self.command
        return RingFault(command.ring_id, command.edge_id, command.port_id, reason, detail)


@dataclass(slots=True)
class Holdings:
    generation: WorkerGeneration | None = None
    role: RoleId | None = None
    step: ExecuteStep | None = None
    rings: dict[RingId, HeldRing] = field(default_factory=dict)
    objects: dict[DeviceObjectHandle, ObjectLoaded] = field(default_factory=dict)
    release_later: list[DeviceObjectHandle] = field(default_factory=list)
    reset_later: list[RoleId] = field(default_factory=list)

    def is_opening(self, ring_id: RingId) -> bool:
        ring = self.rings.get(ring_id)
        return ring is not None and not ring.open

    def has_ring(self, ring_id: RingId, direction: RingDirection) -> bool:
        ring = self.rings.get(ring_id)
        return ring is not None and ring.command.direction is direction

    def mark_faulted(self, ring_id: RingId) -> None:
        ring = self.rings.get(ring_id)
        if ring is not None:
            ring.faulted = True

    def writes_to(self, ring_id: RingId) -> bool:
        """Whether the step in flight has its output there."""
        return self.step is not None and ring_id == self.step.outputs[0].ring_id

    def reads(self, handle: DeviceObjectHandle) -> bool:
        """Whether the step in flight has its input there."""
        return self.step is not None and any(bound.device_handle == handle for bound in self.step.inputs)

    def step_failed(self, reason: StepFailure, detail: str) -> Send:
        """The word that the step in flight has failed."""
        assert self.step is not None
        return Send(CTL, StepFailed(self.step.role_id, self.step.step_id, reason, detail))

    # --- what is given back, and the words of it ---

    def release(self, handle: DeviceObjectHandle) -> tuple[Action, ...]:
        del self.objects[handle]
        return FreeDeviceObject(handle), Send(CTL, DeviceObjectReleased(handle))

    def release_all(self) -> tuple[Action, ...]:
        return tuple(action for handle in tuple(self.objects) for action in self.release(handle))

    def reset(self, role_id: RoleId) -> tuple[Action, ...]:
        """Closes the role and frees what its run loaded; a role that is not here is reset already."""
        if role_id != self.role:
            return (Send(CTL, RoleReset(role_id)),)
        self.role = None
        return (CloseRole(), *self.release_all(), Send(CTL, RoleReset(role_id)))

    def end_step(self) -> tuple[Action, ...]:
        """No step is in flight any more: what waited for that is given back."""
        self.step = None
        released, self.release_later = dict.fromkeys(self.release_later), []
        resets, self.reset_later = self.reset_later, []
        actions = tuple(action for handle in released for action in self.release(handle))
        return actions + tuple(action for role_id in resets for action in self.reset(role_id))

    def close(self) -> tuple[Action, ...]:
        """The role and the backend with all its objects, as far as they were ever made."""
        role = () if self.role is None else (CloseRole(),)
        backend = () if self.generation is None else (*self.release_all(), CloseBackend())
        return (*role, *backend)


def output_header(step: ExecuteStep) -> ObjectHeader:
    out = step.outputs[0]
    return ObjectHeader(out.object_id, out.sequence, out.extent, out.flags)
