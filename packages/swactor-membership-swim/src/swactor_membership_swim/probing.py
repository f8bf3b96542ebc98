"""Probes and relayed probes in flight: who was asked, until when, and whose answer counts. Bookkeeping only.

Knows sequences, lives and times. What a missing answer means is the machine's to say.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from swactor_core.values import frozen

from swactor_membership_swim.events import Address
from swactor_membership_swim.members import Life

_CLOSED_KEPT = 256
_RELAYS_KEPT = 256


@dataclass(slots=True)
class Probe:
    """One question to one life. `asked` turns True when relays were asked too."""

    sequence: int
    name: str
    life: Life
    address: Address
    sent: float
    direct_due: float
    ends: float
    relays: set[Life] = field(default_factory=set)
    asked: bool = False
    answered: float | None = None


class ProbeBook:
    def __init__(self, first_sequence: int) -> None:
        self._sequence = first_sequence
        self._open: dict[int, Probe] = {}
        self._closed: OrderedDict[int, Probe] = OrderedDict()

    def next_sequence(self) -> int:
        self._sequence = (self._sequence + 1) % (1 << 32)
        return self._sequence

    def begin(
        self, name: str, life: Life, address: Address, now: float, *, timeout: float, length: float
    ) -> Probe:
        probe = Probe(self.next_sequence(), name, life, address, now, now + timeout, now + length)
        self._open[probe.sequence] = probe
        return probe

    def answer(self, sequence: int, *, subject: Life, sender: Life, now: float) -> tuple[Probe, bool] | None:
        """The probe that this answer belongs to and whether it came in time; None when it counts for none."""
        probe = self._open.get(sequence)
        in_time = probe is not None
        if probe is None:
            probe = self._closed.get(sequence)
        if probe is None or probe.life != subject or (sender != subject and sender not in probe.relays):
            return None
        probe.answered = now
        self._open.pop(sequence, None)
        self._closed.pop(sequence, None)
        return probe, in_time

    def waiting_for(self, life: Life) -> bool:
        return any(probe.life == life for probe in self._open.values())

    def unanswered(self) -> Iterator[Probe]:
        return iter(list(self._open.values()))

    def close(self, probe: Probe) -> None:
        """No verdict depends on it any more; a late answer is still recognised."""
        if self._open.pop(probe.sequence, None) is not None:
            self._closed[probe.sequence] = probe
            if len(self._closed) > _CLOSED_KEPT:
                self._closed.popitem(last=False)

    def deadline(self) -> float:
        return min((p.ends if p.asked else p.direct_due for p in self._open.values()), default=math.inf)


@frozen
class Relay:
    """A probe made for somebody else: his address and sequence."""

    requester: Address
    sequence: int
    target: Life


class RelayBook:
    """The newest relayed probes; the oldest are forgotten without a word, as if the answer were lost."""

    def __init__(self) -> None:
        self._relays: OrderedDict[int, Relay] = OrderedDict()

    def put(self, own_sequence: int, relay: Relay) -> None:
        self._relays[own_sequence] = relay
        if len(self._relays) > _RELAYS_KEPT:
            self._relays.popitem(last=False)

    def take(self, own_sequence: int, target: Life) -> Relay | None:
        relay = self._relays.get(own_sequence)
        if relay is None or relay.target != target:
            return None
        return self._relays.pop(own_sequence)
