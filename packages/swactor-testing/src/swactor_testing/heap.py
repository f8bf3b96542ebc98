"""Arena mock `heap`: the ring contract on a bytearray of this process (spec sections 18 to 22).

Same header fields, cursor rules, wake bits and errors as a shared arena, so that harness and pump tests need
no descriptor and can damage a header on purpose. One thread only: there are no atomics to get wrong here.
"""

from __future__ import annotations

import struct

from swactor_core.errors import ResourceError, RingError, UsageError
from swactor_core.faults import RingFaultReason
from swactor_core.specs import RING_HEADER_BYTES, RingLayout
from swactor_core.spi.arena import RingState

MAGIC = 0x4E525753  # "SWRN" in memory order
VERSION = 1
ABI = 1
READABLE_PENDING = 1
WRITABLE_PENDING = 2

# magic, version, header_len, ring_id, capacity, commit, consume, state, wake (spec section 20)
_HEADER = struct.Struct("<IHHQQQQII")
_CURSOR = struct.Struct("<Q")
_WORD = struct.Struct("<I")
COMMIT_OFFSET, CONSUME_OFFSET, STATE_OFFSET, WAKE_OFFSET = 24, 32, 40, 44


class HeapRing:
    """`swactor_core.spi.arena.Ring` on a slice of a bytearray."""

    def __init__(self, memory: memoryview, layout: RingLayout) -> None:
        """Raises RingError when the header in memory is not that of `layout`."""
        self._layout = layout
        self._open = True
        self._header = memory[layout.header_offset : layout.header_offset + RING_HEADER_BYTES]
        self._data = memory[layout.data_offset : layout.data_offset + layout.data_capacity]
        self._check_identity()
        self._write = self._cursor(COMMIT_OFFSET)

    @property
    def layout(self) -> RingLayout:
        return self._layout

    @property
    def commit(self) -> int:
        return self._checked_cursors()[0]

    @property
    def consume(self) -> int:
        return self._checked_cursors()[1]

    def readable_span(self) -> memoryview:
        commit, consume = self._checked_cursors()
        start = consume % len(self._data)
        return self._data[start : min(start + commit - consume, len(self._data))]

    def advance_consume(self, count: int) -> bool:
        commit, consume = self._checked_cursors()
        self._require(0 <= count <= commit - consume, f"cannot release {count} of {commit - consume} bytes")
        _CURSOR.pack_into(self._header, CONSUME_OFFSET, consume + count)
        was_full = commit - consume == len(self._data)
        eighth = max(1, len(self._data) // 8)
        wanted = count > 0 and (was_full or (consume + count) // eighth != consume // eighth)
        return wanted and self._set_pending(WRITABLE_PENDING)

    def writable_span(self) -> memoryview:
        commit, consume = self._checked_cursors()
        self._require(commit == self._write, "the commit cursor was moved by somebody else")
        start = commit % len(self._data)
        return self._data[start : min(start + len(self._data) - (commit - consume), len(self._data))]

    def advance_commit(self, count: int) -> bool:
        commit, consume = self._checked_cursors()
        free = len(self._data) - (commit - consume)
        self._require(0 <= count <= free, f"cannot publish {count} bytes into {free} free ones")
        self._write = commit + count
        _CURSOR.pack_into(self._header, COMMIT_OFFSET, self._write)
        return count > 0 and self._set_pending(READABLE_PENDING)

    def acknowledge_readable(self) -> None:
        self._clear_pending(READABLE_PENDING)

    def acknowledge_writable(self) -> None:
        self._clear_pending(WRITABLE_PENDING)

    @property
    def state(self) -> RingState:
        self._check_identity()
        (value,) = _WORD.unpack_from(self._header, STATE_OFFSET)
        self._require(value in set(RingState), f"state {value} does not exist")
        return RingState(value)

    def set_state(self, state: RingState) -> None:
        self._check_identity()
        if self.state is not RingState.FAULTED:
            _WORD.pack_into(self._header, STATE_OFFSET, state)

    def close(self) -> None:
        self._open = False

    def _cursor(self, offset: int) -> int:
        value: int = _CURSOR.unpack_from(self._header, offset)[0]
        return value

    def _checked_cursors(self) -> tuple[int, int]:
        self._check_identity()
        commit, consume = self._cursor(COMMIT_OFFSET), self._cursor(CONSUME_OFFSET)
        sound = 0 <= commit - consume <= len(self._data)
        self._require(sound, f"commit {commit} and consume {consume} contradict each other")
        return commit, consume

    def _check_identity(self) -> None:
        self._require(self._open, "the ring is closed")
        magic, version, length, ring_id, capacity, *_ = _HEADER.unpack_from(self._header)
        invalid = RingFaultReason.RING_LAYOUT_INVALID
        self._require(magic == MAGIC, "no ring header at this offset", invalid)
        self._require(
            (version, length) == (VERSION, RING_HEADER_BYTES),
            f"header version {version}, length {length}",
            RingFaultReason.UNSUPPORTED_RING_VERSION,
        )
        self._require(ring_id == self._layout.ring_id, f"the header names ring {ring_id}", invalid)
        self._require(capacity == len(self._data), f"the header has capacity {capacity}", invalid)

    def _require(
        self, sound: bool, problem: str, reason: RingFaultReason = RingFaultReason.RING_STATE_INVALID
    ) -> None:
        if not sound:
            raise RingError(f"ring {self._layout.ring_id}: {problem}", reason=reason)

    def _set_pending(self, bit: int) -> bool:
        (wake,) = _WORD.unpack_from(self._header, WAKE_OFFSET)
        _WORD.pack_into(self._header, WAKE_OFFSET, wake | bit)
        return not wake & bit

    def _clear_pending(self, bit: int) -> None:
        self._check_identity()
        (wake,) = _WORD.unpack_from(self._header, WAKE_OFFSET)
        _WORD.pack_into(self._header, WAKE_OFFSET, wake & ~bit)


class HeapArena:
    """`swactor_core.spi.arena.Arena` that cannot leave its process: `fd` is -1. `memory` is for tests."""

    def __init__(self, ceiling: int) -> None:
        self.memory = bytearray(ceiling)
        self._view = memoryview(self.memory)

    @property
    def ceiling(self) -> int:
        return len(self.memory)

    @property
    def fd(self) -> int:
        return -1

    def create_ring(self, layout: RingLayout) -> HeapRing:
        """Raises RingError for a layout outside the arena."""
        self._check_range(layout)
        fields = (MAGIC, VERSION, RING_HEADER_BYTES, layout.ring_id, layout.data_capacity)
        _HEADER.pack_into(self._view, layout.header_offset, *fields, 0, 0, RingState.OPEN, 0)
        return HeapRing(self._view, layout)

    def open_ring(self, layout: RingLayout) -> HeapRing:
        """Raises RingError for a layout outside the arena, or without its ring."""
        self._check_range(layout)
        return HeapRing(self._view, layout)

    def discard(self, offset: int, length: int) -> None:
        """Overwrites the range, so that a reader of released bytes is noticed."""
        if offset < 0 or length <= 0 or offset + length > self.ceiling:
            raise UsageError(f"no range of {length} bytes at {offset} in an arena of {self.ceiling}")
        self._view[offset : offset + length] = b"\xdd" * length

    def close(self) -> None:
        """Idempotent. The memory goes with the last reference."""

    def _check_range(self, layout: RingLayout) -> None:
        end = layout.arena_offset + layout.total_len
        data_end = layout.data_offset + layout.data_capacity
        inside = 0 <= layout.arena_offset <= layout.header_offset and data_end <= end <= self.ceiling
        if not inside or layout.header_offset + RING_HEADER_BYTES > layout.data_offset:
            message = f"ring {layout.ring_id}: the layout does not fit an arena of {self.ceiling} bytes"
            raise RingError(message, reason=RingFaultReason.RING_LAYOUT_INVALID)
        if layout.data_capacity <= 0:
            message = f"ring {layout.ring_id}: data capacity {layout.data_capacity}"
            raise RingError(message, reason=RingFaultReason.RING_LAYOUT_INVALID)


class HeapArenas:
    """`swactor_core.spi.arena.ArenaPlugin`. `attach` gives the arena that this same object created last, so a
    node and its in-process worker share one plug-in object."""

    def __init__(self) -> None:
        self._arena: HeapArena | None = None

    @property
    def abi(self) -> int:
        return ABI

    def create(self, ceiling: int) -> HeapArena:
        if ceiling <= 0:
            raise ResourceError(f"an arena of {ceiling} bytes is not possible")
        self._arena = HeapArena(ceiling)
        return self._arena

    def attach(self, fd: int, ceiling: int) -> HeapArena:
        arena = self._arena
        if fd != -1 or arena is None or arena.ceiling != ceiling:
            raise ResourceError(
                f"no heap arena of {ceiling} bytes with descriptor {fd} in this process",
                hint="a heap arena does not cross processes: use the arena plug-in `memfd`",
            )
        return arena
