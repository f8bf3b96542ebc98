"""tokenizer.py on small handmade vocabularies: cuts, control tokens, BOS, end of generation, refusals."""

from __future__ import annotations

import pytest
from swactor_core.errors import ModelError, UsageError
from swactor_loader_gguf.index import GgufIndex
from swactor_loader_gguf.stream import byte_alphabet
from swactor_loader_gguf.tokenizer import GgufTokenizer

BYTES = [character for character, _ in sorted(byte_alphabet().items(), key=lambda pair: pair[1])]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CHAT = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>{% endfor %}<s>assistant:"


@pytest.fixture
def tokenizer_of(raw, tmp_path):
    def build(*, extra=(), merges=(), pre="gpt-2", kind="gpt2", keys=(), types=None):
        """All bytes (id = byte), then `extra` as (text, type), then the results of `merges`."""
        results = [merge.replace(" ", "", 1) if merge[0] != " " else merge for merge in merges]
        texts = [*BYTES, *(text for text, _ in extra), *results]
        kinds = [NORMAL] * 256 + [kind_ for _, kind_ in extra] + [NORMAL] * len(results)
        path = tmp_path / "vocabulary.gguf"
        content = [
            raw.text("tokenizer.ggml.model", kind),
            raw.strings("tokenizer.ggml.tokens", texts),
            raw.numbers("tokenizer.ggml.token_type", 5, "i", kinds if types is None else types),
            raw.strings("tokenizer.ggml.merges", list(merges)),
            *([raw.text("tokenizer.ggml.pre", pre)] if pre else []),
            *keys,
        ]
        path.write_bytes(raw.file(content))
        index = GgufIndex(str(path))
        tokenizer = GgufTokenizer(index)
        index.close()
        return tokenizer

    return build


def pieces(tokenizer, text):
    """The printed text of each token."""
    return [
        tokenizer.stream()._pieces[number].decode("utf-8", "replace") for number in tokenizer.encode(text)
    ]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", "5", "6", "78"]),
        ("smollm", ["1", "2", "3", "4", "5", "6", "7", "8"]),
        ("qwen2", ["1", "2", "3", "4", "5", "6", "7", "8"]),
        ("llama-bpe", ["123", "456", "78"]),
        ("llama3", ["123", "456", "78"]),
        ("llama-v3", ["123", "456", "78"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(tokenizer_of, pre, expected):
    tokenizer = tokenizer_of(pre=pre, merges=["1 2", "12 3", "123 4", "4 5", "45 6", "7 8"])
    assert pieces(tokenizer, "12345678") == expected


@pytest.mark.parametrize(
    ("pre", "whole"), [("gpt-2", False), ("smollm", False), ("qwen2", True), ("llama-bpe", True)]
)
def test_upper_case_contractions(tokenizer_of, pre, whole):
    tokenizer = tokenizer_of(pre=pre, merges=["' L", "'L L"])
    assert ("'LL" in pieces(tokenizer, "WE'LL")) is whole


@pytest.mark.parametrize(("pre", "whole"), [("gpt-2", False), ("qwen2", True), ("llama-bpe", True)])
def test_punctuation_takes_newlines_along(tokenizer_of, pre, whole):
    tokenizer = tokenizer_of(pre=pre, merges=["! Ċ", "!Ċ Ċ"])
    assert ("!\n\n" in pieces(tokenizer, "x!\n\n")) is whole


@pytest.mark.parametrize(("pre", "whole"), [("gpt-2", False), ("qwen2", False), ("llama-bpe", True)])
def test_a_piece_that_is_a_token_needs_no_merge_only_where_llama_cpp_says(tokenizer_of, pre, whole):
    tokenizer = tokenizer_of(pre=pre, extra=[("xyz", NORMAL)])
    assert pieces(tokenizer, "xyz") == (["xyz"] if whole else ["x", "y", "z"])


def test_merges_apply_in_the_files_order(tokenizer_of):
    assert pieces(tokenizer_of(merges=["b c", "a b"]), "abc") == ["a", "bc"]
    assert pieces(tokenizer_of(merges=["a b", "b c"]), "abc") == ["ab", "c"]


def test_a_merge_is_cut_at_the_first_space_after_its_first_character(tokenizer_of):
    tokenizer = tokenizer_of(extra=[(" ", NORMAL), (" x", NORMAL)], merges=["  x"])
    assert tokenizer.encode("x") == [ord("x")]


SPECIALS = [
    ("<s>", CONTROL),
    ("<e>", CONTROL),
    ("<tool>", USER_DEFINED),
    ("<unk>", UNKNOWN),
    ("<e>>", CONTROL),
]
S, E, TOOL, UNK, LONG = range(256, 261)


def test_control_tokens_only_where_they_are_asked_for(tokenizer_of):
    tokenizer = tokenizer_of(extra=SPECIALS)
    assert tokenizer.encode("a<s>b", special=True) == [ord("a"), S, ord("b")]
    assert tokenizer.encode("a<s>b") == list(b"a<s>b")
    assert tokenizer.encode("<unk>", special=True) == [UNK]
    assert tokenizer.encode("<unk>") == list(b"<unk>")


def test_user_defined_tokens_always(tokenizer_of):
    tokenizer = tokenizer_of(extra=SPECIALS)
    assert tokenizer.encode("<tool><tool>x") == [TOOL, TOOL, ord("x")]
    assert tokenizer.prompt_ids("<tool>") == [TOOL]


def test_longer_tokens_are_matched_first(tokenizer_of):
    tokenizer = tokenizer_of(extra=SPECIALS)
    assert tokenizer.encode("<e>>", special=True) == [LONG]
    assert tokenizer.encode("<e><e>>", special=True) == [E, LONG]


def test_text_between_control_tokens_is_cut_there(tokenizer_of):
    tokenizer = tokenizer_of(extra=SPECIALS, merges=["a b"])
    assert tokenizer.encode("a<s>b", special=True) == [ord("a"), S, ord("b")]
    assert tokenizer.encode("ab<s>ab", special=True) == [261, S, 261]


def chat(raw, template=CHAT):
    return raw.text("tokenizer.chat_template", template)


def test_chat_ids_trust_the_template_and_not_the_contents(tokenizer_of, raw):
    tokenizer = tokenizer_of(extra=SPECIALS, keys=[chat(raw)])
    assert tokenizer.has_chat_template
    ids = tokenizer.chat_ids([{"role": "user", "content": "<e><tool>"}])
    assert ids == [S, *b"user:<e>", TOOL, E, S, *b"assistant:"]


def test_chat_text_merges_across_the_contents_border(tokenizer_of, raw):
    """As llama.cpp, which sees one text: `:` and `x` are one token although one is the template's."""
    tokenizer = tokenizer_of(extra=SPECIALS, merges=[": :"], keys=[chat(raw)])
    ids = tokenizer.chat_ids([{"role": "user", "content": ":"}])
    assert ids == [S, *b"user", 261, E, S, *b"assistant:"]


def test_a_content_that_completes_a_control_token_of_the_template_does_not_make_one(tokenizer_of, raw):
    tokenizer = tokenizer_of(extra=SPECIALS, keys=[chat(raw, "{{ messages[0].content }}s>")])
    assert tokenizer.chat_ids([{"role": "user", "content": "<"}]) == list(b"<s>")


def test_no_chat_template(tokenizer_of):
    tokenizer = tokenizer_of()
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.chat_ids([{"role": "user", "content": "x"}])


def number(raw, name, value):
    return raw.u32(f"tokenizer.ggml.{name}", value)


def flag(raw, value):
    return raw.key_value("tokenizer.ggml.add_bos_token", 7, bytes([value]))


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
    ],
)
def test_bos_where_the_file_or_the_family_asks_for_it(tokenizer_of, raw, pre, add_bos, expected):
    keys = [number(raw, "bos_token_id", S)] + ([] if add_bos is None else [flag(raw, add_bos)])
    tokenizer = tokenizer_of(extra=SPECIALS, pre=pre, keys=keys)
    assert tokenizer.prompt_ids("x") == ([S] if expected else []) + [ord("x")]
    assert tokenizer.encode("x") == [ord("x")]
    assert tokenizer.prompt_ids("") == ([S] if expected else [])


def test_a_template_that_writes_bos_gets_no_second_one(tokenizer_of, raw):
    keys = [
        number(raw, "bos_token_id", S),
        flag(raw, True),
        chat(raw, "{{ bos_token }}x{{ messages[0].content }}"),
    ]
    tokenizer = tokenizer_of(extra=SPECIALS, keys=keys)
    assert tokenizer.chat_ids([{"role": "user", "content": "y"}]) == [S, *b"xy"]
    keys[-1] = chat(raw, "x{{ messages[0].content }}{{ eos_token }}")
    tokenizer = tokenizer_of(extra=SPECIALS, keys=[*keys, number(raw, "eos_token_id", E)])
    assert tokenizer.chat_ids([{"role": "user", "content": "y"}]) == [S, *b"xy", E]


@pytest.mark.parametrize("value", [261, 1 << 31, (1 << 32) - 1])
def test_special_ids_outside_the_vocabulary_are_ignored(tokenizer_of, raw, value):
    names = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")
    tokenizer = tokenizer_of(
        extra=SPECIALS, keys=[flag(raw, True), *(number(raw, name, value) for name in names)]
    )
    assert tokenizer.end_of_generation == frozenset()
    assert tokenizer.prompt_ids("x") == [ord("x")]


def test_negative_special_ids_are_ignored(tokenizer_of, raw):
    key = raw.key_value("tokenizer.ggml.eos_token_id", 5, b"\xff\xff\xff\xff")
    assert tokenizer_of(keys=[key]).end_of_generation == frozenset()


def test_end_of_generation_is_a_set_of_keys_and_texts(tokenizer_of, raw):
    extra = [("<a>", CONTROL), ("<b>", CONTROL), ("<c>", CONTROL), ("<|im_end|>", CONTROL), ("</s>", NORMAL)]
    keys = [
        number(raw, name, 256 + i) for i, name in enumerate(("eos_token_id", "eot_token_id", "eom_token_id"))
    ]
    assert tokenizer_of(extra=extra, keys=keys).end_of_generation == {256, 257, 258, 259}
    extra[-1] = ("</s>", CONTROL)
    assert tokenizer_of(extra=extra, keys=keys).end_of_generation == {256, 257, 258, 259, 260}


def test_an_end_token_of_the_wrong_type_is_still_a_control_token(tokenizer_of):
    tokenizer = tokenizer_of(extra=[("<|eot_id|>", NORMAL)])
    assert tokenizer.end_of_generation == {256}
    assert tokenizer.encode("<|eot_id|>", special=True) == [256]
    assert tokenizer.encode("<|eot_id|>") == list(b"<|eot_id|>")
    assert tokenizer.stream().push(256) == ""


@pytest.mark.parametrize(
    ("begin", "end", "control"),
    [(CONTROL, USER_DEFINED, True), (CONTROL, NORMAL, True), (NORMAL, CONTROL, True), (NORMAL, NORMAL, False),
     (USER_DEFINED, USER_DEFINED, False)],
)  # fmt: skip
def test_an_html_tag_ends_nothing_and_half_of_a_pair_of_control_tokens_does(
    tokenizer_of, begin, end, control
):
    tokenizer = tokenizer_of(extra=[("<s>", begin), ("</s>", end)])
    assert (257 in tokenizer.end_of_generation) is control
    assert (257 in tokenizer.encode("a</s>")) is (end == USER_DEFINED and not control)


@pytest.mark.parametrize("key", [None, "fim_mid_token_id", "middle_token_id"])
def test_tokens_of_code_completion_are_control_tokens_unless_a_key_names_others(tokenizer_of, raw, key):
    keys = [] if key is None else [raw.u32(f"tokenizer.ggml.{key}", 257)]
    tokenizer = tokenizer_of(extra=[("<fim_middle>", USER_DEFINED), ("<mid>", CONTROL)], keys=keys)
    assert (tokenizer.encode("<fim_middle>") == [256]) is (key is not None)
    assert tokenizer.encode("<fim_middle>", special=True) == [256]


def test_a_key_of_code_completion_that_points_at_ordinary_text_makes_no_control_token_of_it(
    tokenizer_of, raw
):
    tokenizer = tokenizer_of(keys=[raw.u32("tokenizer.ggml.fim_pad_token_id", ord("x"))])
    assert tokenizer.encode("x") == [ord("x")]
    assert ord("x") in tokenizer.end_of_generation
    assert tokenizer.stream().push(ord("x")) == "x"


def test_nothing_merges_across_a_character_that_the_vocabulary_lacks(raw, tmp_path):
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(
        raw.file(
            [
                raw.text("tokenizer.ggml.model", "gpt2"),
                raw.text("tokenizer.ggml.pre", "gpt-2"),
                raw.strings("tokenizer.ggml.tokens", ["a", "b", "ab"]),
                raw.strings("tokenizer.ggml.merges", ["a b"]),
            ]
        )
    )
    index = GgufIndex(str(path))
    tokenizer = GgufTokenizer(index)
    index.close()
    assert tokenizer.encode("ab") == [2]
    assert tokenizer.encode("axb") == [0, 1]
    assert tokenizer.encode("xyz") == []


def test_of_a_merge_that_stands_twice_the_first_rank_counts(tokenizer_of):
    assert pieces(tokenizer_of(merges=["x y", "y z", "x y"]), "xyz") == ["xy", "z"]


def test_what_each_type_of_token_prints(tokenizer_of):
    extra = [
        ("<s>", CONTROL),
        ("ü", USER_DEFINED),
        ("<unk>", UNKNOWN),
        ("Ġx", UNUSED),
        ("<0xE2>", BYTE),
        ("Ġy", NORMAL),
    ]
    stream = tokenizer_of(extra=extra).stream()
    assert [stream.push(256 + i) for i in (0, 1, 2, 3, 5)] == ["", "ü", "", "", " y"]
    assert [stream.push(260), stream.push(0x82), stream.push(0xAC)] == ["", "", "€"]


def test_files_without_token_types_have_normal_tokens_only(raw, tmp_path):
    path = tmp_path / "m.gguf"
    keys = [
        raw.text("tokenizer.ggml.model", "gpt2"),
        raw.text("tokenizer.ggml.pre", "gpt-2"),
        raw.strings("tokenizer.ggml.tokens", [*BYTES, "<s>"]),
        raw.strings("tokenizer.ggml.merges", []),
    ]
    path.write_bytes(raw.file(keys))
    tokenizer = GgufTokenizer(GgufIndex(str(path)))
    assert tokenizer.encode("<s>", special=True) == list(b"<s>")


def test_a_lone_surrogate_is_the_users_mistake(tokenizer_of):
    with pytest.raises(UsageError, match="lone surrogate at character 1"):
        tokenizer_of().encode("a\udc80")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "t5"}, "kind 't5' are not supported"),
        ({"kind": "bert"}, "kind 'bert' are not supported"),
        ({"kind": "neither"}, "kind 'neither' are not supported: it is not known"),
        ({"pre": "nonsense"}, "pre-tokenizer 'nonsense' is not supported"),
        ({"pre": ""}, "names no pre-tokenizer"),
        ({"types": [1, 1]}, "2 types for 256 tokens"),
    ],
)
def test_kinds_that_are_not_supported_are_named(tokenizer_of, changes, words):
    with pytest.raises(ModelError) as caught:
        tokenizer_of(**changes)
    assert words in caught.value.message
    assert "supported: " in caught.value.hint or "types" in words


@pytest.mark.parametrize(
    ("merge", "words"), [("ab", "'ab'"), ("a qq", "'a qq'"), ("a b", "'a b'"), (" ", "' '")]
)
def test_merges_that_make_no_token(raw, tmp_path, merge, words):
    path = tmp_path / "m.gguf"
    keys = [
        raw.text("tokenizer.ggml.model", "gpt2"),
        raw.text("tokenizer.ggml.pre", "gpt-2"),
        raw.strings("tokenizer.ggml.tokens", BYTES),
        raw.strings("tokenizer.ggml.merges", [merge]),
    ]
    path.write_bytes(raw.file(keys))
    with pytest.raises(ModelError, match="merge 0") as caught:
        GgufTokenizer(GgufIndex(str(path)))
    assert words in caught.value.message
    assert "(at byte " in caught.value.message


def test_a_token_that_is_not_utf8(raw, tmp_path):
    path = tmp_path / "m.gguf"
    keys = [
        raw.text("tokenizer.ggml.model", "gpt2"),
        raw.text("tokenizer.ggml.pre", "gpt-2"),
        raw.strings("tokenizer.ggml.tokens", ["a", b"\xff"]),
    ]
    path.write_bytes(raw.file(keys))
    with pytest.raises(ModelError, match="token 1 is not valid UTF-8"):
        GgufTokenizer(GgufIndex(str(path)))
