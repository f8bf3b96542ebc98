"""stream.py: bytes of tokens to whole characters."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from swactor_loader_gguf.stream import Utf8Stream, byte_alphabet


def test_the_alphabet_is_a_bijection_with_printable_characters():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert all(character.isprintable() and not character.isspace() for character in alphabet)
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"]) == (0x20, 0x0A, 0x41)


def test_the_alphabet_is_the_tokenizers_librarys():
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(ByteLevel.alphabet()) == set(byte_alphabet())


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=20))
def test_any_bytes_in_any_pieces_give_what_a_whole_decode_gives(data, cuts):
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    stream = Utf8Stream(pieces)
    assert "".join(map(stream.push, range(len(pieces)))) + stream.finish() == data.decode("utf-8", "replace")


@given(text=st.text(max_size=30))
def test_nothing_is_held_back_that_is_certain(text):
    """After every byte the text so far is the longest whole prefix."""
    data = text.encode("utf-8", "replace")
    stream = Utf8Stream([bytes([byte]) for byte in range(256)])
    so_far = ""
    for count, byte in enumerate(data, start=1):
        so_far += stream.push(byte)
        assert so_far == data[:count].decode("utf-8", "ignore")


def test_an_id_outside_the_vocabulary_prints_a_replacement_and_does_not_raise():
    stream = Utf8Stream([b"a", b"\xe2\x82"])
    assert stream.push(2) == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(-1) == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(1) == ""
    assert stream.push(9) == "\N{REPLACEMENT CHARACTER}" * 2
    assert stream.push(0) == "a"
    assert stream.finish() == ""


def test_finish_twice():
    stream = Utf8Stream([b"\xe2"])
    stream.push(0)
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""
