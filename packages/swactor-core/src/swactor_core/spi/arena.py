"""Arena and ring interfaces (spec sections 18 to 22).

Provider factory of kind `arena`: `factory() -> ArenaPlugin`. Cursor arithmetic, atomics and wrap belong to
the plug-in's native helper; callers see only spans, counts and flags.

Wake rule, the same in both directions. After `advance_commit` (or `advance_consume`) returns True the
caller must send exactly one RingReadable (RingWritable) hint. Whoever receives a hint first calls
`acknowledge_readable` (`acknowledge_writable`) and only then asks for spans: the pending bit is set before
the send and cleared before cursors are loaded, so no transition is lost.

`advance_consume` asks for a hint when the ring was full as the producer can have seen it, or when consumption
crossed a multiple of one eighth of the capacity: enough for a blocked producer and for transport credit.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from swactor_core.specs import RingLayout


class RingState(IntEnum):
    """Value of the ring header's `state` word."""

    OPEN = 1
    CLOSED = 2
    FAULTED = 3


class Ring(Protocol):
    """One end of a single-producer single-consumer byte ring. Not thread-safe within a process.

    Every method raises RingError when the shared header is not consistent with the layout, and then has
    touched no payload byte; after `close` every method raises RingError.
    """

    @property
    def layout(self) -> RingLayout: ...
    @property
    def commit(self) -> int:
        """First byte after the committed readable prefix (monotonic logical position)."""

    @property
    def consume(self) -> int:
        """First byte not yet released by the consumer (monotonic logical position)."""

    def readable_span(self) -> memoryview:
        """The contiguous committed bytes from `consume` on; empty when there are none. Consumer only."""

    def advance_consume(self, count: int) -> bool:
        """Releases `count` bytes; True when a RingWritable hint must be sent."""

    def writable_span(self) -> memoryview:
        """The contiguous free bytes from the write position on; empty when full. Producer only."""

    def advance_commit(self, count: int) -> bool:
        """Publishes `count` written bytes; True when a RingReadable hint must be sent."""

    def acknowledge_readable(self) -> None:
        """Clears the pending bit of RingReadable; call on receipt, before loading cursors. Consumer only."""

    def acknowledge_writable(self) -> None:
        """Clears the pending bit of RingWritable; call on receipt, before loading cursors. Producer only."""

    @property
    def state(self) -> RingState: ...
    def set_state(self, state: RingState) -> None:
        """CLOSED by the producer: what is committed is all there will be. FAULTED by either end."""

    def close(self) -> None:
        """Drops this end's views. Idempotent; outstanding memoryviews of this ring become invalid."""


class ArenaView(Protocol):
    """A process's one mapping of an arena."""

    @property
    def ceiling(self) -> int: ...
    def open_ring(self, layout: RingLayout) -> Ring:
        """Opens an initialised ring. Raises RingError when magic, version, id or capacity differ."""

    def close(self) -> None: ...


class Arena(ArenaView, Protocol):
    """The owner's side: the node process creates the memory and initialises ring headers in it."""

    @property
    def fd(self) -> int:
        """Descriptor that a child inherits; -1 where the arena cannot leave the process."""

    def create_ring(self, layout: RingLayout) -> Ring:
        """Writes a fresh header (cursors 0, state OPEN) and opens it. Raises ResourceError when the
        pages cannot be had; never SIGBUS later."""

    def discard(self, offset: int, length: int) -> None:
        """Gives the pages of a released range back to the system; their content becomes undefined."""


class ArenaPlugin(Protocol):
    @property
    def abi(self) -> int:
        """Number of the ring helper's layout and protocol; equal in node and worker or the worker refuses."""

    def create(self, ceiling: int) -> Arena:
        """A new sparse arena of `ceiling` bytes. Raises ResourceError."""

    def attach(self, fd: int, ceiling: int) -> ArenaView:
        """Maps an inherited arena once. Raises ResourceError."""
