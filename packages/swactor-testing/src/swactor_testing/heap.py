"""Arena mock `heap`: the ring contract on private memory of this process (spec sections 18 to 22).

Same header fields, cursor rules, wake bits and errors as a shared arena, so that harness and pump tests need
no descriptor and can damage a header on purpose. One thread only: there are no atomics to get wrong here.
"""

from __future__ import annotations

import mmap
import struct

from swactor_core.errors import ResourceError, RingError, UsageError
from swactor_core.faults import RingFaultReason
from swactor_core.specs import RING_HEADER_BYTES, RingLayout
from swactor_core.spi.arena import RingState

MAGIC = 0x47525753  # "SWRG" in memory order
VERSION = 1
ABI = 1
READABLE_PENDING = 1
WRITABLE_PENDING = 2
POISON = b"\xdd"

_MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on

# magic, version, header_len, ring_id, capacity, commit, consume, state, wake (spec section 20)
_HEADER = struct.Struct("<IHHQQQQII")
_CURSOR = struct.Struct("<Q")
_WORD = struct.Struct("<I")
COMMIT_OFFSET, CONSUME_OFFSET, STATE_OFFSET, WAKE_OFFSET = 24, 32, 40, 44


class HeapRing:
    """`swactor_core.spi.arena.Ring` on a slice of the memory.

    As with a shared ring, an end takes its role with its first producing or consuming call and from then on
    insists that nobody else moves its cursor; a count is bounded by the span last given.
    """

    def __init__(self, memory: memoryview, layout: RingLayout) -> None:
        """Raises RingError when the header in memory is not that of `layout`."""
        self._layout = layout
        self._open = True
        self._header = memory[layout.header_offset : layout.header_offset + RING_HEADER_BYTES]
        self._data = memory[layout.data_offset : layout.data_offset + layout.data_capacity]
        self._own_commit: int | None = None
        self._own_consume: int | None = None
        self._write_granted = self._read_granted = 0
        self._cursors()

    @property
    def layout(self) -> RingLayout:
        return self._layout

    @property
    def commit(self) -> int:
        return self._cursors()[0]

    @property
    def consume(self) -> int:
        return self._cursors()[1]

    def readable_span(self) -> memoryview:
        commit, self._own_consume = self._cursors()
        start = self._own_consume % len(self._data)
        self._read_granted = min(commit - self._own_consume, len(self._data) - start)
        return self._data[start : start + self._read_granted]

    def advance_consume(self, count: int) -> bool:
        commit, consume = self._cursors()
        self._require(0 <= count <= self._read_granted, f"count {count} of {self._read_granted} granted")
        self._read_granted -= count
        self._own_consume = consume + count
        _CURSOR.pack_into(self._header, CONSUME_OFFSET, self._own_consume)
        was_full = commit - consume == len(self._data)
        eighth = max(1, len(self._data) // 8)
        wanted = count > 0 and (was_full or self._own_consume // eighth != consume // eighth)
        return wanted and self._set_pending(WRITABLE_PENDING)

    def writable_span(self) -> memoryview:
        self._require(self.state is not RingState.CLOSED, "the state forbids writing")
        self._own_commit, consume = self._cursors()
        start = self._own_commit % len(self._data)
        free = len(self._data) - (self._own_commit - consume)
        self._write_granted = min(free, len(self._data) - start)
        return self._data[start : start + self._write_granted]

    def advance_commit(self, count: int) -> bool:
        self._require(self.state is not RingState.CLOSED, "the state forbids writing")
        commit, _ = self._cursors()
        self._require(0 <= count <= self._write_granted, f"count {count} of {self._write_granted} granted")
        self._write_granted -= count
        self._own_commit = commit + count
        _CURSOR.pack_into(self._header, COMMIT_OFFSET, self._own_commit)
        return count > 0 and self._set_pending(READABLE_PENDING)

    def acknowledge_readable(self) -> None:
        self._clear_pending(READABLE_PENDING)

    def acknowledge_writable(self) -> None:
        self._clear_pending(WRITABLE_PENDING)

    @property
    def state(self) -> RingState:
        self._check_header()
        value: int = _WORD.unpack_from(self._header, STATE_OFFSET)[0]
        self._require(value in set(RingState), f"state {value} does not exist")
        return RingState(value)

    def set_state(self, state: RingState) -> None:
        """States only grow: FAULTED is final, OPEN is set by `create_ring` alone."""
        current = self.state
        self._require(state is not RingState.OPEN, "a ring is opened by its creation only")
        if state > current:
            _WORD.pack_into(self._header, STATE_OFFSET, state)

    def close(self) -> None:
        self._open = False

    def _cursors(self) -> tuple[int, int]:
        """Commit and consume, checked against each other and against this end's own."""
        self._check_header()
        (commit,), (consume,) = (
            _CURSOR.unpack_from(self._header, offset) for offset in (COMMIT_OFFSET, CONSUME_OFFSET)
        )
        sound = 0 <= commit - consume <= len(self._data)
        self._require(sound, f"commit {commit} and consume {consume} contradict each other")
        moved = self._own_commit not in (None, commit) or self._own_consume not in (None, consume)
        self._require(not moved, "this end's cursor was moved by somebody else")
        return commit, consume

    def _check_header(self) -> None:
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
        self._check_header()
        (wake,) = _WORD.unpack_from(self._header, WAKE_OFFSET)
        _WORD.pack_into(self._header, WAKE_OFFSET, wake & ~bit)


class HeapArena:
    """`swactor_core.spi.arena.Arena` that cannot leave its process: `fd` is -1. `memory` is for tests."""

    def __init__(self, ceiling: int) -> None:
        """Raises ResourceError."""
        # Private pages come with their first use: an arena is reserved larger than it is ever filled.
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self.memory = mmap.mmap(-1, ceiling, flags=flags)
        except (OSError, OverflowError) as error:
            raise ResourceError(f"an arena of {ceiling} bytes: {error}") from None
        self._view = memoryview(self.memory)
        self._poisoned: list[tuple[int, int]] = []

    @property
    def ceiling(self) -> int:
        return len(self.memory)

    @property
    def fd(self) -> int:
        return -1

    def create_ring(self, layout: RingLayout) -> HeapRing:
        """Raises RingError for a layout outside the arena, AssertionError when somebody wrote into the range
        after its release: that is a defect of the host, and no run may go on with it."""
        self._check_range(layout)
        self._take_poison(layout.arena_offset, layout.arena_offset + layout.total_len)
        fields = (MAGIC, VERSION, RING_HEADER_BYTES, layout.ring_id, layout.data_capacity)
        _HEADER.pack_into(self._view, layout.header_offset, *fields, 0, 0, RingState.OPEN, 0)
        return HeapRing(self._view, layout)

    def open_ring(self, layout: RingLayout) -> HeapRing:
        """Raises RingError for a layout outside the arena, or without its ring."""
        self._check_range(layout)
        return HeapRing(self._view, layout)

    def discard(self, offset: int, length: int) -> None:
        """Poisons the range: a reader of released bytes is noticed, a writer at the range's next use."""
        if offset < 0 or length <= 0 or offset + length > self.ceiling:
            raise UsageError(f"no range of {length} bytes at {offset} in an arena of {self.ceiling}")
        self._view[offset : offset + length] = POISON * length
        self._poisoned.append((offset, offset + length))

    def _take_poison(self, begin: int, end: int) -> None:
        left = []
        for first, last in self._poisoned:
            low, high = max(first, begin), min(last, end)
            if low < high:
                whole = self._view[low:high] == POISON * (high - low)
                assert whole, f"somebody wrote between {low} and {high} after the range was released"
                left += [(first, low), (high, last)]
            else:
                left.append((first, last))
        self._poisoned = [(first, last) for first, last in left if first < last]

    def close(self) -> None:
        """Idempotent. The memory goes with the last reference."""

    def _check_range(self, layout: RingLayout) -> None:
        begin, end = layout.arena_offset, layout.arena_offset + layout.total_len
        header, data = layout.header_offset, layout.data_offset
        header_end, data_end = header + RING_HEADER_BYTES, data + layout.data_capacity
        power_of_two = layout.alignment > 0 and layout.alignment & (layout.alignment - 1) == 0
        sound = (
            0 <= begin < end <= self.ceiling
            and begin <= header
            and header_end <= end
            and begin <= data < data_end <= end
            and (header_end <= data or data_end <= header)
            and header % RING_HEADER_BYTES == 0
            and power_of_two
            and data % layout.alignment == 0
        )
        if not sound:
            message = f"ring {layout.ring_id}: the layout does not fit itself or its arena"
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
