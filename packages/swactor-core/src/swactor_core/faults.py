"""The error taxonomy (spec section 37) and the one recorded failure of a run (spec section 36).

Knows only reasons. `Fault` says which component saw what, so that an operator never has to scrape logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

from swactor_core.ids import EdgeId, NodeId, RingId, StageIndex, node_hex
from swactor_core.values import frozen


class RingFaultReason(StrEnum):
    """Ring faults (spec section 37)."""

    UNSUPPORTED_RING_VERSION = "UnsupportedRingVersion"
    RING_LAYOUT_INVALID = "RingLayoutInvalid"
    RING_STATE_INVALID = "RingStateInvalid"
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory"
    DEVICE_COPY_FAILED = "DeviceCopyFailed"
    SEQUENCE_VIOLATION = "SequenceViolation"
    HEADER_MALFORMED = "HeaderMalformed"
    WORKER_PROCESS_EXITED = "WorkerProcessExited"
    WORKER_SHUTTING_DOWN = "WorkerShuttingDown"
    WORKER_INTERNAL = "WorkerInternal"


class ObjectFailure(StrEnum):
    """Object failures (spec section 37)."""

    HEADER_MALFORMED = "HeaderMalformed"
    UNSUPPORTED_OBJECT_VERSION = "UnsupportedObjectVersion"
    EXTENT_EXCEEDS_MAX = "ExtentExceedsMax"
    EXTENT_ALIGNMENT_INVALID = "ExtentAlignmentInvalid"
    SEQUENCE_VIOLATION = "SequenceViolation"
    DEVICE_ALLOCATION_FAILED = "DeviceAllocationFailed"
    DEVICE_COPY_FAILED = "DeviceCopyFailed"
    EOF_MID_OBJECT = "EofMidObject"


class StepFailure(StrEnum):
    """Step failures (spec section 37)."""

    ROLE_UNAVAILABLE = "RoleUnavailable"
    INVALID_INPUT_HANDLE = "InvalidInputHandle"
    INVALID_OUTPUT_RING = "InvalidOutputRing"
    TINYGRAD_ERROR = "TinygradError"
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory"
    OUTPUT_EXTENT_INVALID = "OutputExtentInvalid"
    OUTPUT_COPY_FAILED = "OutputCopyFailed"
    WORKER_PROCESS_EXITED = "WorkerProcessExited"
    WORKER_SHUTTING_DOWN = "WorkerShuttingDown"


class WorkerFatalReason(StrEnum):
    """Worker fatal reasons (spec section 37)."""

    ARENA_MAP_FAILED = "ArenaMapFailed"
    RING_HELPER_ABI_MISMATCH = "RingHelperAbiMismatch"
    BACKEND_INIT_FAILED = "BackendInitFailed"
    MALFORMED_CONTROL_MESSAGE = "MalformedControlMessage"
    UNHANDLED_EXCEPTION = "UnhandledException"


class RoleFailure(StrEnum):
    """Why ConfigureRole failed; the spec leaves the members open (section 30)."""

    CONFIG_INVALID = "ConfigInvalid"
    UNSUPPORTED_ARCHITECTURE = "UnsupportedArchitecture"
    UNSUPPORTED_TENSOR_TYPE = "UnsupportedTensorType"
    WEIGHTS_UNREADABLE = "WeightsUnreadable"
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory"
    BACKEND_ERROR = "BackendError"


class ModelFailure(StrEnum):
    """Why a model's bytes cannot be had or are not what they should be (spec section 15); the cause of a
    `WeightLoadFailed`."""

    REFUSED = "ModelRefused"
    NOT_FOUND = "ModelNotFound"
    ACCESS_DENIED = "ModelAccessDenied"
    SOURCE_UNREACHABLE = "ModelSourceUnreachable"
    RANGES_UNSUPPORTED = "ModelRangesUnsupported"
    CONTENT_CHANGED = "ModelContentChanged"
    CHECKSUM_MISMATCH = "ModelChecksumMismatch"
    DISK_FULL = "ModelDiskFull"
    CACHE_UNUSABLE = "ModelCacheUnusable"
    MALFORMED = "ModelMalformed"
    PARTS_INVALID = "ModelPartsInvalid"
    DIFFERENT_FILE = "ModelDifferentFile"
    PLAN_DIFFERS = "ModelPlanDiffers"


class ReleaseFailure(StrEnum):
    UNKNOWN_HANDLE = "UnknownHandle"
    STALE_GENERATION = "StaleGeneration"


class UninstallReason(StrEnum):
    """Other control reasons (spec section 37)."""

    EDGE_STOPPED = "EdgeStopped"
    RING_FAULTED = "RingFaulted"
    WORKER_SHUTDOWN = "WorkerShutdown"


class WorkerStoppedReason(StrEnum):
    """Other control reasons (spec section 37)."""

    GRACEFUL = "Graceful"
    ABORT_IN_FLIGHT = "AbortInFlight"
    FATAL = "Fatal"


class StreamFaultReason(StrEnum):
    """Why an edge's stream or pump failed (spec sections 24 and 25 leave the members open)."""

    PEER_UNREACHABLE = "PeerUnreachable"
    STREAM_BROKEN = "StreamBroken"
    WRONG_PEER = "WrongPeer"
    DUPLICATE_STREAM = "DuplicateStream"
    UNKNOWN_EDGE = "UnknownEdge"
    RING_FAULT = "RingFault"
    PUMP_FAILED = "PumpFailed"


class EstablishmentFailure(StrEnum):
    """What an edge waited for in vain (spec section 26), where that is not the network."""

    RING_NOT_INSTALLED = "RingNotInstalled"


class LeaseRejection(StrEnum):
    EXCEEDS_CEILING = "ExceedsCeiling"
    INVALID_SPEC = "InvalidSpec"
    NO_MEMORY = "NoMemory"
    SHUTTING_DOWN = "ShuttingDown"


class FaultReason(StrEnum):
    """Run-level fault sources (spec section 36), as they stand in `run_faulted`."""

    NODE_UNAVAILABLE = "NodeUnavailable"
    MEMBERSHIP_LOST = "MembershipLost"
    POOL_TIMEOUT = "PoolTimeout"
    PROVISIONING_REJECTED = "ProvisioningRejected"
    PLAN_INVALID = "PlanInvalid"
    ARENA_BOOT_FAILED = "ArenaBootFailed"
    RING_REQUEST_TOO_LARGE = "RingRequestTooLarge"
    ARENA_PRESSURE_TIMEOUT = "ArenaPressureTimeout"
    WEIGHT_LOAD_FAILED = "WeightLoadFailed"
    EDGE_ESTABLISHMENT_FAILED = "EdgeEstablishmentFailed"
    MALFORMED_OBJECT_HEADER = "MalformedObjectHeader"
    EOF_MID_OBJECT = "EofMidObject"
    STREAM_FAULT = "StreamFault"
    PUMP_FAILURE = "PumpFailure"
    RING_FAULT = "RingFault"
    WORKER_FATAL = "WorkerFatal"
    WORKER_CRASHED = "WorkerCrashed"
    DEVICE_OUT_OF_MEMORY = "DeviceOutOfMemory"
    DEVICE_COPY_FAILED = "DeviceCopyFailed"
    SEQUENCE_VIOLATION = "SequenceViolation"
    STEP_FAILED = "StepFailed"
    READINESS_TIMEOUT = "ReadinessTimeout"
    EXECUTION_TIMEOUT = "ExecutionTimeout"
    TEARDOWN_TIMEOUT = "TeardownTimeout"
    INTERNAL = "Internal"


class InternalCause(StrEnum):
    """Of INTERNAL, where it is no defect. MACHINE_LACKS: memory, processes, threads, open files or room on a
    disk were not to be had."""

    MACHINE_LACKS = "MachineLacks"


class Component(StrEnum):
    """The component that detected a fault; the names of the spec's inventory (section 41)."""

    NODE = "Node"
    POOL = "Pool"
    PLANNER = "Planner"
    RUN = "Run"
    STAGE_CONTROLLER = "StageController"
    ARENA_MANAGER = "ArenaManager"
    EDGE_ESTABLISHER = "EdgeEstablisher"
    TX_EDGE = "TxEdge"
    RX_EDGE = "RxEdge"
    DRIVER = "Driver"
    GPU_WORKER_CTL = "GpuWorkerCtl"
    WORKER = "Worker"
    TOKEN_ENDPOINT = "TokenEndpoint"
    MEMBERSHIP = "Membership"


_UNNAMED_ID = re.compile(r"(?<![0-9A-Za-z(])[0-9a-f]{16}(?![0-9A-Za-z])")


def named_node(node_id: NodeId, names: Mapping[NodeId, str]) -> str:
    """A node for people: the name by which they know it, and its id; the id alone where it has none."""
    name = names.get(node_id)
    return f"{name} ({node_hex(node_id)})" if name else node_hex(node_id)


@frozen
class Fault:
    """One failure as its detector saw it. `cause` is the finer enum's value, `detail` one line for people.
    `node_name` is given to it where names are known (`named`); detectors know ids."""

    reason: FaultReason
    component: Component
    detail: str = ""
    cause: str = ""
    node_id: NodeId | None = None
    stage_index: StageIndex | None = None
    edge_id: EdgeId | None = None
    ring_id: RingId | None = None
    node_name: str = ""

    def named(self, names: Mapping[NodeId, str]) -> Fault:
        """With its node's name, and with names beside the ids of nodes in its detail, as far as `names` knows
        them and they do not stand there yet."""

        def both(found: re.Match[str]) -> str:
            return named_node(NodeId(int(found[0], 16)), names)

        name = self.node_name if self.node_id is None else names.get(self.node_id, self.node_name)
        return replace(self, node_name=name, detail=_UNNAMED_ID.sub(both, self.detail))

    def fields(self) -> dict[str, Any]:
        """Of an event that records it (spec section 40). The node that it happened at is `fault_node_id`: an
        event's `node_id` is that of the process whose event it is."""
        node = None if self.node_id is None else node_hex(self.node_id)
        known = {"edge_id": self.edge_id, "ring_id": self.ring_id, "fault_node_id": node}
        known["fault_node_name"] = self.node_name or None
        return {
            "reason": str(self.reason),
            "component": str(self.component),
            "cause": self.cause,
            "detail": self.detail,
            "stage_index": self.stage_index,
            **{name: value for name, value in known.items() if value is not None},
        }

    def line(self) -> str:
        """The one typed line an operator reads."""
        cause = f" ({self.cause})" if self.cause else ""
        said = " ".join(self.detail.split())
        detail = f": {said.removeprefix(f'edge {self.edge_id}: ')}" if said else ""
        return f"{self.reason}{cause} seen by {self.component}{self._where()}{detail}"

    def _where(self) -> str:
        known = (
            "" if self.stage_index is None else f" at stage {self.stage_index}",
            ""
            if self.node_id is None
            else f" on node {named_node(self.node_id, {self.node_id: self.node_name})}",
            "" if self.edge_id is None else f" of edge {self.edge_id}",
        )
        return "".join(known)

    @property
    def remedy(self) -> str:
        """What an operator can do about it, one line."""
        return REMEDIES_OF_CAUSES.get((self.reason, self.cause)) or REMEDIES[self.reason]


_DEFECT = "this is a defect of swactor or of a plug-in: report it with the file of `--events FILE`"
_NETWORK = "check the node before this edge and the network between them, then run again"

REMEDIES: dict[FaultReason, str] = {
    FaultReason.NODE_UNAVAILABLE: (
        "look at what that node said last and at the network to it, start it if it has ended, then run again"
    ),
    FaultReason.MEMBERSHIP_LOST: "check that node and the network to it, then run again",
    FaultReason.POOL_TIMEOUT: "start those nodes, look at the network to them, or run without them",
    FaultReason.PROVISIONING_REJECTED: "do what it says, wait for the other run to end, or take other nodes",
    FaultReason.PLAN_INVALID: "change the number of nodes, the model or the run's options, then run again",
    FaultReason.ARENA_BOOT_FAILED: "give the node's arena fewer bytes, or the machine more shared memory",
    FaultReason.RING_REQUEST_TOO_LARGE: "give the nodes larger arenas, or ask for smaller rings",
    FaultReason.ARENA_PRESSURE_TIMEOUT: "give the nodes larger arenas, or wait for the end of other runs",
    FaultReason.WEIGHT_LOAD_FAILED: "check that this node has the same readable model file as all others",
    FaultReason.EDGE_ESTABLISHMENT_FAILED: "check that the nodes reach each other at the addresses they give",
    FaultReason.MALFORMED_OBJECT_HEADER: _DEFECT,
    FaultReason.EOF_MID_OBJECT: _NETWORK,
    FaultReason.STREAM_FAULT: _NETWORK,
    FaultReason.PUMP_FAILURE: _DEFECT,
    FaultReason.RING_FAULT: _DEFECT,
    FaultReason.WORKER_FATAL: "`swactor-cli doctor` on that node says what its worker lacks",
    FaultReason.WORKER_CRASHED: "look at that node's log for its worker's last words; often memory is short",
    FaultReason.DEVICE_OUT_OF_MEMORY: "take more nodes, a smaller quantisation, or ask for fewer tokens",
    FaultReason.DEVICE_COPY_FAILED: "check the device of that node: `swactor-cli doctor`",
    FaultReason.SEQUENCE_VIOLATION: _DEFECT,
    FaultReason.STEP_FAILED: "look at that node's log for what its worker says of the step",
    FaultReason.READINESS_TIMEOUT: "look at the logs of what was not ready; large models need fast disks",
    FaultReason.EXECUTION_TIMEOUT: "allow a token more time (--token-timeout), or find the node that hangs",
    FaultReason.TEARDOWN_TIMEOUT: "restart what does not stop: its memory is used again only after its end",
    FaultReason.INTERNAL: _DEFECT,
}

REMEDIES_OF_CAUSES: dict[tuple[FaultReason, str], str] = {
    (FaultReason.WEIGHT_LOAD_FAILED, ModelFailure.NOT_FOUND): (
        "give a name that every node can open: the same path on all, or an address"
    ),
    (FaultReason.WEIGHT_LOAD_FAILED, ModelFailure.ACCESS_DENIED): (
        "let that node read the file, or set HF_TOKEN there to a token that may"
    ),
    (FaultReason.WEIGHT_LOAD_FAILED, ModelFailure.SOURCE_UNREACHABLE): (
        "check that node's network and proxy, then run again: it goes on"
    ),
    (FaultReason.WEIGHT_LOAD_FAILED, ModelFailure.RANGES_UNSUPPORTED): (
        "download the file to every node and give its path"
    ),
    (FaultReason.WEIGHT_LOAD_FAILED, ModelFailure.CONTENT_CHANGED): (
        "run again, with a file or an address whose content stays as it is"
    ),
    (FaultReason.WEIGHT_LOAD_FAILED, ModelFailure.CHECKSUM_MISMATCH): (
        "run again to fetch it anew; else the source is damaged"
    ),
    (FaultReason.WEIGHT_LOAD_FAILED, ModelFailure.DISK_FULL): (
        "make room on that node (`swactor-cli cache clear`), or give it another SWACTOR_CACHE_DIR"
    ),
    (FaultReason.WEIGHT_LOAD_FAILED, ModelFailure.CACHE_UNUSABLE): (
        "set SWACTOR_CACHE_DIR on that node to a folder that it may write to"
    ),
    (FaultReason.EDGE_ESTABLISHMENT_FAILED, EstablishmentFailure.RING_NOT_INSTALLED): (
        "look at that node's log for what its worker did instead of installing the ring"
    ),
    (FaultReason.EDGE_ESTABLISHMENT_FAILED, LeaseRejection.NO_MEMORY): (
        "free memory on that node, or raise its container's limit, then run again"
    ),
    (FaultReason.EDGE_ESTABLISHMENT_FAILED, LeaseRejection.SHUTTING_DOWN): (
        "start that node again, or run without it"
    ),
    (FaultReason.EDGE_ESTABLISHMENT_FAILED, LeaseRejection.INVALID_SPEC): _DEFECT,
    (FaultReason.INTERNAL, InternalCause.MACHINE_LACKS): (
        "give that machine, or this user there, what it says, then run again"
    ),
    (FaultReason.WEIGHT_LOAD_FAILED, RoleFailure.BACKEND_ERROR): REMEDIES[FaultReason.WORKER_FATAL],
    (FaultReason.WORKER_CRASHED, ModelFailure.CONTENT_CHANGED): (
        "put the whole file there again, by a rename and never while a run uses it, then run again"
    ),
    (FaultReason.WORKER_CRASHED, RoleFailure.WEIGHTS_UNREADABLE): (
        "look in that machine's kernel log for errors of disk or memory, and run from a sound disk"
    ),
}
"""Where the cause says better than the reason what to do."""

OBJECT_FAULTS: dict[ObjectFailure, FaultReason] = {
    ObjectFailure.HEADER_MALFORMED: FaultReason.MALFORMED_OBJECT_HEADER,
    ObjectFailure.UNSUPPORTED_OBJECT_VERSION: FaultReason.MALFORMED_OBJECT_HEADER,
    ObjectFailure.EXTENT_EXCEEDS_MAX: FaultReason.MALFORMED_OBJECT_HEADER,
    ObjectFailure.EXTENT_ALIGNMENT_INVALID: FaultReason.MALFORMED_OBJECT_HEADER,
    ObjectFailure.SEQUENCE_VIOLATION: FaultReason.SEQUENCE_VIOLATION,
    ObjectFailure.DEVICE_ALLOCATION_FAILED: FaultReason.DEVICE_OUT_OF_MEMORY,
    ObjectFailure.DEVICE_COPY_FAILED: FaultReason.DEVICE_COPY_FAILED,
    ObjectFailure.EOF_MID_OBJECT: FaultReason.EOF_MID_OBJECT,
}

RING_FAULTS: dict[RingFaultReason, FaultReason] = {
    RingFaultReason.DEVICE_OUT_OF_MEMORY: FaultReason.DEVICE_OUT_OF_MEMORY,
    RingFaultReason.DEVICE_COPY_FAILED: FaultReason.DEVICE_COPY_FAILED,
    RingFaultReason.SEQUENCE_VIOLATION: FaultReason.SEQUENCE_VIOLATION,
    RingFaultReason.HEADER_MALFORMED: FaultReason.MALFORMED_OBJECT_HEADER,
    RingFaultReason.WORKER_PROCESS_EXITED: FaultReason.WORKER_CRASHED,
    RingFaultReason.WORKER_INTERNAL: FaultReason.WORKER_CRASHED,
}

STREAM_FAULTS: dict[StreamFaultReason, FaultReason] = {
    StreamFaultReason.PEER_UNREACHABLE: FaultReason.EDGE_ESTABLISHMENT_FAILED,
    StreamFaultReason.WRONG_PEER: FaultReason.EDGE_ESTABLISHMENT_FAILED,
    StreamFaultReason.DUPLICATE_STREAM: FaultReason.EDGE_ESTABLISHMENT_FAILED,
    StreamFaultReason.PUMP_FAILED: FaultReason.PUMP_FAILURE,
    StreamFaultReason.RING_FAULT: FaultReason.RING_FAULT,
}
