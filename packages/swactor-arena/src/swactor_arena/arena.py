"""The arena plug-in proper: `MemfdArenas` makes owners' arenas and attached views, both full of rings.

Knows mapping and rings. It must not know leases: which ranges are free, and when one may be reused, is the
arena manager's to decide. It only checks that a layout lies inside the mapping.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

from swactor_core.errors import ResourceError, RingError, UsageError
from swactor_core.faults import RingFaultReason
from swactor_core.specs import RingLayout

from swactor_arena import memory
from swactor_arena._native import ffi, lib
from swactor_arena.ring import EXPECTED_ABI, NativeRing, native_layout, refuse, release_unless_exported


class AttachedArena:
    """`swactor_core.spi.arena.ArenaView`: one mapping of an arena that another process owns."""

    def __init__(self, mapping: mmap.mmap, ceiling: int) -> None:
        self._ceiling = ceiling
        self._mapping: mmap.mmap | None = mapping
        self._memory = memoryview(mapping)
        self._base = ffi.from_buffer("uint8_t[]", mapping, require_writable=True)
        self._rings: weakref.WeakSet[NativeRing] = weakref.WeakSet()

    @property
    def ceiling(self) -> int:
        return self._ceiling

    def open_ring(self, layout: RingLayout) -> NativeRing:
        self._require_open(layout)
        ring = NativeRing(layout, self._base, self._ceiling, self._memory)
        self._rings.add(ring)
        return ring

    def _require_open(self, layout: RingLayout) -> None:
        if self._mapping is None:
            message = f"ring {layout.ring_id}: the arena is closed"
            raise RingError(message, reason=RingFaultReason.RING_STATE_INVALID)

    def close(self) -> None:
        """Closes every ring. Idempotent. While somebody still exports a span the mapping outlives this call,
        so that no access ever meets unmapped memory."""
        if self._mapping is None:
            return
        for ring in list(self._rings):
            ring.close()
        ffi.release(self._base)
        release_unless_exported(self._memory)
        with contextlib.suppress(BufferError):  # the last export unmaps it
            self._mapping.close()
        self._mapping = None


class OwnedArena(AttachedArena):
    """`swactor_core.spi.arena.Arena`: the node process's side. The descriptor is close-on-exec; a child gets
    it through `pass_fds=(arena.fd,)`, which keeps its number."""

    def __init__(self, fd: int, ceiling: int) -> None:
        super().__init__(memory.map_memory(fd, ceiling), ceiling)
        self._fd = fd

    @property
    def fd(self) -> int:
        return self._fd

    def create_ring(self, layout: RingLayout) -> NativeRing:
        self._require_open(layout)
        native = native_layout(layout)
        code = lib.swactor_ring_check_layout(self._ceiling, native)
        if code == 0:
            memory.reserve(self._fd, layout.arena_offset, length=layout.total_len)
            code = lib.swactor_ring_init(self._base, self._ceiling, native)
        if code < 0:
            refuse(code, layout, "create")
        return self.open_ring(layout)

    def discard(self, offset: int, length: int) -> None:
        """Raises UsageError for a range outside the arena, ResourceError when the system refuses."""
        if self._mapping is None or offset < 0 or length <= 0 or offset + length > self._ceiling:
            raise UsageError(f"no range of {length} bytes at {offset} in an open arena of {self._ceiling}")
        memory.discard(self._fd, offset, length=length)

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemfdArenas:
    """`swactor_core.spi.arena.ArenaPlugin`. Raises ResourceError when the compiled helper is stale."""

    def __init__(self) -> None:
        if lib.swactor_ring_abi() != EXPECTED_ABI:
            message = (
                f"the compiled ring helper has ABI {lib.swactor_ring_abi()}, this code needs {EXPECTED_ABI}"
            )
            raise ResourceError(message, hint="reinstall swactor-arena so that it is built again")

    @property
    def abi(self) -> int:
        return lib.swactor_ring_abi()

    def create(self, ceiling: int) -> OwnedArena:
        fd = memory.create_memory(ceiling)
        try:
            return OwnedArena(fd, ceiling)
        except ResourceError:
            os.close(fd)
            raise

    def attach(self, fd: int, ceiling: int) -> AttachedArena:
        """Leaves `fd` open: it stays the caller's."""
        memory.check_inherited(fd, ceiling)
        return AttachedArena(memory.map_memory(fd, ceiling), ceiling)
