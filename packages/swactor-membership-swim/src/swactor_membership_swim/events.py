"""What goes into the membership machine and what comes out of it. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member

from swactor_membership_swim.members import Life

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Received:
    """An authenticated packet: `sender` is proven by the seal, `source` is where an answer goes."""

    sender: Life
    data: bytes
    source: Address


@dataclass(frozen=True, slots=True)
class Outlived:
    """An authenticated packet of a life whose key has had a later one here, of this epoch. It may be a
    recording: nothing in it counts as news."""

    sender: Life
    data: bytes
    source: Address
    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time has come that `deadline` named, or a later one."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The system refused to send to this address."""

    address: Address


@dataclass(frozen=True, slots=True)
class ProbeAsked:
    """Somebody has outside evidence against a member."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This participant departs; ticks go on until `departed`."""


Event = Received | Outlived | Tick | SendFailed | ProbeAsked | LeaveAsked


@dataclass(frozen=True, slots=True)
class Transmit:
    """Seal `data` and send it."""

    address: Address
    data: bytes


@dataclass(frozen=True, slots=True)
class Changed:
    """The state, life or endpoint of another member is now this."""

    member: Member


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another life stands in this one's place (`by`): this participant falls silent for good."""

    by: Member


Action = Transmit | Changed | Superseded
