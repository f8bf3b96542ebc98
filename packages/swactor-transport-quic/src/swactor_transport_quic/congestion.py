"""Congestion control for trusted machines: Reno's response to loss without its early exit from slow start.

aioquic's own controllers leave slow start when the round trip grows, which CPU jitter on loopback causes at
once, and Cubic restarts from its first window after two idle seconds, which a stalled edge is. This one keeps
its window while idle, halves once per round of loss (RFC 9002 section 7.3.2), and never exceeds a ceiling, so
that flights stay far below the 32 000 packets that two-byte packet numbers can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control
from aioquic.quic.packet_builder import QuicSentPacket

from swactor_transport_quic.compat.packets import SizeProbe

_SMALLEST_WINDOW = 2  # datagrams, RFC 9002 section 7.2
_registered: set[str] = set()


class BoundedReno(QuicCongestionControl):
    """`first` and `ceiling` are windows in bytes; the window stays between two datagrams and the ceiling.
    `largest_acknowledged` is the size of the largest packet since somebody set it back."""

    def __init__(self, *, max_datagram_size: int, first: int, ceiling: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._datagram = max_datagram_size
        self._floor = _SMALLEST_WINDOW * max_datagram_size
        self._ceiling = max(ceiling, 2 * self._floor)
        self.congestion_window = min(max(first, self._floor), self._ceiling)
        self._recovery_start = 0.0
        self._acknowledged = 0
        self._peak = 0
        self.largest_acknowledged = 0

    def resize(self, max_datagram_size: int) -> None:
        """The path carries datagrams of this size."""
        self._datagram = max_datagram_size
        self._floor = _SMALLEST_WINDOW * max_datagram_size
        self._ceiling = max(self._ceiling, 2 * self._floor)
        self.congestion_window = max(self.congestion_window, self._floor)

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        self.bytes_in_flight -= packet.sent_bytes
        if packet.sent_bytes > self.largest_acknowledged:
            self.largest_acknowledged = packet.sent_bytes
        used, self._peak = self._peak, self._peak if self.bytes_in_flight else 0
        if packet.sent_time is None or packet.sent_time <= self._recovery_start:
            return
        if 2 * used < self.congestion_window:
            return  # RFC 9002 section 7.8: a window that was not used says nothing
        if self.ssthresh is None or self.congestion_window < self.ssthresh:
            grown = self.congestion_window + packet.sent_bytes
        else:
            self._acknowledged += packet.sent_bytes
            rounds, self._acknowledged = divmod(self._acknowledged, self.congestion_window)
            grown = self.congestion_window + rounds * self._datagram
        self.congestion_window = min(grown, self._ceiling)

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        self.bytes_in_flight += packet.sent_bytes
        self._peak = max(self._peak, self.bytes_in_flight)

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        newest = 0.0
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            if not isinstance(packet, SizeProbe):
                newest = max(newest, packet.sent_time or 0.0)
        if newest > self._recovery_start:
            self._recovery_start = now
            self.congestion_window = max(self.congestion_window // 2, self._floor)
            self.ssthresh = self.congestion_window

    def on_persistent_congestion(self) -> None:
        self.congestion_window = self._floor
        self._recovery_start = 0.0

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        pass


def congestion_name(first: int, ceiling: int) -> str:
    """The name under which aioquic's configuration finds a BoundedReno with these windows (bytes)."""
    name = f"swactor-{first}-{ceiling}"
    if name not in _registered:
        register_congestion_control(name, partial(BoundedReno, first=first, ceiling=ceiling))
        _registered.add(name)
    return name
