"""pretokenizers.py against llama.cpp itself: what its `unicode_regex_split` gave over random texts
with each family's expressions (tests/data/tokenize/pre_tokenizers.json)."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from swactor_loader_gguf.pretokenizers import PRE_TOKENIZERS
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

VECTORS = json.loads((Path(__file__).parents[1] / "data/tokenize/pre_tokenizers.json").read_text("utf-8"))


def cuts(pre, text):
    steps = Sequence([Split(Regex(pattern), "isolated") for pattern in pre.patterns])
    return [piece for piece, _ in steps.pre_tokenize_str(text)]


def test_the_vectors_name_every_pre_tokenizer_once():
    named = [name for family in VECTORS["families"] for name in family["names"]]
    assert sorted(named) == sorted(PRE_TOKENIZERS)
    assert len(VECTORS["texts"]) > 100


@pytest.mark.parametrize("family", VECTORS["families"], ids=lambda family: family["names"][0])
def test_text_is_cut_as_llama_cpp_cuts_it(family):
    for pre in {PRE_TOKENIZERS[name] for name in family["names"]}:
        for text, lengths in zip(VECTORS["texts"], family["lengths"], strict=True):
            bounds = [0, *accumulate(lengths)]
            assert cuts(pre, text) == [text[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize("family", VECTORS["families"], ids=lambda family: family["names"][0])
@pytest.mark.parametrize("unit", ["a", "é", " ", "1", "\u0301", "x1 "])
def test_long_runs_are_cut_without_loss(family, unit):
    """An expression that backtracks without bound would stop here."""
    text = unit * 3000
    assert "".join(cuts(PRE_TOKENIZERS[family["names"][0]], text)) == text
