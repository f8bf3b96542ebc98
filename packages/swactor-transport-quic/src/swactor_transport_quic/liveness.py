"""When to ping a silent peer and when to give it up. Pure: time comes in, a verdict goes out.

A peer is lost only when a ping went unanswered for `loss_after`; anything heard after that ping is an answer.
When this process itself was paused, the wait starts anew once, because the pause was not the peer's.
"""

from __future__ import annotations

from enum import Enum, auto


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
