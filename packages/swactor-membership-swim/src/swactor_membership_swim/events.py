"""What goes into the membership machine and what comes out of it. Data only."""

from __future__ import annotations

from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member
from swactor_core.values import frozen

from swactor_membership_swim.members import Life

Address = tuple[str, int]


@frozen
class Received:
    """An authenticated packet: `sender` is proven by the seal, `source` is where an answer goes."""

    sender: Life
    data: bytes
    source: Address


@frozen
class Outlived:
    """An authenticated packet of a life whose key has had a later one here, of this epoch. It may be a
    recording: nothing in it counts as news."""

    sender: Life
    data: bytes
    source: Address
    epoch: int


@frozen
class Tick:
    """The time has come that `deadline` named, or a later one."""


@frozen
class SendFailed:
    """The system refused to send to this address."""

    address: Address


@frozen
class ProbeAsked:
    """Somebody has outside evidence against a member."""

    node_id: NodeId


@frozen
class LeaveAsked:
    """This participant departs; ticks go on until `departed`."""


Event = Received | Outlived | Tick | SendFailed | ProbeAsked | LeaveAsked


@frozen
class Transmit:
    """Seal `data` and send it."""

    address: Address
    data: bytes


@frozen
class Changed:
    """The state, life or endpoint of another member is now this."""

    member: Member


@frozen
class Superseded:
    """Another life stands in this one's place (`by`): this participant falls silent for good."""

    by: Member


Action = Transmit | Changed | Superseded
