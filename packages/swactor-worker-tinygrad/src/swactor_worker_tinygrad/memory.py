"""What a stage takes in memory besides what its model says: second copies, and the worker's process itself.

Knows what the settings do to weights, and what was measured of the process (docs/performance.md). Must not
know engines or files, and imports no tinygrad: plans are made where nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swactor_core.specs import align_up
from swactor_core.spi.loader import StageManifest, TensorRef
from swactor_core.spi.provider import WorkerMemory

from swactor_worker_tinygrad.environment import WorkerSettings, read_settings
from swactor_worker_tinygrad.parameters import ModelParameters
from swactor_worker_tinygrad.stage_tensors import StageTensors, check_model
from swactor_worker_tinygrad.tensor_types import GRAPH_TYPES, NATIVE_TYPES, PACKED_TYPES

F32_BYTES = 4
LANES = 16  # rows that are packed side by side
_MIB = 1 << 20
# Interpreter, libraries and opened device; what configuring adds to them; what capturing graphs adds, which a
# later start of the same graphs does not. Measured, and the same for every model.
PROCESS = 66 * _MIB
CONFIGURED = 5 * _MIB
CAPTURED = 27 * _MIB
_KEPT_IN_FILE = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def stage_memory(
    manifest: StageManifest, max_context: int, *, prefill_chunk: int, settings: Mapping[str, object]
) -> WorkerMemory:
    """See `Provider.memory`. Raises ConfigError for a wrong setting, RoleError for a model or a choice of
    kernels that the worker would refuse."""
    wanted = read_settings(settings)
    parameters, tensors = check_model(manifest, max_context)
    native = _native(wanted, manifest, tensors)
    copies = sum(_unpacked(ref, native=native) for ref in tensors.all())
    if native and wanted.weights != "mapped":
        copies += _packed(tensors)
    rows = min(prefill_chunk, max_context)
    process = PROCESS + CONFIGURED + (0 if native else CAPTURED)
    return WorkerMemory(copies + _expert_rows(parameters, rows), process)


def _native(wanted: WorkerSettings, manifest: StageManifest, tensors: StageTensors) -> bool:
    """As the backend decides it, but for the compiler, which another machine may lack."""
    if wanted.kernels == "graph" or wanted.device_kind != "CPU":
        return False
    kinds = {ref.ggml_type for ref in tensors.all() if len(ref.dims) > 1} | set(manifest.matrix_types)
    return wanted.kernels == "native" or not any(
        kind not in NATIVE_TYPES and kind in GRAPH_TYPES for kind in kinds
    )


def _unpacked(ref: TensorRef, *, native: bool) -> int:
    """The f32 copy of a tensor whose type kernels do not read; the file's own pages count as weights."""
    if ref.ggml_type in (NATIVE_TYPES if native else GRAPH_TYPES):
        return 0
    elements = 1
    for size in ref.dims:
        elements *= size
    return elements * F32_BYTES


def _packed(tensors: StageTensors) -> int:
    """What packing adds: rows filled up to whole lanes, and the embedding where the head is the same table,
    which stays mapped for looking rows up."""
    matrices = [
        ref
        for block in tensors.blocks
        for name, ref in block.items()
        if len(ref.dims) > 1 and name.removesuffix(".weight") not in _KEPT_IN_FILE
    ]
    added = _filled_up(matrices)
    if tensors.head is not None:
        added += _filled_up([tensors.head])
        if tensors.head == tensors.embedding and tensors.head.ggml_type in PACKED_TYPES:
            added += tensors.head.nbytes
    return added


def _filled_up(refs: Iterable[TensorRef]) -> int:
    packed = [ref for ref in refs if ref.ggml_type in PACKED_TYPES]
    return sum(ref.nbytes // ref.dims[1] * (align_up(ref.dims[1], LANES) - ref.dims[1]) for ref in packed)


def _expert_rows(parameters: ModelParameters, rows: int) -> int:
    """Gate and up of all experts that the rows of a chunk use: the model's facts speak of one."""
    return F32_BYTES * rows * parameters.experts_used * (2 * parameters.feed_forward_dim + LANES)
