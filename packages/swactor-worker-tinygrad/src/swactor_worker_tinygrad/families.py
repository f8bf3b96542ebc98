"""The model families this worker computes, as a table: one row is all that tells one family from another.

Knows what llama.cpp's graph of each architecture does (`src/models/*.cpp`). Must not know metadata values,
tensors of a file, nor engines. An architecture without a row is refused.
"""

from __future__ import annotations

from enum import Enum

from swactor_core.values import frozen


class Pairs(Enum):
    """Which elements of a head rotary embedding turns together: 2i and 2i + 1, or i and i + dims / 2."""

    ADJACENT = "adjacent"
    HALVES = "halves"


class Activation(Enum):
    """Of the feed-forward gate; GELU is the tanh form, rounded to f16 as in llama.cpp's table of it."""

    SILU = "silu"
    GELU = "gelu"


_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_ALL = _QKV | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}


@frozen
class Family:
    """What differs; a default is what the Llama block does.

    `biases` are matrices that may have one. `head_norms` normalise each query and key head before rotation,
    `post_norms` the two residual branches before they are added. `gate_in_up`: the gate is the upper half of
    `ffn_up`. `tied`: the head is the embedding even where the file says otherwise. `window_period` p: layer
    i sees only the window unless i % p == p - 1; 1: no layer has a window; None: the file must not ask for
    one. `ignores_window`: what the file says of a window has no effect. `default_*` hold where the file says
    nothing. `no_rope_period` p: layers with (i + 1) % p == 0 do not rotate. `wide_query_layers`: with this
    many blocks, queries are scaled by the hidden width a head, not by the head's own. `yarn_shape`: YaRN's
    bounds come from the file, not from YaRN's paper. `partial_rope`: a head may turn only its first elements.
    `rope_factor_pair`: frequency factors for short and for
    long contexts.
    """

    architecture: str
    models: str
    pairs: Pairs = Pairs.HALVES
    activation: Activation = Activation.SILU
    biases: frozenset[str] = _QKV
    output_bias: bool = False
    rope_factors: bool = False
    rope_factor_pair: bool = False
    yarn: bool = True
    yarn_shape: bool = False
    partial_rope: bool = False
    attention_temperature: bool = False
    head_norms: bool = False
    post_norms: bool = False
    gate_in_up: bool = False
    experts: bool = False
    scaled_embedding: bool = False
    tied: bool = False
    window_period: int | None = None
    ignores_window: bool = False
    default_window: int = 0
    default_local_base: float = 0.0
    default_score_cap: float | None = None
    default_logit_cap: float | None = None
    wide_query_layers: int = 0
    no_rope_period: int = 0


FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            "llama",
            "Llama 1 to 3.3, Mistral 7B and Nemo, TinyLlama, SmolLM2",
            pairs=Pairs.ADJACENT,
            biases=_ALL,
            rope_factors=True,
        ),
        Family(
            "mistral3",
            "Mistral Small 3.1, Ministral 3",
            pairs=Pairs.ADJACENT,
            biases=_ALL,
            rope_factors=True,
            yarn_shape=True,
            attention_temperature=True,
        ),
        Family("qwen2", "Qwen 2 and 2.5", output_bias=True),
        Family("qwen3", "Qwen 3", head_norms=True),
        Family("qwen3moe", "Qwen 3 mixtures of experts", head_norms=True, experts=True),
        Family(
            "gemma2",
            "Gemma 2",
            activation=Activation.GELU,
            post_norms=True,
            scaled_embedding=True,
            tied=True,
            yarn=False,
            partial_rope=True,
            window_period=2,
            default_window=4096,
            default_score_cap=50.0,
            default_logit_cap=30.0,
            wide_query_layers=46,
        ),
        Family(
            "gemma3",
            "Gemma 3",
            activation=Activation.GELU,
            head_norms=True,
            post_norms=True,
            scaled_embedding=True,
            yarn=False,
            partial_rope=True,
            window_period=6,
            default_local_base=10000.0,
            default_logit_cap=0.0,
            wide_query_layers=62,
        ),
        # llama.cpp reads Phi's window and computes without it: files say windows that the models were not
        # trained with (its conversion wrote wrong ones), so applying them would be the deviation.
        Family(
            "phi3",
            "Phi 3, 3.5 and 4 mini",
            partial_rope=True,
            gate_in_up=True,
            rope_factor_pair=True,
            ignores_window=True,
        ),
        Family(
            "smollm3",
            "SmolLM 3",
            pairs=Pairs.ADJACENT,
            no_rope_period=4,
        ),
    )
}
