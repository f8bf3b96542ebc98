"""Object and ring specifications (spec sections 17 and 18): what an edge's two ends agree on.

Pure data and its arithmetic. Knows no codec (`wire.py`) and no memory.
"""

from __future__ import annotations

from enum import StrEnum

from swactor_core.ids import RingId
from swactor_core.values import frozen

OBJECT_HEADER_BYTES = 40
RING_HEADER_BYTES = 64
CACHE_LINE = 64
#: rows of a prompt that a stage computes at once, which reads its weights once for them; a run may choose
PREFILL_CHUNK = 64


class ObjectKind(StrEnum):
    TOKENS = "Tokens"
    ACTIVATION = "Activation"
    LOGITS = "Logits"


class DTypeFamily(StrEnum):
    FLOAT = "Float"
    BFLOAT = "BFloat"
    UNSIGNED = "Unsigned"


class ShapeRule(StrEnum):
    """Rows of a fixed width: an object of `rows` rows has `rows * row_bytes` bytes."""

    ROWS = "Rows"


class LayoutRule(StrEnum):
    CONTIGUOUS_LITTLE_ENDIAN = "ContiguousLittleEndian"


class SequencePolicy(StrEnum):
    """Sequences on an edge start at 0 and grow by one (spec section 39)."""

    STRICTLY_INCREASING_FROM_ZERO = "StrictlyIncreasingFromZero"


@frozen
class ObjectSpec:
    """The validation contract of an edge's objects. `row_width` is the elements of one row (1 for tokens)."""

    kind: ObjectKind
    max_extent: int
    dtype_family: DTypeFamily
    dtype_width_bytes: int
    row_width: int
    shape: ShapeRule = ShapeRule.ROWS
    layout: LayoutRule = LayoutRule.CONTIGUOUS_LITTLE_ENDIAN
    alignment: int = 4
    sequence_policy: SequencePolicy = SequencePolicy.STRICTLY_INCREASING_FROM_ZERO

    @property
    def row_bytes(self) -> int:
        return self.row_width * self.dtype_width_bytes


class RingDirection(StrEnum):
    INGRESS = "Ingress"
    EGRESS = "Egress"


class HostPinning(StrEnum):
    PAGEABLE = "Pageable"
    PINNED_REQUIRED = "PinnedRequired"


class WakeCoalescing(StrEnum):
    PENDING_BIT = "PendingBit"
    READY_SET = "ReadySet"


@frozen
class RingSpec:
    """The requested operating shape of a ring. `data_capacity` and `alignment` in bytes."""

    data_capacity: int
    direction: RingDirection
    alignment: int = CACHE_LINE
    host_pinning: HostPinning = HostPinning.PAGEABLE
    wake_coalescing: WakeCoalescing = WakeCoalescing.PENDING_BIT


@frozen
class RingLayout:
    """Where a leased ring lies, as arena-relative byte offsets; never a pointer (spec section 18)."""

    ring_id: RingId
    arena_offset: int
    total_len: int
    header_offset: int
    data_offset: int
    data_capacity: int
    alignment: int


def align_up(value: int, alignment: int) -> int:
    """The least multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def activation_max_extent(max_seq_len: int, hidden_dim: int, dtype_width_bytes: int) -> int:
    """Bytes of the largest activation object (spec section 17)."""
    return max_seq_len * hidden_dim * dtype_width_bytes
