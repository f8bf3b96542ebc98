"""1-RTT packets by a short way, leaving, and how large they may be.

aioquic builds each packet with the machinery of all packet types and walks every open stream for it. Here
only the streams that want something are looked at; see `arriving` for what is left to aioquic. Knows no edge,
no socket and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aioquic import tls
from aioquic.quic.connection import QuicConnectionState
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder, QuicSentPacket
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from swactor_transport_quic.compat.arriving import CONNECTION_ID_BYTES, Address, ArrivingPackets
from swactor_transport_quic.path_size import PathSize

_PACKET_NUMBER_BYTES = 2  # aioquic's, for all packets it sends
_HEADER_BYTES = 1 + CONNECTION_ID_BYTES + _PACKET_NUMBER_BYTES
_TAG_BYTES = 16
_FIXED_BIT = 0x40
_ACK_ROOM = 64
"""Bytes that an acknowledgement of a single range and its neighbours may take."""
_ACK_RANGES = 32
"""Ranges in one frame, at most; older ones need not be told (RFC 9000 section 13.2.3)."""
_BLACK_HOLE_TIMEOUTS = 3
"""Probe timeouts in a row after which the size of datagrams is suspected (RFC 8899 section 4.3)."""
_SILENCE_TIMEOUTS = 2
"""Probe timeouts in a row from which on nothing is heard at all: what is lost then says nothing of sizes."""
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


class SizeProbe(QuicSentPacket):
    """A packet that is sent to see whether the path carries its size."""


class ShortPackets(ArrivingPackets):
    """Sends what `ArrivingPackets` says is wanted."""

    def __init__(self, *, largest: int = 0, **keywords: Any) -> None:
        """The path is probed for `largest`, from the configured datagram size on."""
        super().__init__(**keywords)
        self._aborted: set[QuicStream] = set()
        self._probed_at = 0.0
        self._oldest_lost: dict[int, tuple[int, int]] = {}
        self._path_size = PathSize(self._max_datagram_size, largest)
        lose = self._loss._on_packets_lost

        def lost(**keywords: Any) -> None:
            packets = keywords["packets"]
            lose(**keywords)
            if packets:
                self.general = True
                self._note_large(packets, keywords["now"])

        self._loss._on_packets_lost = lost  # type: ignore[method-assign]

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Address]]:
        if self.general or self._close_pending or self._ping_pending or self._probe_pending:
            self.settle()
            size, path = self._max_datagram_size, self._network_paths[0]
            if self._handshake_confirmed and (path.remote_challenges or not path.is_validated):
                # What the way from or to another address carries is not known, and a challenge or an answer
                # that gets lost proves nothing.
                self._max_datagram_size = self._path_size.base
            sent = super().datagrams_to_send(now)
            self._max_datagram_size = size
            self.general = self._something_general()
            return sent
        if self._state is not QuicConnectionState.CONNECTED:
            return []
        return self._short_datagrams(now)

    def get_timer(self) -> float | None:
        if self._late_acks:
            self.settle()
        loss, at = self._loss, self._close_at
        if self.general or at is None or self._is_ending() or not loss.peer_completed_address_validation:
            return super().get_timer()
        # The same for a confirmed connection on its validated path, which has one packet space left.
        space = self._keys()[1]
        lost_at = space.loss_time
        if lost_at is None and space.ack_eliciting_in_flight:
            timeout = loss.get_probe_timeout() * 2**loss._pto_count
            lost_at = loss._time_of_last_sent_ack_eliciting_packet + timeout
        self._loss_at = lost_at
        if lost_at is not None and lost_at < at:
            at = lost_at
        if space.ack_at is not None and space.ack_at < at:
            at = space.ack_at
        if self._pacing_at is not None and self._pacing_at < at:
            at = self._pacing_at
        return at

    def handle_timer(self, now: float) -> None:
        if self._late_acks:
            self.settle()
        super().handle_timer(now)
        if self._loss._pto_count >= _BLACK_HOLE_TIMEOUTS and self._path_size.fall_back(now):
            self._use_size()

    def excuse_pause(self, now: float) -> None:
        """This process was paused, perhaps its peers with it: the time to be idle begins anew."""
        if self._state is QuicConnectionState.CONNECTED and self._close_at is not None:
            self._close_at = now + self._idle_timeout()

    def has_something(self, now: float) -> bool:
        """Whether a flush may have anything to send: cheaper to ask than to flush."""
        if (
            self.general
            or self.wanting
            or self._late_acks
            or self._close_pending
            or self._ping_pending
            or self._probe_pending
            or self.probe_due(now)
        ):
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
        _, space = self._keys()
        loss, path = self._loss, self._network_paths[0]
        pacer = loss._pacer
        room = self._max_datagram_size - _HEADER_BYTES - _TAG_BYTES
        window = loss.congestion_window - loss.bytes_in_flight
        made: list[tuple[bytes, Address]] = []
        self._pacing_at = None
        probe = self._path_size.due(now)
        if probe:
            made.append((self._probe(probe, now), path.addr))
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
            data = self._seal(payload, number)
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
            self._register(packet, now)
            if eliciting:
                window -= size
            made.append((data, path.addr))
        return made

    def _seal(self, payload: bytes, number: int) -> bytes:
        """The protected packet (RFC 9001 sections 5.3 and 5.4)."""
        send = self._keys()[0].send
        peer = self._peer_cid.cid
        first = _FIXED_BIT | (send.key_phase << 2) | (_PACKET_NUMBER_BYTES - 1)
        short_number = number & 0xFFFF
        header = bytes((first,)) + peer + short_number.to_bytes(2, "big")
        nonce = (send.aead._iv ^ number).to_bytes(12, "big")
        body = send.aead._aead.encrypt(nonce, payload, header)
        mask = send.hp._encryptor.update(body[2:18])
        return b"".join(
            (
                bytes((first ^ (mask[0] & 0x1F),)),
                peer,
                (short_number ^ int.from_bytes(mask[1:3], "big")).to_bytes(2, "big"),
                body,
            )
        )

    def _register(self, packet: QuicSentPacket, now: float) -> None:
        self._packet_number = packet.packet_number + 1
        self._loss.on_packet_sent(packet=packet, space=self._keys()[1])
        self._loss._pacer.update_after_send(now=now)
        self._network_paths[0].bytes_sent += packet.sent_bytes
        if packet.is_ack_eliciting and not self._ack_eliciting_sent_since_receipt:
            self._ack_eliciting_sent_since_receipt = True
            self._close_at = now + self._idle_timeout()

    # The path's size

    def _note_large(self, lost: Iterable[QuicSentPacket], now: float) -> None:
        """Whether all that is large gets lost, as far as these say it."""
        base, controller = self._path_size.base, self._loss._cc
        large = [packet for packet in lost if packet.sent_bytes > base and not isinstance(packet, SizeProbe)]
        largest = getattr(controller, "largest_acknowledged", None)
        if not large or largest is None:
            return
        controller.largest_acknowledged = 0  # type: ignore[attr-defined]  # as `congestion` has it
        newest = max(packet.sent_time or 0.0 for packet in large)
        smallest = min(packet.sent_bytes for packet in large)
        if self._path_size.missed(smallest, acknowledged=largest, sent_at=newest, now=now):
            self._use_size()

    def _probe(self, size: int, now: float) -> bytes:
        """A ping that fills a datagram of `size`. Its loss says nothing of congestion (RFC 9000 14.4)."""
        number = self._packet_number
        payload = b"\x01".ljust(size - _HEADER_BYTES - _TAG_BYTES, b"\0")
        data = self._seal(payload, number)
        packet = SizeProbe(
            tls.Epoch.ONE_RTT,
            True,
            True,
            False,
            number,
            QuicPacketType.ONE_RTT,
            now,
            size,
            [(self._on_probe_delivery, (size,))],
        )
        self._path_size.sent(size)
        self._probed_at = now
        self._register(packet, now)
        return data

    def _on_probe_delivery(self, delivery: QuicDeliveryState, size: int) -> None:
        if delivery is _LOST:
            silence = self._loss._pto_count >= _SILENCE_TIMEOUTS
            self._path_size.lost(size, self._probed_at, silence=silence)
        else:
            self._path_size.acknowledged(size, self._probed_at)
            self._use_size()

    def probe_due(self, now: float) -> bool:
        """Whether the next flush probes the path."""
        return not self.general and self._path_size.due(now) > 0

    def too_big(self, size: int, now: float) -> None:
        """The kernel refused to send a datagram of `size`."""
        self._path_size.refused(size, now)
        self._use_size()

    def _use_size(self) -> None:
        size = self._path_size.size
        self._max_datagram_size = size
        self._loss._pacer._max_datagram_size = size
        resize = getattr(self._loss._cc, "resize", None)
        if resize is not None:
            resize(size)

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
            if start + size == sender._buffer_stop and not sender._pending_eof:
                sender.buffer_is_empty = True
            else:
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
            self._note_oldest(stream, start, stop)
        elif stream.sender.is_finished:
            self.general = True

    def _note_oldest(self, stream: QuicStream, start: int, stop: int) -> None:
        oldest, stream_id = stream.sender._buffer_start, stream.stream_id
        if stream_id is not None and start <= oldest < stop:
            where, times = self._oldest_lost.get(stream_id, (oldest, 0))
            self._oldest_lost[stream_id] = oldest, times + 1 if where == oldest else 1

    def undelivered(self) -> dict[int, tuple[int, int]]:
        """By stream, where its oldest byte lies that was sent and is not acknowledged, and how often that
        byte was lost."""
        found = {}
        for stream_id, stream in self._streams.items():
            sender = stream.sender
            oldest = sender._buffer_start
            if oldest < sender.highest_offset and sender._reset_error_code is None:
                where, times = self._oldest_lost.get(stream_id, (oldest, 0))
                found[stream_id] = oldest, times if where == oldest else 0
        self._oldest_lost = {stream_id: known for stream_id, known in found.items() if known[1]}
        return found

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
