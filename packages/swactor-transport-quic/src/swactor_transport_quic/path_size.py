"""How large a datagram the path carries: packetization-layer path MTU discovery (RFC 8899, RFC 9000 14.3).

Every path starts at what QUIC may assume. From there the sizes of a ladder are probed from the largest down,
and the first that is acknowledged is used; a path that stops carrying what it carried falls back to the
smallest and is searched again. Pure: time comes in. Knows sizes only, neither packets nor sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

LADDER = (16_200, 8_952, 4_352, 1_452)
"""UDP payloads worth a probe: aioquic's largest; jumbo frames, FDDI-sized frames and Ethernet, each less 48
bytes of IPv6 and UDP header."""

_TRIES = 3
"""Probes of one size before it is given up (RFC 8899 section 5.1.2, MAX_PROBES)."""
_FLIGHTS_MISSED = 3
"""Flights of large datagrams in a row of which none has arrived (RFC 8899 section 4.3)."""
_SEARCH_AGAIN = 600.0
"""Seconds after which a path that carried less than the largest is searched again (PMTU_RAISE_TIMER)."""


class PathSize:
    """`size` is what may be sent, never less than `base`. One probe is out at a time; sizes that the ladder
    holds above `largest` are left out."""

    def __init__(self, base: int, largest: int) -> None:
        self.size = base
        self.base = base
        steps = {step for step in LADDER if base < step < largest} | ({largest} if largest > base else set())
        self._ladder: Sequence[int] = sorted(steps, reverse=True)
        self._step = 0
        self._tries = 0
        self._out = 0
        self._search_at: float | None = 0.0 if self._ladder else None
        self._missed = 0
        self._missed_at = 0.0

    def due(self, now: float) -> int:
        """The size to probe now; 0 for none."""
        if self._search_at is None or self._out or now < self._search_at:
            return 0
        if self._step >= len(self._ladder):  # a search that ended below the top begins anew
            self._step = self._tries = 0
        return self._ladder[self._step]

    def sent(self, size: int) -> None:
        self._out = size

    def acknowledged(self, size: int, now: float) -> None:
        """The path carries `size`."""
        if size != self._out:
            return
        self._out = self._tries = 0
        self.size = size
        found_the_top = size == self._ladder[0]
        self._search_at = None if found_the_top else now + _SEARCH_AGAIN
        self._step = len(self._ladder)

    def lost(self, size: int, now: float, *, silence: bool = False) -> None:
        """The probe was lost; whether by its size is known after some tries. In `silence`, where nothing else
        arrives either, as while a peer is paused, it was no try."""
        if size != self._out:
            return
        self._out = 0
        self._tries += not silence
        if self._tries >= _TRIES:
            self._give_up(now)

    def refused(self, size: int, now: float) -> None:
        """The kernel does not send `size` at all."""
        if size == self._out:
            self._out = 0
            self._give_up(now)
        elif size <= self.size:
            self.fall_back(now)

    def _give_up(self, now: float) -> None:
        self._tries = 0
        self._step += 1
        # What is left to try must exceed what is known to pass.
        if self._step >= len(self._ladder) or self._ladder[self._step] <= self.size:
            self._step = len(self._ladder)
            self._search_at = now + _SEARCH_AGAIN

    def missed(self, size: int, *, acknowledged: int, sent_at: float, now: float) -> bool:
        """A datagram of `size`, more than `base`, sent at `sent_at`, was lost; the largest that arrived since
        the call before is `acknowledged`. True when the path falls back.

        Timeouts do not tell it where small datagrams pass: their acknowledgements end each row of timeouts.
        """
        if acknowledged >= size:
            self._missed = 0
        if sent_at > self._missed_at:  # else it is of a flight that is counted
            self._missed, self._missed_at = self._missed + 1, now
        return self._missed >= _FLIGHTS_MISSED and self.fall_back(now)

    def fall_back(self, now: float) -> bool:
        """The path carries nothing of `size` any more, it seems. False when it was the smallest already."""
        if self.size == self.base:
            return False
        self.size = self.base
        self._step = self._tries = self._out = self._missed = 0
        self._search_at = now
        return True
