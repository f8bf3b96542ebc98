"""SPM vocabularies: merging against a plain quadratic reading of the rule, prefixes, bytes, unknown."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.errors import ModelError
from swactor_loader_gguf.index import GgufIndex
from swactor_loader_gguf.tokenizer import GgufTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
HEAD = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
BYTES = [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]


@pytest.fixture
def spm(raw, tmp_path):
    def build(tokens, *, keys=(), head=(*HEAD, *BYTES), scores=True):
        everything = [*head, *tokens]
        path = tmp_path / "spm.gguf"
        content = [
            raw.text("tokenizer.ggml.model", "llama"),
            raw.strings("tokenizer.ggml.tokens", [text for text, _, _ in everything]),
            raw.numbers("tokenizer.ggml.token_type", 5, "i", [kind for _, kind, _ in everything]),
            *keys,
        ]
        if scores:
            content.append(raw.numbers("tokenizer.ggml.scores", 6, "f", [s for _, _, s in everything]))
        path.write_bytes(raw.file(content))
        index = GgufIndex(str(path))
        tokenizer = GgufTokenizer(index)
        index.close()
        return tokenizer

    return build


def no_prefix(raw):
    return [raw.key_value("tokenizer.ggml.add_space_prefix", 7, b"\0")]


def texts(tokenizer, text):
    return [tokenizer._vocabulary.texts[number] for number in tokenizer.encode(text)]


def plainly(symbols, scores):
    """Join the best pair, the leftmost of equals, until none is a token."""
    symbols = list(symbols)
    while True:
        pairs = [
            (-scores[left + right], at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            return symbols
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


VOCABULARY = st.dictionaries(
    st.text("abc▁", min_size=1, max_size=5), st.sampled_from([-3.0, -2.0, -1.0, 0.0, 1.5]), max_size=25
)


@settings(max_examples=300, deadline=None)
@given(vocabulary=VOCABULARY, text=st.text("abc ", max_size=30))
def test_merging_is_the_plain_rule(vocabulary, text):
    from swactor_loader_gguf.merging import SpmMerger
    from swactor_loader_gguf.vocabulary import Vocabulary, VocabularyKind

    tokens = [*HEAD, *BYTES, *((text, NORMAL, score) for text, score in vocabulary.items())]
    held = Vocabulary(
        kind=VocabularyKind.SPM,
        pre=None,
        texts=[text for text, _, _ in tokens],
        types=[kind for _, kind, _ in tokens],
        ids={text: number for number, (text, _, _) in enumerate(tokens)},
        bos=1,
        eos=2,
        unknown=0,
        add_bos=True,
        add_eos=False,
        space_prefix=False,
        end_of_generation=frozenset(),
        printed=frozenset(),
        strips_right=frozenset(),
        suppressed=frozenset(),
    )
    expected = []
    for symbol in plainly(text.replace(" ", "▁"), vocabulary):
        if symbol in vocabulary:
            expected.append(held.ids[symbol])
        else:
            expected += [3 + byte for byte in symbol.encode()]
    assert SpmMerger(held, [score for _, _, score in tokens]).encode(text) == expected


def test_the_best_score_merges_first_and_the_leftmost_of_equals(spm, raw):
    tokens = [(c, NORMAL, -9.0) for c in "abc"] + [("ab", NORMAL, -2.0), ("bc", NORMAL, -1.0)]
    assert texts(spm(tokens, keys=no_prefix(raw)), "abc") == ["a", "bc"]
    tokens[-1] = ("bc", NORMAL, -2.0)
    assert texts(spm(tokens, keys=no_prefix(raw)), "abc") == ["ab", "c"]


def test_characters_need_not_be_tokens_to_be_joined(spm, raw):
    assert texts(spm([("ab", NORMAL, -1.0)], keys=no_prefix(raw)), "abx") == ["ab", "<0x78>"]


def test_without_scores_the_leftmost_pair_merges_first(spm, raw):
    tokens = [("ab", NORMAL, 0.0), ("bc", NORMAL, 0.0)]
    assert texts(spm(tokens, keys=no_prefix(raw), scores=False), "abc") == ["ab", "<0x63>"]


def test_a_space_goes_in_front_of_text_at_the_beginning_and_behind_special_tokens(spm, raw):
    tokens = [("▁a", NORMAL, -1.0), ("a", NORMAL, -2.0), ("<tool>", USER_DEFINED, 0.0)]
    assert texts(spm(tokens), "a<tool>a") == ["▁a", "<tool>", "▁a"]
    assert texts(spm(tokens, keys=no_prefix(raw)), "a<tool>a") == ["a", "<tool>", "a"]
    assert spm(tokens).encode("") == []
    assert texts(spm(tokens), "<tool>") == ["<tool>"]


def test_the_text_of_control_and_byte_tokens_stays_text(spm, raw):
    letters = [(c, NORMAL, -5.0) for c in "<s>/0x41unk"] + [("<s", NORMAL, -1.0), ("s>", NORMAL, -1.0)]
    tokenizer = spm(dict.fromkeys(letters), keys=no_prefix(raw))
    for text in ("<s>", "</s>", "<0x41>", "<unk>"):
        ids = tokenizer.encode(text)
        assert not set(ids) & set(range(3 + 256))
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) == text
    assert tokenizer.encode("<s>", special=True) == [1]


def test_a_byte_without_a_token_is_the_unknown_token(spm, raw):
    tokenizer = spm([("a", NORMAL, -1.0)], head=HEAD, keys=no_prefix(raw))
    assert tokenizer.encode("aéa") == [3, 0, 3]
    assert tokenizer.stream().push(0) == ""


def test_defaults_of_files_without_keys(spm):
    tokenizer = spm([("▁a", NORMAL, -1.0)])
    assert tokenizer.prompt_ids("a") == [1, 259]
    assert tokenizer.end_of_generation == {2}


def test_eos_behind_the_prompt_where_the_file_asks_for_it(spm, raw):
    keys = [raw.key_value("tokenizer.ggml.add_eos_token", 7, b"\1")]
    assert spm([("▁a", NORMAL, -1.0)], keys=keys).prompt_ids("a") == [1, 259, 2]


def test_what_tokens_print(spm):
    stream = spm([("▁a▁b", NORMAL, -1.0), ("▁▁", USER_DEFINED, 0.0)]).stream()
    assert [stream.push(number) for number in (1, 259, 260, 3 + 0xC3, 3 + 0xA9)] == [
        "",
        " a b",
        "▁▁",
        "",
        "é",
    ]


@pytest.mark.parametrize(
    ("scores", "words"), [([0.0], "1 scores for 260 tokens"), ([float("nan")] * 260, "not a number")]
)
def test_malformed_scores(spm, raw, scores, words):
    with pytest.raises(ModelError, match=words):
        spm(
            [("a", NORMAL, 0.0)],
            scores=False,
            keys=[raw.numbers("tokenizer.ggml.scores", 6, "f", scores)],
        )


def test_phi_3s_special_tokens_swallow_white_space(spm, raw):
    tokens = [("<|user|>", CONTROL, 0.0), ("▁a", NORMAL, -1.0)]
    named = [raw.text("general.name", "Phi-3-mini")]
    assert spm(tokens, keys=named).encode("<|user|> \n\na<s> a", special=True) == [
        259,
        260,
        1,
        3 + 0xE2,
        3 + 0x96,
        3 + 0x81,
        260,
    ]
    assert spm(tokens).encode("<|user|>\n", special=True)[-1] == 3 + 10


def test_tokens_that_the_file_suppresses(spm, raw):
    keys = [raw.numbers("tokenizer.ggml.suppress_tokens", 5, "i", [2, 259, 260, -1])]
    assert spm([("▁a", NORMAL, -1.0)], keys=keys).suppressed == {2, 259}
    assert spm([("▁a", NORMAL, -1.0)]).suppressed == frozenset()
