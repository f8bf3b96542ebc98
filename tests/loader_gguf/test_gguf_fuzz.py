"""Any bytes give a Model or a ModelError, nothing else, in memory bounded by the bytes (Hypothesis)."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from swactor_core.errors import ModelError
from swactor_core.spi.loader import ModelFacts
from swactor_loader_gguf.ggml_types import ggml_type
from swactor_loader_gguf.model import GgufModel

RELAXED = settings(
    max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
ggml_type(0)  # the type table is no file's doing


@contextmanager
def bounded(nbytes):
    """Peak of Python's allocations stays within a constant and a multiple of the file."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000 + 1000 * nbytes


def exercise(path, content):
    """Everything that the SPI offers on such a file; returns whether it opened."""
    path.write_bytes(content)
    with bounded(len(content)):
        try:
            model = GgufModel(str(path))
        except ModelError:
            return False
        try:
            calls = [lambda: model.facts, model.digest, lambda: model.manifest(0, 1), model.tokenizer]
            for call in calls:
                try:
                    call()
                except ModelError:
                    continue
        finally:
            model.close()
    return True


@pytest.fixture(scope="module")
def vocabulary(raw):
    """A small model with a vocabulary, merges and a template: mutations reach every parser."""
    tokens = ["a", "b", "ab", "Ġ", "<|im_end|>"]
    return raw.small_model(
        keys={
            "general.alignment": raw.u32("general.alignment", 32),
            "tokenizer.ggml.model": raw.text("tokenizer.ggml.model", "gpt2"),
            "tokenizer.ggml.pre": raw.text("tokenizer.ggml.pre", "smollm"),
            "tokenizer.ggml.tokens": raw.strings("tokenizer.ggml.tokens", tokens),
            "tokenizer.ggml.token_type": raw.numbers("tokenizer.ggml.token_type", 5, "i", [1, 1, 1, 1, 3]),
            "tokenizer.ggml.merges": raw.strings("tokenizer.ggml.merges", ["a b"]),
            "tokenizer.ggml.eos_token_id": raw.u32("tokenizer.ggml.eos_token_id", 4),
            "llama.attention.head_count_kv": raw.numbers("llama.attention.head_count_kv", 5, "i", [1, 2]),
        }
    )


def test_the_unmutated_file_is_a_model(vocabulary, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(vocabulary)
    model = GgufModel(str(path))
    assert isinstance(model.facts, ModelFacts)
    assert model.tokenizer().encode("ab") == [2]


@RELAXED
@given(content=st.binary(max_size=200))
@example(content=b"GGUF")
def test_arbitrary_bytes(content, tmp_path):
    exercise(tmp_path / "m.gguf", content)


@RELAXED
@given(body=st.binary(max_size=200), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_arbitrary_bytes_behind_a_good_header(body, counts, tmp_path):
    exercise(tmp_path / "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)


MUTATION = st.tuples(
    st.floats(0, 1),
    st.sampled_from(["flip", "byte", "u32", "u64", "cut", "insert", "repeat"]),
    st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, 7, 9, 42, 1 << 31, 1 << 32, (1 << 64) - 1]),
)


def mutated(content, mutations):
    work = bytearray(content)
    for place, kind, value in mutations:
        at = int(place * max(len(work) - 1, 0))
        if kind == "flip" and work:
            work[at] ^= 1 << value % 8
        elif kind == "byte" and work:
            work[at] = value % 256
        elif kind == "u32":
            work[at : at + 4] = struct.pack("<I", value % (1 << 32))
        elif kind == "u64":
            work[at : at + 8] = struct.pack("<Q", value)
        elif kind == "cut":
            del work[at : at + value % 16]
        elif kind == "insert":
            work[at:at] = bytes(value % 16)
        else:
            work[at:at] = work[at : at + value % 64]
    return bytes(work)


@settings(RELAXED, max_examples=800)
@given(mutations=st.lists(MUTATION, min_size=1, max_size=4))
def test_mutations_of_a_whole_model(mutations, vocabulary, tmp_path):
    exercise(tmp_path / "m.gguf", mutated(vocabulary, mutations))


def test_every_single_byte_set_to_its_extremes(vocabulary, tmp_path):
    """The header's every byte as 0, 255 and with its lowest bit flipped: nothing but ModelError."""
    header_end = vocabulary.index(b"output_norm.weight") + 40
    opened = 0
    for at in range(header_end):
        for value in (0, 255, vocabulary[at] ^ 1):
            changed = bytearray(vocabulary)
            changed[at] = value
            opened += exercise_quickly(tmp_path / "m.gguf", bytes(changed))
    assert 0 < opened < 3 * header_end


def seeds(raw, vocabulary, data_folder):
    """Whole files of different kinds, by which mutation reaches every branch of the reader."""
    found = {"vocabulary": vocabulary, "large": raw.large_model(3, layers=1, tokens=5)[:200_000]}
    found |= {f"part {number}": part for number, part in enumerate(raw.split_model(2))}
    found |= {path.name: path.read_bytes()[:60_000] for path in sorted((data_folder / "tiny").glob("*.gguf"))}
    return found


def fuzz(path, corpus, *, seed, seconds):
    """Random mutations until time is up; a failure names seed and round. Returns (rounds, opened)."""
    generator = random.Random(seed)
    kinds = ["flip", "byte", "u32", "u64", "cut", "insert", "repeat"]
    values = [0, 1, 7, 9, 42, 255, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]
    until, rounds, opened = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        name = generator.choice(sorted(corpus))
        mutations = [
            # most of what matters lies near the beginning
            (
                generator.random() ** 3,
                generator.choice(kinds),
                generator.choice(values) if generator.random() < 0.5 else generator.getrandbits(64),
            )
            for _ in range(generator.randint(1, 5))
        ]
        try:
            opened += exercise(path, mutated(corpus[name], mutations))
        except BaseException:
            print(f"seed {seed}, round {rounds}, file {name}, mutations {mutations}")
            raise
        rounds += 1
    return rounds, opened


@pytest.mark.parametrize(
    "seconds", [pytest.param(3.0, id="short"), pytest.param(60.0, id="long", marks=pytest.mark.long)]
)
def test_fuzzing_by_the_clock(seconds, raw, vocabulary, data_folder, tmp_path):
    seed = random.randrange(1 << 32)
    rounds, opened = fuzz(
        tmp_path / "m.gguf", seeds(raw, vocabulary, data_folder), seed=seed, seconds=seconds
    )
    print(f"seed {seed}: {rounds} files, of which {opened} opened")
    assert rounds > 10 * seconds
    assert 0 < opened < rounds


def exercise_quickly(path, content):
    path.write_bytes(content)
    try:
        model = GgufModel(str(path))
    except ModelError:
        return False
    for call in (lambda: model.facts, lambda: model.manifest(0, 1)):
        try:
            call()
        except ModelError:
            continue
    model.close()
    return True
