"""Which tensors a stage needs, and in which shape: every tensor of the manifest gets its place or is refused.

Knows tensor names and shapes of each family. Must not know tinygrad, files or devices. Fused tensors
(`attn_qkv`, Phi's `ffn_up`) are cut here into ranges of their rows, so that no engine knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swactor_core.spi.loader import StageManifest, TensorRef
from swactor_core.values import frozen

from swactor_worker_tinygrad.model_keys import invalid, unsupported
from swactor_worker_tinygrad.parameters import ModelParameters, read_parameters
from swactor_worker_tinygrad.tensor_types import LAYOUT, check_layout, check_types

Dims = tuple[int, ...]


def block_shapes(parameters: ModelParameters) -> dict[str, tuple[Dims, bool]]:
    """Tensors of one block: name without `blk.N.` -> (dims fastest first, required)."""
    p, family = parameters, parameters.family
    hidden, wide = p.hidden_dim, p.feed_forward_dim
    matrices = {
        "attn_q": (hidden, p.query_width),
        "attn_k": (hidden, p.key_width),
        "attn_v": (hidden, p.value_width),
        "attn_output": (p.attended_width, hidden),
    }
    if not p.experts:
        matrices |= {"ffn_gate": (hidden, wide), "ffn_up": (hidden, wide), "ffn_down": (wide, hidden)}
    shapes: dict[str, tuple[Dims, bool]] = {}
    for name, dims in matrices.items():
        shapes[f"{name}.weight"] = (dims, True)
        if name in family.biases:
            shapes[f"{name}.bias"] = (dims[1:], False)
    if p.experts:
        shapes["ffn_gate_inp.weight"] = ((hidden, p.experts), True)
        shapes["ffn_gate_exps.weight"] = ((hidden, wide, p.experts), True)
        shapes["ffn_up_exps.weight"] = ((hidden, wide, p.experts), True)
        shapes["ffn_down_exps.weight"] = ((wide, hidden, p.experts), True)
    norms = ["attn_norm", "ffn_norm"]
    norms += ["post_attention_norm", "post_ffw_norm"] if family.post_norms else []
    shapes |= {f"{name}.weight": ((hidden,), True) for name in norms}
    if family.head_norms:
        shapes |= {f"{name}.weight": ((p.key_dim,), True) for name in ("attn_q_norm", "attn_k_norm")}
    return shapes


def _fused(parameters: ModelParameters) -> Mapping[str, dict[str, int]]:
    """Fused tensor -> its parts, in order, with their rows."""
    p = parameters
    fused = {"attn_qkv": {"attn_q": p.query_width, "attn_k": p.key_width, "attn_v": p.value_width}}
    if p.family.gate_in_up:
        fused["ffn_up"] = {"ffn_gate": p.feed_forward_dim, "ffn_up": p.feed_forward_dim}
    return fused


@frozen
class StageTensors:
    """The stage's tensors by place. `blocks` in order of layer, names without `blk.N.`."""

    blocks: tuple[dict[str, TensorRef], ...]
    rope_factors: TensorRef | None
    embedding: TensorRef | None
    output_norm: TensorRef | None
    head: TensorRef | None
    head_bias: TensorRef | None

    def all(self) -> list[TensorRef]:
        single = (self.rope_factors, self.embedding, self.output_norm, self.head, self.head_bias)
        named = {ref.name: ref for ref in single if ref is not None}
        return [ref for block in self.blocks for ref in block.values()] + list(named.values())


def check_model(manifest: StageManifest, max_context: int) -> tuple[ModelParameters, StageTensors]:
    """All that can be said of a stage without opening a file: that every key, tensor and type of it is one
    that this worker computes with. Raises RoleError naming the first that is not."""
    parameters = read_parameters(manifest, max_context)
    tensors = sort_tensors(manifest, parameters)
    check_types(tensors.all())
    check_layout(manifest.metadata.get("general.quantization_version", LAYOUT), tensors.all())
    return parameters, tensors


class _Given:
    """The manifest's tensors, which must all be taken."""

    def __init__(self, refs: tuple[TensorRef, ...]) -> None:
        self._left: dict[str, TensorRef] = {}
        for ref in refs:
            if ref.name in self._left:
                raise invalid(f"tensor {ref.name!r} is in the stage's manifest twice")
            self._left[ref.name] = ref

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, dims: Dims) -> TensorRef | None:
        """None when it is not there. Raises RoleError when its shape is another; dims of one at the end may
        be there or not."""
        ref = self._left.pop(name, None)
        if ref is not None and _trimmed(ref.dims) != _trimmed(dims):
            raise invalid(
                f"tensor {name!r} has dims {list(ref.dims)}, the model's parameters say {list(dims)}"
            )
        return ref if ref is None else replace(ref, dims=dims)

    def require(self, name: str, dims: Dims) -> TensorRef:
        ref = self.take(name, dims)
        if ref is None:
            raise invalid(f"the model file lacks tensor {name!r}")
        return ref

    def refuse_the_rest(self, architecture: str) -> None:
        if self._left:
            name = min(self._left)
            raise unsupported(
                f"tensor {name!r} has no place in a {architecture} model (with {len(self._left) - 1} others)",
                "the model has parts that this worker does not implement",
            )


def sort_tensors(manifest: StageManifest, parameters: ModelParameters) -> StageTensors:
    """Puts every tensor of the manifest in its place. Raises RoleError for one that is unknown, missing,
    twice there, or of another shape than the parameters say."""
    p, family, given = parameters, parameters.family, _Given(manifest.tensors)
    blocks = tuple(_block(given, p, f"blk.{layer}.") for layer in p.layers)
    table = (p.hidden_dim, p.vocab_size)
    embedding = output_norm = head = head_bias = None
    if manifest.first or (manifest.last and manifest.tied_head):
        embedding = given.require("token_embd.weight", table)
    if manifest.last:
        output_norm = given.require("output_norm.weight", (p.hidden_dim,))
        if manifest.tied_head:
            head = embedding
        elif not family.tied:
            head = given.require("output.weight", table)
        if family.output_bias:
            head_bias = given.take("output.bias", (p.vocab_size,))
    factors = _rope_factors(given, p)
    given.refuse_the_rest(family.architecture)
    return StageTensors(
        blocks=blocks,
        rope_factors=factors,
        embedding=embedding if manifest.first else None,
        output_norm=output_norm,
        head=head,
        head_bias=head_bias,
    )


def _block(given: _Given, parameters: ModelParameters, prefix: str) -> dict[str, TensorRef]:
    block: dict[str, TensorRef] = {}
    shapes = block_shapes(parameters)
    for whole, parts in _fused(parameters).items():
        if f"{prefix}{whole}.weight" not in given:
            continue
        for suffix in ("weight", "bias"):
            first = shapes.get(f"{next(iter(parts))}.{suffix}")
            if first is None:
                continue
            ref = given.take(f"{prefix}{whole}.{suffix}", (*first[0][:-1], sum(parts.values())))
            block |= {} if ref is None else _cut(ref, parts, suffix)
        alone = [part for part in parts if f"{prefix}{part}.bias" in given]
        if alone and len(alone) < len(parts):
            # llama.cpp reads them and adds none
            raise unsupported(
                f"tensor '{prefix}{alone[0]}.bias' beside a fused '{prefix}{whole}.weight', without biases "
                "of all of its parts, is not implemented"
            )
    for name, (dims, required) in shapes.items():
        if name in block:
            continue
        found = given.require(prefix + name, dims) if required else given.take(prefix + name, dims)
        if found is not None:
            block[name] = found
    return block


def _cut(ref: TensorRef, parts: Mapping[str, int], suffix: str) -> dict[str, TensorRef]:
    """The parts of a fused tensor, as tensors of their own in the same bytes."""
    row_bytes, rest = divmod(ref.nbytes, sum(parts.values()))
    if rest:
        raise invalid(f"tensor {ref.name!r} of dims {list(ref.dims)} cannot have {ref.nbytes} bytes")
    cut, start = {}, 0
    for part, rows in parts.items():
        cut[f"{part}.{suffix}"] = replace(
            ref,
            name=f"{ref.name}[{start}:{start + rows}]",
            dims=(*_trimmed(ref.dims)[:-1], rows),
            offset=ref.offset + start * row_bytes,
            nbytes=rows * row_bytes,
        )
        start += rows
    return cut


def _rope_factors(given: _Given, parameters: ModelParameters) -> TensorRef | None:
    dims = (parameters.rope.dims // 2,)
    if parameters.family.rope_factors:
        return given.take("rope_freqs.weight", dims)
    if not parameters.family.rope_factor_pair:
        return None
    pair = [given.take(f"rope_factors_{name}.weight", dims) for name in ("short", "long")]
    if (pair[0] is None) != (pair[1] is None):
        raise invalid("the model file has only one of the tensors rope_factors_short and rope_factors_long")
    return pair[parameters.long_context]


def _trimmed(dims: Dims) -> Dims:
    """Without the trailing ones that some writers add."""
    kept = list(dims)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return tuple(kept)
