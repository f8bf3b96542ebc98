"""A stage's blocks as tinygrad graphs: runs on every device, and says what any other engine must compute.

Knows the llama block and its KV cache. Must not know rings, objects, sampling or files. One graph per kind of
block (blocks whose tensors have the same types) and row count is captured, then replayed over every block's
own buffers, so that compiling costs one block and not the whole stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from swactor_worker_tinygrad import internals
from swactor_worker_tinygrad.parameters import LlamaParameters
from swactor_worker_tinygrad.weights import Weight

POSITION = "position"
BlockWeights = dict[str, Weight]


def rope_table(
    parameters: LlamaParameters, rows: int, factors: NDArray[np.float32] | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines of all positions, each (rows, rope_dims / 2), computed in double precision.

    Pair i of a head turns by position * base**(-2i/rope_dims) / factors[i] / divisor (Su et al. 2021; the
    factors are Llama 3.1's `rope_freqs.weight`).
    """
    pairs = np.arange(parameters.rope_dims // 2, dtype=np.float64)
    speed = parameters.rope_base ** (-2.0 * pairs / parameters.rope_dims) / parameters.rope_divisor
    if factors is not None:
        speed = speed / factors.astype(np.float64)
    angle = np.arange(rows, dtype=np.float64)[:, None] * speed[None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dims: int) -> Tensor:
    """Turns adjacent pairs of the first `dims` elements of each head; x is (rows, heads, head_dim)."""
    rows, heads, width = x.shape
    pairs = x[:, :, :dims].reshape(rows, heads, dims // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos.reshape(rows, 1, dims // 2), sin.reshape(rows, 1, dims // 2)
    turned = (even * cos - odd * sin).stack(even * sin + odd * cos, dim=-1).reshape(rows, heads, dims)
    return turned if dims == width else turned.cat(x[:, :, dims:], dim=-1)


def block_function(parameters: LlamaParameters, rows: int, weights: BlockWeights) -> Callable[..., None]:
    """One block over `rows` positions from `position` on, as a function for `internals.Graph`.

    Its inputs: x (rows, hidden), result (rows, hidden), key cache (context, kv_heads, key_dim), value cache
    (context, kv_heads, value_dim), cosines, sines, then the weights' blobs in the order of `weights`.
    """
    p = parameters
    group = p.heads // p.kv_heads
    order = list(weights)

    def run(inputs: list[Tensor], position: UOp) -> None:
        x, result, keys, values, cosines, sines, *blobs = inputs
        bound = {name: replace(weights[name], blob=blob) for name, blob in zip(order, blobs, strict=True)}

        def linear(name: str, value: Tensor) -> Tensor:
            product = value @ bound[name + ".weight"].values().T
            return product + bound[name + ".bias"].values() if name + ".bias" in bound else product

        cos, sin = cosines[position : position + rows], sines[position : position + rows]
        h = _rms_norm(x, bound["attn_norm.weight"].values(), p.rms_epsilon).contiguous()
        q = _rotate(linear("attn_q", h).contiguous().reshape(rows, p.heads, p.key_dim), cos, sin, p.rope_dims)
        k = _rotate(
            linear("attn_k", h).contiguous().reshape(rows, p.kv_heads, p.key_dim), cos, sin, p.rope_dims
        )
        v = linear("attn_v", h).reshape(rows, p.kv_heads, p.value_dim)
        keys[position : position + rows].assign(k).realize()
        values[position : position + rows].assign(v).realize()
        seen_keys = keys[: position + rows].permute(1, 2, 0)  # (kv_heads, key_dim, seen)
        seen_values = values[: position + rows].permute(1, 0, 2)  # (kv_heads, seen, value_dim)
        q = q.reshape(rows, p.kv_heads, group, p.key_dim).permute(1, 2, 0, 3)
        q = (q * p.attention_scale).reshape(p.kv_heads, group * rows, p.key_dim).contiguous()
        scores = (q @ seen_keys).reshape(p.kv_heads, group, rows, position + rows)
        if rows > 1:
            place = Tensor.arange(position + rows).reshape(1, 1, 1, position + rows)
            own = Tensor.arange(rows).reshape(1, 1, rows, 1) + position
            scores = (place <= own).where(scores, -float("inf"))
        shares = scores.softmax(-1).reshape(p.kv_heads, group * rows, position + rows)
        attended = (shares @ seen_values).reshape(p.kv_heads, group, rows, p.value_dim).permute(2, 0, 1, 3)
        attended = attended.reshape(rows, p.attended_width).contiguous()
        x = (x + linear("attn_output", attended)).contiguous()
        h = _rms_norm(x, bound["ffn_norm.weight"].values(), p.rms_epsilon).contiguous()
        h = (linear("ffn_gate", h).silu() * linear("ffn_up", h)).contiguous()
        result.assign(x + linear("ffn_down", h)).realize()

    return run


def head_function(parameters: LlamaParameters, norm: Weight, head: Weight) -> Callable[..., None]:
    """Final norm and output projection of one row: inputs x (1, hidden), logits (1, vocab), two blobs."""

    def run(inputs: list[Tensor]) -> None:
        x, logits, norm_blob, head_blob = inputs
        weight = replace(norm, blob=norm_blob).values()
        h = _rms_norm(x, weight, parameters.rms_epsilon).contiguous()
        logits.assign(h @ replace(head, blob=head_blob).values().T).realize()

    return run


class GraphEngine:
    """Blocks, KV cache and head of one stage on one device.

    Graphs have fixed shapes, so there are two widths: one row, and a whole chunk that fewer rows are padded
    to. Padded rows come after the real ones, which therefore never see them, and later rows overwrite them in
    the cache.
    """

    def __init__(
        self,
        parameters: LlamaParameters,
        *,
        device: str,
        context: int,
        chunk: int,
        blocks: list[BlockWeights],
        norm_and_head: tuple[Weight, Weight] | None,
        lookup: Callable[[NDArray[np.uint32]], NDArray[np.float32]],
        rope: tuple[NDArray[np.float32], NDArray[np.float32]],
    ) -> None:
        """Allocates cache and activations. Raises MemoryError. `context` is the cache's rows."""
        self.parameters, self.device, self.context, self.chunk = parameters, device, context, chunk
        self._blocks, self._norm_and_head = blocks, norm_and_head
        self._lookup = lookup
        self._tables = [self._constant(table) for table in rope]
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
        self._chains: dict[int, list[internals.Launches]] = {}
        self._head: internals.Launches | None = None
        if norm_and_head is not None:
            self._logits = self._zeros((1, parameters.vocab_size))
            self.logits = internals.buffer_of(self._logits)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return self._constant(np.zeros(shape, np.float32))

    def _constant(self, data: NDArray[np.float32]) -> Tensor:
        buffer = internals.new_buffer(self.device, data.nbytes)
        internals.write_bytes(buffer, 0, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        return internals.tensor_of(buffer, data.shape, internals.FLOAT32)

    def compile_steps(self) -> list[Callable[[], None]]:
        """What `step` and `project` need compiled, in parts that may be reported and interrupted between."""
        kinds: dict[tuple[Any, ...], internals.Graph] = {}

        def link(width: int, index: int) -> None:
            weights = self._blocks[index]
            kind = (width, *((name, w.ggml_type, w.shape) for name, w in weights.items()))
            inputs = self._block_inputs(width, index)
            if kind not in kinds:
                variable = internals.position_variable(POSITION, self.context - width)
                function = block_function(self.parameters, width, weights)
                kinds[kind] = internals.Graph(function, inputs, {POSITION: variable})
            self._chains.setdefault(width, []).append(kinds[kind].bind(inputs))

        def head() -> None:
            assert self._norm_and_head is not None
            inputs = [
                self._rows[1][len(self._blocks) % 2],
                self._logits,
                *(w.blob for w in self._norm_and_head),
            ]
            graph = internals.Graph(head_function(self.parameters, *self._norm_and_head), inputs, {})
            self._head = graph.bind(inputs)

        parts: list[Callable[[], None]] = [
            partial(link, width, index) for width in self.widths for index in range(len(self._blocks))
        ]
        return parts if self._norm_and_head is None else [*parts, head]

    def _block_inputs(self, width: int, index: int) -> list[Tensor]:
        pair = self._rows[width]
        x, result = (pair[0], pair[1]) if index % 2 == 0 else (pair[1], pair[0])
        blobs = [weight.blob for weight in self._blocks[index].values()]
        return [x, result, *self._caches[index], *self._tables, *blobs]

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

    def input(self, count: int) -> internals.Buffer:
        """The (count, hidden) f32 rows that `step` reads."""
        return internals.buffer_of(self._rows[self._width(count)][0])

    def output(self, count: int) -> internals.Buffer:
        """The (count, hidden) f32 rows that `step` has written."""
        return internals.buffer_of(self._rows[self._width(count)][len(self._blocks) % 2])

    def embed(self, ids: NDArray[np.uint32]) -> None:
        """Rows of the embedding for `ids` into `input(len(ids))`."""
        rows = np.ascontiguousarray(self._lookup(ids)).reshape(-1).view(np.uint8)
        internals.write_bytes(self.input(len(ids)), 0, rows.data)

    def step(self, count: int, position: int) -> None:
        """Runs all blocks over `count` rows, at rows [position, position + count) of the cache."""
        width, row_bytes = self._width(count), self.parameters.hidden_dim * 4
        if count < width:
            # masked by position, but a stale NaN would not be: 0 * NaN is NaN
            padding = np.zeros((width - count) * row_bytes, np.uint8)
            internals.write_bytes(self.input(count), count * row_bytes, padding.data)
        values = {POSITION: position}
        for launches in self._chains[width]:
            launches.run(values)

    def project(self, count: int) -> None:
        """Logits of the last of `output`'s `count` rows."""
        assert self._head is not None
        if count > 1:
            row_bytes = self.parameters.hidden_dim * 4
            source, target = self.output(count), self.output(1)
            internals.copy_within_device(target, 0, source, (count - 1) * row_bytes, row_bytes)
        self._head.run({})

    def close(self) -> None:
        self._chains.clear()
        self._head = None
        self._blocks, self._caches, self._tables, self._norm_and_head = [], [], [], None
        self._rows.clear()
