"""What a stage manifest says about the model, checked before a single weight is touched.

Knows what metadata keys mean for each family. Must not know tensors, tinygrad, files or devices. Whatever
could change the result and is not implemented is refused by its name. Meanings follow llama.cpp's
`load_hparams` and its graphs. Everything that depends on a layer depends on its index in the whole model.
"""

from __future__ import annotations

import math

from swactor_core.spi.loader import StageManifest
from swactor_core.values import frozen

from swactor_worker_tinygrad.families import FAMILIES, Family
from swactor_worker_tinygrad.model_keys import ModelKeys, invalid, unsupported
from swactor_worker_tinygrad.rope import Rope, Temperature, Yarn


@frozen
class ModelParameters:
    """Dims in elements. `windowed` has an entry for each layer of the model: whether it sees only the last
    `window` positions. A cap of 0.0 is none. `experts` is 0 for a dense model; `feed_forward_dim` is that of
    one expert otherwise. `long_context`: the run is longer than the context of the short rope factors."""

    family: Family
    layer_start: int
    layer_end_exclusive: int
    hidden_dim: int
    feed_forward_dim: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rms_epsilon: float
    rope: Rope
    local_rope: Rope
    temperature: Temperature | None
    attention_scale: float
    vocab_size: int
    window: int
    windowed: tuple[bool, ...]
    score_cap: float
    logit_cap: float
    experts: int
    experts_used: int
    long_context: bool

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

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_dim) if self.family.scaled_embedding else 1.0

    @property
    def layers(self) -> range:
        """The stage's layers, by their index in the whole model."""
        return range(self.layer_start, self.layer_end_exclusive)

    def window_of(self, layer: int) -> int:
        """How many positions the layer sees, its own included; 0 for all."""
        return self.window if self.windowed[layer] else 0

    def rope_of(self, layer: int) -> Rope:
        period = self.family.no_rope_period
        if period and (layer + 1) % period == 0:
            return Rope(self.rope.dims, 0.0)
        return self.local_rope if self.windowed[layer] else self.rope


def family_of(architecture: str) -> Family:
    """Raises RoleError for one that has no row in the table."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise unsupported(
            f"architecture {architecture!r} is not implemented", f"this worker runs {', '.join(FAMILIES)}"
        )
    return family


def read_parameters(manifest: StageManifest, max_context: int) -> ModelParameters:
    """The parameters of the stage's model, for runs of `max_context` positions. Raises RoleError naming key
    or architecture."""
    family = family_of(manifest.architecture)
    layers = manifest.num_layers
    if not 0 <= manifest.layer_start < manifest.layer_end_exclusive <= layers:
        raise invalid(
            f"layers [{manifest.layer_start}, {manifest.layer_end_exclusive}) are not a range "
            f"within the model's {layers}"
        )
    keys = ModelKeys(manifest.architecture, manifest.metadata)
    if extra := keys.raw("nextn_predict_layers"):
        raise unsupported(f"metadata key {keys.prefix}nextn_predict_layers = {extra} is not implemented")
    hidden = keys.whole("embedding_length")
    if hidden != manifest.hidden_dim:
        raise invalid(f"{keys.prefix}embedding_length = {hidden} but the plan says {manifest.hidden_dim}")
    if (stored := keys.whole("block_count")) != layers:
        raise invalid(f"{keys.prefix}block_count = {stored} but the plan says {layers}")
    heads = keys.whole("attention.head_count")
    kv_heads = keys.whole("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise invalid(f"{heads} attention heads cannot share {kv_heads} key heads")
    if heads > hidden and layers == family.wide_query_layers:
        raise invalid(f"{keys.prefix}attention.head_count = {heads} is more than the {hidden} of a row")
    even = max(1, hidden // heads)
    key_dim = keys.whole("attention.key_length", even)
    value_dim = keys.whole("attention.value_length", even)
    if value_dim != key_dim:
        raise unsupported(
            f"metadata key {keys.prefix}attention.value_length = {value_dim} beside "
            f"{keys.prefix}attention.key_length = {key_dim} is not implemented"
        )
    epsilon = keys.real("attention.layer_norm_rms_epsilon")
    if epsilon < 0.0:
        raise invalid(f"{keys.prefix}attention.layer_norm_rms_epsilon = {epsilon} is negative")
    rope, trained = _rope(keys, family, key_dim)
    window, windowed = _windows(keys, family, layers, max_context)
    experts, used, wide = _feed_forward(keys, family)
    parameters = ModelParameters(
        family=family,
        layer_start=manifest.layer_start,
        layer_end_exclusive=manifest.layer_end_exclusive,
        hidden_dim=hidden,
        feed_forward_dim=wide,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        rms_epsilon=epsilon,
        rope=rope,
        local_rope=_local_rope(keys, family, rope),
        temperature=_temperature(keys, family, trained),
        attention_scale=_attention_scale(family, layers, even, key_dim),
        vocab_size=manifest.vocab_size,
        window=window,
        windowed=windowed,
        score_cap=_cap(keys, "attn_logit_softcapping", family.default_score_cap),
        logit_cap=_cap(keys, "final_logit_softcapping", family.default_logit_cap),
        experts=experts,
        experts_used=used,
        long_context=max_context > trained,
    )
    keys.refuse_the_rest()
    return parameters


def _rope(keys: ModelKeys, family: Family, key_dim: int) -> tuple[Rope, int]:
    """The rotation of layers that see everything, and the context that it was trained with."""
    dims = keys.whole("rope.dimension_count", key_dim)
    if dims % 2 or dims > key_dim:
        raise invalid(f"{keys.prefix}rope.dimension_count = {dims} does not fit heads of {key_dim}")
    if dims != key_dim and not family.partial_rope:
        raise unsupported(
            f"metadata key {keys.prefix}rope.dimension_count = {dims} in heads of {key_dim} is not "
            f"implemented for {family.architecture}"
        )
    base = keys.real("rope.freq_base", 10000.0)
    if base <= 0.0:
        raise invalid(f"{keys.prefix}rope.freq_base = {base} is out of range")
    scaling = keys.text("rope.scaling.type", "linear")
    known = ["none", "linear", *(["yarn"] if family.yarn else [])]
    known += ["longrope"] if family.rope_factor_pair else []
    if scaling not in known:
        raise unsupported(
            f"{keys.prefix}rope.scaling.type = {scaling!r} is not implemented for {family.architecture}",
            f"{', '.join(known)} work",
        )
    factor = _rope_factor(keys)
    if factor < 0.0:
        raise invalid(f"{keys.prefix}rope.scaling.factor = {factor} is negative")
    divisor = factor if scaling != "none" else 1.0
    if scaling == "longrope" and divisor != 1.0:
        raise unsupported(f"{keys.prefix}rope.scaling.factor = {factor} beside longrope is not implemented")
    magnitude = keys.real("rope.scaling.attn_factor", 1.0)
    trained = keys.whole("rope.scaling.original_context_length", keys.whole("context_length", 1))
    if scaling != "yarn":
        return Rope(dims, base, divisor, magnitude), trained
    if base <= 1.0:
        raise invalid(f"{keys.prefix}rope.freq_base = {base} does not go with YaRN")
    fast, slow, weight = 32.0, 1.0, 0.0
    if family.yarn_shape:
        fast = keys.real("rope.scaling.yarn_beta_fast", fast)
        slow = keys.real("rope.scaling.yarn_beta_slow", slow)
        weight = keys.real("rope.scaling.yarn_log_multiplier", weight)
        if fast <= 0.0 or slow <= 0.0:
            raise invalid(f"{keys.prefix}rope.scaling.yarn_beta_fast = {fast} or _slow = {slow} is negative")
    magnitude *= _yarn_magnitude(divisor, 1.0) / (_yarn_magnitude(divisor, weight) if weight else 1.0)
    yarn = Yarn.of(dims=dims, base=base, context=trained, fast=fast, slow=slow)
    return Rope(dims, base, divisor, magnitude, yarn), trained


def _rope_factor(keys: ModelKeys) -> float:
    return keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 0.0)) or 1.0


def _yarn_magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 1.0 + 0.1 * weight * math.log(factor)


def _local_rope(keys: ModelKeys, family: Family, rope: Rope) -> Rope:
    """The rotation of layers with a window; only Gemma's may differ."""
    if not family.window_period:
        return rope
    if family.default_local_base:
        base = keys.real("rope.freq_base_swa", family.default_local_base)
        local = Rope(rope.dims, base, 1.0, rope.magnitude)
    else:
        base = keys.real("rope.freq_base_swa", rope.base)
        # as in llama.cpp, the scaling type `none` speaks of the other layers only
        local = Rope(rope.dims, base, _rope_factor(keys), rope.magnitude)
    if base <= 0.0:
        raise invalid(f"{keys.prefix}rope.freq_base_swa = {base} is out of range")
    return local


def _windows(keys: ModelKeys, family: Family, layers: int, max_context: int) -> tuple[int, tuple[bool, ...]]:
    """The window, 0 for none, and which layers have it."""
    if family.ignores_window:
        keys.raw("attention.sliding_window")
        return 0, (False,) * layers
    window = keys.whole("attention.sliding_window", family.default_window, least=0)
    if family.window_period is None:
        if 0 < window < max_context:
            raise unsupported(
                f"metadata key {keys.prefix}attention.sliding_window = {window} asks for a window, which is "
                f"not implemented for {family.architecture} and matters to a run of {max_context} positions",
                "ask for fewer tokens, so that prompt and answer fit the window",
            )
        return 0, (False,) * layers
    if not window and family.default_window:
        raise unsupported(
            f"metadata key {keys.prefix}attention.sliding_window = 0 is not implemented for "
            f"{family.architecture}, whose layers alternate between a window and none"
        )
    if not window:
        keys.raw("attention.sliding_window_pattern")
        return 0, (False,) * layers
    pattern = keys.raw("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        if len(pattern) != layers or any(item not in (0, 1) for item in pattern):
            raise invalid(
                f"metadata key {keys.prefix}attention.sliding_window_pattern has {len(pattern)} elements "
                f"for {layers} layers, or others than true and false"
            )
        return window, tuple(bool(item) for item in pattern)
    period = keys.whole("attention.sliding_window_pattern", family.window_period, least=0)
    return window, tuple(not period or layer % period < period - 1 for layer in range(layers))


def _feed_forward(keys: ModelKeys, family: Family) -> tuple[int, int, int]:
    """(experts, experts used, width), the first two 0 for a dense model."""
    if not family.experts:
        return 0, 0, keys.whole("feed_forward_length")
    experts, used = keys.whole("expert_count"), keys.whole("expert_used_count")
    if used > experts:
        raise invalid(f"{keys.prefix}expert_used_count = {used} of {experts} experts")
    if wide := keys.whole("expert_feed_forward_length", 0, least=0):
        keys.raw("feed_forward_length")  # that of dense layers, of which the family has none
        return experts, used, wide
    return experts, used, max(1, keys.whole("feed_forward_length") // used)


def _temperature(keys: ModelKeys, family: Family, trained: int) -> Temperature | None:
    scale = keys.real("attention.temperature_scale", 0.0) if family.attention_temperature else 0.0
    # the scale is part of the rope tables, which turn whole heads in every family that has it
    return Temperature(scale, trained) if scale else None


def _attention_scale(family: Family, layers: int, even: int, key_dim: int) -> float:
    return 1.0 / math.sqrt(even if layers == family.wide_query_layers else key_dim)


def _cap(keys: ModelKeys, name: str, default: float | None) -> float:
    """A soft cap, 0.0 for none; a family that knows none leaves the key to be refused."""
    if default is None:
        return 0.0
    cap = keys.real(name, default)
    if cap < 0.0:
        raise invalid(f"metadata key {keys.prefix}{name} = {cap} is negative")
    if default and not cap:
        # llama.cpp divides by it, so that no reference says what a model without its caps computes
        raise unsupported(f"metadata key {keys.prefix}{name} = 0 is not implemented")
    return cap
