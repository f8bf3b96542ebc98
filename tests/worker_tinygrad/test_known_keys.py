"""Every metadata key of a model that llama.cpp knows decides something here, is refused by its name, or is
one of the few that change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stage_support import DATA, manifest_of
from swactor_core.spi.loader import Scalar, StageManifest
from swactor_core.spi.worker import RoleError
from swactor_worker_tinygrad.families import FAMILIES
from swactor_worker_tinygrad.parameters import ModelParameters, read_parameters

KEYS = (DATA.parent / "llama_cpp_keys.txt").read_text().split()
# what the model is not, where a whole number is not what the key holds
OTHER: dict[str, Scalar] = {
    "attention.causal": False,
    "attention.layer_norm_rms_epsilon": 0.125,
    "expert_weights_norm": False,
    "rope.scaling.type": "yarn",
    "rope.scaling.yarn_beta_fast": 1000.0,
    "tensor_data_layout": "Meta AI original pth",
}
# No graph of these families depends on them. Tensors say the vocabulary's size, the context is a limit of the
# run, and that of training counts where a scaling uses it, which has a test of its own.
NO_EFFECT = {
    "vocab_size",
    "context_length",
    "tensor_data_layout",
    "attention.layer_norm_epsilon",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
# and what some of them read and do not use
UNUSED = {
    "qwen3moe": {"feed_forward_length"},
    "phi3": {"attention.sliding_window"},  # as llama.cpp
    "mistral3": {"rope.scale_linear", "rope.scaling.type"},  # the file says the same in newer words
}
# those of mixtures are harmless without one
DENSE = {"expert_feed_forward_length"}


def whole(family: str) -> StageManifest:
    variants = DATA.parent / "variants"
    names = {
        "llama": DATA / "llama-gqa.gguf",
        "mistral3": variants / "mistral3-hot.gguf",
        "smollm3": variants / "smollm3.gguf",
    }
    base = manifest_of(names.get(family, DATA / f"{family}.gguf"))
    # long enough for the bounds of YaRN to matter
    longer = {f"{family}.rope.scaling.original_context_length": 100000} if family == "mistral3" else {}
    return replace(base, metadata={**base.metadata, **longer})


def read(base: StageManifest, key: str, value: Scalar) -> ModelParameters:
    return read_parameters(replace(base, metadata={**base.metadata, f"{base.architecture}.{key}": value}), 32)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_key_counts_or_is_refused_by_its_name(family: str) -> None:
    base = whole(family)
    plain = read_parameters(base, 32)
    allowed = NO_EFFECT | UNUSED.get(family, set()) | (set() if plain.experts else DENSE)
    silent, unnamed = set(), {}
    for key in KEYS:
        try:
            made = read(base, key, OTHER.get(key, 7))
        except RoleError as error:
            if key not in error.message and not key.startswith("attention.head_count"):
                unnamed[key] = error.message
            continue
        if made == plain:
            silent.add(key)
    assert not unnamed
    assert silent <= allowed, silent - allowed


def test_a_key_that_nobody_knows() -> None:
    with pytest.raises(RoleError, match=r"metadata key llama\.attention\.novelty = 7"):
        read(whole("llama"), "attention.novelty", 7)


# what converters write for features that a model does not have
NOTHING: dict[str, Scalar] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_count": 0,
    "expert_weights_norm": True,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
    "attention.shared_kv_layers": 0,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attn_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "use_parallel_residual": False,
}


@pytest.mark.parametrize("key", NOTHING)
def test_a_key_that_asks_for_nothing_changes_nothing(key: str) -> None:
    base = whole("llama")
    assert read(base, key, NOTHING[key]) == read_parameters(base, 32)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "attention.causal", 1),
        ("llama", "expert_count", False),
        ("qwen3moe", "expert_feed_forward_length", ""),
    ],
)
def test_a_value_of_another_kind_does_not_ask_for_nothing(family: str, key: str, value: Scalar) -> None:
    with pytest.raises(RoleError, match=f"metadata key {family}.{key} = "):
        read(whole(family), key, value)
