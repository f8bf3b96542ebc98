"""Identifiers of the system (spec section 6): distinct types over plain integers.

Knows only names. An EdgeId is assigned by the orchestrator alone; a RingId is never reused while its
node lives; a DeviceObjectHandle is valid only in the worker generation that made it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NewType

from swactor_core.values import value

RunId = NewType("RunId", int)
NodeId = NewType("NodeId", int)
RoleId = NewType("RoleId", int)
PortId = NewType("PortId", int)
StageIndex = NewType("StageIndex", int)
EdgeId = NewType("EdgeId", int)
RingId = NewType("RingId", int)
ObjectId = NewType("ObjectId", int)
Sequence = NewType("Sequence", int)
StepId = NewType("StepId", int)
WorkerGeneration = NewType("WorkerGeneration", int)
LeaseRequestId = NewType("LeaseRequestId", int)

RUN_IDS = range(1 << 64)
EDGE_IDS = range(1, 1 << 64)
"""What an EdgeId may be: 64 bits on the wire, and never 0, the key of components that are one of a kind."""

INPUT_PORT = PortId(0)
OUTPUT_PORT = PortId(1)


@value
class DeviceObjectHandle:
    """Opaque to the node process (spec section 6): a worker's device object in one generation."""

    worker_generation: WorkerGeneration
    id: int


def node_id_of(public_key: bytes) -> NodeId:
    """The 64-bit NodeId of a node's public key: the first eight bytes of its BLAKE2b digest."""
    return NodeId(int.from_bytes(blake2b(public_key, digest_size=8).digest(), "big"))


def node_hex(node_id: NodeId) -> str:
    """The NodeId as people see it: sixteen hexadecimal digits."""
    return f"{node_id:016x}"
