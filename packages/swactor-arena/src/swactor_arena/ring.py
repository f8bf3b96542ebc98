"""One end of a shared ring (spec sections 20 to 22): spans as memoryviews, error codes as RingError.

Knows the native helper's operations and their error numbers. It computes no cursor, index or wrap: every hot
call is one call into C. It must not know who uses the ring or how hints travel.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NoReturn

from swactor_core.errors import RingError
from swactor_core.faults import RingFaultReason
from swactor_core.specs import RingLayout
from swactor_core.spi.arena import RingState

from swactor_arena._native import ffi, lib

if TYPE_CHECKING:
    from swactor_arena._native import LayoutStruct, Pointer, RingHandle

EXPECTED_ABI = 2
"""What this Python code was written for; a stale compiled helper has another number."""

_LAYOUT = RingFaultReason.RING_LAYOUT_INVALID
_STATE = RingFaultReason.RING_STATE_INVALID
_PROBLEMS = {
    lib.SWACTOR_RING_E_HANDLE: (_STATE, "the ring is closed"),
    lib.SWACTOR_RING_E_LAYOUT: (_LAYOUT, "the layout does not fit itself or its arena"),
    lib.SWACTOR_RING_E_MAGIC: (_LAYOUT, "no ring header at this offset"),
    lib.SWACTOR_RING_E_VERSION: (
        RingFaultReason.UNSUPPORTED_RING_VERSION,
        "another header version or length",
    ),
    lib.SWACTOR_RING_E_IDENTITY: (_LAYOUT, "the header names another ring"),
    lib.SWACTOR_RING_E_CAPACITY: (_LAYOUT, "the header has another capacity"),
    lib.SWACTOR_RING_E_CURSOR: (_STATE, "commit and consume contradict each other"),
    lib.SWACTOR_RING_E_FOREIGN: (_STATE, "this end's cursor was moved by somebody else"),
    lib.SWACTOR_RING_E_STATE: (_STATE, "the state is invalid or forbids this call"),
    lib.SWACTOR_RING_E_COUNT: (_STATE, "the count is negative or beyond the span last given"),
}
_STATES = {int(state): state for state in RingState}
_SPANS_WATCHED = 64
_EMPTY = memoryview(bytearray())
"""The span of nothing, which has nothing to be watched for."""

_readable = lib.swactor_ring_readable
_writable = lib.swactor_ring_writable
_advance_consume = lib.swactor_ring_advance_consume
_advance_commit = lib.swactor_ring_advance_commit


def refuse(code: int, layout: RingLayout, call: str) -> NoReturn:
    """Raises the RingError of a native error code; `call` is what was attempted."""
    reason, text = _PROBLEMS[code]
    raise RingError(f"ring {layout.ring_id}: {call}: {text}", reason=reason)


def native_layout(layout: RingLayout) -> LayoutStruct:
    """The C struct of a layout. Raises RingError for a number that is no unsigned 64-bit value."""
    fields = {
        "ring_id": layout.ring_id,
        "arena_offset": layout.arena_offset,
        "total_len": layout.total_len,
        "header_offset": layout.header_offset,
        "data_offset": layout.data_offset,
        "data_capacity": layout.data_capacity,
        "alignment": layout.alignment,
    }
    try:
        struct: LayoutStruct = ffi.new("swactor_ring_layout *", fields)
    except OverflowError as error:
        message = f"ring {layout.ring_id}: layout {layout} has a number out of range"
        raise RingError(message, reason=_LAYOUT) from error
    return struct


class NativeRing:
    """`swactor_core.spi.arena.Ring` over the native helper.

    A handle takes a role (producer, consumer or both) with its first call of that role and from then on
    insists that nobody else moves that role's cursor. Spans stay valid until the ring is closed or, for the
    bytes of it, until they are committed or released. They are writable views in both directions, since
    device copies ask for the address through writable buffers; a consumer must not write.
    """

    __slots__ = ("__weakref__", "_data", "_handle", "_layout", "_spans")

    def __init__(self, layout: RingLayout, base: Pointer, ceiling: int, memory: memoryview) -> None:
        """`memory` is the arena's whole mapping, `base` its address. Raises RingError."""
        self._layout = layout
        self._spans: list[weakref.ref[memoryview]] = []
        self._handle: RingHandle = ffi.new("swactor_ring *")
        code = lib.swactor_ring_open(self._handle, base, ceiling, native_layout(layout))
        if code < 0:
            refuse(code, layout, "open")
        self._data = memory[layout.data_offset : layout.data_offset + layout.data_capacity]

    @property
    def layout(self) -> RingLayout:
        return self._layout

    @property
    def commit(self) -> int:
        self._load_cursors()
        return self._handle.commit_now

    @property
    def consume(self) -> int:
        self._load_cursors()
        return self._handle.consume_now

    def _load_cursors(self) -> None:
        code = lib.swactor_ring_cursors(self._handle)
        if code < 0:
            refuse(code, self._layout, "load cursors")

    def readable_span(self) -> memoryview:
        length = _readable(self._handle)
        if length < 0:
            refuse(length, self._layout, "readable_span")
        if not length:
            return _EMPTY
        offset = self._handle.read_offset
        return self._watched(self._data[offset : offset + length])

    def writable_span(self) -> memoryview:
        length = _writable(self._handle)
        if length < 0:
            refuse(length, self._layout, "writable_span")
        if not length:
            return _EMPTY
        offset = self._handle.write_offset
        return self._watched(self._data[offset : offset + length])

    def advance_consume(self, count: int) -> bool:
        hint = _advance_consume(self._handle, count)
        if hint < 0:
            refuse(hint, self._layout, f"advance_consume({count})")
        return hint == 1

    def advance_commit(self, count: int) -> bool:
        hint = _advance_commit(self._handle, count)
        if hint < 0:
            refuse(hint, self._layout, f"advance_commit({count})")
        return hint == 1

    def acknowledge_readable(self) -> None:
        code = lib.swactor_ring_acknowledge_readable(self._handle)
        if code < 0:
            refuse(code, self._layout, "acknowledge_readable")

    def acknowledge_writable(self) -> None:
        code = lib.swactor_ring_acknowledge_writable(self._handle)
        if code < 0:
            refuse(code, self._layout, "acknowledge_writable")

    @property
    def state(self) -> RingState:
        state = lib.swactor_ring_get_state(self._handle)
        if state < 0:
            refuse(state, self._layout, "state")
        return _STATES[state]

    def set_state(self, state: RingState) -> None:
        """FAULTED is final: a later CLOSED changes nothing. OPEN is only ever set by `create_ring`."""
        code = lib.swactor_ring_set_state(self._handle, state)
        if code < 0:
            refuse(code, self._layout, f"set_state({state.name})")

    def close(self) -> None:
        """A span that is exported further (a ctypes or numpy object over it) cannot be revoked; its memory
        stays mapped until that object is gone."""
        lib.swactor_ring_close(self._handle)
        for reference in self._spans:
            span = reference()
            if span is not None:
                release_unless_exported(span)
        self._spans.clear()
        self._data.release()

    def _watched(self, span: memoryview) -> memoryview:
        spans = self._spans
        if len(spans) >= _SPANS_WATCHED:
            spans[:] = [reference for reference in spans if reference() is not None]
        spans.append(weakref.ref(span))
        return span


def release_unless_exported(view: memoryview) -> None:
    """Invalidates a view; one that somebody exports further keeps its memory alive instead."""
    try:
        view.release()
    except BufferError:
        return
