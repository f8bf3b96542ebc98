"""A stage's blocks as lists of hand-written CPU kernels: the same numbers as `graph_engine`, much faster.

Knows the llama block and its KV cache in terms of `native/*.c`. Must not know rings, objects or sampling. A
step is one call into machine code, which runs the whole stage and reads weights where the file map has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from swactor_core.specs import CACHE_LINE, align_up

from swactor_worker_tinygrad import internals
from swactor_worker_tinygrad.native import (
    LANE_TYPES,
    LANES,
    TYPES,
    KernelList,
    Kernels,
    Team,
    float_bits,
    matmul_words,
    shares_words,
)
from swactor_worker_tinygrad.parameters import ModelParameters
from swactor_worker_tinygrad.rope import Tables
from swactor_worker_tinygrad.weights import BLOCKS, F32, HOST_TYPES, Ends, Weight, unpack_on_host

BlockWeights = dict[str, Weight]
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
Entry = list[int]


def can_compute(ggml_types: set[int], graph_types: frozenset[int]) -> bool:
    """Whether matrices of these types are best computed here: each has a kernel, or must be unpacked anyway
    because the graph cannot read it either."""
    return all(kind in TYPES or (kind in HOST_TYPES and kind not in graph_types) for kind in ggml_types)


def implements(parameters: ModelParameters) -> bool:
    """Whether this engine computes every part of the model."""
    return parameters.family.architecture == "llama"


def _packed_bytes(weight: Weight) -> int:
    """Bytes of a packed matrix: as stored, the rows filled up to a multiple of sixteen."""
    return len(weight.stored) // weight.shape[0] * align_up(weight.shape[0], LANES)


class NativeEngine:
    """Blocks, KV cache and head of one stage on the CPU device; see `graph_engine.GraphEngine`.

    Blocks work in place: output rows take the place of input rows. Shapes of the working memory, for T rows:
    h (T, hidden), q (T, heads * key_dim), k (T, kv_heads * key_dim), v (T, kv_heads * value_dim), attended
    (T, heads * value_dim), gate and up (T, feed_forward).
    """

    #: multiplications below which a part costs more to hand over than it saves (about 2 microseconds)
    products_per_part = 1 << 15

    def __init__(
        self,
        parameters: ModelParameters,
        *,
        device: str,
        context: int,
        chunk: int,
        threads: int,
        packing: bool,
        blocks: list[BlockWeights],
        ends: Ends | None,
        embedding: Weight | None,
        rope: Sequence[Tables],
    ) -> None:
        """Allocates cache and working memory. Raises MemoryError.

        `context` is the cache's rows. With `packing`, quantised matrices are laid out anew in memory
        (`native/pack.c`); otherwise they are read from the file map.
        """
        self.packing = packing
        self.parameters, self.threads = parameters, threads
        self._context = align_up(context, LANES)
        self._device = device
        self._blocks, self._ends, self._embedding = blocks, ends, embedding
        self._buffers: list[internals.Buffer] = []
        self._kept: list[NDArray[np.float32]] = []
        self._kernels = Kernels()
        self._team: Team | None = None
        self._packed: dict[str, int] = {}
        self._packed_room: NDArray[np.uint8] | None = None
        p = parameters
        self._tables = [[self._constant(table) for table in tables] for tables in rope]
        self._caches = [
            (
                self._room(self._context * p.kv_heads * p.key_dim),
                self._room(self._context * p.kv_heads * p.value_dim),
            )
            for _ in blocks
        ]
        self._chunk = chunk
        self._rows = self._buffer(chunk * p.hidden_dim)
        self._h = self._room(chunk * p.hidden_dim)
        self._q = self._room(chunk * p.query_width)
        self._k = self._room(chunk * p.key_width)
        self._v = self._room(chunk * p.value_width)
        self._attended = self._room(chunk * p.attended_width)
        self._gate = self._room(chunk * p.feed_forward_dim)
        self._up = self._room(chunk * p.feed_forward_dim)
        widest = max(p.hidden_dim, p.feed_forward_dim, p.attended_width)
        self._scratch = self._room(matmul_words(widest, chunk, threads))
        self._shares = self._room(shares_words(self._context, threads))
        self._position = np.zeros(1, np.uint64)
        self._lists: dict[int, KernelList] = {}
        self._heads: dict[int, KernelList] = {}
        if ends is not None:
            self.logits = self._buffer(p.vocab_size)

    # Memory.

    def _buffer(self, words: int) -> internals.Buffer:
        buffer = internals.new_buffer(self._device, words * 4)
        self._buffers.append(buffer)
        return buffer

    def _room(self, words: int) -> int:
        """The address of `words` f32 words that live as long as the engine."""
        return internals.address_of(self._buffer(words))

    def _constant(self, data: NDArray[np.float32]) -> int:
        data = np.ascontiguousarray(data, np.float32)
        self._kept.append(data)
        return data.ctypes.data

    def _vector(self, weight: Weight) -> int:
        """The address of a small vector's values as f32."""
        if weight.ggml_type == F32:
            return internals.address_of(internals.buffer_of(weight.blob))
        return self._constant(unpack_on_host(weight.stored[None, :], weight.ggml_type, weight.elements))

    # Lists.

    def compile_steps(self) -> list[Callable[[], None]]:
        """Building of each kernel, then of the lists: parts that may be reported and interrupted between."""
        matrices = self._matrices()
        kinds = sorted({weight.ggml_type for weight in matrices})
        wanted: list[tuple[str, int | None]] = [("run", None)]
        wanted += [(self._product_of(kind), kind) for kind in kinds]
        wanted += [(name, None) for name in ("norm", "rope", "attention", "gate")]
        if self._embedding is not None:
            wanted.append(("rows", self._embedding.ggml_type))
        packed = [weight for weight in matrices if self._product_of(weight.ggml_type) == "matmul_lanes"]
        if packed:
            wanted.append(("pack", None))
        steps: list[Callable[[], None]] = [partial(self._build, *each) for each in wanted]
        steps.append(partial(self._start, packed))
        steps += [partial(self._pack, weight) for weight in packed]
        steps += [partial(self._prepare, count) for count in (1, self._chunk)]
        return steps

    def _matrices(self) -> list[Weight]:
        found = [block[name + ".weight"] for block in self._blocks for name in _MATRICES]
        return found if self._ends is None else [*found, self._ends.head]

    def _product_of(self, ggml_type: int) -> str:
        """The kernel that multiplies with matrices of this type."""
        return "matmul_lanes" if self.packing and ggml_type in LANE_TYPES else "matmul"

    def _build(self, name: str, kind: int | None) -> None:
        self._kernels.address(name, kind)

    def _start(self, packed: list[Weight]) -> None:
        """Starts the threads and takes the memory that packed matrices will lie in."""
        self._team = Team(self._kernels, self.threads)
        places, total = {}, 0
        for weight in packed:
            places[weight.name] = total
            total += align_up(_packed_bytes(weight), CACHE_LINE)
        if total:
            self._packed_room = internals.large_memory(total + CACHE_LINE)
            start = self._packed_room.ctypes.data
            start += -start % CACHE_LINE
            self._packed = {name: start + place for name, place in places.items()}

    def _pack(self, weight: Weight) -> None:
        assert self._team is not None
        rows, columns = weight.shape
        values, block_bytes = BLOCKS[weight.ggml_type]
        row_bytes = columns // values * block_bytes
        source = internals.address_of(internals.buffer_of(weight.blob))
        parts = self._parts(rows // LANES, rows * row_bytes)
        words = [self._packed[weight.name], source, rows, row_bytes, block_bytes]
        self._team.run(self._team.prepare([[self._kernels.address("pack"), parts, *words]]))

    def _prepare(self, count: int) -> None:
        self._list(count)

    def _list(self, count: int) -> KernelList:
        """The stage's kernels for `count` rows, put together when first needed."""
        assert self._team is not None
        if count not in self._lists:
            entries: list[Entry] = []
            for index in range(len(self._blocks)):
                entries += self._block(count, index)
            self._lists[count] = self._team.prepare(entries)
        return self._lists[count]

    def _parts(self, units: int, products: int) -> int:
        """How many parts a kernel of `units` rows or heads is worth cutting into."""
        if self.threads == 1:
            return 1
        return max(1, min(units, 4 * self.threads, products // self.products_per_part))

    def _norm(self, x: int, weight: Weight, rows: int) -> Entry:
        p = self.parameters
        kernel, parts = self._kernels.address("norm"), self._parts(rows, rows * p.hidden_dim)
        return [
            kernel,
            parts,
            self._h,
            x,
            self._vector(weight),
            p.hidden_dim,
            rows,
            float_bits(p.rms_epsilon),
        ]

    def _matmul(
        self, out: int, x: int, weight: Weight, rows: int, *, bias: Weight | None = None, residual: int = 0
    ) -> Entry:
        height, columns = weight.shape
        kernel = self._kernels.address(self._product_of(weight.ggml_type), weight.ggml_type)
        blob = self._packed.get(weight.name) or internals.address_of(internals.buffer_of(weight.blob))
        added = 0 if bias is None else self._vector(bias)
        parts = self._parts(height // LANES, height * columns * rows)
        return [kernel, parts, out, x, blob, height, columns, rows, height, added, residual, self._scratch]

    def _block(self, rows: int, index: int) -> list[Entry]:
        weights, cache, tables = self._blocks[index], self._caches[index], self._tables[index]
        p, kernels = self.parameters, self._kernels
        x, place = internals.address_of(self._rows), self._position.ctypes.data
        shape = [place, rows, p.heads, p.kv_heads, p.key_dim, p.value_dim, self._context]
        # the work of attention grows with the context; half of it is taken for the usual
        seen = self._context // 2 * rows * p.heads * (p.key_dim + p.value_dim)
        turned, attended = self._parts(rows, rows * p.query_width), self._parts(rows * p.heads, seen)
        gated = rows * p.feed_forward_dim
        softmax = [float_bits(p.attention_scale), self._shares]

        def linear(out: int, given: int, name: str, residual: int = 0) -> Entry:
            bias = weights.get(name + ".bias")
            return self._matmul(out, given, weights[name + ".weight"], rows, bias=bias, residual=residual)

        return [
            self._norm(x, weights["attn_norm.weight"], rows),
            linear(self._q, self._h, "attn_q"),
            linear(self._k, self._h, "attn_k"),
            linear(self._v, self._h, "attn_v"),
            [
                kernels.address("rope"),
                turned,
                self._q,
                self._k,
                self._v,
                *tables,
                *cache,
                *shape,
                p.rope.dims,
            ],
            [kernels.address("attention"), attended, self._attended, self._q, *cache, *shape, *softmax],
            linear(x, self._attended, "attn_output", residual=x),
            self._norm(x, weights["ffn_norm.weight"], rows),
            linear(self._gate, self._h, "ffn_gate"),
            linear(self._up, self._h, "ffn_up"),
            [kernels.address("gate"), self._parts(gated, gated), self._gate, self._up, gated],
            linear(x, self._gate, "ffn_down", residual=x),
        ]

    @property
    def packed_names(self) -> frozenset[str]:
        """Matrices whose stored bytes are no longer read."""
        return frozenset(self._packed)

    # Steps.

    def count(self, remaining: int) -> int:
        """How many of `remaining` rows the next step takes: no count costs a new kernel."""
        return min(self._chunk, remaining)

    @property
    def warm_counts(self) -> tuple[int, ...]:
        """Row counts to run once before the first real step: one row touches all that a step needs."""
        return (1,)

    def input(self, count: int) -> internals.Buffer:
        """The (count, hidden) f32 rows that `step` reads."""
        return self._rows

    def output(self, count: int) -> internals.Buffer:
        """The (count, hidden) f32 rows that `step` has written."""
        return self._rows

    def embed(self, ids: NDArray[np.uint32]) -> None:
        """Rows of the embedding for `ids` into `input(len(ids))`."""
        assert self._embedding is not None
        assert self._team is not None
        ids = np.ascontiguousarray(ids, np.uint32)
        table = internals.address_of(internals.buffer_of(self._embedding.blob))
        kernel = self._kernels.address("rows", self._embedding.ggml_type)
        out, columns = internals.address_of(self._rows), self.parameters.hidden_dim
        self._team.run(self._team.prepare([[kernel, 1, out, table, ids.ctypes.data, len(ids), columns]]))

    def step(self, count: int, position: int) -> None:
        """Runs all blocks over `count` rows in place, at rows [position, position + count) of the cache."""
        assert self._team is not None
        self._position[0] = position
        self._team.run(self._list(count))

    def project(self, count: int) -> None:
        """Logits of the last of `output`'s `count` rows."""
        assert self._team is not None
        assert self._ends is not None
        if count not in self._heads:
            norm, head = self._ends.norm, self._ends.head
            x = internals.address_of(self._rows) + (count - 1) * self.parameters.hidden_dim * 4
            logits = internals.address_of(self.logits)
            entries = [self._norm(x, norm, 1), self._matmul(logits, self._h, head, 1)]
            self._heads[count] = self._team.prepare(entries)
        self._team.run(self._heads[count])

    def close(self) -> None:
        """Ends the threads and frees cache and working memory. Idempotent."""
        if self._team is not None:
            self._team.close()
            self._team = None
        self._lists.clear()
        self._heads.clear()
        self._blocks, self._ends, self._embedding = [], None, None
        self._buffers.clear()
        self._kept.clear()
        self._packed.clear()
        self._packed_room = None
