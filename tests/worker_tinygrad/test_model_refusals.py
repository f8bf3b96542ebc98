"""What cannot be computed faithfully is refused by its name, before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage_support import DATA, config_of, manifest_of
from swactor_core.faults import RoleFailure
from swactor_core.spi.loader import StageManifest, TensorRef
from swactor_core.spi.worker import RoleError

MODEL = DATA / "llama-gqa.gguf"


def refuse(backend: Any, config: Any, reason: RoleFailure, words: str) -> RoleError:
    seen: list[str] = []
    with pytest.raises(RoleError, match=words) as caught:
        backend.configure(config, progress=lambda made: seen.append(made.phase), should_abort=lambda: False)
    assert caught.value.reason is reason
    assert seen == [], "a refusal comes before the first weight"
    return caught.value


def manifest(**changes: Any) -> StageManifest:
    return replace(manifest_of(MODEL), **changes)


def with_keys(**keys: Any) -> StageManifest:
    base = manifest_of(MODEL)
    metadata = dict(base.metadata)
    for name, value in keys.items():
        full = "llama." + name.replace("__", ".")
        if value is None:
            metadata.pop(full)
        else:
            metadata[full] = value
    return replace(base, metadata=metadata)


def with_tensor(name: str, **changes: Any) -> StageManifest:
    base = manifest_of(MODEL)
    tensors = tuple(replace(ref, **changes) if ref.name == name else ref for ref in base.tensors)
    return replace(base, tensors=tensors)


def test_another_architecture(backend: Any) -> None:
    error = refuse(
        backend,
        config_of(manifest(architecture="falcon")),
        RoleFailure.UNSUPPORTED_ARCHITECTURE,
        "architecture 'falcon' is not implemented",
    )
    assert "llama, mistral3, qwen2" in error.hint


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"attention__sliding_window": 63}, "llama.attention.sliding_window = 63"),
        ({"rope__scaling__type": "longrope"}, "llama.rope.scaling.type = 'longrope'"),
        ({"rope__scaling__yarn_beta_fast": 16.0}, "llama.rope.scaling.yarn_beta_fast"),
        ({"attention__temperature_scale": 0.1}, "llama.attention.temperature_scale"),
        ({"attention__scale": 0.3}, "llama.attention.scale = 0.3"),
        ({"attention__value_length": 32}, "llama.attention.value_length = 32"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ({"attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
        ({"nextn_predict_layers": 1}, "llama.nextn_predict_layers"),
        ({"logit_scale": 0.5}, "llama.logit_scale"),
        ({"something_new": 1}, "llama.something_new = 1"),
        ({"attention__causal": False}, "llama.attention.causal"),
    ],
)
def test_features_that_are_not_implemented(backend: Any, keys: dict[str, Any], words: str) -> None:
    refuse(backend, config_of(with_keys(**keys)), RoleFailure.UNSUPPORTED_ARCHITECTURE, words)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attention__head_count": None}, "lacks the metadata key llama.attention.head_count"),
        ({"attention__head_count": "four"}, "head_count = 'four'"),
        ({"attention__head_count": True}, "head_count = True"),
        ({"attention__head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"attention__head_count_kv": (2, 2, 4, 4)}, "differs between layers"),
        ({"attention__head_count_kv": (2, 2, 2, 2, 2)}, "has 5 elements for 4 layers"),
        ({"feed_forward_length": 0}, "feed_forward_length = 0"),
        ({"rope__dimension_count": 15}, "dimension_count = 15"),
        ({"rope__dimension_count": 18}, "dimension_count = 18"),
        ({"rope__freq_base": float("nan")}, "freq_base"),
        ({"rope__freq_base": -1.0}, "freq_base"),
        ({"rope__scaling__type": 3}, "is not a string"),
        ({"rope__scaling__type": (3, 3, 3, 3)}, "is not a string"),
        ({"rope__scaling__factor": -2.0}, "factor = -2.0"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"block_count": 5}, "block_count = 5"),
        ({"embedding_length": 128}, "embedding_length = 128"),
        ({"feed_forward_length": 128}, "ffn_gate.weight"),
    ],
)
def test_parameters_that_make_no_sense(backend: Any, keys: dict[str, Any], words: str) -> None:
    refuse(backend, config_of(with_keys(**keys)), RoleFailure.CONFIG_INVALID, words)


def test_harmless_keys_and_features_that_are_off(backend: Any) -> None:
    from swactor_worker_tinygrad.parameters import read_parameters

    keys = {
        "expert_count": 0,
        "attention__sliding_window": 0,
        "rope__scaling__type": "none",
        "logit_scale": 1.0,
    }
    assert read_parameters(with_keys(**keys), 64).rope.divisor == 1.0
    linear = with_keys(rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert read_parameters(linear, 64).rope.divisor == 4.0
    assert read_parameters(with_keys(rope__scale_linear=2.0), 64).rope.divisor == 2.0
    assert read_parameters(with_keys(attention__head_count_kv=(2, 2, 2, 2)), 64).kv_heads == 2
    assert read_parameters(with_keys(rope__freq_base=None), 64).rope.base == 10000.0


def test_a_window_that_a_run_does_not_reach_changes_nothing(backend: Any) -> None:
    from swactor_worker_tinygrad.parameters import read_parameters

    wide = with_keys(attention__sliding_window=64)
    assert read_parameters(wide, 64).window_of(0) == 0
    with pytest.raises(RoleError, match="sliding_window = 64") as caught:
        read_parameters(wide, 65)
    assert "fewer tokens" in caught.value.hint


def extra(name: str) -> TensorRef:
    return replace(manifest_of(MODEL).tensors[0], name=name)


def test_tensors_without_a_place(backend: Any) -> None:
    base = manifest_of(MODEL)
    for name in ("blk.0.attn_q_norm.weight", "blk.1.ffn_gate_exps.weight", "rope_factors_long.weight"):
        added = replace(base, tensors=(*base.tensors, extra(name)))
        refuse(
            backend, config_of(added), RoleFailure.UNSUPPORTED_ARCHITECTURE, f"tensor '{name}' has no place"
        )
    twice = replace(base, tensors=(*base.tensors, base.tensors[0]))
    refuse(backend, config_of(twice), RoleFailure.CONFIG_INVALID, "twice")


def test_biases_of_some_parts_of_a_fused_matrix(backend: Any) -> None:
    """llama.cpp adds those of all three, and reads fewer without adding them."""
    from swactor_worker_tinygrad.stage_tensors import check_model

    base = manifest_of(DATA / "phi3.gguf")
    model, _ = check_model(base, 16)
    widths = {"q": model.query_width, "k": model.key_width, "v": model.value_width}
    biases = [
        replace(base.tensors[0], name=f"blk.0.attn_{name}.bias", ggml_type=0, dims=(width,), nbytes=4 * width)
        for name, width in widths.items()
    ]
    check_model(replace(base, tensors=(*base.tensors, *biases)), 16)
    fewer = replace(base, tensors=(*base.tensors, *biases[:2]))
    refuse(backend, config_of(fewer), RoleFailure.UNSUPPORTED_ARCHITECTURE, "'blk.0.attn_q.bias' beside a")


def test_tensors_that_are_missing_or_misshapen(backend: Any) -> None:
    base = manifest_of(MODEL)
    for name in ("blk.2.ffn_down.weight", "output_norm.weight", "output.weight", "token_embd.weight"):
        fewer = replace(base, tensors=tuple(ref for ref in base.tensors if ref.name != name))
        refuse(backend, config_of(fewer), RoleFailure.CONFIG_INVALID, f"lacks tensor '{name}'")
    refuse(
        backend,
        config_of(with_tensor("blk.0.attn_k.weight", dims=(64, 64))),
        RoleFailure.CONFIG_INVALID,
        "'blk.0.attn_k.weight' has dims",
    )
    refuse(backend, config_of(manifest(vocab_size=161)), RoleFailure.CONFIG_INVALID, "token_embd.weight")


@pytest.mark.parametrize(
    ("number", "name"), [(9, "Q8_1"), (15, "Q8_K"), (42, "Q2_0"), (4, "Q4_2"), (-1, "?")]
)
def test_tensor_types_that_cannot_be_computed_with(backend: Any, number: int, name: str) -> None:
    wrong = with_tensor("blk.3.ffn_up.weight", ggml_type=number, type_name=name)
    error = refuse(backend, config_of(wrong), RoleFailure.UNSUPPORTED_TENSOR_TYPE, "'blk.3.ffn_up.weight'")
    assert name in error.message
    assert "Q4_K_M" in error.hint


def test_quantised_tensors_of_another_layout(backend: Any) -> None:
    """Their bytes would pass for those of this layout; what is not quantised has no version."""
    from swactor_worker_tinygrad.stage_tensors import check_model
    from swactor_worker_tinygrad.tensor_types import stored_bytes

    plain, name, q8_0 = manifest(), "blk.3.ffn_up.weight", 8
    dims = next(ref.dims for ref in plain.tensors if ref.name == name)
    quantised = with_tensor(name, ggml_type=q8_0, type_name="Q8_0", nbytes=stored_bytes(dims, q8_0))

    def of(version: Any, base: StageManifest) -> StageManifest:
        return replace(base, metadata={**base.metadata, "general.quantization_version": version})

    check_model(quantised, 16)
    check_model(of(2, quantised), 16)
    check_model(of(1, plain), 16)
    for other in (1, 3, True, "2"):
        words = f"general.quantization_version = {other!r} says that tensor '{name}'"
        config = config_of(of(other, quantised))
        refuse(backend, config, RoleFailure.UNSUPPORTED_TENSOR_TYPE, words)


def test_sizes_that_do_not_fit_the_type(backend: Any) -> None:
    wrong = with_tensor("blk.3.ffn_up.weight", nbytes=12)
    refuse(backend, config_of(wrong), RoleFailure.CONFIG_INVALID, "cannot have 12 bytes")
    rows = with_tensor("blk.3.ffn_up.weight", ggml_type=12, type_name="Q4_K")
    refuse(backend, config_of(rows), RoleFailure.CONFIG_INVALID, "Q4_K")


def test_files_that_cannot_be_read(backend: Any, tmp_path: Path) -> None:
    base = manifest_of(MODEL)

    def moved(path: Path) -> StageManifest:
        return replace(base, tensors=tuple(replace(ref, path=str(path)) for ref in base.tensors))

    gone = tmp_path / "gone.gguf"
    error = refuse(backend, config_of(moved(gone)), RoleFailure.WEIGHTS_UNREADABLE, "gone.gguf")
    assert "every node" in error.hint
    short = tmp_path / "short.gguf"
    short.write_bytes(MODEL.read_bytes()[:-1000])
    refuse(backend, config_of(moved(short)), RoleFailure.WEIGHTS_UNREADABLE, "ends before tensor")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    refuse(backend, config_of(moved(empty)), RoleFailure.WEIGHTS_UNREADABLE, "empty.gguf")


def test_ranges_and_sizes_of_the_stage(backend: Any) -> None:
    base = config_of(manifest_of(MODEL))
    for start, end in ((0, 5), (2, 2), (3, 1)):
        wrong = replace(base, manifest=manifest(layer_start=start, layer_end_exclusive=end))
        refuse(backend, wrong, RoleFailure.CONFIG_INVALID, "are not a range")
    refuse(backend, replace(base, max_context=0), RoleFailure.CONFIG_INVALID, "max_context 0")
    refuse(backend, replace(base, prefill_chunk=0), RoleFailure.CONFIG_INVALID, "prefill_chunk 0")
    refuse(
        backend,
        replace(base, max_context=513),
        RoleFailure.CONFIG_INVALID,
        "exceeds the model's context of 512",
    )


def test_objects_that_the_stage_cannot_take_or_make(backend: Any) -> None:
    base = config_of(manifest_of(MODEL))
    half = replace(base, input_spec=replace(base.input_spec, dtype_width_bytes=2))
    refuse(backend, half, RoleFailure.CONFIG_INVALID, "input is Tokens of 2-byte Unsigned")
    rows = config_of(manifest_of(MODEL, 0, 2))
    refuse(
        backend,
        replace(base, output_spec=rows.output_spec),
        RoleFailure.CONFIG_INVALID,
        "output is Activation",
    )
    refuse(
        backend,
        replace(rows, output_spec=replace(rows.output_spec, row_width=63)),
        RoleFailure.CONFIG_INVALID,
        "63 a row",
    )
