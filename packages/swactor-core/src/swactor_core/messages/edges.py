"""EdgeEstablisher, gates and Driver (spec sections 24, 26, 27)."""

from __future__ import annotations

from dataclasses import dataclass

from swactor_core.faults import Fault, StreamFaultReason
from swactor_core.ids import EdgeId, NodeId, PortId, RingId
from swactor_core.messages.address import Address
from swactor_core.specs import ObjectSpec, RingLayout, RingSpec


@dataclass(frozen=True, slots=True)
class ProvisionTx:
    edge_id: EdgeId
    port_id: PortId
    rx_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@dataclass(frozen=True, slots=True)
class ProvisionRx:
    edge_id: EdgeId
    port_id: PortId
    tx_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@dataclass(frozen=True, slots=True)
class EstablishSend:
    edge_id: EdgeId
    rx_node_id: NodeId
    ring_id: RingId
    ring_layout: RingLayout
    tx_addr: Address


@dataclass(frozen=True, slots=True)
class EstablishRecv:
    edge_id: EdgeId
    tx_node_id: NodeId
    ring_id: RingId
    ring_layout: RingLayout
    rx_addr: Address


@dataclass(frozen=True, slots=True)
class StreamArrived:
    """`stream` is the driver's number for the transport stream, which never leaves the driver."""

    edge_id: EdgeId
    peer: NodeId
    stream: int


@dataclass(frozen=True, slots=True)
class StopEdge:
    edge_id: EdgeId


@dataclass(frozen=True, slots=True)
class DriverEdgeReady:
    edge_id: EdgeId


@dataclass(frozen=True, slots=True)
class StreamClosed:
    edge_id: EdgeId


@dataclass(frozen=True, slots=True)
class StreamFault:
    edge_id: EdgeId
    reason: StreamFaultReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PumpStopped:
    edge_id: EdgeId
    ring_id: RingId


@dataclass(frozen=True, slots=True)
class EdgeReady:
    edge_id: EdgeId
    ring_id: RingId


@dataclass(frozen=True, slots=True)
class EdgeStopped:
    """`unproven` is set when the range could not be released with a proof."""

    edge_id: EdgeId
    unproven: str = ""


@dataclass(frozen=True, slots=True)
class EdgeFailed:
    edge_id: EdgeId
    fault: Fault
