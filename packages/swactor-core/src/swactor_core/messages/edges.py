"""EdgeEstablisher, gates and Driver (spec sections 24, 26, 27)."""

from __future__ import annotations

from swactor_core.faults import Fault, StreamFaultReason
from swactor_core.ids import EdgeId, NodeId, PortId, RingId
from swactor_core.messages.address import Address
from swactor_core.specs import ObjectSpec, RingLayout, RingSpec
from swactor_core.values import frozen


@frozen
class ProvisionTx:
    edge_id: EdgeId
    port_id: PortId
    rx_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@frozen
class ProvisionRx:
    edge_id: EdgeId
    port_id: PortId
    tx_node_id: NodeId
    object_spec: ObjectSpec
    ring_spec: RingSpec


@frozen
class EstablishSend:
    edge_id: EdgeId
    rx_node_id: NodeId
    ring_id: RingId
    ring_layout: RingLayout
    tx_addr: Address


@frozen
class EstablishRecv:
    edge_id: EdgeId
    tx_node_id: NodeId
    ring_id: RingId
    ring_layout: RingLayout
    rx_addr: Address


@frozen
class StreamArrived:
    """`stream` is the driver's number for the transport stream, which never leaves the driver."""

    edge_id: EdgeId
    peer: NodeId
    stream: int


@frozen
class StopEdge:
    edge_id: EdgeId


@frozen
class DriverEdgeReady:
    edge_id: EdgeId


@frozen
class StreamClosed:
    edge_id: EdgeId


@frozen
class StreamFault:
    edge_id: EdgeId
    reason: StreamFaultReason
    detail: str = ""


@frozen
class PumpStopped:
    edge_id: EdgeId
    ring_id: RingId


@frozen
class EdgeReady:
    edge_id: EdgeId
    ring_id: RingId


@frozen
class EdgeStopped:
    """`unproven` is set when the range could not be released with a proof."""

    edge_id: EdgeId
    unproven: str = ""


@frozen
class EdgeFailed:
    edge_id: EdgeId
    fault: Fault
