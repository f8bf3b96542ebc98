"""A stage's blocks as lists of hand-written CPU kernels: the same numbers as `graph_engine`, much faster.

Knows the blocks of every family and their KV cache in terms of `native/*.c`. Must not know rings, objects
or sampling. A step is one call into machine code, which runs the whole stage and reads weights where the file
map has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from swactor_core.specs import CACHE_LINE, align_up

from swactor_worker_tinygrad.device_memory import Allocation, HostMemory, large_memory
from swactor_worker_tinygrad.families import Activation, Pairs
from swactor_worker_tinygrad.native import (
    MOST_PARTS,
    QUADS,
    QUERIES,
    Group,
    KernelList,
    Kernels,
    Team,
    expert_words,
    float_bits,
    matmul_words,
    rounded_words,
    shares_words,
)
from swactor_worker_tinygrad.parameters import ModelParameters
from swactor_worker_tinygrad.rope_tables import Tables
from swactor_worker_tinygrad.settings import KernelChoice, Numerics
from swactor_worker_tinygrad.tensor_types import BLOCKS, F32, LANES, PACKED_TYPES
from swactor_worker_tinygrad.weights import Ends, Weight, unpack_on_host

BlockWeights = dict[str, Weight]
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp")
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
Entry = list[int]
Work = Entry | Group


def _packed_bytes(weight: Weight) -> int:
    """Bytes of a packed matrix: as stored, the rows filled up to a multiple of sixteen."""
    return len(weight.stored) // weight.shape[0] * align_up(weight.shape[0], LANES)


class NativeEngine:
    """Blocks, KV cache and head of one stage on the CPU device; see `graph_engine.GraphEngine`.

    Blocks work in place: output rows take the place of input rows. Shapes of the working memory, for T rows:
    h (T, hidden), q (T, heads * key_dim), k (T, kv_heads * key_dim), v (T, kv_heads * value_dim), attended
    (T, heads * value_dim), gate and up (T, feed_forward); with experts, gate and up (T, experts used,
    feed_forward), scores (T, experts), chosen, shares and order (T, experts used).
    """

    #: multiplications below which a kernel costs more to share than that saves (about 2 microseconds)
    least_shared = 1 << 15
    #: multiplications of the least part (about a quarter of a microsecond)
    products_per_part = 1 << 12
    kernels = KernelChoice.NATIVE

    def __init__(
        self,
        parameters: ModelParameters,
        *,
        context: int,
        chunk: int,
        threads: int,
        packing: bool,
        fast: bool,
        blocks: list[BlockWeights],
        ends: Ends | None,
        embedding: Weight | None,
        stored_rows: Callable[[NDArray[np.uint32]], NDArray[np.uint8]],
        rope: Sequence[Tables],
    ) -> None:
        """Allocates cache and working memory. Raises MemoryError, ValueError for `fast` without `packing`.

        `context` is the cache's rows. With `packing`, quantised matrices are laid out anew in memory
        (`native/pack.c`); otherwise they are read from the file map. With `fast`, which needs `packing`,
        activations are rounded to bytes (`native/round.c`) for the types that have such a product.
        `stored_rows` reads rows of the embedding from the file, for a table that is packed because it is the
        head too: looking them up in the map would hold much of it a second time.
        """
        if fast and not packing:
            raise ValueError("fast numerics read weights that are laid out for them")
        self.packing, self.fast = packing, fast
        self.parameters, self.threads = parameters, threads
        self._context = align_up(context, LANES)
        self._blocks, self._ends, self._embedding = blocks, ends, embedding
        self._stored_rows = stored_rows
        self._memory: list[HostMemory] = []
        self._kept: list[NDArray[np.float32]] = []
        self._kernels = Kernels()
        self._team: Team | None = None
        self._packed: dict[str, int] = {}
        self._laid_out: set[str] = set()
        self._packed_room: NDArray[np.uint8] | None = None
        self._tables = [[self._constant(table) for table in tables] for tables in rope]
        self._chunk = chunk
        self._take_cache()
        self._take_rows(chunk)
        self._take_scratch(chunk)
        self._position = np.zeros(1, np.uint64)
        self._lists: dict[int, KernelList] = {}
        self._heads: dict[int, KernelList] = {}
        if ends is not None:
            logits = self._allocation(parameters.vocab_size)
            self.logits = Allocation(logits, len(logits.view), logits.view)

    # Memory.

    def _take_cache(self) -> None:
        """Each block's keys (kv_heads, context / 16, key_dim, 16) and values (kv_heads, context, value_dim),
        as `native/attention.c` reads them."""
        p = self.parameters
        self._caches = [
            (
                self._room(self._context * p.kv_heads * p.key_dim),
                self._room(self._context * p.kv_heads * p.value_dim),
            )
            for _ in self._blocks
        ]

    def _take_rows(self, chunk: int) -> None:
        """What `chunk` rows are on their way through a block; shapes as the class has them."""
        p = self.parameters
        rows = self._allocation(chunk * p.hidden_dim)
        self._x = rows.address
        self._rows = Allocation(rows, len(rows.view), rows.view)
        self._h = self._room(chunk * p.hidden_dim)
        self._q = self._room(chunk * p.query_width)
        self._k = self._room(chunk * p.key_width)
        self._v = self._room(chunk * p.value_width)
        self._attended = self._room(chunk * p.attended_width)
        slots = chunk * max(1, p.experts_used)
        self._gate = self._room(slots * p.feed_forward_dim)
        self._up = self._room(slots * p.feed_forward_dim)
        if p.experts:
            self._scores = self._room(chunk * p.experts)
            self._chosen = self._room(slots * 2)  # u64, as are order and starts behind it
            self._expert_shares = self._room(slots)
            self._order = self._room((slots + p.experts + 1) * 2)

    def _take_scratch(self, chunk: int) -> None:
        """What kernels need beside what they read and write, for each thread."""
        p, threads = self.parameters, self.threads
        widest = max(p.hidden_dim, p.feed_forward_dim, p.attended_width)
        self._scratch = self._room(matmul_words(widest, chunk, threads=threads))
        self._rounded = self._room(rounded_words(widest, chunk)) if self.fast else 0
        self._shares = self._room(shares_words(self._context, threads))
        if p.experts:
            longest, slots = max(p.hidden_dim, p.feed_forward_dim), chunk * p.experts_used
            self._expert_scratch = self._room(expert_words(longest, slots, threads=threads))

    def _room(self, words: int) -> int:
        """The address of `words` f32 words that live as long as the engine."""
        return self._allocation(words).address

    def _allocation(self, words: int) -> HostMemory:
        self._memory.append(HostMemory(words * 4))
        return self._memory[-1]

    def _constant(self, data: NDArray[np.float32]) -> int:
        data = np.ascontiguousarray(data, np.float32)
        self._kept.append(data)
        return data.ctypes.data

    def _vector(self, weight: Weight) -> int:
        """The address of a small vector's values as f32."""
        if weight.ggml_type == F32:
            return weight.address
        return self._constant(unpack_on_host(weight.stored[None, :], weight.ggml_type, weight.elements))

    # Lists.

    def compile_steps(self) -> list[Callable[[], None]]:
        """Building of each kernel, then of the lists: parts that may be reported and interrupted between."""
        matrices = self._matrices()
        kinds = sorted({weight.ggml_type for weight in matrices})
        wanted: list[tuple[str, int | None]] = [("run", None)]
        wanted += [(self._product_of(kind), kind) for kind in kinds]
        wanted += [(name, None) for name in ("norm", "rope", "attention", "gate")]
        wanted += [("experts", kind) for kind in sorted({weight.ggml_type for weight in self._experts()})]
        wanted += [("route", None), ("group", None)] if self.parameters.experts else []
        wanted += [("cap", None)] if self._ends is not None and self.parameters.logit_cap else []
        if self._embedding is not None:
            wanted.append(("rows", self._embedding.ggml_type))
        packed = [weight for weight in matrices if self._product_of(weight.ggml_type) != "matmul"]
        if packed:
            wanted.append(("pack", None))
        if any(self._is_fast(weight) for weight in matrices):
            wanted.append(("round", None))
        steps: list[Callable[[], None]] = [partial(self._build, *each) for each in wanted]
        steps.append(partial(self._start, packed))
        steps += [partial(self._pack, weight) for weight in packed]
        steps += [partial(self._prepare, count) for count in (1, self._chunk)]
        return steps

    def _matrices(self) -> list[Weight]:
        found = self._weights(_MATRICES)
        return found if self._ends is None else [*found, self._ends.head]

    def _experts(self) -> list[Weight]:
        return self._weights(_EXPERTS)

    def _weights(self, names: tuple[str, ...]) -> list[Weight]:
        named = [f"{name}.weight" for name in names]
        return [block[name] for block in self._blocks for name in named if name in block]

    def _product_of(self, ggml_type: int) -> str:
        """The kernel that multiplies with matrices of this type."""
        if self.fast and ggml_type in QUADS:
            return "matmul_fast"
        return "matmul_lanes" if self.packing and ggml_type in PACKED_TYPES else "matmul"

    def _is_fast(self, weight: Weight) -> bool:
        return self._product_of(weight.ggml_type) == "matmul_fast"

    @property
    def numerics(self) -> dict[str, str]:
        """By which numerics the stage computes, for its facts: `fast` where any matrix is computed so, with
        how many of the stage's matrices are; experts and types without such a product stay exact."""
        if not self.fast:
            return {"numerics": Numerics.EXACT}
        matrices = [*self._matrices(), *self._experts()]
        fast = sum(map(self._is_fast, self._matrices()))
        return {
            "numerics": Numerics.FAST if fast else Numerics.EXACT,
            "fast_matrices": f"{fast} of {len(matrices)}",
        }

    def _build(self, name: str, kind: int | None) -> None:
        self._kernels.address(name, kind)

    def _start(self, packed: list[Weight]) -> None:
        """Starts the threads and takes the memory that packed matrices will lie in."""
        self._kernels.close()
        self._team = Team(self._kernels, self.threads)
        places, total = {}, 0
        for weight in packed:
            places[weight.name] = total
            total += align_up(_packed_bytes(weight), CACHE_LINE)
        if total:
            self._packed_room = large_memory(total + CACHE_LINE)
            start = self._packed_room.ctypes.data
            start += -start % CACHE_LINE
            self._packed = {name: start + place for name, place in places.items()}

    def _pack(self, weight: Weight) -> None:
        assert self._team is not None
        rows, columns = weight.shape
        values, block_bytes = BLOCKS[weight.ggml_type]
        row_bytes = columns // values * block_bytes
        source = weight.address
        parts = self._parts(rows // LANES, rows * row_bytes)
        words = [self._packed[weight.name], source, rows, row_bytes, block_bytes]
        words += QUADS[weight.ggml_type] if self._is_fast(weight) else (0, 0)
        self._team.run(self._team.prepare([[self._kernels.address("pack"), parts, *words]]))
        self._laid_out.add(weight.name)

    def _prepare(self, count: int) -> None:
        self._list(count)

    def _list(self, count: int) -> KernelList:
        """The stage's kernels for `count` rows, put together when first needed."""
        assert self._team is not None
        if count not in self._lists:
            entries: list[Work] = []
            for index in range(len(self._blocks)):
                entries += self._block(count, index)
            self._lists[count] = self._team.prepare(entries)
        return self._lists[count]

    def _parts(self, units: int, products: int) -> int:
        """How many parts a kernel of `units` rows or heads is worth cutting into."""
        if self.threads == 1 or products < self.least_shared:
            return 1
        return max(1, min(units, products // self.products_per_part, MOST_PARTS))

    def _group(self, *entries: Entry) -> Group:
        """Entries none of which reads what another writes, as one."""
        parts = max(entry[1] for entry in entries)
        return Group([kernel, parts, *words] for kernel, _, *words in entries)

    def _norm(
        self, out: int, x: int, weight: Weight, rows: int, *, width: int = 0, residual: int = 0
    ) -> Entry:
        """`rows` rows of `width`, which is the hidden width unless it is said."""
        width = width or self.parameters.hidden_dim
        kernel, parts = self._kernels.address("norm"), self._parts(rows, rows * width)
        epsilon = float_bits(self.parameters.rms_epsilon)
        return [kernel, parts, out, x, self._vector(weight), width, rows, epsilon, residual]

    def _matmul(
        self, out: int, x: int, weight: Weight, rows: int, *, bias: Weight | None = None, residual: int = 0
    ) -> Entry:
        height, columns = weight.shape
        kernel = self._kernels.address(self._product_of(weight.ggml_type), weight.ggml_type)
        blob = self._packed.get(weight.name) or weight.address
        added = 0 if bias is None else self._vector(bias)
        parts = self._parts(height // LANES, height * columns * rows)
        x = self._rounded if self._is_fast(weight) else x
        return [kernel, parts, out, x, blob, height, columns, rows, height, added, residual, self._scratch]

    def _round(self, x: int, rows: int, *matrices: Weight) -> list[Entry]:
        """Rounds `rows` rows to bytes if any of these matrices, which all take them, is multiplied so."""
        if not any(map(self._is_fast, matrices)):
            return []
        columns = matrices[0].shape[1]
        parts = self._parts(rows, rows * columns)
        return [[self._kernels.address("round"), parts, self._rounded, x, columns, rows]]

    def _linear(
        self, out: int, x: int, weights: BlockWeights, name: str, rows: int, *, residual: int = 0
    ) -> Entry:
        bias = weights.get(name + ".bias")
        return self._matmul(out, x, weights[name + ".weight"], rows, bias=bias, residual=residual)

    def _added(self, x: int, weights: BlockWeights, name: str, rows: int, norm: str) -> list[Entry]:
        """The residual rows plus a product, which is normalised first where the family does that."""
        rest = self._x
        rounded = self._round(x, rows, weights[name + ".weight"])
        if not self.parameters.family.post_norms:
            return [*rounded, self._linear(rest, x, weights, name, rows, residual=rest)]
        made = self._linear(self._h, x, weights, name, rows)
        return [*rounded, made, self._norm(rest, self._h, weights[norm + ".weight"], rows, residual=rest)]

    def _block(self, rows: int, index: int) -> list[Work]:
        weights = self._blocks[index]
        x = self._x
        return [
            self._norm(self._h, x, weights["attn_norm.weight"], rows),
            *self._attention(rows, index),
            *self._added(self._attended, weights, "attn_output", rows, "post_attention_norm"),
            self._norm(self._h, x, weights["ffn_norm.weight"], rows),
            *(self._mixture if self.parameters.experts else self._feed_forward)(rows, weights),
        ]

    def _attention(self, rows: int, index: int) -> list[Work]:
        """From h to attended."""
        p, kernels, weights = self.parameters, self._kernels, self._blocks[index]
        cache, tables = self._caches[index], self._tables[index]
        shape = [self._position.ctypes.data, rows, p.heads, p.kv_heads, p.key_dim, p.value_dim, self._context]
        window = p.window_of(p.layer_start + index)
        # the work of attention grows with the context; half of it is taken for the usual
        usual = min(self._context // 2, window or self._context)
        seen = usual * rows * p.heads * (p.key_dim + p.value_dim)
        turned = self._parts(rows, rows * p.query_width)
        attended = self._parts(rows * p.heads // (1 if rows == 1 else QUERIES), seen)
        halves = int(p.family.pairs is Pairs.HALVES)
        softmax = [float_bits(p.attention_scale), self._shares, window, float_bits(p.score_cap)]
        entries: list[Work] = [
            *self._round(self._h, rows, *(weights[f"attn_{name}.weight"] for name in "qkv")),
            self._group(
                self._linear(self._q, self._h, weights, "attn_q", rows),
                self._linear(self._k, self._h, weights, "attn_k", rows),
                self._linear(self._v, self._h, weights, "attn_v", rows),
            ),
        ]
        if p.family.head_norms:
            for place, name, heads in ((self._q, "q", p.heads), (self._k, "k", p.kv_heads)):
                weight = weights[f"attn_{name}_norm.weight"]
                entries.append(self._norm(place, place, weight, rows * heads, width=p.key_dim))
        made = [self._q, self._k, self._v]
        turn = [*made, *tables[:2], *cache, *shape, p.rope.dims, halves, *tables[-2:]]
        entries.append([kernels.address("rope"), turned, *turn])
        entries.append(
            [kernels.address("attention"), attended, self._attended, self._q, *cache, *shape, *softmax]
        )
        return entries

    def _feed_forward(self, rows: int, weights: BlockWeights) -> list[Work]:
        """From h into the residual rows."""
        return [
            *self._round(self._h, rows, weights["ffn_gate.weight"], weights["ffn_up.weight"]),
            *self._gated(
                rows,
                self._linear(self._gate, self._h, weights, "ffn_gate", rows),
                self._linear(self._up, self._h, weights, "ffn_up", rows),
            ),
            *self._added(self._gate, weights, "ffn_down", rows, "post_ffw_norm"),
        ]

    def _mixture(self, rows: int, weights: BlockWeights) -> list[Work]:
        """As `_feed_forward`, with the experts that each row chooses."""
        p, x = self.parameters, self._x
        slots = rows * p.experts_used

        def experts(out: int, given: int, name: str, *last: int) -> Entry:
            weight = weights[f"ffn_{name}_exps.weight"]
            kernel = self._kernels.address("experts", weight.ggml_type)
            _, height, columns = weight.shape
            blob = weight.address
            units = height if rows > 1 else slots * height
            parts = self._parts(units // LANES, slots * height * columns)
            shape = [height, columns, rows, p.experts_used, self._chosen]
            return [kernel, parts, out, given, blob, *shape, *(last or (0, 0)), *by_expert]

        starts = self._order + slots * 8
        by_expert = [self._order, starts, p.experts, self._expert_scratch] if rows > 1 else []
        grouped = [self._kernels.address("group"), 1, self._chosen, self._order, starts, slots, p.experts]
        routed = [self._scores, self._chosen, self._expert_shares, rows, p.experts, p.experts_used]
        return [
            *self._round(self._h, rows, weights["ffn_gate_inp.weight"]),
            self._linear(self._scores, self._h, weights, "ffn_gate_inp", rows),
            [self._kernels.address("route"), 1, *routed],
            *([grouped] if rows > 1 else []),
            *self._gated(
                slots, experts(self._gate, self._h, "gate"), experts(self._up, self._h, "up"), alone=rows == 1
            ),
            experts(x, self._gate, "down", self._expert_shares, x),
        ]

    def _gated(self, rows: int, gate: Entry, up: Entry, *, alone: bool | None = None) -> list[Work]:
        """The products that make `rows` rows of gate and up, then the gating; `alone`: of one row of h."""
        width = self.parameters.feed_forward_dim
        gelu = int(self.parameters.family.activation is Activation.GELU)
        kernel, words = self._kernels.address("gate"), [self._gate, self._up, rows * width, gelu]
        made = self._group(gate, up)
        parts = made[0][1]
        # who makes some of one row's values gates them too, where both kernels cut between the same ones
        if (rows == 1 if alone is None else alone) and width % LANES == 0 == rows * width // LANES % parts:
            return [Group([*made, [kernel, parts, *words]])]
        return [made, [kernel, self._parts(rows * width, rows * width), *words]]

    @property
    def packed_names(self) -> frozenset[str]:
        """Matrices whose stored bytes are no longer read."""
        return frozenset(self._laid_out)

    # Steps.

    def count(self, remaining: int) -> int:
        """How many of `remaining` rows the next step takes: no count costs a new kernel."""
        return min(self._chunk, remaining)

    @property
    def warm_counts(self) -> tuple[int, ...]:
        """Row counts to run once before the first real step: one row touches all that a step needs."""
        return (1,)

    def input(self, count: int) -> Allocation:
        """The (count, hidden) f32 rows that `step` reads."""
        return self._rows

    def output(self, count: int) -> Allocation:
        """The (count, hidden) f32 rows that `step` has written."""
        return self._rows

    def embed(self, ids: NDArray[np.uint32]) -> None:
        """Rows of the embedding for `ids` into `input(len(ids))`."""
        assert self._embedding is not None
        assert self._team is not None
        ids = np.ascontiguousarray(ids, np.uint32)
        table = self._embedding.address
        if self._embedding.name in self._packed:
            rows = self._stored_rows(ids)
            table, ids = rows.ctypes.data, np.arange(len(ids), dtype=np.uint32)
        kernel = self._kernels.address("rows", self._embedding.ggml_type)
        out, columns = self._x, self.parameters.hidden_dim
        scale = self.parameters.embedding_scale
        words = [out, table, ids.ctypes.data, len(ids), columns, float_bits(scale) if scale != 1.0 else 0]
        self._team.run(self._team.prepare([[kernel, 1, *words]]))

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
            ends, p = self._ends, self.parameters
            x = self._x + (count - 1) * self.parameters.hidden_dim * 4
            logits = self.logits.buffer.address
            entries = [
                self._norm(self._h, x, ends.norm, 1),
                *self._round(self._h, 1, ends.head),
                self._matmul(logits, self._h, ends.head, 1, bias=ends.bias),
            ]
            if p.logit_cap:
                parts = self._parts(p.vocab_size // LANES, p.vocab_size)
                words = [logits, p.vocab_size, float_bits(p.logit_cap)]
                entries.append([self._kernels.address("cap"), parts, *words])
            self._heads[count] = self._team.prepare(entries)
        self._team.run(self._heads[count])

    def close(self) -> None:
        """Ends the threads and frees cache and working memory. Idempotent."""
        self._kernels.close()
        if self._team is not None:
            self._team.close()
            self._team = None
        self._lists.clear()
        self._heads.clear()
        self._blocks, self._ends, self._embedding = [], None, None
        self._memory.clear()
        self._kept.clear()
        self._packed.clear()
        self._laid_out.clear()
        self._packed_room = None
