"""A stage's blocks as tinygrad graphs: runs on every device, and says what any other engine must compute.

Knows the blocks of every family and their KV cache. Must not know rings, objects, sampling or files. One
graph per kind of block (blocks whose tensors have the same types, and the same window) and row count is
captured, then replayed over every block's own buffers, so that compiling costs one block and not the whole
stage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from swactor_core.values import frozen
from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from swactor_worker_tinygrad import internals
from swactor_worker_tinygrad.device_memory import Allocation, of_buffer
from swactor_worker_tinygrad.families import Activation, Pairs
from swactor_worker_tinygrad.kernel_search import Found, KernelSearch
from swactor_worker_tinygrad.parameters import ModelParameters
from swactor_worker_tinygrad.rope_tables import Tables
from swactor_worker_tinygrad.settings import KernelChoice, Numerics
from swactor_worker_tinygrad.weights import Ends, Weight

POSITION = "position"
LEAST_SHARE_SUM = 6.103515625e-5  # what llama.cpp keeps the sum of the experts' shares from falling under
BlockWeights = dict[str, Weight]


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def _cap(x: Tensor, cap: float) -> Tensor:
    return _tanh(x / cap) * cap if cap else x


def _tanh(x: Tensor) -> Tensor:
    """tinygrad's is made of a sigmoid, which leaves little of values near 0; there Cephes' tanhf."""
    z = x * x
    p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    return (z < 0.390625).where((p - 3.33332819422e-1) * z * x + x, x.tanh())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """Turns the first elements of each head, as many as the tables say; x is (rows, heads, head_dim)."""
    rows, heads, width = x.shape
    half = cos.shape[-1]
    cos, sin = cos.reshape(rows, 1, half), sin.reshape(rows, 1, half)
    if pairs is Pairs.ADJACENT:
        both = x[:, :, : 2 * half].reshape(rows, heads, half, 2)
        a, b = both[..., 0], both[..., 1]
        turned = (a * cos - b * sin).stack(a * sin + b * cos, dim=-1).reshape(rows, heads, 2 * half)
    else:
        a, b = x[:, :, :half], x[:, :, half : 2 * half]
        turned = (a * cos - b * sin).cat(a * sin + b * cos, dim=-1)
    return turned if 2 * half == width else turned.cat(x[:, :, 2 * half :], dim=-1)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.SILU:
        return x.silu()
    made = _to_half(_to_half(x.clamp(-10.0, 10.0)).gelu())
    return (x >= 10.0).where(x, (x <= -10.0).where(0.0, made))


def _to_half(x: Tensor) -> Tensor:
    """Rounded to an f16, by arithmetic because casts there and back are optimised away: to eleven bits, below
    2**-14 to multiples of 2**-24."""
    bits = x.bitcast(dtypes.uint32)
    normal = ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).bitcast(dtypes.float32)
    return (x.abs() < 2.0**-14).where((x * 2.0**24).round() * 2.0**-24, normal)


def _route(scores: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """The `used` experts of each row with the greatest scores, and their shares, which add up to 1: both
    (rows, used), from (rows, experts). Of equal scores the lower index goes first."""
    rows, experts = scores.shape
    shares = scores.softmax(-1).contiguous()
    own, other = shares.reshape(rows, experts, 1), shares.reshape(rows, 1, experts)
    index = Tensor.arange(experts)
    earlier = index.reshape(1, 1, experts) < index.reshape(1, experts, 1)
    rank = ((other > own) | ((other == own) & earlier)).cast(dtypes.int32).sum(-1).contiguous()
    place = rank.reshape(rows, 1, experts) == Tensor.arange(used).reshape(1, used, 1)
    chosen = (place * index.reshape(1, 1, experts)).sum(-1).cast(dtypes.int32).contiguous()
    taken = (place * shares.reshape(rows, 1, experts)).sum(-1)
    return chosen, (taken / taken.sum(-1, keepdim=True).maximum(LEAST_SHARE_SUM)).contiguous()


def block_function(
    parameters: ModelParameters, rows: int, weights: BlockWeights, *, window: int, tables: int
) -> Callable[..., None]:
    """One block over `rows` positions from `position` on, as a function for `internals.Graph`.

    Its inputs: x (rows, hidden), result (rows, hidden), key cache (context, kv_heads, key_dim), value cache
    (context, kv_heads, value_dim), `tables` rope tables, then the weights' blobs in the order of `weights`.
    """
    p, family = parameters, parameters.family
    group = p.heads // p.kv_heads
    order = list(weights)

    def run(inputs: list[Tensor], position: UOp) -> None:
        x, result, keys, values, *rest = inputs
        turns = [table[position : position + rows] for table in rest[:tables]]
        bound = {
            name: replace(weights[name], copy=blob) for name, blob in zip(order, rest[tables:], strict=True)
        }

        def linear(name: str, value: Tensor) -> Tensor:
            product = value @ bound[name + ".weight"].values().T
            return product + bound[name + ".bias"].values() if name + ".bias" in bound else product

        def norm(name: str, value: Tensor) -> Tensor:
            return _rms_norm(value, bound[name + ".weight"].values(), p.rms_epsilon).contiguous()

        def heads(name: str, value: Tensor, count: int, turn: Sequence[Tensor]) -> Tensor:
            made = linear(name, value).contiguous().reshape(rows, count, p.key_dim)
            if family.head_norms:
                made = norm(f"{name}_norm", made)
            return _rotate(made, turn[0], turn[1], family.pairs)

        def experts(name: str, value: Tensor, chosen: Tensor) -> Tensor:
            """(rows, used or 1, in) times each row's own experts: (rows, used, out)."""
            matrices = bound[f"ffn_{name}_exps.weight"].values()[chosen]  # (rows, used, out, in)
            return (matrices * value.unsqueeze(2)).sum(-1)

        h = norm("attn_norm", x)
        q = heads("attn_q", h, p.heads, turns[-2:])
        k = heads("attn_k", h, p.kv_heads, turns[:2])
        v = linear("attn_v", h).reshape(rows, p.kv_heads, p.value_dim)
        keys[position : position + rows].assign(k).realize()
        values[position : position + rows].assign(v).realize()
        seen_keys = keys[: position + rows].permute(1, 2, 0)  # (kv_heads, key_dim, seen)
        seen_values = values[: position + rows].permute(1, 0, 2)  # (kv_heads, seen, value_dim)
        q = q.reshape(rows, p.kv_heads, group, p.key_dim).permute(1, 2, 0, 3)
        q = (q * p.attention_scale).reshape(p.kv_heads, group * rows, p.key_dim).contiguous()
        scores = (q @ seen_keys).reshape(p.kv_heads, group, rows, position + rows)
        scores = _cap(scores, p.score_cap)
        place = Tensor.arange(position + rows).reshape(1, 1, 1, position + rows)
        own = Tensor.arange(rows).reshape(1, 1, rows, 1) + position
        if rows > 1:
            scores = (place <= own).where(scores, -float("inf"))
        if window:
            scores = (place + window > own).where(scores, -float("inf"))
        shares = scores.softmax(-1).reshape(p.kv_heads, group * rows, position + rows)
        attended = (shares @ seen_values).reshape(p.kv_heads, group, rows, p.value_dim).permute(2, 0, 1, 3)
        attended = attended.reshape(rows, p.attended_width).contiguous()
        added = linear("attn_output", attended)
        if family.post_norms:
            added = norm("post_attention_norm", added.contiguous())
        x = (x + added).contiguous()

        h = norm("ffn_norm", x)
        if p.experts:
            chosen, share = _route((h @ bound["ffn_gate_inp.weight"].values().T).contiguous(), p.experts_used)
            gate = experts("gate", h.unsqueeze(1), chosen)
            wide = (_activate(gate, family.activation) * experts("up", h.unsqueeze(1), chosen)).contiguous()
            added = (experts("down", wide, chosen).contiguous() * share.unsqueeze(2)).sum(1)
        else:
            gate = linear("ffn_gate", h)
            wide = (_activate(gate, family.activation) * linear("ffn_up", h)).contiguous()
            added = linear("ffn_down", wide)
        if family.post_norms:
            added = norm("post_ffw_norm", added.contiguous())
        result.assign(x + added).realize()

    return run


def head_function(parameters: ModelParameters, ends: Ends) -> Callable[..., None]:
    """Final norm and output projection of one row: inputs x (1, hidden), logits (1, vocab), the blobs of
    `ends.weights()`."""

    def run(inputs: list[Tensor]) -> None:
        x, logits, *blobs = inputs
        norm, head, *bias = [replace(w, copy=b).values() for w, b in zip(ends.weights(), blobs, strict=True)]
        h = _rms_norm(x, norm, parameters.rms_epsilon).contiguous()
        made = h @ head.T
        made = made + bias[0] if bias else made
        logits.assign(_cap(made, parameters.logit_cap)).realize()

    return run


def _key_of(parameters: ModelParameters) -> str:
    """Everything but types, shapes and windows that a block's or the head's graph follows from: the family by
    its name, the model's parameters, and this package's code, which turns them into a graph."""
    code = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    of_the_stage = ("family", "layer_start", "layer_end_exclusive", "windowed")
    names = [field.name for field in fields(parameters) if field.name not in of_the_stage]
    facts = [(name, getattr(parameters, name)) for name in names]
    return f"{code.hexdigest()} {parameters.family.architecture} {facts!r}"


@frozen
class _Wanted:
    """What one graph is captured from; graphs of the same `key` are one, over other inputs."""

    function: Callable[..., None]
    inputs: list[Tensor]
    variables: dict[str, UOp]
    key: str


class GraphEngine:
    """Blocks, KV cache and head of one stage on one device.

    Graphs have fixed shapes, so there are two widths: one row, and a whole chunk that fewer rows are padded
    to. Padded rows come after the real ones, which therefore never see them, and later rows overwrite them in
    the cache.
    """

    kernels = KernelChoice.GRAPH
    #: how the kernels of graphs to be captured are chosen; None: as tinygrad does it by itself
    search: KernelSearch | None = None

    def __init__(
        self,
        parameters: ModelParameters,
        *,
        device: str,
        context: int,
        chunk: int,
        blocks: list[BlockWeights],
        ends: Ends | None,
        lookup: Callable[[NDArray[np.uint32]], NDArray[np.float32]],
        rope: Sequence[Tables],
    ) -> None:
        """Allocates cache and activations. Raises MemoryError. `context` is the cache's rows; `rope` has the
        tables of each block, and where two blocks' are one object they share the device's copy."""
        self.parameters, self.device, self.context, self.chunk = parameters, device, context, chunk
        self._blocks, self._ends = blocks, ends
        self._lookup = lookup
        self._named = _key_of(parameters)
        single = {id(table): table for tables in rope for table in tables}
        copies = {key: self._constant(table) for key, table in single.items()}
        self._tables = [[copies[id(table)] for table in tables] for tables in rope]
        self._caches = [
            (
                self._zeros((context, parameters.kv_heads, parameters.key_dim)),
                self._zeros((context, parameters.kv_heads, parameters.value_dim)),
            )
            for _ in blocks
        ]
        hidden = parameters.hidden_dim
        self.widths = (1, chunk) if chunk > 1 else (1,)
        self._rows = {
            width: (self._zeros((width, hidden)), self._zeros((width, hidden))) for width in self.widths
        }
        self._choices: dict[str, Found | None] = {}
        self._chains: dict[int, list[internals.Launches]] = {}
        self._head: internals.Launches | None = None
        if ends is not None:
            self._logits = self._zeros((1, parameters.vocab_size))
            self.logits = of_buffer(internals.buffer_of(self._logits))

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self._constant(np.zeros(shape, np.float32))

    def _constant(self, data: NDArray[np.float32]) -> Tensor:
        buffer = internals.new_buffer(self.device, data.nbytes)
        internals.write_bytes(buffer, 0, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        return internals.tensor_of(buffer, data.shape, internals.FLOAT32)

    def compile_steps(self) -> list[Callable[[], None]]:
        """What `step` and `project` need compiled, in parts that may be reported and interrupted between."""
        self._chains.clear()
        self._choices.clear()
        captured: dict[str, internals.Graph] = {}

        def made(wanted: _Wanted) -> internals.Launches:
            if wanted.key not in captured:
                captured[wanted.key] = self._captured(wanted)
            return captured[wanted.key].bind(wanted.inputs)

        def link(width: int, index: int) -> None:
            chain = self._chains.setdefault(width, [])
            chain.append(made(self._block(width, index)))
            if width == 1 and len(chain) == len(self._blocks):
                self._chains[1] = internals.in_one(chain)  # a prompt's chunks are too few to repay it

        def head() -> None:
            self._head = made(self._projection())

        parts: list[Callable[[], None]] = [
            partial(link, width, index) for width in self.widths for index in range(len(self._blocks))
        ]
        return parts if self._ends is None else [*parts, head]

    @property
    def kept(self) -> bool:
        """Whether an earlier process has captured all that `compile_steps` needs."""
        blocks = [self._block(width, index) for width in self.widths for index in range(len(self._blocks))]
        wanted = {each.key: each for each in blocks}
        if self._ends is not None:
            head = self._projection()
            wanted[head.key] = head
        return all(
            internals.is_kept(each.inputs, each.variables, key=each.key, search=self.search)
            for each in wanted.values()
        )

    def _block(self, width: int, index: int) -> _Wanted:
        p, weights, tables = self.parameters, self._blocks[index], len(self._tables[index])
        window = p.window_of(p.layer_start + index)
        kind = (width, window, *((name, w.ggml_type, w.shape) for name, w in weights.items()))
        return _Wanted(
            block_function(p, width, weights, window=window, tables=tables),
            self._block_inputs(width, index),
            {POSITION: internals.position_variable(POSITION, self.context - width)},
            f"block {width} {kind!r} {self._named}",
        )

    def _projection(self) -> _Wanted:
        assert self._ends is not None
        x = self._rows[1][len(self._blocks) % 2]
        weights = self._ends.weights()
        kind = [(w.ggml_type, w.shape) for w in weights]
        inputs = [x, self._logits, *(w.blob for w in weights)]
        key = f"head {kind!r} {self._named}"
        return _Wanted(head_function(self.parameters, self._ends), inputs, {}, key)

    def _captured(self, wanted: _Wanted) -> internals.Graph:
        graph = internals.Graph(
            wanted.function, wanted.inputs, wanted.variables, key=wanted.key, search=self.search
        )
        self._choices.update(graph.choices)
        return graph

    @property
    def numerics(self) -> dict[str, str]:
        """By which numerics the stage computes, for its facts, and of how many kernels a search has found a
        faster one, where any was."""
        faster = sum(found is not None and found.steps is not None for found in self._choices.values())
        counted = {"searched_kernels": f"{faster} of {len(self._choices)}"} if faster else {}
        return {"numerics": Numerics.EXACT, **counted}

    def _block_inputs(self, width: int, index: int) -> list[Tensor]:
        pair = self._rows[width]
        x, result = (pair[0], pair[1]) if index % 2 == 0 else (pair[1], pair[0])
        blobs = [weight.blob for weight in self._blocks[index].values()]
        return [x, result, *self._caches[index], *self._tables[index], *blobs]

    @property
    def packed_names(self) -> frozenset[str]:
        """Matrices whose stored bytes are no longer read: none."""
        return frozenset()

    def count(self, remaining: int) -> int:
        """How many of `remaining` rows the next step takes."""
        return min(self.chunk, remaining)

    def _width(self, count: int) -> int:
        return 1 if count == 1 else self.chunk

    @property
    def warm_counts(self) -> tuple[int, ...]:
        """Row counts to run once before the first real step (the capture was the run before)."""
        return self.widths

    def input(self, count: int) -> Allocation:
        """The (count, hidden) f32 rows that `step` reads."""
        return of_buffer(self._input(count))

    def output(self, count: int) -> Allocation:
        """The (count, hidden) f32 rows that `step` has written."""
        return of_buffer(self._output(count))

    def _input(self, count: int) -> internals.Buffer:
        return internals.buffer_of(self._rows[self._width(count)][0])

    def _output(self, count: int) -> internals.Buffer:
        return internals.buffer_of(self._rows[self._width(count)][len(self._blocks) % 2])

    def embed(self, ids: NDArray[np.uint32]) -> None:
        """Rows of the embedding for `ids` into `input(len(ids))`."""
        rows = np.ascontiguousarray(self._lookup(ids)) * np.float32(self.parameters.embedding_scale)
        internals.write_bytes(self._input(len(ids)), 0, rows.reshape(-1).view(np.uint8).data)

    def step(self, count: int, position: int) -> None:
        """Runs all blocks over `count` rows, at rows [position, position + count) of the cache."""
        width, row_bytes = self._width(count), self.parameters.hidden_dim * 4
        if count < width:
            # masked by position, but a stale NaN would not be: 0 * NaN is NaN
            padding = np.zeros((width - count) * row_bytes, np.uint8)
            internals.write_bytes(self._input(count), count * row_bytes, padding.data)
        values = {POSITION: position}
        for launches in self._chains[width]:
            launches.run(values)

    def project(self, count: int) -> None:
        """Logits of the last of `output`'s `count` rows."""
        assert self._head is not None
        if count > 1:
            row_bytes = self.parameters.hidden_dim * 4
            source, target = self._output(count), self._output(1)
            internals.copy_within_device(target, 0, source, (count - 1) * row_bytes, row_bytes)
        self._head.run({})

    def trial(self) -> list[NDArray[np.float32]]:
        """What the stage makes of the same rows whenever it is asked, one array for each width and one for
        the head's logits: to hold one choice of kernels against another. Overwrites the cache."""
        made = []
        shape = self.chunk, self.parameters.hidden_dim
        rows = np.random.default_rng(0).standard_normal(shape, np.float32)
        for width in self.widths:
            internals.write_bytes(self._input(width), 0, rows[:width].reshape(-1).view(np.uint8).data)
            self.step(width, 0)
            made.append(self._read(self._output(width), width * shape[1]))
        if self._ends is not None:
            self.project(1)
            made.append(self._read(internals.buffer_of(self._logits), self.parameters.vocab_size))
        return made

    def _read(self, buffer: internals.Buffer, elements: int) -> NDArray[np.float32]:
        values = np.empty(elements, np.float32)
        internals.read_bytes(buffer, 0, values.view(np.uint8).data)
        return values

    def close(self) -> None:
        """Frees weights' copies, cache and activations. Idempotent."""
        self._chains.clear()
        self._head = None
        self._blocks, self._caches, self._tables, self._ends = [], [], [], None
        self._rows.clear()
        internals.release_unused(self.device)
