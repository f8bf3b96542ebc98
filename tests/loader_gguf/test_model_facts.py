"""model.py: planning facts and stage manifests (spec sections 11 and 15)."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.errors import ModelError
from swactor_loader_gguf.model import GgufModel

BASE = [
    ("token_embd.weight", (8, 4), 0),
    ("blk.0.attn_q.weight", (8, 8), 0),
    ("blk.1.attn_q.weight", (8, 16), 0),
    ("output_norm.weight", (8,), 0),
]


@pytest.fixture
def model_of(raw, tmp_path):
    opened = []

    def build(**changes):
        path = tmp_path / "m.gguf"
        path.write_bytes(raw.small_model(**changes))
        opened.append(GgufModel(str(path)))
        return opened[-1]

    yield build
    for model in opened:
        model.close()


def names(manifest):
    return [tensor.name for tensor in manifest.tensors]


def test_facts_of_a_tied_model(model_of, tmp_path):
    facts = model_of(names=BASE).facts
    assert (facts.architecture, facts.num_layers, facts.hidden_dim) == ("llama", 2, 8)
    assert (facts.vocab_size, facts.context_length, facts.tied_head) == (4, 64, True)
    assert facts.layer_bytes == (256, 512)
    assert (facts.embedding_bytes, facts.head_bytes) == (128, 128 + 32)
    assert facts.type_names == ("F32",)
    assert facts.has_vocabulary is False
    assert facts.model_id == "m"
    assert facts.file_bytes == (tmp_path / "m.gguf").stat().st_size


def test_facts_of_an_untied_model(model_of, raw):
    facts = model_of(
        names=[*BASE, ("output.weight", (8, 6), 1)], keys={"n": raw.text("general.name", " Small ")}
    ).facts
    assert (facts.tied_head, facts.vocab_size, facts.model_id) == (False, 6, "Small")
    assert (facts.embedding_bytes, facts.head_bytes) == (128, 32 + 96)
    assert facts.type_names == ("F16", "F32")


def test_kv_bytes_follow_heads_and_head_widths(model_of, raw):
    assert model_of().facts.kv_bytes_per_token == (2 * (4 + 4) * 4,) * 2
    grouped = {
        "kv": raw.numbers("llama.attention.head_count_kv", 5, "i", [1, 0]),
        "k": raw.u32("llama.attention.key_length", 16),
        "v": raw.u32("llama.attention.value_length", 8),
    }
    assert model_of(keys=grouped).facts.kv_bytes_per_token == ((16 + 8) * 4, 0)


def test_a_recurrent_model_has_facts_so_that_a_worker_can_refuse_it_by_name(model_of, raw):
    state = {"llama.attention.head_count": None, "s": raw.u32("llama.ssm.state_size", 16)}
    assert model_of(keys=state).facts.kv_bytes_per_token == (0, 0)


def test_a_key_of_the_model_s_that_is_not_held_is_not_lost(model_of, raw):
    """A worker would take the key's default otherwise."""
    facts = model_of(keys={"s": raw.strings("llama.rope.scaling.type", ["yarn"])}).facts
    assert facts.metadata["llama.rope.scaling.type"] == "an array of 1 STRING"


def test_metadata_holds_scalars_and_small_numeric_arrays_but_no_vocabulary(model_of, raw):
    facts = model_of(
        keys={
            "pattern": raw.numbers("llama.pattern", 7, "B", [1, 0]),
            "large": raw.numbers("llama.large", 4, "I", [0] * 4097),
            "words": raw.strings("llama.words", ["a"]),
            "types": raw.numbers("tokenizer.ggml.token_type", 5, "i", [1]),
            "tokens": raw.strings("tokenizer.ggml.tokens", ["a"]),
            "bos": raw.u32("tokenizer.ggml.bos_token_id", 0),
            "long": raw.text("llama.long", "x" * 70_000),
            "tags": raw.strings("general.tags", ["a"]),
            "story": raw.text("general.long", "x" * 70_000),
        }
    ).facts
    assert facts.metadata["llama.pattern"] == (True, False)
    assert facts.metadata["llama.rope.freq_base"] == 10000.0
    assert facts.metadata["general.architecture"] == "llama"
    assert facts.metadata["tokenizer.ggml.bos_token_id"] == 0
    assert facts.metadata["llama.large"] == "an array of 4097 UINT32"
    assert facts.metadata["llama.words"] == "an array of 1 STRING"
    assert facts.metadata["llama.long"] == "a text of 70000 bytes"
    assert not {"general.tags", "general.long"} & facts.metadata.keys()
    assert not {"tokenizer.ggml.token_type", "tokenizer.ggml.tokens"} & facts.metadata.keys()
    assert facts.has_vocabulary


def test_blocks_behind_the_stack_are_no_layers(model_of, raw):
    facts = model_of(keys={"n": raw.u32("llama.nextn_predict_layers", 1)}, names=BASE).facts
    assert (facts.num_layers, facts.layer_bytes) == (1, (256,))


FULL = [
    *BASE,
    ("output.weight", (8, 4), 0),
    ("rope_freqs.weight", (4,), 0),
    ("strange.weight", (4,), 0),
]


def test_first_and_last_stage_have_their_ends(model_of):
    model = model_of(names=FULL)
    assert names(model.manifest(0, 1)) == [
        "token_embd.weight",
        "rope_freqs.weight",
        "strange.weight",
        "blk.0.attn_q.weight",
    ]
    assert names(model.manifest(1, 2)) == [
        "output_norm.weight",
        "output.weight",
        "rope_freqs.weight",
        "strange.weight",
        "blk.1.attn_q.weight",
    ]
    whole = model.manifest(0, 2)
    assert sorted(names(whole)) == sorted(name for name, _, _ in FULL)
    assert whole.first
    assert whole.last


def test_a_tied_head_goes_to_both_ends(model_of):
    model = model_of(names=BASE)
    assert "token_embd.weight" in names(model.manifest(0, 1))
    last = model.manifest(1, 2)
    assert names(last) == ["token_embd.weight", "output_norm.weight", "blk.1.attn_q.weight"]
    assert last.tied_head
    assert names(model.manifest(0, 2)).count("token_embd.weight") == 1


def test_an_interior_stage_has_its_blocks_under_global_names(data_folder):
    model = GgufModel(str(data_folder / "tiny" / "llama-ropefreqs.gguf"))
    manifest = model.manifest(1, 3)
    assert {name.split(".")[1] for name in names(manifest) if name.startswith("blk.")} == {"1", "2"}
    assert [name for name in names(manifest) if not name.startswith("blk.")] == ["rope_freqs.weight"]
    assert (manifest.first, manifest.last, manifest.num_layers) == (False, False, 4)
    model.close()


@given(cuts=st.sets(st.integers(1, 3), max_size=3))
def test_stages_together_hold_the_whole_file(cuts, data_folder):
    """However the blocks are cut: every tensor once, but for shared rope tensors and a tied table."""
    for file in ("llama-ropefreqs", "llama-tied"):
        path = data_folder / "tiny" / f"{file}.gguf"
        model = GgufModel(str(path))
        bounds = [0, *sorted(cuts), 4]
        stages = [model.manifest(a, b) for a, b in pairwise(bounds)]
        held = [name for stage in stages for name in names(stage)]
        assert set(held) == set(model.index.tensors)
        shared = {"rope_freqs.weight": len(stages), "token_embd.weight": 2 if len(stages) > 1 else 1}
        for name in set(held):
            once = file != "llama-tied" and name == "token_embd.weight"
            assert held.count(name) == (1 if once else shared.get(name, 1))
        model.close()


def test_tensor_refs_point_at_the_bytes(data_folder):
    path = data_folder / "tiny" / "llama-gqa.gguf"
    model = GgufModel(str(path))
    content = path.read_bytes()
    for tensor in model.manifest(0, 4).tensors:
        assert tensor.path == str(path)
        values = struct.unpack_from(f"<{tensor.nbytes // 4}f", content, tensor.offset)
        assert all(abs(value) < 100 for value in values)
        assert any(values)
    model.close()


def test_facts_are_those_of_the_tensors(data_folder):
    model = GgufModel(str(data_folder / "tiny" / "llama-gqa.gguf"))
    facts, whole = model.facts, model.manifest(0, 4)
    assert sum(facts.layer_bytes) + facts.embedding_bytes + facts.head_bytes == sum(
        tensor.nbytes for tensor in whole.tensors
    )
    assert whole.vocab_size == facts.vocab_size == 160
    assert whole.token_count == 0
    model.close()


@pytest.mark.parametrize("layers", [(0, 0), (1, 1), (2, 1), (-1, 1), (0, 3), (2, 3)])
def test_a_range_outside_the_file(model_of, layers):
    with pytest.raises(ModelError, match="no layers") as caught:
        model_of().manifest(*layers)
    assert f"[{layers[0]}, {layers[1]})" in caught.value.message


def test_an_unknown_type_fails_only_the_stage_that_needs_it(model_of):
    model = model_of(names=[BASE[0], BASE[1], ("blk.1.attn_q.weight", (8, 16), 42), BASE[3]])
    assert model.facts.type_names == ("F32", "Q2_0")
    assert model.facts.layer_bytes == (256, 512)
    assert "blk.0.attn_q.weight" in names(model.manifest(0, 1))
    with pytest.raises(ModelError, match=r"'blk\.1\.attn_q\.weight' has type Q2_0"):
        model.manifest(1, 2)


def absent(*keys):
    return {"keys": dict.fromkeys(keys)}


def broken_models(raw):
    """name -> (changes, call, words)."""
    facts = lambda model: model.facts  # noqa: E731 - two calls, named once
    first, last = (lambda model: model.manifest(0, 1)), (lambda model: model.manifest(1, 2))
    no_architecture = raw.text("general.architecture", "LLAMA x")
    kv = raw.numbers("llama.attention.head_count_kv", 5, "i", [1])
    return {
        "architecture absent": (absent("general.architecture"), facts, "'general.architecture' is missing"),
        "architecture odd": ({"keys": {"general.architecture": no_architecture}}, facts, "'LLAMA x'"),
        "block count absent": (absent("llama.block_count"), facts, "'llama.block_count' is missing"),
        "block count 0": ({"keys": {"llama.block_count": raw.u32("llama.block_count", 0)}}, facts, "is 0"),
        "block count huge": (
            {"keys": {"llama.block_count": raw.u32("llama.block_count", 1 << 31)}},
            facts,
            "not in 1 to 1024",
        ),
        "block without tensor": (
            {"keys": {"llama.block_count": raw.u32("llama.block_count", 3)}},
            facts,
            "block 2 of 3 has no tensor",
        ),
        "block behind the last": (
            {"keys": {"llama.block_count": raw.u32("llama.block_count", 1)}},
            facts,
            "' belongs to a block behind the last of 1",
        ),
        "context absent": (absent("llama.context_length"), facts, "'llama.context_length' is missing"),
        "heads absent": (absent("llama.attention.head_count"), facts, "head_count' is missing"),
        "heads of some layers": ({"keys": {"kv": kv}}, facts, "1 elements for 2 layers"),
        "width differs": (
            {"keys": {"llama.embedding_length": raw.u32("llama.embedding_length", 16)}},
            facts,
            "embedding length is 16",
        ),
        "embedding absent": ({"names": BASE[1:]}, first, "'token_embd.weight' is missing"),
        "norm absent": ({"names": BASE[:3]}, last, "'output_norm.weight' is missing"),
        "tokens mistyped": (
            {"keys": {"t": raw.numbers("tokenizer.ggml.tokens", 5, "i", [1])}},
            facts,
            "'tokenizer.ggml.tokens' is an array of INT32",
        ),
        "text not UTF-8": ({"keys": {"t": raw.text("x.y", b"\xc3")}}, facts, "'x.y' is not valid UTF-8"),
    }


BROKEN = [
    "architecture absent",
    "architecture odd",
    "block count absent",
    "block count 0",
    "block count huge",
    "block without tensor",
    "block behind the last",
    "context absent",
    "heads absent",
    "heads of some layers",
    "width differs",
    "embedding absent",
    "norm absent",
    "tokens mistyped",
    "text not UTF-8",
]


def test_every_broken_model_is_run(raw):
    assert list(broken_models(raw)) == BROKEN


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_opens_and_is_refused_where_it_is_used(model_of, raw, name):
    changes, call, words = broken_models(raw)[name]
    model = model_of(**changes)
    with pytest.raises(ModelError) as caught:
        call(model)
    assert words in caught.value.message
    assert caught.value.hint


def test_a_file_without_vocabulary_has_no_tokenizer(model_of):
    with pytest.raises(ModelError, match="no vocabulary"):
        model_of().tokenizer()


def test_the_tokenizer_is_built_once(demo_path):
    model = GgufModel(demo_path)
    assert model.tokenizer() is model.tokenizer()
    model.close()


@pytest.mark.parametrize(
    ("name", "words", "remedy"),
    [
        ("LLaMA", "'LLaMA', and architectures are written in small letters", "should have written 'llama'"),
        ("LLAMA x", "'LLAMA x', which no architecture is called", "whatever wrote the file"),
        ("", "'', which no architecture is called", "whatever wrote the file"),
    ],
)
def test_an_architecture_that_is_written_wrongly_is_no_damage(model_of, raw, name, words, remedy):
    model = model_of(keys={"general.architecture": raw.text("general.architecture", name)})
    with pytest.raises(ModelError) as caught:
        model.facts  # noqa: B018 - asked for what it raises
    assert words in caught.value.message
    assert remedy in caught.value.hint
    assert "another conversion" in caught.value.hint


def test_a_value_that_cannot_be_is_laid_to_whoever_wrote_it(model_of, raw):
    model = model_of(keys={"llama.block_count": raw.u32("llama.block_count", 0)})
    with pytest.raises(ModelError, match="is 0, not in 1 to 1024") as caught:
        model.facts  # noqa: B018 - asked for what it raises
    assert "another conversion" in caught.value.hint
    assert "not a GGUF" not in caught.value.hint
