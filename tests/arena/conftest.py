"""Fixtures of the arena tests: arenas that are closed afterwards, layouts, and a hand on the raw header."""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from swactor_arena.arena import MemfdArenas, OwnedArena
from swactor_core.ids import RingId
from swactor_core.specs import RING_HEADER_BYTES, RingLayout

sys.path.insert(0, str(Path(__file__).parent))

CEILING = 1 << 20


class RawHeader:
    """The header's bytes through a mapping of the test's own, as a hostile process would have it."""

    FIELDS: ClassVar = {
        "magic": ("<I", 0),
        "version": ("<H", 4),
        "header_len": ("<H", 6),
        "ring_id": ("<Q", 8),
        "capacity": ("<Q", 16),
        "commit": ("<Q", 24),
        "consume": ("<Q", 32),
        "state": ("<I", 40),
        "wake": ("<I", 44),
    }

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._offset = offset

    def __getitem__(self, field: str) -> int:
        code, at = self.FIELDS[field]
        return struct.unpack_from(code, self._memory, self._offset + at)[0]

    def __setitem__(self, field: str, value: int) -> None:
        code, at = self.FIELDS[field]
        struct.pack_into(code, self._memory, self._offset + at, value)

    def content(self) -> bytes:
        return self._memory[self._offset : self._offset + RING_HEADER_BYTES]


@pytest.fixture
def arena() -> Iterator[OwnedArena]:
    owner = MemfdArenas().create(CEILING)
    yield owner
    owner.close()


@pytest.fixture
def raw(arena: OwnedArena) -> Iterator[Callable[[int], RawHeader]]:
    memory = mmap.mmap(arena.fd, arena.ceiling)
    yield lambda offset=0: RawHeader(memory, offset)
    memory.close()


@pytest.fixture
def layout_of() -> Callable[..., RingLayout]:
    def make(capacity: int, *, ring_id: int = 1, offset: int = 0, alignment: int = 64) -> RingLayout:
        return RingLayout(
            ring_id=RingId(ring_id),
            arena_offset=offset,
            total_len=RING_HEADER_BYTES + capacity,
            header_offset=offset,
            data_offset=offset + RING_HEADER_BYTES,
            data_capacity=capacity,
            alignment=alignment,
        )

    return make
