"""Fixtures of the membership tests: records, and a seeded world of machines in virtual time.

The world runs the production machines with every packet encoded, sealed sizes checked, and faults drawn from
one seed: loss, delay, pause, crash, restart, partition, starvation. Nothing here sleeps or reads a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random

import pytest
from swactor_core.ids import node_id_of
from swactor_core.spi.membership import Member, MemberState
from swactor_membership_swim.events import (
    Action,
    Changed,
    Event,
    LeaveAsked,
    ProbeAsked,
    Received,
    SendFailed,
    Superseded,
    Tick,
    Transmit,
)
from swactor_membership_swim.machine import SwimMachine
from swactor_membership_swim.members import life_of
from swactor_membership_swim.seal import SEAL_BYTES
from swactor_membership_swim.settings import LOCAL, SwimSettings

Address = tuple[str, int]


def record_of(name: str, *, epoch: int = 1, port: int | None = None, **changes: object) -> Member:
    key = blake2b(name.encode(), digest_size=32).digest()
    number = int.from_bytes(blake2b(name.encode(), digest_size=2).digest(), "big")
    member = Member(
        name=name,
        node_id=node_id_of(key),
        epoch=epoch,
        incarnation=0,
        state=MemberState.ALIVE,
        public_key=key,
        host="10.0.0.1",
        port=4433,
        gossip_host=name,
        gossip_port=number if port is None else port,
    )
    return replace(member, **changes)


@dataclass
class Participant:
    """One process of the world."""

    machine: SwimMachine
    address: Address
    running: bool = True
    paused_until: float = 0.0
    backlog: list[tuple[Received, float]] = field(default_factory=list)
    extra_delay: float = 0.0
    ticks: int = 0
    changes: list[tuple[float, Member]] = field(default_factory=list)
    superseded: bool = False

    def states(self) -> dict[str, MemberState]:
        return {member.name: member.state for member in self.machine.members()}


class World:
    """Virtual time over real machines. `loss` is the share of packets lost on each way; of those larger than
    `carries` all are."""

    def __init__(self, seed: int, *, settings: SwimSettings = LOCAL, loss: float = 0.0) -> None:
        self.seed = seed
        self.now = 1000.0
        self.settings = settings
        self.loss = loss
        self.carries = 65_507
        self.delay = (0.0002, 0.002)
        self.cut: Callable[[str, str], bool] = lambda sender, receiver: False
        self.people: dict[str, Participant] = {}
        self.sent_packets = 0
        self.sent_bytes = 0
        self.lost = 0
        self._network = Random(f"{seed}/network")
        self._queue: list[tuple[float, int, str, Event | None]] = []
        self._order = 0
        self._by_address: dict[Address, str] = {}

    def start(
        self, label: str, *, seeds: tuple[str, ...] = (), epoch: int = 1, name: str | None = None
    ) -> Participant:
        """Starts a process under `label`; its member name is the same unless `name` says otherwise."""
        me = replace(record_of(label, epoch=epoch), name=label if name is None else name)
        addresses = tuple(self.people[s].address for s in seeds)
        random = Random(f"{self.seed}/{label}/{epoch}")
        machine = SwimMachine(me, addresses, self.settings, random=random, now=self.now)
        person = Participant(machine, (me.gossip_host, me.gossip_port))
        self.people[label] = person
        self._by_address[person.address] = label
        self._arm(label)
        return person

    def cluster(self, count: int) -> list[str]:
        """`count` participants that know each other, after a second of calm."""
        names = [f"node-{i}" for i in range(count)]
        for name in names:
            self.start(name, seeds=tuple(names[:1]) if name != names[0] else ())
        loss, self.loss = self.loss, 0.0
        self.run(2.0)
        self.loss = loss
        for name in names:
            assert self.people[name].states() == dict.fromkeys(names, MemberState.ALIVE), f"seed {self.seed}"
            self.people[name].changes.clear()
        return names

    def crash(self, name: str) -> None:
        self.people[name].running = False

    def pause(self, name: str, seconds: float) -> None:
        """As SIGSTOP and SIGCONT: packets wait in the socket, and are read before any timer fires."""
        person = self.people[name]
        person.paused_until = self.now + seconds
        self._push(person.paused_until, name, None)

    def leave(self, name: str) -> None:
        self._step(name, LeaveAsked())

    def suspect(self, name: str, whom: str) -> None:
        self._step(name, ProbeAsked(record_of(whom).node_id))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            at, _, name, event = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            person = self.people[name]
            if not person.running:
                continue
            if self.now < person.paused_until:
                if isinstance(event, Received):
                    person.backlog.append((event, self.now))
                continue
            backlog, person.backlog = person.backlog, []
            for received, _ in backlog:
                self._step(name, received)
            if isinstance(event, Received):
                self._step(name, event)
            elif person.machine.deadline <= self.now:
                person.ticks += 1
                self._step(name, Tick())
        self.now = end

    def _step(self, name: str, event: Event) -> None:
        person = self.people[name]
        for action in person.machine.step(event, self.now):
            self._perform(name, person, action)
        self._arm(name)

    def _perform(self, name: str, person: Participant, action: Action) -> None:
        if isinstance(action, Changed):
            assert action.member.name != person.machine.me.name, "a participant never reports itself"
            person.changes.append((self.now, action.member))
        elif isinstance(action, Superseded):
            person.superseded = True
        elif isinstance(action, Transmit):
            self._transmit(name, person, action)

    def _transmit(self, name: str, person: Participant, action: Transmit) -> None:
        size = len(action.data) + SEAL_BYTES
        assert size <= self.settings.packet_limit, f"a packet of {size} bytes"
        self.sent_packets += 1
        self.sent_bytes += size
        receiver = self._by_address.get(action.address)
        stopped = receiver is None or self.cut(name, receiver) or size > self.carries
        if stopped or self._network.random() < self.loss:
            self.lost += 1
            return
        event = Received(life_of(person.machine.me), action.data, person.address)
        at = self.now + self._network.uniform(*self.delay) + self.people[receiver].extra_delay
        self._push(at, receiver, event)

    def fail_send(self, name: str, receiver: str) -> None:
        self._step(name, SendFailed(self.people[receiver].address))

    def _arm(self, name: str) -> None:
        due = self.people[name].machine.deadline
        if due < float("inf"):
            self._push(max(due, self.now), name, None)

    def _push(self, at: float, name: str, event: Event | None) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at, self._order, name, event))

    # Questions

    def verdicts(self, state: MemberState) -> list[tuple[str, str, int, float]]:
        """(observer, member, epoch, when) of every change to that state so far."""
        return [
            (observer, member.name, member.epoch, at)
            for observer, person in self.people.items()
            for at, member in person.changes
            if member.state is state
        ]

    def state_at(self, observer: str, name: str) -> MemberState | None:
        return self.people[observer].states().get(name)


@pytest.fixture(scope="session")
def record() -> Callable[..., Member]:
    return record_of


@pytest.fixture(scope="session")
def world() -> type[World]:
    return World
