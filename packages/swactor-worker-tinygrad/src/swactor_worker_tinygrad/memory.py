"""What a model's stages take in memory besides what its facts say: copies, scratch, and the worker's process.

Knows what the settings do to weights, and what was measured of the process (docs/performance.md). Must not
know engines or files, and imports no tinygrad: plans are made where nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import add

from swactor_core.memory import F32_BYTES, spare_rows
from swactor_core.specs import align_up
from swactor_core.spi.loader import StageManifest, TensorRef
from swactor_core.spi.provider import WorkerMemory

from swactor_worker_tinygrad.parameters import ModelParameters
from swactor_worker_tinygrad.settings import KernelChoice, WeightsChoice, WorkerSettings, read_settings
from swactor_worker_tinygrad.stage_tensors import StageTensors, check_model
from swactor_worker_tinygrad.tensor_types import GRAPH_TYPES, LANES, NATIVE_TYPES, PACKED_TYPES

# With `weights=auto`: a smaller model starts later by what hundreds of its tokens gain (docs/performance.md).
WORTH_PACKING = 256 << 20
_MIB = 1 << 20
# Interpreter, libraries, and what configuring adds to them: measured, the same for every model and in a first
# start, whose kernels are built and whose graphs are captured in processes of their own.
PROCESS = 46 * _MIB
# tinygrad with its device, which native kernels do without
TINYGRAD = 26 * _MIB
_KEPT_IN_FILE = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def model_memory(
    manifest: StageManifest, max_context: int, *, prefill_chunk: int, settings: Mapping[str, object]
) -> WorkerMemory:
    """See `Provider.memory`. Raises ConfigError for a wrong setting, RoleError for a model or a choice of
    kernels that the worker would refuse."""
    wanted = read_settings(settings)
    parameters, tensors = check_model(manifest, max_context)
    native = (
        wanted.kernels is not KernelChoice.GRAPH and wanted.has_native_kernels
    )  # as the backend decides it

    def copies(refs: Iterable[TensorRef]) -> int:
        unpacked = (ref for ref in refs if ref.ggml_type not in (NATIVE_TYPES if native else GRAPH_TYPES))
        return sum(_elements(ref) * F32_BYTES for ref in unpacked)

    # a graph takes rows of the embedding from the file; native kernels read the table
    table = [tensors.embedding] if native and tensors.embedding is not None else []
    ends = [ref for ref in (tensors.output_norm, tensors.head, tensors.head_bias) if ref is not None]
    rows = min(prefill_chunk, max_context)
    places = max_context + spare_rows(max_context, prefill_chunk)
    scratch = _expert_rows(parameters, rows) + _further_tables(parameters, places)
    if not native:
        scratch += _scores(parameters, tensors, rows, places)
    mapped = WorkerMemory(
        layers=tuple(copies(block.values()) for block in tensors.blocks),
        embedding=copies(table),
        head=copies(ends),
        shared=copies(table) if tensors.head == tensors.embedding else 0,
        scratch=scratch,
        process=_process(wanted, native=native),
        in_file=wanted.device_kind == "CPU",
    )
    if wanted.weights is WeightsChoice.MAPPED or not native or not packed_weights(tensors):
        return mapped
    packed = _packed(mapped, tensors)
    if wanted.weights is WeightsChoice.PACKED:
        return packed
    worth = sum(ref.nbytes for ref in packed_weights(tensors)) >= WORTH_PACKING
    return replace(mapped, in_memory=packed) if worth else mapped


def _packed(memory: WorkerMemory, tensors: StageTensors) -> WorkerMemory:
    """With what packing adds: a matrix takes its place anew and lets its pages of the file go, but its rows
    are filled up to whole lanes."""
    filled = (_filled_up(_packed_of(block)) for block in tensors.blocks)
    return replace(
        memory,
        layers=tuple(map(add, memory.layers, filled)),
        head=memory.head + _filled_up(_packed_head(tensors)),
        in_file=False,
    )


def _process(wanted: WorkerSettings, *, native: bool) -> int:
    """Where the device has a memory of its own, the process lies in another."""
    if wanted.device_kind != "CPU":
        return 0
    return PROCESS + (0 if native else TINYGRAD)


def _elements(ref: TensorRef) -> int:
    elements = 1
    for size in ref.dims:
        elements *= size
    return elements


def packed_weights(tensors: StageTensors) -> list[TensorRef]:
    """The matrices that packing takes out of the file and lays out anew: none of experts, nor of other types,
    and of the embedding only one that is the head."""
    return [ref for block in tensors.blocks for ref in _packed_of(block)] + _packed_head(tensors)


def _packed_head(tensors: StageTensors) -> list[TensorRef]:
    return [] if tensors.head is None or tensors.head.ggml_type not in PACKED_TYPES else [tensors.head]


def _packed_of(block: Mapping[str, TensorRef]) -> list[TensorRef]:
    return [
        ref
        for name, ref in block.items()
        if len(ref.dims) > 1
        and name.removesuffix(".weight") not in _KEPT_IN_FILE
        and ref.ggml_type in PACKED_TYPES
    ]


def _filled_up(packed: Iterable[TensorRef]) -> int:
    return sum(ref.nbytes // ref.dims[1] * (align_up(ref.dims[1], LANES) - ref.dims[1]) for ref in packed)


def _expert_rows(parameters: ModelParameters, rows: int) -> int:
    """Gate and up of all experts that the rows of a chunk use: the model's facts speak of one."""
    return F32_BYTES * rows * parameters.experts_used * (2 * parameters.feed_forward_dim + LANES)


def _further_tables(parameters: ModelParameters, places: int) -> int:
    """Rope tables of layers that turn heads otherwise, and of queries: the model's facts speak of one."""
    ropes = {parameters.rope_of(layer) for layer in parameters.layers}
    tables = len(ropes) * (1 if parameters.temperature is None else 2)
    return F32_BYTES * (tables - 1) * places * parameters.rope.dims


def _scores(parameters: ModelParameters, tensors: StageTensors, rows: int, places: int) -> int:
    """Between the kernels of a graph, scores and shares of a chunk lie in memory; each kind of block has its
    own graph. Native kernels have only those of a few rows."""
    layers = zip(parameters.layers, tensors.blocks, strict=True)
    kinds = {
        (parameters.window_of(layer), *((name, ref.ggml_type, ref.dims) for name, ref in block.items()))
        for layer, block in layers
    }
    return 2 * F32_BYTES * len(kinds) * parameters.heads * rows * places
