"""Sets of byte ranges: what of a file is here, what of it is wanted.

Pure arithmetic on half-open (start, end) pairs. Knows no file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

Range = tuple[int, int]


class Ranges:
    """A set of bytes as disjoint ranges in order; ranges that touch are one."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def __iter__(self) -> Iterator[Range]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def nbytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """Puts [start, end) in. An empty range changes nothing."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)  # the first range that reaches or touches `start`
        last = first
        while last < len(self._starts) and self._starts[last] <= end:
            start, end = min(start, self._starts[last]), max(end, self._ends[last])
            last += 1
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def missing(self, start: int, end: int) -> list[Range]:
        """What of [start, end) is not in the set, in order."""
        gaps = []
        for number in range(bisect_left(self._ends, start), len(self._starts)):
            if self._starts[number] >= end:
                break
            if start < self._starts[number]:
                gaps.append((start, self._starts[number]))
            start = max(start, self._ends[number])
        if start < end:
            gaps.append((start, end))
        return gaps

    def covers(self, start: int, end: int) -> bool:
        return not self.missing(start, end)

    def prefix(self) -> int:
        """How many bytes from 0 on are in the set without a gap."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0


def joined(ranges: Iterable[Range], *, gap: int) -> list[Range]:
    """The ranges in order, those at most `gap` bytes apart as one: a short gap costs less than a request."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1] + gap:
            result[-1] = result[-1][0], max(result[-1][1], end)
        elif start < end:
            result.append((start, end))
    return result


def cut(ranges: Iterable[Range], *, most: int) -> list[Range]:
    """The same bytes in pieces of at most `most`."""
    return [(at, min(at + most, end)) for start, end in ranges for at in range(start, end, most)]
