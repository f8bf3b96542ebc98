"""One QUIC connection in one event loop: feeds it datagrams, drains its events once, flushes once, times it.

Knows streams only as handlers in a table and peers only by what the certificate claimed. Owns no socket: it
sends through its carrier. No task is ever made here; everything happens in callbacks of the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum, StrEnum, auto
from typing import Protocol

from aioquic.quic import events
from swactor_core.ids import NodeId

from swactor_transport_quic.compat import Connection, Ending
from swactor_transport_quic.liveness import Delivery, Liveness, Verdict
from swactor_transport_quic.settings import QuicSettings
from swactor_transport_quic.udp import Address
from swactor_transport_quic.waiting import Signal

logger = logging.getLogger(__name__)

PROMPT_ACK_FROM = 4
"""Datagrams in one batch from which on they are acknowledged at once: a sender of bulk waits for it, while a
lone message needs no datagram of its own for that."""

HANDSHAKE_TIMED_OUT = "no whole handshake in time: both ways must carry UDP datagrams of 1200 bytes"

DUPLICATE_LINGER = 1.0
"""Seconds that the weaker of two simultaneous connections stays, for whoever has not yet seen the other."""


class Alpn(StrEnum):
    """The two protocols of a connection (RFC 7301), the preferred first."""

    CONTROL = "swactor/control/1"
    EDGE = "swactor/edge/1"


class LinkState(Enum):
    """Until the handshake is confirmed, then until the end."""

    HANDSHAKE = auto()
    READY = auto()
    CLOSED = auto()


class CloseCode(IntEnum):
    """Application codes of CONNECTION_CLOSE."""

    SHUTDOWN = 0
    DUPLICATE = 1
    FORMER_LIFE = 2
    REMOVED = 3
    VIOLATION = 4
    UNRESPONSIVE = 5
    HANDSHAKE_TIMEOUT = 6
    NO_CERTIFICATE = 7
    INTERNAL = 8


class StreamCode(IntEnum):
    """Application codes of RESET_STREAM and STOP_SENDING."""

    ABORTED = 1
    STOPPED = 2
    PREAMBLE_TIMEOUT = 3
    PREAMBLE_INVALID = 4
    DUPLICATE_EDGE = 5
    CHANNEL_CLOSED = 6


class StreamHandler(Protocol):
    """What a link tells the owner of one stream. None of these may raise."""

    def received(self, data: bytes, end: bool) -> None: ...
    def reset(self) -> None: ...
    def stopped(self) -> None: ...
    def broken(self, reason: str) -> None: ...
    def poke(self) -> None: ...


class Carrier(Protocol):
    """The socket's side: sends datagrams, and routes connection ids to links."""

    @property
    def blocked(self) -> bool: ...
    def send_all(self, datagrams: Sequence[tuple[bytes, Address]]) -> int: ...
    def defer(self, link: Link) -> None: ...
    def drain(self) -> None: ...
    def add_id(self, connection_id: bytes, link: Link) -> None: ...
    def remove_id(self, connection_id: bytes) -> None: ...
    def forget(self, link: Link, farewell: bytes | None) -> None: ...


class LinkOwner(Protocol):
    """The transport's side: hears what became of a link and gives handlers to streams that the peer opens."""

    def link_ready(self, link: Link) -> None: ...
    def link_ended(self, link: Link, lost: bool) -> None: ...
    def stream_opened(self, link: Link, stream_id: int) -> StreamHandler: ...
    def has_better(self, link: Link) -> bool: ...


class Link:
    """`handlers` by stream id; after each receive batch those in `arrived` are poked once, because
    something came for them, and those in `blocked`, because an acknowledgement or credit may have come."""

    def __init__(
        self,
        quic: Connection,
        *,
        carrier: Carrier,
        owner: LinkOwner,
        settings: QuicSettings,
        address: Address,
        dialled: bool,
        alpn: Alpn | None,
        expected: NodeId | None,
    ) -> None:
        self.quic = quic
        self.settings = settings
        self.address = address
        self.dialled = dialled
        self.alpn = alpn
        self.peer = expected
        self.state = LinkState.HANDSHAKE
        self.reason = ""
        self.fatal = False
        self.ready_at = 0.0
        self.handlers: dict[int, StreamHandler] = {}
        self.blocked: set[StreamHandler] = set()
        self.arrived: dict[StreamHandler, None] = {}
        self.activity = Signal()
        self._carrier = carrier
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._liveness = Liveness(now, loss_after=settings.loss_after, stall_grace=settings.stall_grace)
        self._delivery = Delivery(now, stuck_after=settings.stuck_after)
        self._handshake_until = now + settings.handshake_timeout
        self._preambles: dict[int, float] = {}
        self._peer_opened = 0
        self._violations = 0
        self._pings = 0
        self._sent = 0
        self._received = 0
        self._unpumped = 0
        self._key_from = 0
        self.key_updates = 0
        self._retire_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flush_handle: asyncio.Handle | None = None

    @property
    def peer_key(self) -> bytes:
        """Raw public key of the peer; empty while it has shown none."""
        return b"" if self.quic.claim is None else self.quic.claim.public_key

    @property
    def epoch(self) -> int:
        """The epoch of the peer's life; 0 while it has shown none."""
        return 0 if self.quic.claim is None else self.quic.claim.epoch

    def __repr__(self) -> str:
        peer = "?" if self.peer is None else f"{self.peer:016x}"
        return f"<Link {self.alpn} {'to' if self.dialled else 'from'} {peer} {self.state.name}>"

    # What arrives

    def receive(self, data: bytes, address: Address, now: float) -> None:
        """Feeds one datagram. Events wait for `pump`."""
        self._received += 1
        self._unpumped += 1
        try:
            self.quic.receive_datagram(data, address, now)
            if self.quic.heard_at == now:  # not so for a stranger's bytes, and for a copy
                self._liveness.heard(now)
        except Exception as error:  # a stranger's bytes must not stop the loop
            logger.warning("%r: datagram refused: %s: %s", self, type(error).__name__, error)
            self.quic.close(error_code=CloseCode.VIOLATION, reason_phrase="malformed")

    def pump(self, now: float) -> None:
        """After a batch of datagrams: what came is handed on at once; all else, where there is any, is for
        the next turn.

        Whoever is woken by it may write before that, and its datagram then carries acknowledgements and
        credit too.
        """
        self._guarded(self._pump_and_follow, now)

    def _pump_and_follow(self, now: float) -> None:
        self._pump(now)
        if self.blocked or self.activity or self.quic.has_something(now):
            self.flush_soon()
        elif self.state is not LinkState.CLOSED:
            self._arm()

    def _guarded(self, step: Callable[[float], None], now: float) -> None:
        if self.state is LinkState.CLOSED:
            return
        try:
            step(now)
        except Exception as error:
            # One connection's fault ends that connection, not the loop and not its neighbours.
            logger.exception("%r: internal error", self)
            self.lose(f"internal error: {type(error).__name__}: {error}")

    def _pump(self, now: float) -> None:
        while (event := self.quic.next_event()) is not None:
            self._handle(event, now)
        ending = self.quic.ending
        if ending is not None:
            self._conclude(ending, now)
            return
        if self.state is LinkState.HANDSHAKE and self.quic.confirmed:
            self._become_ready(now)
        if self.arrived:
            arrived, self.arrived = self.arrived, {}
            for handler in arrived:
                handler.poke()
        if self._unpumped >= PROMPT_ACK_FROM:
            self.quic.acknowledge_now(now)
        self._unpumped = 0

    def _handle(self, event: events.QuicEvent, now: float) -> None:
        match event:
            case events.StreamDataReceived(data=data, end_stream=end, stream_id=stream_id):
                handler = self._handler(stream_id, now)
                if handler is not None:
                    handler.received(data, end)
            case events.StreamReset(stream_id=stream_id):
                handler = self._handler(stream_id, now)
                if handler is not None:
                    handler.reset()
            case events.StopSendingReceived(stream_id=stream_id):
                handler = self.handlers.get(stream_id)
                if handler is not None:
                    handler.stopped()
            case events.ConnectionIdIssued(connection_id=connection_id):
                self._carrier.add_id(connection_id, self)
            case events.ConnectionIdRetired(connection_id=connection_id):
                self._carrier.remove_id(connection_id)
            case events.ProtocolNegotiated(alpn_protocol=alpn):
                self.alpn = None if alpn is None else Alpn(alpn)  # one of those that were offered
            case events.HandshakeCompleted() if self.quic.claim is None:
                # aioquic lets a client without a certificate through; this is where it ends.
                self.quic.close(error_code=CloseCode.NO_CERTIFICATE, reason_phrase="no certificate")

    def _handler(self, stream_id: int, now: float) -> StreamHandler | None:
        handler = self.handlers.get(stream_id)
        if handler is not None or self.quic.claim is None:
            return handler
        locally_initiated = (stream_id & 1 == 0) == self.dialled
        if locally_initiated or stream_id // 4 < self._peer_opened:
            return None  # ended here; what still arrives for it has no reader
        kind = stream_id & 3
        # A stream opens all lower ones of its kind (RFC 9000 section 2.1): each has its deadline from now.
        for index in range(self._peer_opened, stream_id // 4 + 1):
            opened = index * 4 + kind
            self.handlers[opened] = self._owner.stream_opened(self, opened)
            self._preambles[opened] = now + self.settings.preamble_timeout
        self._peer_opened = stream_id // 4 + 1
        return self.handlers[stream_id]

    def _become_ready(self, now: float) -> None:
        self.state = LinkState.READY
        self.ready_at = now
        self._owner.link_ready(self)

    # What streams ask for

    def preamble_done(self, stream_id: int) -> None:
        """Its first bytes have arrived: whoever opened it waits to hear that, and writes nothing before."""
        self._preambles.pop(stream_id, None)
        self.quic.acknowledge_now(self._loop.time())
        self.flush_soon()

    def drop(self, stream_id: int) -> None:
        """The stream has no owner any more."""
        self._preambles.pop(stream_id, None)
        handler = self.handlers.pop(stream_id, None)
        if handler is not None:
            self.blocked.discard(handler)
            self.arrived.pop(handler, None)

    def violation(self, stream_id: int, code: StreamCode, why: str) -> None:
        """Stops a peer's stream that cannot be an edge; too many of them close the connection."""
        logger.warning("%r: stream %d: %s", self, stream_id, why)
        self._violations += 1
        self.drop(stream_id)
        self.quic.stop_receiving(stream_id, code)
        if self._violations > self.settings.violations_allowed:
            self.quic.close(error_code=CloseCode.VIOLATION, reason_phrase=why)
        self.flush_soon()

    # What leaves

    def send(self, stream_id: int, data: memoryview) -> None:
        """Hands bytes to a stream and sends at once. They are copied before return."""
        now = self._loop.time()
        self.quic.send_stream_data(stream_id, data)  # type: ignore[arg-type]  # appended to a bytearray
        self.quic.acknowledge_now(now)  # rides along, instead of a datagram of its own
        self.flush(now)

    def flush(self, now: float | None = None) -> None:
        """Sends what the connection has to send, now; nothing while the socket is full."""
        if self.state is LinkState.CLOSED:
            return
        if self._carrier.blocked:
            self._carrier.defer(self)
            return
        now = self._loop.time() if now is None else now
        if (
            self.dialled
            and max(self._sent, self._received) - self._key_from >= self.settings.key_update_packets
        ):
            self._key_from = max(self._sent, self._received)
            self.quic.request_key_update()
            self.key_updates += 1
        self.quic.renew_burst()
        datagrams = self._outgoing(now)
        if datagrams:
            self._sent += len(datagrams)
            too_big = self._carrier.send_all(datagrams)
            if too_big:
                self.quic.too_big(too_big, now)
                self.flush_soon()
        if self.quic.burst_exhausted or self.quic.probe_due(now):
            self.flush_soon()
        self._arm()

    def _outgoing(self, now: float) -> list[tuple[bytes, Address]]:
        # An accepted connection has no path before a datagram of it was understood.
        return self.quic.datagrams_to_send(now) if self.quic.get_peer_address() is not None else []

    def flush_soon(self) -> None:
        """Flushes in the next turn of the loop, once for all who asked."""
        if self._flush_handle is None and self.state is not LinkState.CLOSED:
            self._flush_handle = self._loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_handle = None
        self._guarded(self._pump_and_flush, self._loop.time())

    def _pump_and_flush(self, now: float) -> None:
        if self.quic.ending is not None:
            self._pump(now)
        self._resume_senders()
        if self.quic.has_something(now):
            self.flush(now)
        elif self.state is not LinkState.CLOSED:
            self._arm()

    def _resume_senders(self) -> None:
        """What was acknowledged, and new credit, may let writers go on."""
        self.quic.settle()
        if self.blocked:
            for handler in tuple(self.blocked):
                handler.poke()
        self.activity.fire()

    # Time

    @property
    def _interval(self) -> float:
        return self.settings.probe_interval if self.handlers else self.settings.keepalive_interval

    def _next_deadline(self) -> float:
        if self.state is LinkState.HANDSHAKE:
            return self._handshake_until
        deadline = self._liveness.next_look(self._interval)
        if self.handlers:
            deadline = min(deadline, self._delivery.next_look)
        if self._retire_at is not None:
            deadline = min(deadline, self._retire_at)
        for until in self._preambles.values():
            return min(deadline, until)  # all have the same span, so the oldest entry is the first due
        return deadline

    def _arm(self) -> None:
        at = self._next_deadline()
        quic_at = self.quic.get_timer()
        if quic_at is not None and quic_at < at:
            at = quic_at
        if self._timer is not None:
            if self._timer.when() <= at:
                return  # fires early and arms anew: cheaper than a cancelled timer per packet
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        assert self._timer is not None
        armed_for, self._timer = self._timer.when(), None
        if self._loop.time() - armed_for > self.settings.stall_grace:
            self._carrier.drain()  # this process was paused: what came meanwhile counts before any timeout
            self.quic.excuse_pause(self._loop.time())  # and silence meanwhile was not the peer's
        self._guarded(self._time_passed, self._loop.time())
        self._guarded(self._pump, self._loop.time())
        self._guarded(self._pump_and_flush, self._loop.time())

    def _time_passed(self, now: float) -> None:
        due = self.quic.get_timer()
        if due is not None and due <= now:
            self.quic.handle_timer(now)
        if self.quic.ending is None and self._next_deadline() <= now:
            self._meet_deadlines()

    def _meet_deadlines(self) -> None:
        # What has arrived is read before anyone is accused.
        self._carrier.drain()
        now = self._loop.time()
        if self.state is LinkState.HANDSHAKE and now >= self._handshake_until:
            self.quic.close(error_code=CloseCode.HANDSHAKE_TIMEOUT, reason_phrase=HANDSHAKE_TIMED_OUT)
        if self.state is not LinkState.READY:
            return
        for stream_id in [s for s, until in self._preambles.items() if until <= now]:
            self.violation(stream_id, StreamCode.PREAMBLE_TIMEOUT, "no whole preamble in time")
        if self._retire_at is not None and now >= self._retire_at:
            self._retire(now)
        if self.handlers and now >= self._delivery.next_look:
            self.quic.settle()
            if self._delivery.stuck(now, self.quic.undelivered()):
                seconds = f"{self.settings.stuck_after:g} s"
                self._give_up(f"what was sent has not arrived for {seconds}, though pings are answered")
                return
        match self._liveness.look(now, self._interval):
            case Verdict.PING:
                self._pings += 1
                self.quic.send_ping(self._pings)
            case Verdict.LOST:
                self._give_up(f"no answer to a ping for {self.settings.loss_after:g} s")
            case Verdict.WAIT:
                pass

    def _give_up(self, why: str) -> None:
        self.quic.close(error_code=CloseCode.UNRESPONSIVE, reason_phrase=why)

    # The end

    def supersede(self) -> None:
        """Another connection serves better: this one closes after a while in which it has no streams."""
        self._retire_at = self._loop.time() + DUPLICATE_LINGER
        self._arm()

    def _retire(self, now: float) -> None:
        if not self._owner.has_better(self):
            self._retire_at = None
        elif self.handlers:
            self._retire_at = now + DUPLICATE_LINGER
        else:
            self.quic.close(error_code=CloseCode.DUPLICATE, reason_phrase="duplicate connection")

    def refused(self, address: Address) -> None:
        """The kernel says that nothing listens at `address`; what a peer has left is no news of it."""
        if self.state is LinkState.CLOSED:
            return
        if not self.quic.path_refused(address):
            self.flush_soon()  # what was to go there goes elsewhere now, and so do the timers
            return
        if self.state is LinkState.HANDSHAKE:
            self.lose("nothing listens there")
        else:
            self.lose("its port is closed: the process is gone")

    def close(self, code: CloseCode, reason: str) -> None:
        """Ends the connection from this side and tells the peer; its streams break here with `reason`."""
        if self.state is LinkState.CLOSED:
            return
        self.quic.close(error_code=code, reason_phrase=reason)
        self._conclude(
            self.quic.ending or Ending(code, reason, by_peer=False, application=True), self._loop.time()
        )

    def lose(self, why: str) -> None:
        """The connection is known to be dead, by other evidence than its own."""
        if self.state is not LinkState.CLOSED:
            self._end(why, lost=self.state is LinkState.READY, farewell=None)

    def _conclude(self, ending: Ending, now: float) -> None:
        farewell = None
        if not ending.by_peer and not self._carrier.blocked:
            datagrams = self._outgoing(now)
            if datagrams:
                farewell = datagrams[-1][0]
                self._carrier.send_all(datagrams)
        if ending.by_peer:
            told = ending.reason or f"code {ending.code:#x}"
            if ending.application and ending.code == CloseCode.FORMER_LIFE:
                told = f"it knows a later life of this process's key; there {told}"
            reason = f"the peer closed the connection: {told}"
        else:
            reason = ending.reason or f"connection error {ending.code:#x}"
        deliberate = ending.application and ending.code != CloseCode.UNRESPONSIVE
        self.fatal = bool(self.quic.refusal) and not ending.by_peer
        self._end(reason, lost=self.state is LinkState.READY and not deliberate, farewell=farewell)

    def _end(self, reason: str, *, lost: bool, farewell: bytes | None) -> None:
        self.state = LinkState.CLOSED
        self.reason = reason
        for handle in (self._timer, self._flush_handle):
            if handle is not None:
                handle.cancel()
        self._timer = self._flush_handle = None
        self._carrier.forget(self, farewell)
        handlers, self.handlers = tuple(self.handlers.values()), {}
        self.blocked.clear()
        for handler in handlers:
            handler.broken(reason)
        self._owner.link_ended(self, lost)
        self.activity.fire()
