"""The participant on a real datagram socket: reads, seals, resolves names, and owns the one timer.

Knows asyncio and sockets, nothing of the protocol. Rule of every wake-up: read all that has come, then fire
what is due, so that a process which was paused hears its peers before it judges them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
import time
from dataclasses import replace
from random import Random

from swactor_core.errors import ConfigError, ResourceError, UsageError
from swactor_core.ids import NodeId
from swactor_core.spi.membership import Member, MembershipContext, MemberState

from swactor_membership_swim.events import (
    Action,
    Address,
    Changed,
    Event,
    LeaveAsked,
    Outlived,
    ProbeAsked,
    Received,
    SendFailed,
    Superseded,
    Tick,
    Transmit,
)
from swactor_membership_swim.machine import SwimMachine
from swactor_membership_swim.members import Claim, life_of
from swactor_membership_swim.seal import Refusal, Seal
from swactor_membership_swim.settings import settings_from
from swactor_membership_swim.wire import PacketError, encode_claim

_LOG = logging.getLogger(__name__)
_READS_AT_ONCE = 512
_RECEIVE_BUFFER = 1 << 20
_LEAVE_BOUND = 1.0
_STRANGERS_KEPT = 16
PATIENCE = 10.0
"""Seconds of silence, or of datagrams that cannot be opened, before a person is told."""
_NOISE_APART = 60.0
"""Seconds from one to the next of an address that was noise: a node in earnest asks its seeds more often."""
_NAME_LIFETIME = 30.0
_WAITING_FOR_NAME = 8


def own_record(context: MembershipContext) -> Member:
    """This participant's record. Raises ConfigError when others could not use or carry it."""
    gossip_host = context.bind_host
    if _is_wildcard(gossip_host):
        gossip_host = context.host
    if _is_wildcard(gossip_host):
        raise ConfigError(
            f"{context.name!r} would tell others to reach it at {gossip_host!r}",
            hint="give the host name or address at which other nodes reach this one",
        )
    me = Member(
        name=context.name,
        node_id=context.node_id,
        epoch=context.epoch,
        incarnation=0,
        state=MemberState.ALIVE,
        public_key=context.public_key,
        host=context.host,
        port=context.port,
        gossip_host=gossip_host,
        gossip_port=context.bind_port,
        role=context.role,
    )
    try:
        if not encode_claim(Claim(me)) or not context.name:
            raise PacketError("a member needs a name")
    except PacketError as error:
        raise ConfigError(f"membership record of {context.name!r}: {error}") from error
    return me


def _is_wildcard(host: str) -> bool:
    if not host:
        return True
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class SwimMembership:
    """`swactor_core.spi.membership.Membership`. Raises ConfigError for a setting, key or record that cannot
    be.

    The epoch must be a later one at every start: a life that has departed or was replaced cannot return.
    """

    def __init__(self, context: MembershipContext) -> None:
        self._context = context
        self._settings = settings_from(context.settings)
        self._me = own_record(context)
        self._seal = Seal(
            context.gossip_key, context.cluster_id, life_of(self._me), first_counter=time.time_ns()
        )
        self._machine: SwimMachine | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._alone: asyncio.TimerHandle | None = None
        self._strangers: dict[Address, tuple[float, float]] = {}
        self._patience = PATIENCE
        self._departed = asyncio.Event()
        self._closed = False
        self._names: dict[str, tuple[str, float]] = {}
        self._waiting: dict[str, list[tuple[int, bytes]]] = {}
        self._lookups: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int]:
        return self._me.gossip_host, self._me.gossip_port

    @property
    def counters(self) -> dict[str, int]:
        """What was refused or is worth noting, by reason: for events and tests."""
        machine = {} if self._machine is None else dict(self._machine.counters)
        return machine | {str(reason): count for reason, count in self._seal.refusals.items()}

    async def start(self) -> None:
        if self._socket is not None or self._closed:
            raise UsageError("this membership was started before", hint="create another one with a new epoch")
        self._loop = asyncio.get_running_loop()
        self._socket = await self._bind(self._loop)
        port = self._socket.getsockname()[1]
        self._me = replace(self._me, gossip_port=port)
        seed = self._context.settings.get("seed", f"{self._me.node_id}/{self._me.epoch}")
        # Randomness here spreads load and order; nothing secret depends on it.
        random = Random(str(seed))  # noqa: S311
        self._machine = SwimMachine(
            self._me, self._context.seeds, self._settings, random=random, now=self._loop.time()
        )
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._arm()
        if any(seed != self.address for seed in self._context.seeds):
            self._alone = self._loop.call_later(self._patience, self._say_if_alone)

    async def _bind(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        host, port = self._context.bind_host, self._context.bind_port
        try:
            found = await loop.getaddrinfo(
                host or None, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
            )
        except (OSError, UnicodeError) as error:  # the latter for what no host name can be
            why = error.strerror if isinstance(error, OSError) else "no host has such a name"
            hint = "give an address of this machine"
            raise ResourceError(f"membership address {host!r}: {why}", hint=hint) from error
        if self._closed:  # meanwhile: nobody would read from a socket any more, nor close it
            raise ResourceError("the membership was closed while it started")
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setblocking(False)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            bound.bind(address)
        except OSError as error:
            bound.close()
            message = f"membership cannot receive at {host}:{port}: {error.strerror}"
            raise ResourceError(message, hint="choose another port, or 0 for any") from error
        return bound

    def members(self) -> tuple[Member, ...]:
        return (self._me,) if self._machine is None else self._machine.members()

    def suspect(self, node_id: NodeId, why: str) -> None:
        if self._machine is not None and not self._closed:
            _LOG.debug("probing %016x at once: %s", node_id, why)
            self._take(ProbeAsked(node_id))

    async def leave(self) -> None:
        if self._machine is not None and not self._closed:
            self._take(LeaveAsked())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_BOUND):
                    await self._departed.wait()
        await self.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for timer in (self._timer, self._alone):
            if timer is not None:
                timer.cancel()
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        lookups = list(self._lookups)
        for lookup in lookups:
            lookup.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)

    # Wake-ups

    def _on_readable(self) -> None:
        self._drain()

    def _on_time(self) -> None:
        assert self._loop is not None
        self._timer = None
        if self._closed:
            return
        if self._drain():
            self._take(Tick())
        else:  # more is waiting than one turn may take; the timer stays due
            self._timer = self._loop.call_at(self._loop.time(), self._on_time)

    def _drain(self) -> bool:
        """Reads what has come, a bounded number of datagrams; whether that was all."""
        assert self._socket is not None
        for _ in range(_READS_AT_ONCE):
            if self._closed:
                return True
            try:
                datagram, source = self._socket.recvfrom(65535)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as error:  # an error of an earlier send, reported late
                _LOG.debug("membership socket: %s", error)
                continue
            opened = self._seal.open(datagram)
            address = (_plain(source[0]), source[1])
            if not isinstance(opened, Refusal):
                sender, packet = opened
                if address in self._strangers:  # it has the key: what could not be opened was damaged
                    self._strangers[address] = (math.inf, self._strangers[address][1])
                self._take(Received(sender, packet, address))
            elif opened is Refusal.OLD_EPOCH and (outlived := self._seal.outlived(datagram)) is not None:
                sender, packet, epoch = outlived
                self._take(Outlived(sender, packet, address, epoch))
            elif opened is Refusal.UNAUTHENTIC:
                self._hear_stranger(address)
        return False

    # What an operator would look for in vain elsewhere: a wrong key is answered by silence, on both sides

    def _hear_stranger(self, address: Address) -> None:
        """Told once of each address that goes on for so long, of a bounded number: what comes now and then is
        noise, or was meant for another process that had this port."""
        assert self._loop is not None
        now = self._loop.time()
        tell_at, heard = self._strangers.get(address, (0.0, -math.inf))
        if now - heard > _NOISE_APART:
            known = self._strangers.items()
            self._strangers = {one: times for one, times in known if now - times[1] <= _NOISE_APART}
            if len(self._strangers) == _STRANGERS_KEPT:
                return
            tell_at = now + self._patience
        self._strangers[address] = (math.inf if now >= tell_at else tell_at), now
        if now >= tell_at:
            _LOG.warning(
                "membership datagrams from %s:%d cannot be opened: another gossip_key or cluster id",
                *address,
            )

    def _say_if_alone(self) -> None:
        if len(self.members()) == 1:
            _LOG.warning(
                "nobody has answered at the seeds %s in %g s, they are asked on: look whether they run, "
                "can be reached, and have the same gossip_key and cluster id",
                ", ".join(f"{host}:{port}" for host, port in self._context.seeds),
                self._patience,
            )

    def _take(self, event: Event) -> None:
        """One step and all its actions, before the next step."""
        assert self._machine is not None
        assert self._loop is not None
        for action in self._machine.step(event, self._loop.time()):
            self._perform(action)
        if self._machine.departed:
            self._departed.set()
        self._arm()

    def _arm(self) -> None:
        assert self._machine is not None
        assert self._loop is not None
        if self._closed:
            return
        due = self._machine.deadline
        if self._timer is not None:
            if self._timer.when() == due:
                return
            self._timer.cancel()
            self._timer = None
        if due < math.inf:
            self._timer = self._loop.call_at(due, self._on_time)

    # Actions

    def _perform(self, action: Action) -> None:
        match action:
            case Transmit(address, data):
                self._transmit(address, self._seal.seal(data))
            case Changed(member):
                try:
                    self._context.on_change(member)
                except Exception:  # the listener's fault must not stop the protocol
                    _LOG.exception("listener failed on %s", member)
            case Superseded(by):
                _LOG.error(
                    "membership of %r (epoch %d) is over: %s of epoch %d stands in its place; "
                    "give every node its own name and every start a later epoch",
                    self._me.name,
                    self._me.epoch,
                    by.state,
                    by.epoch,
                )
                try:
                    self._context.on_over(by)
                except Exception:
                    _LOG.exception("listener failed on %s", by)

    def _transmit(self, address: Address, datagram: bytes) -> None:
        host, port = address
        numeric = self._numeric(host)
        if numeric is None:
            waiting = self._waiting.setdefault(host, [])
            if len(waiting) < _WAITING_FOR_NAME:
                waiting.append((port, datagram))
            return
        self._send_numeric(address, (numeric, port), datagram)

    def _send_numeric(self, address: Address, numeric: Address, datagram: bytes) -> None:
        assert self._socket is not None
        assert self._loop is not None
        if self._closed:
            return
        try:
            self._socket.sendto(datagram, numeric)
        except (BlockingIOError, InterruptedError):
            return  # a full buffer is loss on the way
        except OSError as error:
            _LOG.debug("cannot send to %s: %s", address, error)
            # Not within the step that asked for the sending.
            self._loop.call_soon(self._on_send_failed, address)

    def _on_send_failed(self, address: Address) -> None:
        if not self._closed:
            self._take(SendFailed(address))

    def _numeric(self, host: str) -> str | None:
        """The host as an address that this socket can send to; None while a name is being resolved."""
        assert self._socket is not None
        assert self._loop is not None
        try:
            return self._fitting(ipaddress.ip_address(host))
        except ValueError:
            pass
        known = self._names.get(host)
        stale = known is None or known[1] < self._loop.time()
        if stale and host not in self._waiting:
            self._waiting[host] = []
            task = self._loop.create_task(self._resolve(host))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)
        return None if known is None else known[0]

    def _fitting(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
        assert self._socket is not None
        if address.version == 4 and self._socket.family == socket.AF_INET6:
            return f"::ffff:{address}"
        return str(address)

    async def _resolve(self, host: str) -> None:
        assert self._socket is not None
        assert self._loop is not None
        try:
            found = await self._loop.getaddrinfo(host, None, family=self._family(), type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError) as error:
            _LOG.debug("cannot resolve %r: %s", host, error)
            self._waiting.pop(host, None)
            return
        numeric = self._fitting(ipaddress.ip_address(found[0][4][0]))
        self._names[host] = (numeric, self._loop.time() + _NAME_LIFETIME)
        for port, datagram in self._waiting.pop(host, ()):
            self._send_numeric((host, port), (numeric, port), datagram)

    def _family(self) -> socket.AddressFamily:
        """An IPv6 socket reaches both kinds, an IPv4 socket its own."""
        assert self._socket is not None
        return socket.AF_UNSPEC if self._socket.family == socket.AF_INET6 else socket.AF_INET


def _plain(host: str) -> str:
    """An IPv4 peer of an IPv6 socket as it calls itself."""
    return host.removeprefix("::ffff:")
