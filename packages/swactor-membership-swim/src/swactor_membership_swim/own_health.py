"""What a participant concludes of itself from how its probes are answered (Lifeguard, local health).

Strained when answers come too late, isolated when nobody of several answers: then it accuses more slowly.
Knows probes, no member and no packet.
"""

from __future__ import annotations

import math

from swactor_membership_swim.probing import Probe
from swactor_membership_swim.settings import SwimSettings


class OwnHealth:
    """`isolated` until somebody answers again."""

    def __init__(self, settings: SwimSettings) -> None:
        self.isolated = False
        self._settings = settings
        self._strain = 0
        self._late_answers = 0

    @property
    def factor(self) -> int:
        """How many times as long as it should a round takes, and everything that waits for one."""
        return 1 + self._strain

    def answered_late(self) -> None:
        self._late_answers += 1

    def end_round(self, asked: list[Probe]) -> None:
        """The strain grows with answers that came too late, and falls when all would have been in time with
        less of it."""
        if len(asked) > 1:
            self.isolated = self.isolated or all(probe.answered is None for probe in asked)
        if self._late_answers:
            self._strain = min(self._strain + 1, self._settings.strain_limit)
        elif self._strain and asked:
            comfortable = self._settings.probe_interval * self._strain / 2
            waits = [p.answered - p.sent if p.answered is not None else math.inf for p in asked]
            if sorted(waits)[len(waits) // 2] <= comfortable:
                self._strain -= 1
        self._late_answers = 0
