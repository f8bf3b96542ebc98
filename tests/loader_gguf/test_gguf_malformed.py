# ruff: noqa: E501 - the table of malformed files reads best a line each
"""index.py on handcrafted malformed files: the cases of llama.cpp's test-gguf.cpp and of its bug reports."""

from __future__ import annotations

import os
import struct

import pytest
from swactor_core.errors import ModelError
from swactor_loader_gguf.index import GgufIndex
from swactor_loader_gguf.model import GgufModel

HUGE = (1 << 64) - 1


def file_cases(raw):
    """name -> (bytes, words of the error)."""
    architecture = raw.text("general.architecture", "llama")
    one = raw.tensor("a", (8,), 0, 0)

    def with_tensors(*rows, keys=(), data=bytes(64), **more):
        return raw.file(list(keys), list(rows), data, **more)

    def alignment(value):
        return with_tensors(one, keys=[raw.u32("general.alignment", value)])

    return {
        # the header
        "magic": (raw.file([], magic=b"FUGG"), "magic is b'FUGG'"),
        "empty": (b"", "empty"),
        "magic only": (b"GGUF", "version needs 4 bytes and the file has 0 left"),
        "version 0": (raw.file([], version=0), "version is 0"),
        "version 1": (raw.file([], version=1), "version is 1"),
        "version future": (raw.file([], version=4), "version is 4"),
        "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        "tensor count": (raw.file([], n_tensors=HUGE), f"tensor count is {HUGE}"),
        "tensor count beyond bytes": (raw.file([], n_tensors=1000), "need at least 33000 bytes"),
        "key count": (raw.file([], n_keys=HUGE), f"metadata count is {HUGE}"),
        "key count beyond bytes": (raw.file([], n_keys=1000), "need at least 14000 bytes"),
        # metadata
        "key size": (raw.file([struct.pack("<Q", HUGE) + b"x" * 40]), "metadata key 0 is"),
        "key longer than file": (raw.file([struct.pack("<Q", 1000) + b"x" * 40]), "needs 1000 bytes"),
        "key empty": (raw.file([raw.u32("", 1), architecture]), "metadata key 0 is 0 bytes long"),
        "key not UTF-8": (raw.file([raw.key_value(b"\xff\xfe", 4, bytes(4))]), "not valid UTF-8"),
        "value type": (raw.file([raw.key_value("k", 13, bytes(8))]), "unknown value type 13"),
        "value type huge": (raw.file([raw.key_value("k", 0xFFFFFFFF, bytes(8))]), "unknown value type"),
        "value cut": (raw.file([raw.key_value("key", 10, bytes(4))]), "needs 8 bytes"),
        "bool of 2": (raw.file([raw.key_value("key", 7, b"\x02")]), "bool of value 2"),
        "string size": (raw.file([raw.key_value("k", 8, struct.pack("<Q", HUGE))]), "and the file has 0 left"),
        "array type": (raw.file([raw.array("k", 13, 1, bytes(8))]), "unknown value type 13"),
        "array of arrays": (raw.file([raw.array("k", 9, 1, bytes(16))]), "array of arrays"),
        "array count": (raw.file([raw.array("k", 0, HUGE, bytes(8))]), f"needs {HUGE} bytes"),
        "array bytes wrap": (raw.file([raw.array("k", 10, 1 << 61, bytes(8))]), f"needs {1 << 64} bytes"),
        "strings count": (raw.file([raw.array("k", 8, HUGE, bytes(8))]), f"claims {HUGE} strings"),
        "strings count plausible": (raw.file([raw.array("k", 8, 2, raw.string("abcdefgh"))]), "inside the length of string 1"),
        "string in array": (raw.file([raw.array("k", 8, 1, struct.pack("<Q", HUGE))]), "string 0 of 'k' is longer"),
        "key twice": (raw.file([architecture, architecture]), "'general.architecture' occurs twice"),
        "alignment 0": (alignment(0), "general.alignment is 0"),
        "alignment 13": (alignment(13), "general.alignment is 13"),
        "alignment 2^21": (alignment(1 << 21), "not a power of two up to 1048576"),
        "alignment type": (with_tensors(one, keys=[raw.key_value("general.alignment", 5, struct.pack("<i", 32))]), "not a 32-bit unsigned"),
        "alignment array": (with_tensors(one, keys=[raw.numbers("general.alignment", 4, "I", [32])]), "not a 32-bit unsigned"),
        # the tensor table
        "name size": (with_tensors(raw.tensor("x" * 64, (8,), 0, 0)), "name of tensor 0 is 64 bytes long"),
        "name empty": (with_tensors(raw.tensor("", (8,), 0, 0)), "name of tensor 0 is 0 bytes long"),
        "name huge": (with_tensors(struct.pack("<Q", HUGE) + bytes(40)), "name of tensor 0 is"),
        "name not UTF-8": (with_tensors(raw.tensor(b"\xff", (8,), 0, 0)), "name of tensor 0 is not valid UTF-8"),
        "name twice": (with_tensors(one, one), "tensor 'a' occurs twice"),
        "5 dimensions": (with_tensors(raw.tensor("a", (1,) * 5, 0, 0)), "has 5 dimensions"),
        "0 dimensions": (with_tensors(raw.tensor("a", (), 0, 0)), "has 0 dimensions"),
        "2^32-1 dimensions": (with_tensors(raw.string("a") + struct.pack("<I", 0xFFFFFFFF) + bytes(40)), "dimensions"),
        "dimension 0": (with_tensors(raw.tensor("a", (8, 0), 0, 0)), "not positive"),
        "dimension negative": (with_tensors(raw.tensor("a", (HUGE,), 0, 0)), "not positive"),
        "element count wraps": (with_tensors(raw.tensor("a", (1 << 32, 1 << 32, 4), 0, 0)), "ends at byte"),
        "byte count wraps": (with_tensors(raw.tensor("a", (1 << 62,), 0, 0)), "ends at byte"),
        "padding wraps": (with_tensors(raw.tensor("a", ((1 << 62) - 1,), 0, 0)), "ends at byte"),
        "row not of blocks": (with_tensors(raw.tensor("a", (48, 2), 2, 0)), "is Q4_0 and its rows of 48"),
        "offset unaligned": (with_tensors(raw.tensor("a", (8,), 0, 8)), "offset 8 of 'a' is not a multiple of 32"),
        "offset far": (with_tensors(raw.tensor("a", (8,), 0, 64)), "ends at byte"),
        "offset huge": (with_tensors(raw.tensor("a", (8,), 0, HUGE - 31)), "ends at byte"),
        "unknown type beyond file": (with_tensors(raw.tensor("a", (8,), 42, 64)), "Q2_0"),
        "overlap": (with_tensors(raw.tensor("a", (16,), 0, 0), raw.tensor("b", (8,), 0, 32)), "'a' and 'b' overlap"),
        "same place": (with_tensors(one, raw.tensor("b", (8,), 0, 0)), "overlap"),
        "unknown types at one place": (with_tensors(raw.tensor("a", (8,), 42, 0), raw.tensor("b", (8,), 42, 0)), "overlap"),
        "offset not of this alignment": (with_tensors(raw.tensor("a", (8,), 0, 32), keys=[raw.u32("general.alignment", 64)], data=bytes(256)), "not a multiple of 64"),
        "not enough data": (with_tensors(one, data=bytes(31)), "ends at byte"),
        "no data": (with_tensors(one, data=b""), "ends at byte"),
    }  # fmt: skip


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        # names only: the files are built by the fixture's builders
        metafunc.parametrize("case", CASE_NAMES)


CASE_NAMES = """magic|empty|magic only|version 0|version 1|version future|big-endian|tensor count
tensor count beyond bytes|key count|key count beyond bytes|key size|key longer than file|key empty|key not UTF-8
value type|value type huge|value cut|bool of 2|string size|array type|array of arrays|array count
array bytes wrap|strings count|strings count plausible|string in array|key twice|alignment 0|alignment 13
alignment 2^21|alignment type|alignment array|name size|name empty|name huge|name not UTF-8|name twice
5 dimensions|0 dimensions|2^32-1 dimensions|dimension 0|dimension negative|element count wraps
byte count wraps|padding wraps|row not of blocks|offset unaligned|offset far|offset huge
unknown type beyond file|overlap|same place|unknown types at one place|offset not of this alignment
not enough data|no data""".replace("\n", "|").split("|")


def test_every_case_is_run(raw):
    assert list(file_cases(raw)) == CASE_NAMES


def test_a_malformed_file_is_refused_with_field_offset_and_hint(case, raw, tmp_path):
    content, words = file_cases(raw)[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        GgufIndex(str(path))
    assert words in caught.value.message
    assert "(at byte " in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_the_file_that_is_broken_above_opens(raw, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(
        raw.file([raw.text("general.architecture", "llama")], [raw.tensor("a", (8,), 0, 0)], bytes(32))
    )
    assert GgufIndex(str(path)).tensors["a"].nbytes == 32


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("m.gguf.part1of2", True),
        ("m.gguf-split-a", True),
        ("m.gguf.part-b", True),
        ("m.gguf", False),
        ("m-part.gguf", False),
    ],
)
@pytest.mark.parametrize("half", [0, 1])
def test_a_piece_of_a_file_is_told_from_one_that_is_cut_short(raw, tmp_path, name, piece, half):
    whole = raw.small_model()
    (tmp_path / name).write_bytes((whole[:-40], whole[-40:])[half])
    with pytest.raises(ModelError) as caught:
        GgufIndex(str(tmp_path / name))
    assert ("join all pieces" in caught.value.hint) == piece


def test_truncation_at_every_byte(raw, tmp_path):
    """Any shorter file is refused; when only weights' padding is gone, still the same model."""
    whole = raw.small_model(keys={"words": raw.strings("words", ["a", "", "bc"])})
    path = tmp_path / "m.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            GgufIndex(str(path))
    path.write_bytes(whole)
    assert len(GgufIndex(str(path)).tensors) == 4


def test_a_failed_open_leaves_no_descriptor(raw, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file([], version=9))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(ModelError):
            GgufIndex(str(path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_named_pipe_is_refused_at_once(tmp_path):
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="not a regular file"):
        GgufIndex(str(pipe))


@pytest.mark.parametrize("name", ["absent.gguf", ".", "a\0b"])
def test_paths_that_are_no_file(tmp_path, name):
    with pytest.raises(ModelError):
        GgufModel(str(tmp_path / name))


def test_too_many_strings_are_refused_before_they_are_walked(raw, tmp_path, monkeypatch):
    monkeypatch.setattr("swactor_loader_gguf.index.MAX_STRINGS", 5)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file([raw.strings("a", ["x"] * 3), raw.strings("b", ["x"] * 3)]))
    with pytest.raises(ModelError, match="'b' has 3 strings, too many"):
        GgufIndex(str(path))
