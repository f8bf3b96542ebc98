"""When to ping a silent peer, when to give it up, and when a path that answers carries nothing. Pure: time
comes in, a verdict goes out.

A peer is lost only when a ping went unanswered for `loss_after`; anything heard after that ping is an answer.
When this process itself was paused, the wait starts anew once, because the pause was not the peer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

_TIMES_LOST = 3
"""A byte that was lost less often is slow, not stuck: it may wait in a queue of the path for long."""


class Verdict(Enum):
    WAIT = auto()
    PING = auto()
    LOST = auto()


class Liveness:
    """One per connection. `interval` (seconds of silence before a ping) may differ from call to call."""

    __slots__ = (
        "_excused",
        "_heard_at",
        "_looked_at",
        "_loss_after",
        "_pinged_at",
        "_stall_grace",
        "_wanted_at",
    )

    def __init__(self, now: float, *, loss_after: float, stall_grace: float) -> None:
        self._loss_after = loss_after
        self._stall_grace = stall_grace
        self._heard_at = now
        self._pinged_at: float | None = None
        self._wanted_at = now
        self._looked_at = now
        self._excused = False

    def heard(self, now: float) -> None:
        self._heard_at = now
        self._pinged_at = None
        self._excused = False

    def next_look(self, interval: float) -> float:
        """When `look` should be called next."""
        base = self._heard_at + interval if self._pinged_at is None else self._pinged_at + self._loss_after
        self._wanted_at = base
        return base

    def look(self, now: float, interval: float) -> Verdict:
        """The caller has read everything that had arrived before it asks. After PING it sends one."""
        late = now - self._wanted_at > self._stall_grace and now - self._looked_at > self._stall_grace
        self._looked_at = now
        if self._pinged_at is None:
            if now < self._heard_at + interval:
                return Verdict.WAIT
            self._pinged_at = now
            return Verdict.PING
        if now < self._pinged_at + self._loss_after:
            return Verdict.WAIT
        if late and not self._excused:
            self._excused = True
            self._pinged_at = now
            return Verdict.PING
        return Verdict.LOST


class Delivery:
    """Whether what was sent arrives. A peer may answer pings while the path loses all that is larger: what is
    lost time and again and never acknowledged for `stuck_after` seconds is stuck. `next_look`: when to ask
    next."""

    __slots__ = ("_interval", "_since", "_stuck_after", "next_look")

    def __init__(self, now: float, *, stuck_after: float) -> None:
        self._stuck_after = stuck_after
        self._interval = stuck_after / 5
        self._since: dict[tuple[int, int], float] = {}
        self.next_look = now + self._interval

    def stuck(self, now: float, waiting: Mapping[int, tuple[int, int]]) -> bool:
        """`waiting`: by stream, where its oldest byte lies that was sent and not acknowledged, and how often
        that was lost. The wait starts anew where nobody has asked in time, after a pause of this process."""
        if now - self.next_look > self._interval:
            self._since.clear()
        self.next_look = now + self._interval
        before, self._since = self._since, {}
        stuck = False
        for stream_id, (oldest, lost) in waiting.items():
            where = stream_id, oldest
            since = self._since[where] = before.get(where, now)
            stuck = stuck or (lost >= _TIMES_LOST and now - since >= self._stuck_after)
        return stuck
