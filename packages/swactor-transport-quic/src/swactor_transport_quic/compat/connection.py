"""A connection whose credit is granted, whose peer is named by its key, and whose flushes are bounded.

aioquic has no public way to tie receive credit to consumption, to bound what a stream holds unsent, to ask
a client for its certificate, or to leave out the pacer. Each is one small override here. Knows no socket, no
clock and no edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from aioquic import tls
from aioquic.quic import connection as _connection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicFrameType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketPacer, QuicPacketSpace
from aioquic.quic.stream import QuicStream
from swactor_core.values import frozen

from swactor_transport_quic.compat.packets import ShortPackets
from swactor_transport_quic.identity import Claim, IdentityRejected, read_certificate

TIMER_STEP = 0.001
"""Seconds: the event loop's timers are no finer."""
SMALLEST_BURST = 10
"""Datagrams, the first window of RFC 9002 section 7.2."""

MAX_DATA = 2**61
"""Connection-level credit: never the limit, so that one stalled stream cannot starve another."""


@frozen
class StreamLimits:
    """What the peer may open on a connection, and what it may send on a stream not yet accepted (bytes)."""

    uni_streams: int
    uni_credit: int
    bidi_streams: int
    bidi_credit: int


@frozen
class Ending:
    """Why a connection is over. `application` means a deliberate close, not a protocol or TLS error."""

    code: int
    reason: str
    by_peer: bool
    application: bool


class BurstLimit(QuicPacketPacer):
    """Stands in for the pacer on loopback: no delay, but at most `burst` datagrams per flush."""

    def __init__(self, *, max_datagram_size: int, burst: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._burst = burst
        self._left = burst

    def renew(self) -> None:
        self._left = self._burst

    @property
    def exhausted(self) -> bool:
        return self._left <= 0

    def next_send_time(self, now: float) -> float | None:  # type: ignore[override]  # None is what it returns
        return None if self._left > 0 else now

    def update_after_send(self, now: float) -> None:
        self._left -= 1

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        pass


class PacedBursts(QuicPacketPacer):
    """Spreads a window over its round trip (RFC 9002 section 7.7) in bursts that a timer of a millisecond can
    release: aioquic's own 16 datagrams per wake-up would be the ceiling of a fast path's rate."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._rate = math.inf  # datagrams a second
        self._credit = float(SMALLEST_BURST)
        self._credit_at = 0.0

    def next_send_time(self, now: float) -> float | None:  # type: ignore[override]  # None is what it returns
        if self._rate == math.inf:
            return None
        most = max(SMALLEST_BURST, self._rate * 2 * TIMER_STEP)
        self._credit = min(most, self._credit + (now - self._credit_at) * self._rate)
        self._credit_at = now
        return None if self._credit >= 1 else now + max(TIMER_STEP, (1 - self._credit) / self._rate)

    def update_after_send(self, now: float) -> None:
        self._credit -= 1

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        self._rate = 1.25 * congestion_window / self._max_datagram_size / max(smoothed_rtt, TIMER_STEP / 10)


class SendHalf:
    """Counters of a stream's sending half."""

    __slots__ = ("_sender", "_stream", "stream_id")

    def __init__(self, stream: QuicStream, stream_id: int) -> None:
        self.stream_id = stream_id
        self._stream = stream
        self._sender = stream.sender

    @property
    def unacknowledged(self) -> int:
        """Bytes handed over and not yet acknowledged."""
        return self._sender._buffer_stop - self._sender._buffer_start

    @property
    def credit(self) -> int:
        """Bytes that the peer still has room for."""
        return self._stream.max_stream_data_remote - self._sender._buffer_stop

    @property
    def delivered(self) -> bool:
        """Everything to the end of the stream, or its reset, is acknowledged."""
        return self._sender.is_finished

    @property
    def reset(self) -> bool:
        return self._sender._reset_error_code is not None


class ReceiveHalf:
    """A stream's receiving half: its advertised limit."""

    __slots__ = ("_connection", "_stream", "stream_id")

    def __init__(self, connection: ShortPackets, stream: QuicStream, stream_id: int) -> None:
        self.stream_id = stream_id
        self._connection = connection
        self._stream = stream

    def advertise(self, limit: int) -> None:
        """Lets the peer send up to the absolute offset `limit`; the next flush tells it."""
        if limit > self._stream.max_stream_data_local:
            self._stream.max_stream_data_local = limit
            self._connection.wanting[self._stream] = None

    @property
    def finished(self) -> bool:
        return self._stream.receiver.is_finished


class Connection(ShortPackets):
    """A connection whose credit is granted, whose peer is named by its key, and whose flushes are bounded.

    `limits(alpn)` gives the stream limits, `judge(claim)` returns why a peer is refused or an empty string.
    `burst` datagrams at most leave in one flush, without pacing; None paces. `largest` is the datagram size
    that the path is probed for.
    """

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        limits: Callable[[str], StreamLimits],
        judge: Callable[[Claim], str],
        burst: int | None,
        largest: int = 0,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
    ) -> None:
        super().__init__(
            largest=largest,
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        self._limits = limits
        self._judge = judge
        self.claim: Claim | None = None
        self.refusal = ""
        self._burst_limit: BurstLimit | None = None
        if burst is not None:
            self._burst_limit = BurstLimit(max_datagram_size=configuration.max_datagram_size, burst=burst)
            self._loss._pacer = self._burst_limit
        else:
            self._loss._pacer = PacedBursts(max_datagram_size=configuration.max_datagram_size)
        if configuration.is_client:
            assert configuration.alpn_protocols is not None
            self._apply_limits(configuration.alpn_protocols[0])

    def _apply_limits(self, alpn: str) -> None:
        limits = self._limits(alpn)
        for limit, streams in (
            (self._local_max_streams_uni, limits.uni_streams),
            (self._local_max_streams_bidi, limits.bidi_streams),
        ):
            limit.value = limit.sent = streams
        self._local_max_stream_data_uni = limits.uni_credit
        self._local_max_stream_data_bidi_local = limits.bidi_credit
        self._local_max_stream_data_bidi_remote = limits.bidi_credit

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        # The TLS context exists only from here on, and the server's whole flight is produced before
        # receive_datagram returns: any later is too late to ask for a certificate.
        if not self._is_client:
            self.tls._request_client_certificate = True
        accept = self.tls._set_peer_certificate

        def check_and_accept(certificate: tls.Certificate) -> None:
            if certificate.certificates:
                accept(certificate)
            self._judge_peer()

        self.tls._set_peer_certificate = check_and_accept  # type: ignore[method-assign]

    def _judge_peer(self) -> None:
        certificate = self.tls._peer_certificate
        try:
            if certificate is None:
                raise IdentityRejected("no certificate")
            claim = read_certificate(certificate, self.tls._peer_certificate_chain)
            self.refusal = self._judge(claim)
        except IdentityRejected as error:
            self.refusal = str(error)
        if self.refusal:
            raise tls.AlertBadCertificate(self.refusal)
        self.claim = claim

    def _alpn_handler(self, alpn_protocol: str) -> None:
        super()._alpn_handler(alpn_protocol)
        if not self._is_client:
            # A server learns the ALPN after its transport parameters were made, and before they are sent.
            self._apply_limits(alpn_protocol)
            self.tls.handshake_extensions = [
                (tls.ExtensionType.QUIC_TRANSPORT_PARAMETERS, self._serialize_transport_parameters())
            ]

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream
    ) -> None:
        limit = stream.max_stream_data_local
        if limit == stream.max_stream_data_local_sent or stream.receiver.is_finished:
            return
        buffer = builder.start_frame(
            QuicFrameType.MAX_STREAM_DATA,
            capacity=_connection.MAX_STREAM_DATA_FRAME_CAPACITY,
            handler=self._on_max_stream_data_delivery,
            handler_args=(stream,),
        )
        assert stream.stream_id is not None
        buffer.push_uint_var(stream.stream_id)
        buffer.push_uint_var(limit)
        stream.max_stream_data_local_sent = limit

    def acknowledge_now(self, now: float) -> None:
        """Lets the next flush acknowledge what has arrived, instead of a timer a millisecond later."""
        space = self._spaces[tls.Epoch.ONE_RTT]
        if space.ack_at is not None:
            space.ack_at = now

    def renew_burst(self) -> None:
        if self._burst_limit is not None:
            self._burst_limit.renew()

    @property
    def burst_exhausted(self) -> bool:
        return self._burst_limit is not None and self._burst_limit.exhausted

    @property
    def confirmed(self) -> bool:
        """Both sides have judged each other and the handshake is over."""
        return self._handshake_confirmed and self.claim is not None

    @property
    def ending(self) -> Ending | None:
        """Why the connection is over, once that is known; aioquic's event comes only after its linger."""
        event = self._close_event
        if event is None:
            return None
        return Ending(
            event.error_code,
            event.reason_phrase,
            by_peer=self._state is _connection.QuicConnectionState.DRAINING,
            application=event.frame_type is None,
        )

    def open_stream(self, first: bytes, *, is_unidirectional: bool) -> SendHalf | None:
        """Takes the next stream id and writes `first` in one step; None while the peer allows no more.

        A stream beyond the peer's limit could not even be reset, so none is ever made.
        """
        stream_id = self.get_next_available_stream_id(is_unidirectional=is_unidirectional)
        allowed = self._remote_max_streams_uni if is_unidirectional else self._remote_max_streams_bidi
        if stream_id // 4 >= allowed:
            return None
        self.send_stream_data(stream_id, first)
        return SendHalf(self._streams[stream_id], stream_id)

    def send_half(self, stream_id: int) -> SendHalf | None:
        """None when the stream is already forgotten."""
        stream = self._streams.get(stream_id)
        return None if stream is None else SendHalf(stream, stream_id)

    def receive_half(self, stream_id: int) -> ReceiveHalf | None:
        """None when the stream is already forgotten."""
        stream = self._streams.get(stream_id)
        return None if stream is None else ReceiveHalf(self, stream, stream_id)

    def stop_receiving(self, stream_id: int, code: int) -> None:
        """Asks the peer to stop; nothing happens when it has already ended the stream."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.receiver.is_finished:
            self.stop_stream(stream_id, code)

    def abort_sending(self, stream_id: int, code: int) -> None:
        """Resets the sending half; nothing happens when the stream is already forgotten."""
        if stream_id in self._streams:
            self.reset_stream(stream_id, code)
