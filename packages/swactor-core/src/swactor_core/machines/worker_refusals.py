"""What a worker refuses, and why (spec sections 29, 31 and 37).

Pure. A command that no node sends is malformed and ends the worker; one that names what is not here, or
comes while the worker drains, is answered and changes nothing.
"""

from __future__ import annotations

from swactor_core.faults import ReleaseFailure, RingFaultReason, RoleFailure, StepFailure
from swactor_core.ids import DeviceObjectHandle
from swactor_core.machines.worker_holdings import Holdings, output_header
from swactor_core.messages import (
    ConfigureRole,
    ExecuteStep,
    InstallRing,
    ReleaseFailed,
    RingFault,
    RoleFailed,
    StepFailed,
)
from swactor_core.specs import RingDirection
from swactor_core.wire import HeaderRejected, check_object_header

NewWork = ConfigureRole | InstallRing | ExecuteStep


def misfit(held: Holdings, command: InstallRing) -> str:
    """What is wrong with an InstallRing that no node sends, or nothing."""
    if command.ring_id in held.rings:
        return f"InstallRing names ring {command.ring_id}, which is installed"
    if command.layout.ring_id != command.ring_id:
        return f"InstallRing {command.ring_id} has the layout of {command.layout.ring_id}"
    return ""


def out_of_range(event: ExecuteStep) -> bool:
    """Whether an output is named by numbers that no header can hold."""
    return any(
        not (0 <= binding.object_id < 1 << 64 and 0 <= binding.flags < 1 << 32 and binding.extent >= 0)
        for binding in event.outputs
    )


def step_refusal(held: Holdings, event: ExecuteStep) -> tuple[StepFailure, str] | None:
    """Why this step cannot run here and now (spec section 29, execution requirements)."""
    if event.role_id != held.role:
        return StepFailure.ROLE_UNAVAILABLE, f"role {event.role_id} is not configured"
    if held.step is not None:
        return StepFailure.ROLE_UNAVAILABLE, f"step {held.step.step_id} is in flight"
    if len(event.inputs) != 1 or event.runtime.position < 0:
        return StepFailure.INVALID_INPUT_HANDLE, "a step takes one input at a position from 0 on"
    bound = event.inputs[0]
    handle = bound.device_handle
    if handle.worker_generation != held.generation:
        detail = f"handle of generation {handle.worker_generation}, this is {held.generation}"
        return StepFailure.INVALID_INPUT_HANDLE, detail
    loaded = held.objects.get(handle)
    if loaded is None:
        return StepFailure.INVALID_INPUT_HANDLE, f"no device object {handle.id}"
    said = (bound.port_id, bound.object_id, bound.sequence)
    if said != (loaded.port_id, loaded.object_id, loaded.sequence):
        detail = f"device object {handle.id} is object {loaded.object_id}, sequence {loaded.sequence}"
        return StepFailure.INVALID_INPUT_HANDLE, f"{detail}, on port {loaded.port_id}"
    if len(event.outputs) != 1:
        return StepFailure.INVALID_OUTPUT_RING, "a step has one output"
    out = event.outputs[0]
    ring = held.rings.get(out.ring_id)
    if ring is None or not ring.open or ring.command.direction is not RingDirection.EGRESS:
        return StepFailure.INVALID_OUTPUT_RING, f"ring {out.ring_id} is not an installed egress ring"
    if ring.faulted or ring.command.port_id != out.port_id:
        what = "faulted" if ring.faulted else f"of port {ring.command.port_id}"
        return StepFailure.INVALID_OUTPUT_RING, f"ring {out.ring_id} is {what}"
    if out.sequence != ring.next_sequence:
        detail = f"sequence {out.sequence} on ring {out.ring_id}, expected {ring.next_sequence}"
        return StepFailure.INVALID_OUTPUT_RING, detail
    try:
        check_object_header(output_header(event), ring.command.object_spec, ring.next_sequence)
    except HeaderRejected as rejected:
        return StepFailure.OUTPUT_EXTENT_INVALID, str(rejected)
    return None


def release_refusal(held: Holdings, handle: DeviceObjectHandle) -> ReleaseFailed | None:
    if handle in held.objects:
        return None
    stale = handle.worker_generation != held.generation
    return ReleaseFailed(handle, ReleaseFailure.STALE_GENERATION if stale else ReleaseFailure.UNKNOWN_HANDLE)


def while_draining(command: NewWork) -> RoleFailed | RingFault | StepFailed:
    """The answer to new work from a worker that has been told to end."""
    detail = "the worker is shutting down"
    match command:
        case ConfigureRole():
            return RoleFailed(command.role_id, RoleFailure.BACKEND_ERROR, detail)
        case InstallRing():
            reason = RingFaultReason.WORKER_SHUTTING_DOWN
            return RingFault(command.ring_id, command.edge_id, command.port_id, reason, detail)
        case ExecuteStep():
            return StepFailed(command.role_id, command.step_id, StepFailure.WORKER_SHUTTING_DOWN, detail)
