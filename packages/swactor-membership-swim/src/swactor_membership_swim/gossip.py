"""The rumours that still have to spread, each with its count of sends (SWIM section 4.1).

At most one rumour a name, so the queue is bounded by the members. Least sent goes first. Knows encoded bytes
and names, nothing of what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Rumour:
    encoded: bytes
    sends: int
    order: int


class RumourQueue:
    def __init__(self, retransmit: int) -> None:
        self._retransmit = retransmit
        self._rumours: dict[str, _Rumour] = {}
        self._order = 0

    def __len__(self) -> int:
        return len(self._rumours)

    def put(self, name: str, encoded: bytes) -> None:
        """Replaces any rumour about that name."""
        self._order += 1
        self._rumours[name] = _Rumour(encoded, 0, self._order)

    def take(self, budget: int, *, members: int, without: Iterable[str] = ()) -> list[bytes]:
        """Rumours that fit into `budget` bytes, counted as sent once; `members` sets how often each goes out.

        `without` names rumours that the packet already carries.
        """
        limit = self._retransmit * max(1, math.ceil(math.log10(members + 1)))
        skipped = frozenset(without)
        chosen = []
        for name, rumour in sorted(self._rumours.items(), key=lambda item: (item[1].sends, -item[1].order)):
            if name in skipped or len(rumour.encoded) > budget:
                continue
            budget -= len(rumour.encoded)
            chosen.append(rumour.encoded)
            rumour.sends += 1
            if rumour.sends >= limit:
                del self._rumours[name]
        return chosen
