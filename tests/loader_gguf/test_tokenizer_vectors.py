"""Whole vocabularies against the vectors that llama.cpp tests itself with (scripts/fetch_vocab_vectors)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.errors import ModelError, UsageError
from swactor_loader_gguf.index import GgufIndex
from swactor_loader_gguf.tokenizer import GgufTokenizer

DECODERS = {
    "command-r": 47,
    "deepseek-coder": 47,
    "deepseek-llm": 47,
    "falcon": 47,
    "gemma-4": 46,
    "gpt-2": 47,
    "llama-bpe": 47,
    "llama-spm": 47,
    "mpt": 47,
    "phi-3": 47,
    "qwen2": 47,
    "qwen35": 51,
    "refact": 47,
    "starcoder": 47,
}
WITHOUT_VECTORS = {"aquila", "baichuan", "gpt-neox"}
ENCODERS = {"bert-bge": "WordPiece", "nomic-bert-moe": "encoder-decoder"}
SEPARATOR = "\n__ggml_vocab_test__\n"
ODD = json.loads((Path(__file__).parents[1] / "data/tokenize/odd_texts.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def vocabulary(vectors_folder):
    """Tokenizers by vocabulary name, each loaded once."""
    held = {}

    def load(name, pre=None):
        if (name, pre) not in held:
            index = GgufIndex(str(vectors_folder / f"ggml-vocab-{name}.gguf"))
            try:
                held[name, pre] = GgufTokenizer(index, pre=pre)
            finally:
                index.close()
        return held[name, pre]

    return load


def decoded(tokenizer, ids):
    stream = tokenizer.stream()
    return "".join(map(stream.push, ids)) + stream.finish()


def test_every_vocabulary_of_the_source_distribution_is_accounted_for(vectors_folder):
    found = {path.name.removeprefix("ggml-vocab-") for path in vectors_folder.glob("ggml-vocab-*.gguf")}
    assert {name.removesuffix(".gguf") for name in found} == {*DECODERS, *WITHOUT_VECTORS, *ENCODERS}


@pytest.mark.parametrize("name", DECODERS)
def test_ids_are_those_of_llama_cpps_vectors(vectors_folder, vocabulary, name):
    file = vectors_folder / f"ggml-vocab-{name}.gguf"
    texts = file.with_name(file.name + ".inp").read_bytes().decode("utf-8").split(SEPARATOR)
    lines = file.with_name(file.name + ".out").read_text("utf-8").split("\n")
    expected = [[int(number) for number in line.split()] for line in lines[: len(texts)]]
    assert len(texts) == DECODERS[name]
    tokenizer = vocabulary(name)
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text) == ids, repr(text)


@pytest.mark.parametrize("name", ODD["ids"])
def test_ids_of_odd_texts_are_those_that_llama_cpp_gave(vocabulary, name):
    tokenizer = vocabulary(name)
    for text, ids in zip(ODD["texts"], ODD["ids"][name], strict=True):
        assert tokenizer.encode(text) == ids, repr(text)


@pytest.mark.parametrize("name", [*DECODERS, "baichuan"])
def test_text_comes_back_out_of_its_ids(vocabulary, name):
    tokenizer = vocabulary(name)
    text = "Grüße 123 — 中文 🎉 x = {a[1]}\n\n\tl'été <|im_start|> <s> </s> <0x41> é"
    back = decoded(tokenizer, tokenizer.encode(text))
    assert back.removeprefix(" ") == text


@pytest.mark.parametrize("name", ["llama-spm", "gemma-4", "qwen2", "deepseek-llm"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_comes_back(vocabulary, name, text):
    tokenizer = vocabulary(name)
    back = decoded(tokenizer, tokenizer.encode(text))
    # Tokens of the vocabulary's own text forms cannot be told from what they stand for.
    expected = text.replace("▁", " ") if name in ("llama-spm", "gemma-4") else text
    assert back.removeprefix(" " if name == "llama-spm" else "") == expected


@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "llama-bpe", "gemma-4", "qwen2", "mpt", "command-r"])
def test_the_text_of_a_control_token_makes_none(vocabulary, name):
    tokenizer = vocabulary(name)
    vocab = tokenizer._vocabulary
    controls = [number for number, kind in enumerate(vocab.types) if kind in (2, 3)]
    assert controls
    for number in controls[:300]:
        text = vocab.texts[number]
        assert tokenizer.encode(text, special=True)[-1] == number
        for around in (text, f"a{text}b", f" {text}\n", f"\n{text}"):
            assert not set(tokenizer.encode(around)) & set(controls), around


def test_what_ends_a_generation(vocabulary):
    def ends(name):
        tokenizer = vocabulary(name)
        return {tokenizer._vocabulary.texts[number] for number in tokenizer.end_of_generation}

    assert ends("llama-bpe") == {"<|end_of_text|>", "<|eot_id|>"}
    assert ends("gemma-4") == {"<eos>", "<turn|>", "<|tool_response>"}
    assert ends("phi-3") == {"<|endoftext|>", "<|end|>", "</s>"}
    assert ends("qwen2") == {"<|endoftext|>", "<|im_end|>"}
    assert ends("refact") == {"<|endoftext|>", "<fim_pad>", "<reponame>"}
    assert ends("llama-spm") == ends("baichuan") == {"</s>"}


def test_prompts_begin_with_bos_where_the_file_asks_for_it(vocabulary):
    assert vocabulary("llama-spm").prompt_ids("Hello") == [1, 15043]
    assert vocabulary("llama-spm").prompt_ids("") == [1]
    assert vocabulary("gemma-4").prompt_ids("x")[0] == 2
    assert vocabulary("qwen2").prompt_ids("Hello") == [9707]


@pytest.mark.parametrize("name", ENCODERS)
def test_vocabularies_of_encoders_are_refused_with_the_reason(vocabulary, name):
    with pytest.raises(ModelError, match=ENCODERS[name]) as caught:
        vocabulary(name)
    assert "gpt2, llama, gemma4" in caught.value.hint


@pytest.mark.parametrize("name", ["aquila", "gpt-neox"])
def test_a_file_without_pre_tokenizer_needs_one_named(vocabulary, name):
    with pytest.raises(ModelError, match="names no pre-tokenizer") as caught:
        vocabulary(name)
    assert "--pre" in caught.value.hint
    tokenizer = vocabulary(name, pre="gpt-2")
    assert decoded(tokenizer, tokenizer.encode("Hello  wörld 42\n")) == "Hello  wörld 42\n"


def test_a_pre_tokenizer_that_does_not_exist(vocabulary):
    with pytest.raises(UsageError, match="no pre-tokenizer 'nonsense'") as caught:
        vocabulary("gpt-2", pre="nonsense")
    assert "llama-bpe" in caught.value.hint
    with pytest.raises(UsageError, match="kind llama have none"):
        vocabulary("llama-spm", pre="gpt-2")


def test_a_named_pre_tokenizer_overrules_the_files(vocabulary):
    assert vocabulary("gpt-2", pre="llama-bpe").encode("2024") != vocabulary("gpt-2").encode("2024")


def test_a_large_vocabulary_loads_fast(vectors_folder):
    """About one second of processor time for a quarter of a million tokens; a slower machine has five."""
    started = time.process_time()
    index = GgufIndex(str(vectors_folder / "ggml-vocab-gemma-4.gguf"))
    GgufTokenizer(index)
    index.close()
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize("name", ["llama-spm", "gemma-4", "deepseek-llm"])
def test_a_hundred_thousand_characters_are_encoded_fast(vocabulary, name):
    text = "The quick brown fox 123 jumps över den lata hunden, 中文字符 and so on.\n" * 1450
    tokenizer = vocabulary(name)
    started = time.process_time()
    ids = tokenizer.encode(text)
    assert time.process_time() - started < 5.0
    assert decoded(tokenizer, ids).removeprefix(" ") == text
