"""What a stage manifest says about a `llama` model, checked before a single weight is touched.

Knows GGUF metadata keys, tensor names, shapes and tensor types. Must not know tinygrad, files or devices.
Whatever could change the result and is not implemented is refused by its name: unknown model keys, unknown
tensors, wrong shapes. Meanings follow llama.cpp's `load_hparams` and its llama graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from swactor_core.faults import RoleFailure
from swactor_core.spi.loader import Scalar, StageManifest, TensorRef
from swactor_core.spi.worker import RoleError

ARCHITECTURE = "llama"
Value = Scalar | tuple[Scalar, ...]

# Keys that change nothing in this graph, whatever they say.
_HARMLESS = frozenset(
    {
        "context_length",
        "vocab_size",
        "tensor_data_layout",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "attention.layer_norm_epsilon",
        "expert_feed_forward_length",
    }
)
# Keys of features that are not implemented, and the value that means the feature is off.
_OFF: Mapping[str, tuple[Scalar, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "residual_scale": (1,),
    "embedding_scale": (1,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.scaling.attn_factor": (1,),
    "use_parallel_residual": (False,),
}


@dataclass(frozen=True, slots=True)
class LlamaParameters:
    """`rope_divisor` is the linear position scaling (1.0 for none); dims in elements."""

    layer_start: int
    layer_end_exclusive: int
    hidden_dim: int
    feed_forward_dim: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rms_epsilon: float
    rope_dims: int
    rope_base: float
    rope_divisor: float
    attention_scale: float
    vocab_size: int

    @property
    def query_width(self) -> int:
        return self.heads * self.key_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.kv_heads * self.value_dim

    @property
    def attended_width(self) -> int:
        return self.heads * self.value_dim


def _invalid(message: str, hint: str = "") -> RoleError:
    return RoleError(RoleFailure.CONFIG_INVALID, message, hint=hint)


class _Keys:
    """Typed access to `llama.*`; remembers what was asked for, so that the rest can be refused."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        prefix = ARCHITECTURE + "."
        self.values = {
            name[len(prefix) :]: value for name, value in metadata.items() if name.startswith(prefix)
        }
        self.used: set[str] = set()

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._one(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _invalid(f"metadata key llama.{name} = {value!r} is not a positive whole number")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._one(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _invalid(f"metadata key llama.{name} = {value!r} is not a finite number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self._one(name, default)
        if not isinstance(value, str):
            raise _invalid(f"metadata key llama.{name} = {value!r} is not a string")
        return value

    def _one(self, name: str, default: Scalar | None) -> Scalar:
        """A scalar, or the one value that a per-layer array repeats; arrays that vary are not implemented."""
        self.used.add(name)
        value = self.values.get(name, default)
        if value is None:
            raise _invalid(f"the model file lacks the metadata key llama.{name}")
        if isinstance(value, tuple):
            if not value or any(item != value[0] for item in value):
                raise _invalid(f"metadata key llama.{name} differs between layers, which is not supported")
            return value[0]
        return value

    def refuse_the_rest(self) -> None:
        for name in sorted(self.values.keys() - self.used - _HARMLESS):
            value = self.values[name]
            if name in _OFF and value in _OFF[name]:
                continue
            raise RoleError(
                RoleFailure.UNSUPPORTED_ARCHITECTURE,
                f"metadata key llama.{name} = {value!r} asks for what this worker does not implement",
                hint="use a model without it; plain Llama, Mistral 7B, TinyLlama and SmolLM2 files work",
            )


def read_parameters(manifest: StageManifest) -> LlamaParameters:
    """The parameters of the stage's model. Raises RoleError naming key or architecture."""
    if manifest.architecture != ARCHITECTURE:
        raise RoleError(
            RoleFailure.UNSUPPORTED_ARCHITECTURE,
            f"architecture {manifest.architecture!r} is not implemented",
            hint=f"this worker runs architecture {ARCHITECTURE!r} (Llama, Mistral 7B, TinyLlama, SmolLM2)",
        )
    if not 0 <= manifest.layer_start < manifest.layer_end_exclusive <= manifest.num_layers:
        raise _invalid(
            f"layers [{manifest.layer_start}, {manifest.layer_end_exclusive}) are not a range "
            f"within the model's {manifest.num_layers}"
        )
    keys = _Keys(manifest.metadata)
    hidden = keys.whole("embedding_length")
    if hidden != manifest.hidden_dim:
        raise _invalid(f"llama.embedding_length = {hidden} but the plan says {manifest.hidden_dim}")
    if (layers := keys.whole("block_count")) != manifest.num_layers:
        raise _invalid(f"llama.block_count = {layers} but the plan says {manifest.num_layers}")
    heads = keys.whole("attention.head_count")
    kv_heads = keys.whole("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise _invalid(f"{heads} attention heads cannot share {kv_heads} key heads")
    even = hidden // heads
    key_dim = keys.whole("attention.key_length", even)
    rope_dims = keys.whole("rope.dimension_count", key_dim)
    if rope_dims % 2 or rope_dims > key_dim:
        raise _invalid(f"llama.rope.dimension_count = {rope_dims} does not fit heads of {key_dim}")
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear"):
        raise RoleError(
            RoleFailure.UNSUPPORTED_ARCHITECTURE,
            f"llama.rope.scaling.type = {scaling!r} is not implemented",
            hint="none, linear, and the frequency table of Llama 3.1 and later work",
        )
    factor = keys.real("rope.scaling.factor", 0.0) or keys.real("rope.scale_linear", 0.0)
    keys.used.add("rope.scale_linear")
    if factor < 0.0:
        raise _invalid(f"llama.rope.scaling.factor = {factor} is negative")
    base = keys.real("rope.freq_base", 10000.0)
    epsilon = keys.real("attention.layer_norm_rms_epsilon")
    scale = keys.real("attention.scale", 0.0)
    if base <= 0.0 or epsilon < 0.0:
        raise _invalid(f"llama.rope.freq_base = {base} or layer_norm_rms_epsilon = {epsilon} is out of range")
    parameters = LlamaParameters(
        layer_start=manifest.layer_start,
        layer_end_exclusive=manifest.layer_end_exclusive,
        hidden_dim=hidden,
        feed_forward_dim=keys.whole("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=keys.whole("attention.value_length", even),
        rms_epsilon=epsilon,
        rope_dims=rope_dims,
        rope_base=base,
        rope_divisor=factor if scaling == "linear" and factor else 1.0,
        attention_scale=scale or 1.0 / math.sqrt(key_dim),
        vocab_size=manifest.vocab_size,
    )
    keys.refuse_the_rest()
    return parameters


def block_shapes(parameters: LlamaParameters) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Tensors of one block: name without `blk.N.` -> (dims fastest first, required)."""
    hidden, wide = parameters.hidden_dim, parameters.feed_forward_dim
    query, key, value = parameters.query_width, parameters.key_width, parameters.value_width
    return {
        "attn_norm.weight": ((hidden,), True),
        "attn_q.weight": ((hidden, query), True),
        "attn_q.bias": ((query,), False),
        "attn_k.weight": ((hidden, key), True),
        "attn_k.bias": ((key,), False),
        "attn_v.weight": ((hidden, value), True),
        "attn_v.bias": ((value,), False),
        "attn_output.weight": ((parameters.attended_width, hidden), True),
        "attn_output.bias": ((hidden,), False),
        "ffn_norm.weight": ((hidden,), True),
        "ffn_gate.weight": ((hidden, wide), True),
        "ffn_gate.bias": ((wide,), False),
        "ffn_up.weight": ((hidden, wide), True),
        "ffn_up.bias": ((wide,), False),
        "ffn_down.weight": ((wide, hidden), True),
        "ffn_down.bias": ((hidden,), False),
    }


@dataclass(frozen=True, slots=True)
class StageTensors:
    """The stage's tensors by place. `blocks` in order of layer, names without `blk.N.`."""

    blocks: tuple[dict[str, TensorRef], ...]
    rope_factors: TensorRef | None
    embedding: TensorRef | None
    output_norm: TensorRef | None
    head: TensorRef | None

    def all(self) -> list[TensorRef]:
        single = (self.rope_factors, self.embedding, self.output_norm, self.head)
        named = {ref.name: ref for ref in single if ref is not None}
        return [ref for block in self.blocks for ref in block.values()] + list(named.values())


def sort_tensors(manifest: StageManifest, parameters: LlamaParameters) -> StageTensors:
    """Puts every tensor of the manifest in its place. Raises RoleError for one that is unknown, missing,
    twice there, or of another shape than the parameters say."""
    given: dict[str, TensorRef] = {}
    for ref in manifest.tensors:
        if ref.name in given:
            raise _invalid(f"tensor {ref.name!r} is in the stage's manifest twice")
        given[ref.name] = ref

    def take(name: str, dims: tuple[int, ...], required: bool) -> TensorRef | None:
        ref = given.pop(name, None)
        if ref is None:
            if required:
                raise _invalid(f"the model file lacks tensor {name!r}")
            return None
        if _trimmed(ref.dims) != dims:
            raise _invalid(
                f"tensor {name!r} has dims {list(ref.dims)}, the model's parameters say {list(dims)}"
            )
        return ref

    blocks = []
    for layer in range(parameters.layer_start, parameters.layer_end_exclusive):
        block: dict[str, TensorRef] = {}
        for name, (dims, required) in block_shapes(parameters).items():
            found = take(f"blk.{layer}.{name}", dims, required)
            if found is not None:
                block[name] = found
        blocks.append(block)
    table = (parameters.hidden_dim, parameters.vocab_size)
    embedding: TensorRef | None = None
    output_norm: TensorRef | None = None
    head: TensorRef | None = None
    if manifest.first or (manifest.last and manifest.tied_head):
        embedding = take("token_embd.weight", table, True)
    if manifest.last:
        output_norm = take("output_norm.weight", (parameters.hidden_dim,), True)
        head = embedding if manifest.tied_head else take("output.weight", table, True)
    factors = take("rope_freqs.weight", (parameters.rope_dims // 2,), False)
    if given:
        name = min(given)
        raise RoleError(
            RoleFailure.UNSUPPORTED_ARCHITECTURE,
            f"tensor {name!r} has no place in a plain llama model (with {len(given) - 1} others)",
            hint="the model has parts that this worker does not implement",
        )
    return StageTensors(
        blocks=tuple(blocks),
        rope_factors=factors,
        embedding=embedding if manifest.first else None,
        output_norm=output_norm,
        head=head,
    )


def _trimmed(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Without the trailing ones that some writers add."""
    kept = list(dims)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return tuple(kept)
