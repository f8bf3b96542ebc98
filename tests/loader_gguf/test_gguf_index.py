"""index.py against the gguf package: its writer makes the files, its reader is the oracle."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from swactor_core.errors import ModelError
from swactor_loader_gguf.ggml_types import TYPES, ggml_type, type_name
from swactor_loader_gguf.index import GgufIndex, ValueType


def assert_same_as_reader(path):
    """Every metadata value and every tensor row as gguf's own reader has them."""
    index, reader = GgufIndex(str(path)), GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert index.entries.keys() == fields.keys()
    for name, field in fields.items():
        entry = index.entries[name]
        expected = field.contents()
        if entry.is_array and entry.kind is ValueType.STRING:
            assert [raw.decode() for raw in index.strings(name)] == expected
        elif entry.is_array:
            assert list(index.numbers(entry)) == expected
        else:
            held = index.scalar(entry)
            assert held == expected
            assert isinstance(held, type(expected))
    assert list(index.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        row = index.tensors[tensor.name]
        assert row.ggml_type == tensor.tensor_type
        assert row.dims == tuple(tensor.shape)
        assert row.offset == tensor.data_offset
        assert row.nbytes == tensor.n_bytes
        assert row.room >= row.nbytes
    index.close()


def test_every_value_type_and_array(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", (1 << 32) - 1)
    writer.add_int32("a.i32", -(1 << 31))
    writer.add_uint64("a.u64", (1 << 64) - 1)
    writer.add_int64("a.i64", -(1 << 63))
    writer.add_float32("a.f32", 1.5)
    writer.add_float64("a.f64", 1e300)
    writer.add_bool("a.yes", True)
    writer.add_bool("a.no", False)
    writer.add_string("a.text", "grüße 🦙")
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 2.0])
    writer.add_array("a.bools", [True, False])
    writer.add_array("a.strings", ["", "x", "ü"])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    finish(writer)
    assert_same_as_reader(tmp_path / "m.gguf")


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_block_layouts_are_those_of_the_gguf_package():
    ours = {number: (kind.number, kind.name, kind.block, kind.block_bytes) for number, kind in TYPES.items()}
    theirs = {int(kind): (int(kind), kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    assert ours == theirs


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_every_known_tensor_type_with_random_shapes(tmp_path, alignment):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(alignment)
    for kind, (block, block_bytes) in GGML_QUANT_SIZES.items():
        for copy in range(2):
            shape = [generator.randint(1, 3) for _ in range(generator.randint(0, 3))]
            blocks = generator.randint(1, 4)
            array = np.zeros([*shape, blocks * block_bytes], dtype=np.uint8)
            writer.add_tensor(f"{kind.name}.{copy}", array, raw_dtype=kind, raw_shape=array.shape)
            assert ggml_type(kind).block == block
    finish(writer)
    assert_same_as_reader(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["llama-gqa", "llama-ropefreqs", "llama-tied", "llama-widehead"])
def test_llama_cpp_files(data_folder, name):
    assert_same_as_reader(data_folder / "tiny" / f"{name}.gguf")


def test_the_demo_model(demo_path):
    index = GgufIndex(demo_path)
    reader = GGUFReader(demo_path)
    assert {t.name: (t.data_offset, t.n_bytes) for t in reader.tensors} == {
        t.name: (t.offset, t.nbytes) for t in index.tensors.values()
    }
    index.close()


def test_version_2_is_the_same(tmp_path, raw):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.small_model(version=2))
    index = GgufIndex(str(path))
    assert index.version == 2
    assert len(index.tensors) == 4


def test_a_file_without_keys_and_tensors(tmp_path, raw):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file([]))
    index = GgufIndex(str(path))
    assert (index.entries, index.tensors, index.header_bytes) == ({}, {}, 24)


def test_unknown_type_is_indexed_with_the_room_up_to_the_next_tensor(tmp_path, raw):
    path = tmp_path / "m.gguf"
    rows = [raw.tensor("a", (7,), 42, 0), raw.tensor("b", (8,), 0, 96), raw.tensor("c", (8,), 99, 128)]
    path.write_bytes(raw.file([], rows, bytes(200)))
    index = GgufIndex(str(path))
    assert [(t.nbytes, t.stored_bytes) for t in index.tensors.values()] == [(None, 96), (32, 32), (None, 72)]
    assert (type_name(42), type_name(99)) == ("Q2_0", "type-99")
    assert type_name(GGMLQuantizationType.Q4_K) == "Q4_K"


def test_tensors_may_lie_in_another_order_with_gaps(tmp_path, raw):
    path = tmp_path / "m.gguf"
    rows = [raw.tensor("a", (8,), 0, 128), raw.tensor("b", (8,), 0, 0)]
    path.write_bytes(raw.file([], rows, bytes(160)))
    index = GgufIndex(str(path))
    assert index.tensors["a"].offset - index.tensors["b"].offset == 128
    assert list(index.tensors) == ["a", "b"]


def test_digest_covers_header_and_size_but_no_weight(tmp_path, raw):
    def digest(content):
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        return GgufIndex(str(path)).digest()

    whole = raw.small_model()
    reference = digest(whole)
    assert len(reference) == 64
    assert digest(whole) == reference
    other_weights = bytearray(whole)
    other_weights[-1] ^= 1
    assert digest(bytes(other_weights)) == reference
    assert digest(whole + b"\0") != reference
    header = bytearray(whole)
    header[header.index(b"llama") :][:5] = b"llama"
    header[header.index(b"attn_q")] = ord("b")
    assert digest(bytes(header)) != reference


@pytest.fixture
def typed(tmp_path, raw):
    path = tmp_path / "m.gguf"
    keys = [
        raw.u32("n", 7),
        raw.f32("f", 1.0),
        raw.text("s", "x"),
        raw.text("bad", b"\xff"),
        raw.numbers("layers", 5, "i", [1, 2, 300]),
        raw.numbers("floats", 6, "f", [1.0]),
        raw.strings("words", ["a", "b"]),
        raw.key_value("yes", 7, b"\x01"),
        raw.key_value("minus", 5, struct.pack("<i", -1)),
    ]
    path.write_bytes(raw.file(keys))
    return GgufIndex(str(path))


def test_typed_getters_give_values(typed):
    assert typed.integer("n", 1, 10) == 7
    assert typed.integer("absent", 1, 10, default=3) == 3
    assert typed.integers("n", 1, 10) == 7
    assert typed.integers("layers", 0, 300) == (1, 2, 300)
    assert typed.text("s") == "x"
    assert typed.text("absent", default="d") == "d"
    assert typed.flag("yes", False) is True
    assert typed.flag("absent", True) is True
    assert typed.strings("words") == [b"a", b"b"]
    assert typed.strings("absent") == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda i: i.integer("absent", 0, 1), "'absent' is missing"),
        (lambda i: i.integer("f", 0, 1), "'f' is FLOAT32, not an integer"),
        (lambda i: i.integer("s", 0, 1), "'s' is STRING, not an integer"),
        (lambda i: i.integer("yes", 0, 1), "'yes' is BOOL, not an integer"),
        (lambda i: i.integer("layers", 0, 1), "'layers' is array of INT32, not an integer"),
        (lambda i: i.integer("n", 8, 9), "'n' is 7, not in 8 to 9"),
        (lambda i: i.integer("minus", 0, 9), "'minus' is -1, not in 0 to 9"),
        (lambda i: i.integers("layers", 0, 299), "'layers' has an element outside 0 to 299"),
        (lambda i: i.integers("floats", 0, 9), "'floats' is 1 of FLOAT32, not integers"),
        (lambda i: i.text("n"), "'n' is UINT32, not a string"),
        (lambda i: i.text("bad"), "'bad' is not valid UTF-8"),
        (lambda i: i.flag("n", False), "'n' is UINT32, not a bool"),
        (lambda i: i.strings("layers"), "'layers' is an array of INT32, not an array of STRING"),
        (lambda i: i.strings("s"), "'s' is STRING, not an array of STRING"),
    ],
)
def test_typed_getters_refuse_with_field_and_offset(typed, call, words):
    with pytest.raises(ModelError) as caught:
        call(typed)
    assert words in caught.value.message
    assert "(at byte " in caught.value.message
    assert caught.value.message.startswith(typed.path)


MEASURE = """
import json, sys, time
from swactor_loader_gguf.index import GgufIndex
def peak():  # KiB; what getrusage says is the parent's, from before exec
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
before = peak()
start = time.process_time()
index = GgufIndex(sys.argv[1])
spent = time.process_time() - start
print(json.dumps([spent, peak() - before, len(index.entries)]))
"""


def test_a_large_vocabulary_opens_within_half_a_second_and_100_mib(tmp_path, raw):
    tokens = [f"token number {i}" for i in range(262_144)]
    path = tmp_path / "m.gguf"
    path.write_bytes(
        raw.file(
            [
                raw.strings("tokenizer.ggml.tokens", tokens),
                raw.numbers("tokenizer.ggml.scores", 6, "f", [0.0] * len(tokens)),
                raw.numbers("tokenizer.ggml.token_type", 5, "i", [1] * len(tokens)),
                raw.strings("tokenizer.ggml.merges", ["a b"] * 300_000),
            ]
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    seconds, kibibytes, entries = json.loads(done.stdout)
    print(f"{seconds:.3f} s, {kibibytes / 1024:.1f} MiB resident")
    assert entries == 4
    assert seconds < 0.5
    assert 0 < kibibytes < 100 * 1024
