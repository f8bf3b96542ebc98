"""What metadata means in each family, by a layer's index in the whole model; and what is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stage_support import DATA, Pipeline, manifest_of
from swactor_core.faults import RoleFailure
from swactor_core.plan import TokenOutputPolicy
from swactor_core.spi.loader import StageManifest, TensorRef
from swactor_core.spi.worker import RoleError
from swactor_worker_tinygrad.families import FAMILIES
from swactor_worker_tinygrad.parameters import ModelParameters, read_parameters
from swactor_worker_tinygrad.rope import Rope, Temperature
from swactor_worker_tinygrad.rope_tables import rope_tables
from swactor_worker_tinygrad.stage_tensors import check_model

VARIANTS = DATA.parent / "variants"
WITH_FILES = sorted(FAMILIES.keys() - {"llama"})


def whole(family: str) -> StageManifest:
    names = {"mistral3": VARIANTS / "mistral3-plain.gguf", "smollm3": VARIANTS / "smollm3.gguf"}
    return manifest_of(names.get(family, DATA / f"{family}.gguf"))


def with_keys(base: StageManifest, keys: Mapping[str, Any]) -> StageManifest:
    changed = {f"{base.architecture}.{name}": value for name, value in keys.items()}
    return replace(base, metadata={**base.metadata, **changed})


def read(family: str, context: int = 64, **keys: Any) -> ModelParameters:
    named = {name.replace("__", "."): value for name, value in keys.items()}
    return read_parameters(with_keys(whole(family), named), context)


def test_windows_by_layer() -> None:
    def windows(parameters: ModelParameters) -> list[int]:
        return [parameters.window_of(layer) for layer in parameters.layers]

    assert windows(read("gemma2")) == [16, 0, 16, 0]
    assert windows(read("gemma3")) == [16] * 5 + [0]
    assert windows(read("gemma3", attention__sliding_window_pattern=3)) == [16, 16, 0, 16, 16, 0]
    pattern = (False, True, True, False, False, True)
    assert windows(read("gemma3", attention__sliding_window_pattern=pattern)) == [0, 16, 16, 0, 0, 16]
    assert windows(read("gemma3", attention__sliding_window=0)) == [0] * 6
    assert windows(read("gemma3", attention__sliding_window_pattern=(True,) * 6)) == [16] * 6
    without = dict(whole("gemma2").metadata)
    del without["gemma2.attention.sliding_window"]
    assert read_parameters(replace(whole("gemma2"), metadata=without), 64).window_of(0) == 4096


def test_a_stage_counts_layers_as_the_model_does() -> None:
    part = manifest_of(DATA / "gemma3.gguf", 4, 6)
    parameters = read_parameters(part, 64)
    assert [parameters.window_of(layer) for layer in parameters.layers] == [16, 0]
    smol = read_parameters(manifest_of(VARIANTS / "smollm3.gguf", 3, 6), 64)
    assert [smol.rope_of(layer).base for layer in smol.layers] == [0.0, 5e6, 5e6]


def test_local_layers_of_gemma3_turn_by_their_own_base() -> None:
    made = read("gemma3", rope__freq_base=1e6, rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert made.rope_of(5) == Rope(16, 1e6, 8.0)
    assert made.rope_of(0) == Rope(16, 10000.0, 1.0)
    both = read("gemma2", rope__freq_base=500.0, rope__scaling__factor=2.0)
    assert both.rope_of(0) == both.rope_of(1) == Rope(16, 500.0, 2.0)
    # llama.cpp takes the factor from the layers without a window only
    none = read("gemma2", rope__scaling__type="none", rope__scaling__factor=2.0)
    assert (none.rope_of(0).divisor, none.rope_of(1).divisor) == (2.0, 1.0)


def test_query_scales() -> None:
    assert read("gemma3").attention_scale == 0.25
    assert read("smollm3").attention_scale == pytest.approx(8**-0.5)
    base = whole("gemma3")
    wide = with_keys(replace(base, num_layers=62), {"block_count": 62, "attention.head_count": 16})
    assert read_parameters(wide, 64).attention_scale == 0.5  # 64 wide, 16 heads; a head's own width is 16
    with pytest.raises(RoleError, match="head_count = 68 is more than the 64 of a row"):
        read_parameters(with_keys(wide, {"attention.head_count": 68}), 64)


def test_caps() -> None:
    assert (read("gemma2").score_cap, read("gemma2").logit_cap) == (50.0, 30.0)
    assert (read("gemma3").score_cap, read("gemma3").logit_cap) == (0.0, 0.0)
    assert read("gemma3", final_logit_softcapping=20.0).logit_cap == 20.0


def test_rope_factors_follow_the_length_of_the_run() -> None:
    base = manifest_of(VARIANTS / "phi3-long.gguf")  # trained with 24 positions
    for context, name in ((24, "rope_factors_short.weight"), (25, "rope_factors_long.weight")):
        _, tensors = check_model(base, context)
        assert tensors.rope_factors is not None
        assert tensors.rope_factors.name == name


def test_yarn_and_temperature_in_the_tables() -> None:
    made = read(
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=128,
    ).rope
    assert made.yarn is not None
    pair = 16 * math.log(128 / (32 * 2 * math.pi)) / (2 * math.log(10000.0))
    assert made.yarn.low == max(0, math.floor(pair))
    assert made.magnitude == pytest.approx(1 + 0.1 * math.log(4.0))
    cosines, sines = rope_tables(made, 9, factors=None, temperature=None)
    turns = np.arctan2(sines[1], cosines[1])
    assert turns[0] == pytest.approx(1.0)  # the fastest pair is left as it is
    assert turns[-1] == pytest.approx(10000.0 ** (-14 / 16) / 4.0)  # the slowest is stretched
    tables = rope_tables(Rope(4, 10.0), 9, factors=None, temperature=Temperature(0.5, 4))
    np.testing.assert_allclose(tables[2][8] / tables[0][8], 1 + 0.5 * math.log(3), rtol=1e-6)
    np.testing.assert_array_equal(tables[3][:4], tables[1][:4])


@pytest.mark.parametrize("family", WITH_FILES)
def test_what_no_family_knows(family: str) -> None:
    base = whole(family)
    check_model(base, 64)
    for keys in ({"attention.new_trick": 1}, {"rope.scaling.type": "dynamic"}, {"logit_scale": 0.5}):
        with pytest.raises(RoleError, match=rf"{family}\.{next(iter(keys))}") as caught:
            check_model(with_keys(base, keys), 64)
        assert caught.value.reason is RoleFailure.UNSUPPORTED_ARCHITECTURE
        assert caught.value.hint
    for name in ("per_head_gate.weight", "blk.1.attn_sinks.weight", "blk.0.ffn_gate_exps.bias"):
        extra = replace(base.tensors[0], name=name)
        with pytest.raises(RoleError, match=rf"tensor '{name}' has no place in a {family} model"):
            check_model(replace(base, tensors=(*base.tensors, extra)), 64)


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("qwen2", {"attention.sliding_window": 32}, "sliding_window = 32"),
        ("qwen2", {"attention.scale": 0.5}, "attention.scale"),
        ("qwen2", {"rope.scaling.yarn_beta_fast": 8.0}, "yarn_beta_fast"),
        ("qwen3", {"expert_count": 4}, "qwen3.expert_count = 4"),
        ("qwen3moe", {"expert_weights_norm": False}, "expert_weights_norm = False"),
        ("qwen3moe", {"expert_gating_func": 2}, "expert_gating_func = 2"),
        ("qwen3moe", {"expert_shared_count": 1}, "expert_shared_count"),
        ("qwen3moe", {"expert_used_count": 5}, "expert_used_count = 5 of 4"),
        ("gemma2", {"rope.scaling.type": "yarn"}, "'yarn' is not implemented for gemma2"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"attention.sliding_window_pattern": (True, False)}, "has 2 elements for 6 layers"),
        ("gemma3", {"final_logit_softcapping": -1.0}, "is negative"),
        ("phi3", {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "beside longrope"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping = 0"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping = 0"),
        ("gemma2", {"attention.sliding_window": 0}, "sliding_window = 0"),
        ("gemma3", {"attention.key_length_swa": 8}, "key_length_swa"),
        (
            "gemma3",
            {"attention.value_length": 32},
            "value_length = 32 beside gemma3.attention.key_length = 16",
        ),
        ("mistral3", {"attention.scale": 0.5}, "attention.scale = 0.5"),
        ("mistral3", {"rope.dimension_count": 8}, "dimension_count = 8 in heads of 12"),
        ("qwen3moe", {"expert_used_count": (2, 2)}, "expert_used_count has 2 elements for 4 layers"),
        ("qwen3", {"feed_forward_length": (96, 96, 96, 48)}, "feed_forward_length differs between layers"),
        ("smollm3", {"attention.scale": 0.5}, "attention.scale = 0.5"),
        ("smollm3", {"nextn_predict_layers": 1, "block_count": 10}, "nextn_predict_layers = 1"),
        ("smollm3", {"rope.freq_base_swa": 1.0}, "rope.freq_base_swa"),
    ],
)
def test_what_a_family_does_not_know(family: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(RoleError, match=words):
        check_model(with_keys(whole(family), keys), 64)


def test_tensors_that_a_family_needs_or_has_no_use_for() -> None:
    def without(base: StageManifest, name: str) -> StageManifest:
        return replace(base, tensors=tuple(ref for ref in base.tensors if ref.name != name))

    for family, name in (
        ("qwen3", "blk.1.attn_q_norm.weight"),
        ("gemma2", "blk.1.post_ffw_norm.weight"),
        ("qwen3moe", "blk.1.ffn_gate_inp.weight"),
        ("phi3", "blk.1.ffn_up.weight"),
    ):
        with pytest.raises(RoleError, match="lacks tensor"):
            check_model(without(whole(family), name), 64)
    with pytest.raises(RoleError, match="only one of the tensors rope_factors"):
        check_model(without(manifest_of(VARIANTS / "phi3-long.gguf"), "rope_factors_short.weight"), 64)
    gemma = whole("gemma2")
    embedding = next(ref for ref in gemma.tensors if ref.name == "token_embd.weight")
    untied = replace(
        gemma, tied_head=False, tensors=(*gemma.tensors, replace(embedding, name="output.weight"))
    )
    with pytest.raises(RoleError, match=r"'output\.weight' has no place in a gemma2 model"):
        check_model(untied, 64)


@pytest.mark.parametrize("stored", [(64, 1), (64,)])
def test_a_dim_of_one_at_the_end_may_be_left_out(stored: tuple[int, ...]) -> None:
    one = with_keys(whole("qwen3moe"), {"expert_count": 1, "expert_used_count": 1})
    router = replace(one.tensors[0], name="blk.1.ffn_gate_inp.weight", dims=stored, nbytes=256)

    def cut(ref: TensorRef) -> TensorRef:
        if ref.name.endswith("_inp.weight"):
            return replace(router, name=ref.name)
        if ref.name.endswith("_exps.weight"):
            return replace(ref, dims=ref.dims[:-1], nbytes=ref.nbytes // ref.dims[-1])
        return ref

    _, tensors = check_model(replace(one, tensors=tuple(cut(ref) for ref in one.tensors)), 64)
    assert tensors.blocks[1]["ffn_gate_inp.weight"].dims == (64, 1)
    assert len(tensors.blocks[1]["ffn_up_exps.weight"].dims) == 3


def test_fused_tensors_are_cut_by_rows() -> None:
    base = manifest_of(DATA / "phi3.gguf")
    _, tensors = check_model(base, 64)
    fused = next(ref for ref in base.tensors if ref.name == "blk.2.attn_qkv.weight")
    value = tensors.blocks[2]["attn_v.weight"]
    assert (value.name, value.dims) == ("blk.2.attn_qkv.weight[128:192]", (64, 64))
    assert (value.offset, value.nbytes) == (fused.offset + 128 * 256, 64 * 256)
    gate, up = tensors.blocks[0]["ffn_gate.weight"], tensors.blocks[0]["ffn_up.weight"]
    assert (gate.dims, up.dims, up.offset - gate.offset) == ((64, 96), (64, 96), gate.nbytes)
    odd = tuple(replace(ref, nbytes=ref.nbytes + 1) if ref is fused else ref for ref in base.tensors)
    with pytest.raises(RoleError, match="cannot have"):
        check_model(replace(base, tensors=odd), 64)


@pytest.mark.parametrize("name", ["backend", "graph_backend"])
def test_a_window_of_every_layer_hides_what_lies_before(name: str, request: pytest.FixtureRequest) -> None:
    """Six layers of window 3 reach back 6 * 2 positions: a change before that is not seen, one within is."""
    backend: Any = request.getfixturevalue(name)
    every = {"attention.sliding_window": 3, "attention.sliding_window_pattern": (True,) * 6}
    base = with_keys(whole("gemma3"), every)
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, 160, 20)]
    options: dict[str, Any] = {"max_context": 20, "chunk": 8, "policy": TokenOutputPolicy.LOGITS}
    pipeline = Pipeline(backend, DATA / "gemma3.gguf", 1, manifests=[base], **options)
    plain = pipeline.step(prompt, 0)
    assert pipeline.step([prompt[0], 7, *prompt[2:]], 0) == plain
    assert pipeline.step([*prompt[:6], (prompt[6] + 1) % 160, *prompt[7:]], 0) == plain
    assert pipeline.step([*prompt[:7], (prompt[7] + 1) % 160, *prompt[8:]], 0) != plain
    pipeline.close()


@pytest.mark.parametrize("window", [1, 4, 262144])
def test_the_window_of_phi_has_no_effect(backend: Any, window: int) -> None:
    """As in llama.cpp: the bits are those of the file without the key, wherever the window would end."""
    keys = {"attention.sliding_window": window}
    given, without = with_keys(whole("phi3"), keys), dict(whole("phi3").metadata)
    without.pop("phi3.attention.sliding_window", None)
    assert given.metadata != without
    prompt = [int(token) for token in np.random.default_rng(3).integers(0, 160, 20)]
    options: dict[str, Any] = {"max_context": 20, "chunk": 8, "policy": TokenOutputPolicy.LOGITS}
    made = []
    for manifest in (given, replace(given, metadata=without)):
        pipeline = Pipeline(backend, DATA / "phi3.gguf", 1, manifests=[manifest], **options)
        made.append(pipeline.step(prompt, 0))
        pipeline.close()
    assert made[0] == made[1]
