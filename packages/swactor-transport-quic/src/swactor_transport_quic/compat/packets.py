"""1-RTT packets by a short way: what nearly every datagram of a running connection is.

aioquic builds and reads each packet with the machinery of all packet types, walks every open stream for each,
and makes a handful of objects for it. Here is the same for the one case that matters: handshake confirmed,
validated path, frames STREAM, ACK, MAX_STREAM_DATA, PING and PADDING. Whatever is not that case, and every
error, is left to aioquic, before anything was changed. Wire format: RFC 9000 sections 17.3 and 19, RFC 9001
section 5. Knows no edge, no socket and no clock.
"""

from __future__ import annotations

from typing import Any

from aioquic import tls
from aioquic.quic.connection import (
    QuicConnection,
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
)
from aioquic.quic.packet import QuicFrameType, QuicPacketType, QuicStreamFrame, decode_packet_number
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import MAX_ACK_RANGES, QuicPacketSpace
from aioquic.quic.stream import FinalSizeError, QuicStream
from cryptography.exceptions import InvalidTag

Address = Any

CONNECTION_ID_BYTES = 8
_PACKET_NUMBER_BYTES = 2  # aioquic's, for all packets it sends
_HEADER_BYTES = 1 + CONNECTION_ID_BYTES + _PACKET_NUMBER_BYTES
_TAG_BYTES = 16
_SAMPLE_FROM = 1 + CONNECTION_ID_BYTES + 4  # RFC 9001 section 5.4.2
_SHORTEST = _SAMPLE_FROM + 16
_LONG_HEADER = 0x80
_FIXED_BIT = 0x40
_KEY_PHASE = 0x04
_RESERVED = 0x18
_ACK_ROOM = 64
"""Bytes that an acknowledgement of a single range and its neighbours may take."""
_ACK_RANGES = 32
"""Ranges in one frame, at most; older ones need not be told (RFC 9000 section 13.2.3)."""
_IDLE_STEP = 0.05
"""Seconds by which the idle deadline may lag: it is renewed once in this time, not with every packet."""

_ACK_DELAY = 0.015
"""Seconds until an acknowledgement leaves alone. An answer or more data takes it along before that; both ends
promise 0.025 (max_ack_delay), after which a sender asks."""
_ACK_AT_ONCE = 8
"""Packets that are acknowledged without delay, whoever sends less than a batch at a time."""

_LOST = QuicDeliveryState.LOST


def encode_varint(value: int) -> bytes:
    """RFC 9000 section 16."""
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x40000000:
        return (value | 0x80000000).to_bytes(4, "big")
    return (value | 0xC000000000000000).to_bytes(8, "big")


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


class ShortPackets(QuicConnection):
    """`general` set means that the next flush goes through aioquic: something of another kind may be due.

    `wanting` are the streams that may have data or credit to send, so that a flush does not look at others.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.general = True
        self.wanting: dict[QuicStream, None] = {}
        self._aborted: set[QuicStream] = set()
        self._idle_renewed = 0.0
        self._unacknowledged = 0
        self._one_rtt: tuple[Any, QuicPacketSpace] | None = None
        lose = self._loss._on_packets_lost

        def lost(**keywords: Any) -> None:
            packets = keywords["packets"]
            lose(**keywords)
            if packets:
                self.general = True

        self._loss._on_packets_lost = lost  # type: ignore[method-assign]

    def _keys(self) -> tuple[Any, QuicPacketSpace]:
        # Looked up once: an Epoch hashes in Python, and neither object is replaced after the handshake.
        if self._one_rtt is None:
            self._one_rtt = self._cryptos[tls.Epoch.ONE_RTT], self._spaces[tls.Epoch.ONE_RTT]
        return self._one_rtt

    # What arrives

    def receive_datagram(self, data: bytes, addr: Address, now: float) -> None:
        if not self._receive_short(data, addr, now):
            self.general = True
            super().receive_datagram(data, addr, now)

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
        if path.addr != addr or not path.is_validated or crypto.aead is None or crypto.hp._is_chacha20:
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
        self._loss.on_ack_received(
            ack_rangeset=RangeSet([range(largest - first, largest + 1)]),
            ack_delay=(delay << self._remote_ack_delay_exponent) / 1_000_000,
            now=now,
            space=space,
        )
        return at

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

    # What leaves

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Address]]:
        if self.general or self._close_pending or self._ping_pending or self._probe_pending:
            sent = super().datagrams_to_send(now)
            self.general = self._something_general()
            return sent
        if self._state is not QuicConnectionState.CONNECTED:
            return []
        return self._short_datagrams(now)

    def has_something(self, now: float) -> bool:
        """Whether a flush may have anything to send: cheaper to ask than to flush."""
        if self.general or self.wanting or self._close_pending or self._ping_pending or self._probe_pending:
            return True
        ack_at = self._keys()[1].ack_at
        return ack_at is not None and ack_at <= now

    def _something_general(self) -> bool:
        """Whether aioquic's own builder may be needed again, now that it has had its turn."""
        if not self._handshake_confirmed or not self._network_paths:
            return True
        pair, _ = self._keys()
        path, *others = self._network_paths
        self._aborted = {stream for stream in self._aborted if stream.stream_id in self._streams}
        return bool(
            pair.send.aead is None
            or pair.send.hp._is_chacha20
            or pair._update_key_requested
            or len(self._peer_cid.cid) != CONNECTION_ID_BYTES
            or not path.is_validated
            or path.remote_challenges
            or self._aborted
            or self._handshake_done_pending
            or self._retire_connection_ids
            or self._streams_blocked_pending
            or self._datagrams_pending
            or self._remote_preferred_address is not None
            or not self._crypto_streams[tls.Epoch.ONE_RTT].sender.buffer_is_empty
            or not all(known.was_sent for known in self._host_cids)
            or any(other.remote_challenges or not other.is_validated for other in others)
            or self._local_max_data.value != self._local_max_data.sent
            or any(
                limit.value != limit.sent and limit.sent - limit.used < limit.value - limit.sent
                for limit in (self._local_max_streams_bidi, self._local_max_streams_uni)
            )
            or any(stream.is_finished for stream in self._streams.values())
        )

    def _short_datagrams(self, now: float) -> list[tuple[bytes, Address]]:
        pair, space = self._keys()
        loss, path = self._loss, self._network_paths[0]
        pacer = loss._pacer
        send = pair.send
        aead, iv, protect = send.aead._aead, send.aead._iv, send.hp._encryptor.update
        peer = self._peer_cid.cid
        first = _FIXED_BIT | (send.key_phase << 2) | (_PACKET_NUMBER_BYTES - 1)
        room = self._max_datagram_size - _HEADER_BYTES - _TAG_BYTES
        window = loss.congestion_window - loss.bytes_in_flight
        made: list[tuple[bytes, Address]] = []
        self._pacing_at = None
        while True:
            acknowledge = space.ack_at is not None and space.ack_at <= now
            if not acknowledge:
                if not self.wanting:
                    break
                self._pacing_at = pacer.next_send_time(now=now)
                if self._pacing_at is not None:
                    break
            number = self._packet_number
            frames: list[bytes] = []
            handlers: list[tuple[Any, Any]] = []
            left = room
            eliciting = False
            if acknowledge:
                left -= self._short_ack(frames, handlers, space, now)
                if len(space.ack_queue) > 1 and number % 8 == 0:
                    frames.append(b"\x01")  # a ping, so that the ranges are acknowledged and forgotten
                    left, eliciting = left - 1, True
            if self.wanting and window >= self._max_datagram_size:
                before = left
                left = self._short_streams(frames, handlers, left)
                eliciting = eliciting or left != before
            if not frames:
                break
            payload = b"".join(frames)
            if len(payload) < 4 - _PACKET_NUMBER_BYTES:
                payload = payload.ljust(4 - _PACKET_NUMBER_BYTES, b"\0")
            short_number = number & 0xFFFF
            header = bytes((first,)) + peer + short_number.to_bytes(2, "big")
            body = aead.encrypt((iv ^ number).to_bytes(12, "big"), payload, header)
            mask = protect(body[2:18])
            data = b"".join(
                (
                    bytes((first ^ (mask[0] & 0x1F),)),
                    peer,
                    (short_number ^ int.from_bytes(mask[1:3], "big")).to_bytes(2, "big"),
                    body,
                )
            )
            size = len(data)
            packet = QuicSentPacket(
                tls.Epoch.ONE_RTT,
                eliciting,
                eliciting,
                False,
                number,
                QuicPacketType.ONE_RTT,
                now,
                size,
                handlers,
            )
            self._packet_number = number + 1
            loss.on_packet_sent(packet=packet, space=space)
            pacer.update_after_send(now=now)
            path.bytes_sent += size
            if eliciting:
                window -= size
                if not self._ack_eliciting_sent_since_receipt:
                    self._ack_eliciting_sent_since_receipt = True
                    self._close_at = now + self._idle_timeout()
            made.append((data, path.addr))
        return made

    def _short_ack(
        self, frames: list[bytes], handlers: list[tuple[Any, Any]], space: QuicPacketSpace, now: float
    ) -> int:
        """Adds the acknowledgement that is due; its size."""
        queue = space.ack_queue
        newest = queue[-1]
        assert space.largest_received_time is not None
        delay = int((now - space.largest_received_time) * 1_000_000) >> self._local_ack_delay_exponent
        told = list(queue)[-_ACK_RANGES:]
        parts = [
            b"\x02",
            encode_varint(newest.stop - 1),
            encode_varint(delay),
            encode_varint(len(told) - 1),
            encode_varint(newest.stop - 1 - newest.start),
        ]
        start = newest.start
        for known in reversed(told[:-1]):
            parts.append(encode_varint(start - known.stop - 1))
            parts.append(encode_varint(known.stop - known.start - 1))
            start = known.start
        frame = b"".join(parts)
        frames.append(frame)
        handlers.append((self._on_ack_delivery, (space, space.largest_received_packet)))
        space.ack_at = None
        return len(frame)

    def _short_streams(self, frames: list[bytes], handlers: list[tuple[Any, Any]], left: int) -> int:
        """Adds credit and data of the streams that want to send; what is then left of the packet's room.

        A stream that was served goes to the end of the line; one with nothing left leaves it.
        """
        for stream in tuple(self.wanting):
            if left < _ACK_ROOM:
                break
            del self.wanting[stream]
            name = encode_varint(stream.stream_id or 0)
            limit = stream.max_stream_data_local
            if limit != stream.max_stream_data_local_sent and not stream.receiver.is_finished:
                frame = b"\x11" + name + encode_varint(limit)
                frames.append(frame)
                left -= len(frame)
                handlers.append((self._on_max_stream_data_delivery, (stream,)))
                stream.max_stream_data_local_sent = limit
            sender = stream.sender
            if sender.buffer_is_empty or stream.is_blocked or sender._reset_error_code is not None:
                continue
            where = encode_varint(sender.next_offset)
            overhead = 3 + len(name) + len(where)
            before = sender.highest_offset
            limit = min(
                before + self._remote_max_data - self._remote_max_data_used, stream.max_stream_data_remote
            )
            part = sender.get_frame(left - overhead, limit)
            if part is None:
                if not sender.buffer_is_empty and left - overhead < _ACK_ROOM:
                    self.wanting[stream] = None  # no room in this packet; otherwise it waits for credit
                continue
            data, start = part.data, part.offset
            kind = 0x0A | (4 if start else 0) | (1 if part.fin else 0)
            size = len(data)
            frames.append(
                b"".join(
                    (
                        kind.to_bytes(1, "big"),
                        name,
                        where if start else b"",
                        (size | 0x4000).to_bytes(2, "big"),
                        data,
                    )
                )
            )
            left -= overhead + size
            handlers.append((self._on_stream_delivery, (stream, start, start + size, part.fin)))
            self._remote_max_data_used += sender.highest_offset - before
            if not sender.buffer_is_empty:
                self.wanting[stream] = None
        return left

    # What becomes of it

    def _write_stream_frame(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream, max_offset: int
    ) -> int:
        used = super()._write_stream_frame(builder, space, stream, max_offset)
        handlers = [] if builder._packet is None else builder._packet.delivery_handlers
        if handlers and handlers[-1][0] == stream.sender.on_data_delivery:
            handlers[-1] = (self._on_stream_delivery, (stream, *handlers[-1][1]))
        return used

    def _on_stream_delivery(
        self, delivery: QuicDeliveryState, stream: QuicStream, start: int, stop: int, fin: bool
    ) -> None:
        stream.sender.on_data_delivery(delivery, start, stop, fin)
        if delivery is _LOST:
            self.wanting[stream] = None
        elif stream.sender.is_finished:
            self.general = True

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        super()._on_max_stream_data_delivery(delivery, stream)
        if delivery is _LOST:
            self.wanting[stream] = None

    # What the application asks for

    def send_stream_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None:
        super().send_stream_data(stream_id, data, end_stream)
        self.wanting[self._streams[stream_id]] = None

    def stop_stream(self, stream_id: int, error_code: int) -> None:
        super().stop_stream(stream_id, error_code)
        self._abort(stream_id)

    def reset_stream(self, stream_id: int, error_code: int) -> None:
        super().reset_stream(stream_id, error_code)
        self._abort(stream_id)

    def _abort(self, stream_id: int) -> None:
        # Its frames are aioquic's, and so are all packets until it is gone.
        self._aborted.add(self._streams[stream_id])
        self.general = True

    def request_key_update(self) -> None:
        super().request_key_update()
        self.general = True
