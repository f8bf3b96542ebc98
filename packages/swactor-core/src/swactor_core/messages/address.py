"""Addresses and timers: what every border of this process shares."""

from __future__ import annotations

from typing import NamedTuple

from swactor_core.faults import Component
from swactor_core.values import frozen


class Address(NamedTuple):
    """Whom a message is for: a component of this process, or (NODE, node_id) for a remote node's control.
    `key` is the edge id, node id or the like where a component has many actors. A tuple, because every
    message on a token's way looks its mailbox up by it."""

    component: Component
    key: int = 0


@frozen
class TimerFired:
    """A named timer; one of an older generation is dropped and counted."""

    name: str
    generation: int
