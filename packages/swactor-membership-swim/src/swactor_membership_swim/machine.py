"""One participant of membership (spec section 9), without sockets or clocks: events in, actions out.

SWIM (Das, Gupta, Motivala 2002) with suspicion, the Lifeguard extensions that matter to small clusters
(Dadgar, Phillips, Currey 2018: suspicion that shortens with confirmations, the suspect is told first, a
strained participant slows down), full-mesh probing, and epochs.

Knows the rules of conversation: who is asked, told and answered, and when. What a claim does to what is held
is in `standing.py`, what is in flight in `probing.py`, what this participant concludes of itself in
`own_health.py`. It gets packets that the seal has authenticated, and the time as an argument; randomness is
given to it. After a wake-up the driver must hand over everything received before it hands over `Tick`: a
participant that slept must not accuse its peers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from swactor_core.spi.membership import Member, MemberState

from swactor_membership_swim import wire
from swactor_membership_swim.events import (
    Action,
    Address,
    Event,
    LeaveAsked,
    Outlived,
    ProbeAsked,
    Received,
    SendFailed,
    Tick,
    Transmit,
)
from swactor_membership_swim.members import Claim, Entry, Life, Suspicion, life_of
from swactor_membership_swim.own_health import OwnHealth
from swactor_membership_swim.probing import Probe, ProbeBook, Relay, RelayBook
from swactor_membership_swim.seal import SEAL_BYTES
from swactor_membership_swim.settings import SwimSettings
from swactor_membership_swim.standing import Ask, Outcome, Standing
from swactor_membership_swim.wire import Ack, Body, Gossip, PacketError, Ping, PingRequest, Sync

_STRANGERS_KEPT = 256


class SwimMachine:
    """`me` is this participant's record, Alive. `counters` counts what was refused or is worth noting."""

    def __init__(
        self, me: Member, seeds: Iterable[Address], settings: SwimSettings, *, random: Random, now: float
    ) -> None:
        self._held = Standing(me, settings)
        self._roster, self._rumours = self._held.roster, self._held.rumours
        self._health = OwnHealth(settings)
        self._seeds = tuple(seeds)
        self._settings = settings
        self._random = random
        self._probes = ProbeBook(random.getrandbits(32))
        self._relays = RelayBook()
        self._round: list[Probe] = []
        self._rotation: list[str] = []
        self._round_due = now
        self._gossip_due = now
        self._seeds_due = now if self._seeds else math.inf
        self._sync_due = now + settings.sync_interval
        self._reconnect_due = now + settings.reconnect_interval
        self._strangers: OrderedDict[Life, float] = OrderedDict()
        self._sync_second, self._sync_replies = 0, 0
        self._leave_left = 0
        self._leave_due = math.inf
        self._leave_unheard: set[str] = set()
        self._leave_pings: dict[int, str] = {}
        self.counters = self._held.counters
        self._actions: list[Action] = []

    # What others may look at

    @property
    def me(self) -> Member:
        return self._held.me

    @property
    def departed(self) -> bool:
        """A departure was asked for, and everybody was told as well as can be."""
        return self._held.me.state is MemberState.LEFT and self._leave_due == math.inf

    def members(self) -> tuple[Member, ...]:
        """This participant and all that it holds, the dead and departed for a while included, by name."""
        return self._held.members()

    @property
    def deadline(self) -> float:
        """When the next `Tick` is due; infinity when never."""
        if self._held.superseded or self.departed:
            return math.inf
        if self._held.me.state is MemberState.LEFT:
            return self._leave_due
        gossip = self._gossip_due if self._rumours and self._roster.present() else math.inf
        deaths = (self._dies_at(suspicion) for _, suspicion in self._held.suspects())
        timers = (self._round_due, self._seeds_due, self._sync_due, self._reconnect_due, gossip)
        return min(*timers, self._probes.deadline(), min(deaths, default=math.inf))

    def step(self, event: Event, now: float) -> tuple[Action, ...]:
        """Takes one event. Nothing that a peer sends makes it raise."""
        self._actions = []
        if self._held.superseded:
            return ()
        match event:
            case Received():
                self._receive(event, now)
            case Outlived():
                self._answer_outlived(event, now)
            case Tick():
                self._tick(now)
            case SendFailed(address):
                for probe in self._probes.unanswered():
                    if probe.address == address and not probe.asked:
                        self._ask_relays(probe, now)
            case ProbeAsked(node_id):
                entry = self._roster.of_node(node_id)
                if entry is not None and entry.present and self._held.me.state is MemberState.ALIVE:
                    self._begin_probe(entry, now)
            case LeaveAsked():
                self._leave(now)
        return tuple(self._actions)

    # Packets

    def _receive(self, event: Received, now: float) -> None:
        if event.sender.node_id == self._held.life.node_id:
            self._meet_twin(event, now)
            return
        try:
            packet = wire.decode(event.data)
        except PacketError:
            self.counters["undecodable"] += 1
            return
        merged = isinstance(packet.body, Sync)
        about_me = False
        for claim in packet.claims:
            about_me = about_me or claim.member.name == self._held.me.name
            self._hear(claim, now, merged=merged and life_of(claim.member) != event.sender)
            if self._held.superseded:
                return
        known = self._roster.of_life(event.sender)
        match packet.body:
            case Ping(sequence, target):
                if target == self._held.life:
                    extra = self._held.claims_about(event.sender, own=about_me or known is None)
                    self._send(event.source, Ack(sequence, self._held.life), extra)
                else:
                    self.counters["misdirected ping"] += 1
                    self._send(event.source, Gossip(), [Claim(self._held.me)])
            case Ack(sequence, subject):
                self._answered(sequence, subject, event.sender, now)
            case PingRequest(sequence, target, host, port):
                own = self._probes.next_sequence()
                self._relays.put(own, Relay(event.source, sequence, target))
                self._send((host, port), Ping(own, target), self._held.claims_about(target))
            case Sync(reply_wanted=True) if self._may_reply(now):
                self._send_table(event.source, reply_wanted=False)
        if known is None and not merged:
            self._meet(event, now)

    def _meet(self, event: Received, now: float) -> None:
        """A participant of the cluster that we do not hold: exchange tables, at most once a round each."""
        if self._may_answer(event.sender, now):
            self._send_table(event.source, reply_wanted=True)

    def _meet_twin(self, event: Received, now: float) -> None:
        """Another process with our key. The earlier start of the two gives up, as it would if others told it
        of the later one: they may know one of us only."""
        self.counters["own key"] += 1
        if event.sender.epoch > self._held.life.epoch:
            self._actions += [self._held.give_up(member) for member in self._own_records(event)]
        elif self._may_answer(event.sender, now):
            self._send(event.source, Gossip(), [Claim(self._held.me)])

    def _own_records(self, event: Received | Outlived) -> list[Member]:
        """What the sender of a packet says of itself in it, at most once."""
        try:
            packet = wire.decode(event.data)
        except PacketError:
            self.counters["undecodable"] += 1
            return []
        return [c.member for c in packet.claims if life_of(c.member) == event.sender][:1]

    def _may_answer(self, stranger: Life, now: float) -> bool:
        """Once a round each."""
        if now - self._strangers.get(stranger, -math.inf) < self._settings.probe_interval:
            return False
        self._strangers[stranger] = now
        self._strangers.move_to_end(stranger)
        if len(self._strangers) > _STRANGERS_KEPT:
            self._strangers.popitem(last=False)
        return True

    def _answer_outlived(self, event: Outlived, now: float) -> None:
        """A life whose datagrams are refused, for a later one has been heard, is told whose place it would
        take: once that has ended, as when a clock was set back, or when both live, with one key."""
        if event.sender.node_id == self._held.life.node_id or not self._may_answer(event.sender, now):
            return
        entry = self._roster.of_node(event.sender.node_id)
        if entry is not None:
            entry.outlived = min(entry.outlived, now)
            if entry.member.epoch > event.sender.epoch and (entry.has_twin or not entry.present):
                self._send(event.source, Gossip(), [Claim(entry.member)])
            return
        for member in self._own_records(event):  # its former life is forgotten here, but for its epoch
            former = replace(member, epoch=event.epoch, state=MemberState.LEFT)
            self._send(event.source, Gossip(), [Claim(former)])

    def _may_reply(self, now: float) -> bool:
        second = int(now)
        if second != self._sync_second:
            self._sync_second, self._sync_replies = second, 0
        self._sync_replies += 1
        if self._sync_replies > self._settings.sync_replies_per_second:
            self.counters["table refused"] += 1
            return False
        return True

    def _send(self, address: Address, body: Body, claims: Iterable[Claim] = ()) -> None:
        """Sends a body with its own claims first and rumours in the room that is left."""
        forced = list(claims)
        parts = [wire.encode_body(body), *(wire.encode_claim(claim) for claim in forced)]
        room = self._settings.packet_limit - SEAL_BYTES - sum(map(len, parts))
        names = [claim.member.name for claim in forced]
        parts += self._rumours.take(room, members=1 + len(self._roster), without=names)
        self._actions.append(Transmit(address, b"".join(parts)))

    def _send_table(self, address: Address, *, reply_wanted: bool) -> None:
        """The whole table in as many packets as it takes; each stands for itself; the first asks a reply."""
        limit = self._settings.packet_limit - SEAL_BYTES
        packet = bytearray(wire.encode_body(Sync(reply_wanted)))
        for member in self._held.table():
            row = wire.encode_claim(Claim(member))
            if len(packet) + len(row) > limit:
                self._actions.append(Transmit(address, bytes(packet)))
                packet = bytearray(wire.encode_body(Sync(reply_wanted=False)))
            packet += row
        self._actions.append(Transmit(address, bytes(packet)))

    # Claims

    def _hear(self, claim: Claim, now: float, *, merged: bool = False) -> None:
        self._follow(self._held.hear(claim, now, merged=merged), now)

    def _follow(self, outcomes: Iterable[Outcome], now: float) -> None:
        for outcome in outcomes:
            if not isinstance(outcome, Ask):
                self._actions.append(outcome)
            elif not self._probes.waiting_for(life_of(outcome.entry.member)):
                self._begin_probe(outcome.entry, now)

    # Probes

    def _begin_probe(self, entry: Entry, now: float) -> Probe:
        factor = self._health.factor
        member = entry.member
        probe = self._probes.begin(
            member.name,
            life_of(member),
            (member.gossip_host, member.gossip_port),
            now,
            timeout=self._settings.probe_timeout * factor,
            length=self._settings.probe_interval * factor,
        )
        self._send(probe.address, Ping(probe.sequence, probe.life), self._held.claims_about(probe.life))
        return probe

    def _ask_relays(self, probe: Probe, now: float) -> None:
        """The second half of a probe: once more directly, and through others."""
        probe.asked = True
        claims = self._held.claims_about(probe.life)
        self._send(probe.address, Ping(probe.sequence, probe.life), claims)
        others = [e.member for e in self._roster.present() if life_of(e.member) != probe.life]
        relays = [m for m in others if m.state is MemberState.ALIVE] or others
        if len(relays) > self._settings.exhaustive_relays:
            relays = self._random.sample(relays, self._settings.relays)
        request = PingRequest(probe.sequence, probe.life, *probe.address)
        for relay in relays:
            probe.relays.add(life_of(relay))
            self._send((relay.gossip_host, relay.gossip_port), request, claims)

    def _answered(self, sequence: int, subject: Life, sender: Life, now: float) -> None:
        relay = self._relays.take(sequence, subject) if sender == subject else None
        if relay is not None:
            self._send(relay.requester, Ack(relay.sequence, subject), self._held.record_of(subject))
            return
        if self._held.me.state is MemberState.LEFT:
            self._leave_unheard.discard(self._leave_pings.get(sequence, ""))
            if not self._leave_unheard:
                self._leave_due = math.inf
            return
        found = self._probes.answer(sequence, subject=subject, sender=sender, now=now)
        if found is None:
            return
        probe, in_time = found
        self._end_isolation(now)
        if not in_time:
            self._health.answered_late()
        entry = self._roster.of_life(subject)
        if entry is not None:
            entry.answered = max(entry.answered, probe.sent)

    def _end_isolation(self, now: float) -> None:
        """Somebody answers again: the others, whom nothing could clear until now, get time to do so too."""
        if self._health.isolated:
            self._health.isolated = False
            self._spare_suspects(now)

    def _spare_suspects(self, now: float) -> None:
        self._held.spare(now + 3 * self._settings.probe_interval)

    def _unanswered(self, probe: Probe, now: float) -> None:
        entry = self._roster.of_life(probe.life)
        if entry is None or not entry.present:
            return
        accusation = Claim(replace(entry.member, state=MemberState.SUSPECT), self._held.life)
        self._hear(accusation, now)

    # Time

    def _tick(self, now: float) -> None:
        if self._held.me.state is MemberState.LEFT:
            if now >= self._leave_due:
                self._tell_departure(now)
            return
        if now - self._round_due > self._settings.probe_interval:
            self._resume_after_stall(now)
        for probe in self._probes.unanswered():
            if now >= probe.ends:
                self._probes.close(probe)
                self._unanswered(probe, now)
            elif now >= probe.direct_due and not probe.asked:
                self._ask_relays(probe, now)
        for entry, suspicion in self._held.suspects():
            if now >= self._dies_at(suspicion):
                self._follow(self._held.bury(entry, now), now)
        if now >= self._round_due:
            self._end_round()
            self._begin_round(now)
        self._tick_contacts(now)
        if now >= self._gossip_due and self._rumours:
            self._gossip(now)

    def _resume_after_stall(self, now: float) -> None:
        """This participant slept. What it did not hear proves nothing: probes are asked anew, and suspects
        get the time that was missed."""
        self.counters["stall"] += 1
        for probe in self._probes.unanswered():
            self._probes.close(probe)
        self._round = []
        self._round_due = now
        self._spare_suspects(now)

    def _dies_at(self, suspicion: Suspicion) -> float:
        return self._held.dies_at(suspicion, isolated=self._health.isolated)

    def _end_round(self) -> None:
        self._health.end_round(self._round)
        self._held.answer_lasts = 2 * self._settings.probe_interval * self._health.factor
        self._round = []

    def _begin_round(self, now: float) -> None:
        self._roster.reap(now)
        present = {entry.member.name for entry in self._roster.present()}
        if len(present) <= self._settings.round_limit:
            targets = sorted(present)
            self._random.shuffle(targets)
        else:
            targets = self._next_of_rotation(present)
        self._round = [self._begin_probe(self._roster[name], now) for name in targets]
        self._round_due = now + self._settings.probe_interval * self._health.factor

    def _next_of_rotation(self, present: set[str]) -> list[str]:
        """The next `round_limit` names: everybody once in random order before anybody twice (SWIM 4.3)."""
        limit = self._settings.round_limit
        kept = [name for name in self._rotation if name in present]
        if len(kept) < limit:
            rest = sorted(present - set(kept))
            self._random.shuffle(rest)
            kept += rest
        self._rotation = kept[limit:]
        return kept[:limit]

    def _tick_contacts(self, now: float) -> None:
        present = self._roster.present()
        if now >= self._seeds_due:
            here = {(e.member.gossip_host, e.member.gossip_port) for e in present}
            here.add((self._held.me.gossip_host, self._held.me.gossip_port))
            for seed in self._seeds:
                if seed not in here:
                    self._send_table(seed, reply_wanted=True)
            interval = self._settings.seed_interval if present else self._settings.join_interval
            self._seeds_due = now + self._spread(interval)
        if now >= self._sync_due:
            if present:
                member = self._random.choice(present).member
                self._send_table((member.gossip_host, member.gossip_port), reply_wanted=True)
            self._sync_due = now + self._spread(self._settings.sync_interval)
        if now >= self._reconnect_due:
            dead = self._roster.dead()
            if dead:
                member = self._random.choice(dead).member
                ping = Ping(self._probes.next_sequence(), life_of(member))
                self._send(
                    (member.gossip_host, member.gossip_port), ping, self._held.claims_about(life_of(member))
                )
            self._reconnect_due = now + self._spread(self._settings.reconnect_interval)

    def _spread(self, interval: float) -> float:
        return interval * (0.75 + self._random.random() / 2)

    def _gossip(self, now: float) -> None:
        present = self._roster.present()
        count = min(self._settings.gossip_fanout, len(present))
        for entry in self._random.sample(present, count):
            if self._rumours:
                address = (entry.member.gossip_host, entry.member.gossip_port)
                self._send(address, Gossip(), self._held.claims_about(life_of(entry.member)))
        self._gossip_due = now + self._settings.gossip_interval

    # Departure

    def _leave(self, now: float) -> None:
        if self._held.me.state is not MemberState.ALIVE:
            return
        self._held.depart()
        self._leave_unheard = {entry.member.name for entry in self._roster.present()}
        self._leave_left = self._settings.leave_attempts
        self._tell_departure(now)

    def _tell_departure(self, now: float) -> None:
        if not self._leave_unheard or self._leave_left == 0:
            self._leave_due = math.inf
            return
        self._leave_left -= 1
        # A name may have been forgotten meanwhile: it had ended, and a newcomer has its place.
        unheard = [entry for name in sorted(self._leave_unheard) if (entry := self._roster.get(name))]
        for member in (entry.member for entry in unheard):
            ping = Ping(self._probes.next_sequence(), life_of(member))
            self._leave_pings[ping.sequence] = member.name
            self._send((member.gossip_host, member.gossip_port), ping, [Claim(self._held.me)])
        self._leave_due = now + self._settings.probe_timeout
