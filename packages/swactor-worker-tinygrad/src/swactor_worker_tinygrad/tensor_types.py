"""The ggml types that weights may be stored in, and which of them a stage's tensors have.

Knows numbers, block sizes and who unpacks a type. Must not know tinygrad (tests hold these tables against
it and against the native kernels), files or models; the gguf package knows the sizes too, but imports slowly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from swactor_core.faults import RoleFailure
from swactor_core.spi.loader import TensorRef
from swactor_core.spi.worker import RoleError

F32 = 0
LAYOUT = 2  # ggml's GGML_QNT_VERSION: of the blocks below
# ggml type -> (values in a block, bytes of a block)
BLOCKS = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
}
# types that the gguf package unpacks on the host, once, for kernels that cannot
HOST_TYPES = frozenset({10, 11, 16, 17, 19, 20, 29, 34, 35, 40})
# types that tinygrad unpacks inside the kernel that reads them
GRAPH_TYPES = frozenset(BLOCKS) - HOST_TYPES

# types whose matrices a native kernel reads: all but whole numbers and f64, which no model's matrices are
NATIVE_TYPES = frozenset(BLOCKS) - {24, 25, 26, 27, 28}
#: values of one vector of a native kernel; rows that packing lays side by side
LANES = 16
# those of them that can be laid out anew in memory, for `native/lanes.h`; others are read as stored
PACKED_TYPES = frozenset({2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23})


def check_types(refs: Iterable[TensorRef]) -> None:
    """Raises RoleError naming the first tensor whose type cannot be computed with or whose size is wrong."""
    for ref in refs:
        if ref.ggml_type not in BLOCKS:
            raise RoleError(
                RoleFailure.UNSUPPORTED_TENSOR_TYPE,
                f"tensor {ref.name!r} is stored as {ref.type_name} (type {ref.ggml_type}), "
                "which this worker cannot compute with",
                hint="use a file quantised as Q4_0, Q4_K_M, Q5_K_M, Q6_K, Q8_0 or F16",
            )
        expected = stored_bytes(ref.dims, ref.ggml_type)
        if expected is None or expected != ref.nbytes:
            raise RoleError(
                RoleFailure.CONFIG_INVALID,
                f"tensor {ref.name!r} of dims {list(ref.dims)}, stored as {ref.type_name}, "
                f"cannot have {ref.nbytes} bytes",
            )


def check_layout(version: object, refs: Iterable[TensorRef]) -> None:
    """Raises RoleError for quantised tensors of a file whose `general.quantization_version`, `version`, says
    that their blocks are laid out in another way: they would have the right sizes, and other values."""
    quantised = next((ref for ref in refs if BLOCKS.get(ref.ggml_type, (1, 0))[0] > 1), None)
    if quantised is not None and (isinstance(version, bool) or version != LAYOUT):
        raise RoleError(
            RoleFailure.UNSUPPORTED_TENSOR_TYPE,
            f"metadata key general.quantization_version = {version!r} says that tensor {quantised.name!r}, "
            f"stored as {quantised.type_name}, is not laid out as in version {LAYOUT}, the one known here",
            hint="quantise the model again with current tools",
        )


def stored_bytes(dims: tuple[int, ...], ggml_type: int) -> int | None:
    """Bytes of a tensor as stored; None when its rows are not whole blocks."""
    elements_per_block, block_bytes = BLOCKS[ggml_type]
    if not dims or min(dims) < 1 or dims[0] % elements_per_block:
        return None
    return math.prod(dims) // elements_per_block * block_bytes
