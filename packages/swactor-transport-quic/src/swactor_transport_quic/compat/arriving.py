"""1-RTT packets by a short way, arriving: what nearly every datagram of a running connection is.

aioquic reads each packet with the machinery of all packet types and makes a handful of objects for it. Here
is the same for the one case that matters: handshake confirmed, validated path, frames STREAM, ACK,
MAX_STREAM_DATA, PING and PADDING. Whatever is not that case, and every error, is left to aioquic, before
anything was changed. Wire format: RFC 9000 sections 17.3 and 19, RFC 9001 section 5. Knows no edge, no socket
and no clock.
"""

from __future__ import annotations

from typing import Any

from aioquic import tls
from aioquic.quic.connection import (
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
)
from aioquic.quic.packet import QuicFrameType, QuicStreamFrame, decode_packet_number
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import MAX_ACK_RANGES, QuicPacketSpace
from aioquic.quic.stream import FinalSizeError, QuicStream
from cryptography.exceptions import InvalidTag

from swactor_transport_quic.compat.moving import MovingPeer

Address = Any

CONNECTION_ID_BYTES = 8
_SAMPLE_FROM = 1 + CONNECTION_ID_BYTES + 4  # RFC 9001 section 5.4.2
_SHORTEST = _SAMPLE_FROM + 16
_LONG_HEADER = 0x80
_KEY_PHASE = 0x04
_RESERVED = 0x18
_IDLE_STEP = 0.05
"""Seconds by which the idle deadline may lag: it is renewed once in this time, not with every packet."""

_ACK_DELAY = 0.015
"""Seconds until an acknowledgement leaves alone. An answer or more data takes it along before that; both ends
promise 0.025 (max_ack_delay), after which a sender asks."""
_ACK_AT_ONCE = 8
"""Packets that are acknowledged without delay, whoever sends less than a batch at a time."""

_SHORTEST_RTT = 0.001
"""What aioquic too takes for the shortest round trip: below it the scheduler is measured, not the path."""

_ACKED = QuicDeliveryState.ACKED


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Value and the offset behind it. Raises IndexError beyond the end."""
    first = data[at]
    if first < 0x40:
        return first, at + 1
    if first < 0x80:
        return (first & 0x3F) << 8 | data[at + 1], at + 2
    end = at + (4 if first < 0xC0 else 8)
    if end > len(data):
        raise IndexError
    return int.from_bytes(data[at:end], "big") & (0x3FFFFFFF if first < 0xC0 else 0x3FFFFFFFFFFFFFFF), end


class ArrivingPackets(MovingPeer):
    """`general` set means that the next flush goes through aioquic: something of another kind may be due.

    `wanting` are the streams that may have data or credit to send, so that a flush does not look at others.
    `heard_at` is when the newest packet came that is certainly the peer's, and not one that came before.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.general = True
        self.heard_at = -1.0
        self.wanting: dict[QuicStream, None] = {}
        self._idle_renewed = 0.0
        self._unacknowledged = 0
        self._late_acks: list[tuple[int, int, float, float]] = []
        self._one_rtt: tuple[Any, QuicPacketSpace] | None = None

    def _keys(self) -> tuple[Any, QuicPacketSpace]:
        # Looked up once: an Epoch hashes in Python, and neither object is replaced after the handshake.
        if self._one_rtt is None:
            self._one_rtt = self._cryptos[tls.Epoch.ONE_RTT], self._spaces[tls.Epoch.ONE_RTT]
        return self._one_rtt

    def receive_datagram(self, data: bytes, addr: Address, now: float) -> None:
        if not self._receive_short(data, addr, now):
            self.general = True
            self.settle()
            idle_at = self._close_at
            super().receive_datagram(data, addr, now)
            if self._close_at != idle_at:  # renewed by packets that are the peer's, and new
                self.heard_at = now

    def _is_ending(self) -> bool:
        return self._close_pending or self._state is not QuicConnectionState.CONNECTED

    def _receive_short(self, data: bytes, addr: Address, now: float) -> bool:
        """False, having changed nothing, when this datagram is for aioquic."""
        if (
            not self._handshake_confirmed
            or len(data) < _SHORTEST
            or data[0] & _LONG_HEADER
            or self._is_ending()
            or data[1 : 1 + CONNECTION_ID_BYTES] != self.host_cid
        ):
            return False
        path = self._network_paths[0]
        pair, space = self._keys()
        crypto = pair.recv
        elsewhere = None
        if path.addr != addr:
            elsewhere = self.elsewhere
            if elsewhere is None or elsewhere.addr != addr:
                return False
        if not path.is_validated or crypto.aead is None or crypto.hp._is_chacha20:
            return False
        mask = crypto.hp._encryptor.update(data[_SAMPLE_FROM:_SHORTEST])
        first = data[0] ^ (mask[0] & 0x1F)
        if first & _RESERVED or (first & _KEY_PHASE) >> 2 != crypto.key_phase:
            return False
        number_bytes = (first & 0x03) + 1
        end = 9 + number_bytes
        truncated = int.from_bytes(data[9:end], "big") ^ int.from_bytes(mask[1 : 1 + number_bytes], "big")
        number = decode_packet_number(truncated, number_bytes * 8, space.expected_packet_number)
        header = bytes((first,)) + data[1:9] + truncated.to_bytes(number_bytes, "big")
        aead = crypto.aead
        try:
            payload = aead._aead.decrypt((aead._iv ^ number).to_bytes(12, "big"), data[end:], header)
        except InvalidTag:
            return True
        if number in space.received_packets:
            return True
        if number > space.expected_packet_number:
            space.expected_packet_number = number + 1
        self.heard_at = now
        eliciting = self._take_frames(payload, space, path, now)
        if self._is_ending():
            return True
        if now - self._idle_renewed >= _IDLE_STEP:
            self._idle_renewed = now
            self._close_at = now + self._idle_timeout()
        self._ack_eliciting_sent_since_receipt = False
        in_order = number == space.largest_received_packet + 1
        if number > space.largest_received_packet:
            space.largest_received_packet = number
            space.largest_received_time = now
            if elsewhere is not None:
                elsewhere.bytes_received += len(data)
                self.settle()  # what it acknowledges arrived where the peer was known to be
                self.heard_elsewhere(elsewhere, now)
            elif self.elsewhere is not None:
                self.elsewhere = None
        space.ack_queue.add(number)
        space.received_packets.add(number)
        if len(space.ack_queue) > MAX_ACK_RANGES:
            space.ack_queue.shift()
        if eliciting:
            if space.ack_at is None:
                space.ack_at = now + _ACK_DELAY
                self._unacknowledged = 0
            self._unacknowledged += 1
            if self._unacknowledged >= _ACK_AT_ONCE or not in_order:
                space.ack_at = now  # RFC 9000 section 13.2.1: a gap is told at once
        return True

    def _take_frames(self, payload: bytes, space: QuicPacketSpace, path: Any, now: float) -> bool:
        """Handles the frames of one packet; whether it is to be acknowledged. A frame of another kind, and
        all behind it, are aioquic's."""
        at, end, eliciting = 0, len(payload), False
        if not end:
            return self._take_the_rest(payload, path, now)
        while at < end:
            kind = payload[at]
            if 0x08 <= kind <= 0x0F:
                behind = self._take_stream_frame(payload, at, kind)
            elif kind == QuicFrameType.ACK:
                behind = self._take_ack_frame(payload, at + 1, space, now)
            elif kind == QuicFrameType.MAX_STREAM_DATA:
                behind = self._take_credit_frame(payload, at + 1)
            elif kind == QuicFrameType.PING or kind == QuicFrameType.PADDING:
                behind = at + 1
            else:
                behind = 0
            if not behind:
                return self._take_the_rest(payload[at:], path, now) or eliciting
            eliciting = eliciting or (kind != QuicFrameType.ACK and kind != QuicFrameType.PADDING)
            at = behind
        return eliciting

    def _take_the_rest(self, payload: bytes, path: Any, now: float) -> bool:
        self.general = True
        self.settle()
        context = QuicReceiveContext(
            epoch=tls.Epoch.ONE_RTT,
            host_cid=self.host_cid,
            network_path=path,
            quic_logger_frames=None,
            time=now,
            version=None,
        )
        try:
            eliciting, _ = self._payload_received(context, payload)
        except QuicConnectionError as error:
            self.close(
                error_code=error.error_code, frame_type=error.frame_type, reason_phrase=error.reason_phrase
            )
            return False
        return eliciting

    def _take_stream_frame(self, payload: bytes, at: int, kind: int) -> int:
        """The offset behind the frame; 0, having changed nothing, when it is for aioquic."""
        try:
            stream_id, at = decode_varint(payload, at + 1)
            offset = 0
            if kind & 4:
                offset, at = decode_varint(payload, at)
            behind = len(payload)
            if kind & 2:
                length, at = decode_varint(payload, at)
                behind = at + length
        except IndexError:
            return 0
        stream = self._streams.get(stream_id)
        stop = offset + behind - at
        if (
            stream is None
            or kind & 1  # the end of a stream: aioquic discards it with the next flush
            or not at < behind <= len(payload)
            or stop > stream.max_stream_data_local  # 0 for a stream that only this side may send on
        ):
            return 0
        receiver = stream.receiver
        fresh = stop - receiver.highest_offset
        try:
            event = receiver.handle_frame(QuicStreamFrame(data=payload[at:behind], offset=offset))
        except FinalSizeError:
            return 0
        if event is not None:
            self._events.append(event)
            if event.end_stream:
                self.general = True
        if fresh > 0:
            self._local_max_data.used += fresh
        return behind

    def _take_ack_frame(self, payload: bytes, at: int, space: QuicPacketSpace, now: float) -> int:
        try:
            largest, at = decode_varint(payload, at)
            delay, at = decode_varint(payload, at)
            more, at = decode_varint(payload, at)
            first, at = decode_varint(payload, at)
        except IndexError:
            return 0
        if more or first > largest:
            return 0  # several ranges mean loss or reordering, which is rare
        delay_seconds = (delay << self._remote_ack_delay_exponent) / 1_000_000
        self._late_acks.append((largest - first, largest, delay_seconds, now))
        return at

    def settle(self) -> None:
        """Handles the acknowledgements that have arrived.

        Whoever feeds datagrams calls it soon after them, and may hand on the data that came with them first:
        until then windows and counters are those of before.
        """
        acks, self._late_acks = self._late_acks, []
        for smallest, largest, delay, now in acks:
            _, space = self._keys()
            if not self._settle_in_order(smallest, largest, delay, now):
                self._loss.on_ack_received(
                    ack_rangeset=RangeSet([range(smallest, largest + 1)]),
                    ack_delay=delay,
                    now=now,
                    space=space,
                )

    def _settle_in_order(self, smallest: int, largest: int, delay: float, now: float) -> bool:
        """RFC 9002 for the usual case, that everything sent up to `largest` is acknowledged now: nothing can
        be lost. False, having changed nothing, in any other case."""
        loss = self._loss
        _, space = self._keys()
        acknowledged = []
        for number, packet in space.sent_packets.items():
            if number > largest:
                break
            if number < smallest:
                return False
            acknowledged.append(packet)
        if not acknowledged or acknowledged[-1].packet_number != largest or not loss._rtt_initialized:
            return False
        controller = loss._cc
        eliciting = False
        for packet in acknowledged:
            del space.sent_packets[packet.packet_number]
            if packet.is_ack_eliciting:
                eliciting = True
                space.ack_eliciting_in_flight -= 1
            if packet.in_flight:
                controller.on_packet_acked(packet=packet, now=now)
            for handler, arguments in packet.delivery_handlers:
                handler(_ACKED, *arguments)
        space.largest_acked_packet = max(largest, space.largest_acked_packet)
        space.loss_time = None
        sent_time = acknowledged[-1].sent_time
        if eliciting and sent_time is not None:
            latest = max(now - sent_time, _SHORTEST_RTT)
            loss._rtt_min = min(loss._rtt_min, latest)
            delay = min(delay, loss.max_ack_delay)
            if latest > loss._rtt_min + delay:
                latest -= delay
            loss._rtt_latest = latest
            loss._rtt_variance = 0.75 * loss._rtt_variance + 0.25 * abs(loss._rtt_smoothed - latest)
            loss._rtt_smoothed = 0.875 * loss._rtt_smoothed + 0.125 * latest
            loss._pacer.update_rate(
                congestion_window=controller.congestion_window, smoothed_rtt=loss._rtt_smoothed
            )
        if loss.peer_completed_address_validation:
            loss._pto_count = 0
        return True

    def _take_credit_frame(self, payload: bytes, at: int) -> int:
        try:
            stream_id, at = decode_varint(payload, at)
            limit, at = decode_varint(payload, at)
        except IndexError:
            return 0
        stream = self._streams.get(stream_id)
        if stream is None or not self._stream_can_send(stream_id):
            return 0
        if limit > stream.max_stream_data_remote:
            stream.max_stream_data_remote = limit
            self.wanting[stream] = None
        return at
