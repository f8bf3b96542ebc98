"""One connection between two endpoints: two one-way lanes that carry calls in order, late or not at all.

A lane without latency delivers at once, inside the call that sends; with it, in order after the time. A held
lane keeps everything; a lost connection drops what was under way. Knows no stream and no peer table.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from swactor_core.ids import NodeId

from swactor_testing.memory.waiting import Signal


class LinkKind(StrEnum):
    EDGES = "edges"
    CONTROL = "control"


class Stream(Protocol):
    """What ends with its link."""

    @property
    def settled(self) -> bool:
        """Whether nothing that was accepted from the host is still under way."""

    def broken(self, reason: str) -> None: ...


class Lane:
    """One direction. `latency` in seconds; `held` is a script's stall."""

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.held = False
        self.closed = False
        self.delivered = Signal()
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def empty(self) -> bool:
        return not self._queue

    def carry(self, call: Callable[[], None]) -> None:
        """Calls it at the other end, after everything that was carried before."""
        if self.closed:
            return
        if not self.latency and not self.held and not self._queue:
            call()
            return
        self._queue.append((asyncio.get_running_loop().time() + self.latency, call))
        self._arm()

    def release(self) -> None:
        """Ends a stall: what is due goes now."""
        self.held = False
        self._arm()

    def drop(self) -> None:
        """The connection is gone: nothing of it arrives any more."""
        self.closed = True
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.delivered.fire()

    def _arm(self) -> None:
        if self._queue and not self.held and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._queue[0][0], self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._queue and not self.held and self._queue[0][0] <= now:
            self._queue.popleft()[1]()
        self.delivered.fire()
        self._arm()


class LinkEnd:
    """One side's end of a link: whose it is, whom it reaches, its outgoing lane, its streams."""

    def __init__(
        self, link: Link, owner: object, *, peer: NodeId, peer_key: bytes, peer_epoch: int, latency: float
    ) -> None:
        self.link = link
        self.owner = owner
        self.peer = peer
        self.peer_key = peer_key
        self.peer_epoch = peer_epoch
        self.out = Lane(latency)
        self.streams: dict[Stream, None] = {}  # in the order in which they were opened
        self.other: LinkEnd = self
        self.on_ended: Callable[[LinkEnd, str, bool], None] = lambda end, reason, lost: None


class Link:
    """An authenticated connection. `ends` are the dialler's and the acceptor's, set by whoever makes it."""

    def __init__(self, kind: LinkKind) -> None:
        self.kind = kind
        self.up = True
        self.ends: tuple[LinkEnd, ...] = ()

    def end(self, reason: str, *, lost_by: tuple[LinkEnd, ...] = ()) -> None:
        """Ends it for both sides at once; `lost_by` are the ends whose host did not want it. Idempotent."""
        if not self.up:
            return
        self.up = False
        for end in self.ends:
            end.out.drop()
        for end in self.ends:
            for stream in tuple(end.streams):
                stream.broken(reason)
            end.streams.clear()
            end.on_ended(end, reason, end in lost_by)

    def lose(self, reason: str) -> None:
        """It breaks without either side's wish."""
        self.end(reason, lost_by=self.ends)
