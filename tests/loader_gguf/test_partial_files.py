"""index.py over a file that is still on its way: the same index, no byte read before it is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swactor_core.errors import ModelError
from swactor_loader_gguf.index import GgufIndex
from swactor_loader_gguf.model import GgufModel


class Arriving:
    """Bytes that come into `path` when they are needed, `spare` more than asked for; the rest is noise."""

    name = "the file on its way"

    def __init__(self, path, content: bytes, spare: int) -> None:
        self.path, self.content, self.spare, self.here = str(path), content, spare, 0
        self.size = len(content)
        self.asked = []
        path.write_bytes(b"\xff" * len(content))

    def need(self, end: int) -> int:
        self.asked.append(end)
        assert end <= self.size
        if end > self.here:
            upto = min(end + self.spare, self.size)
            with open(self.path, "r+b") as file:
                file.seek(self.here)
                file.write(self.content[self.here : upto])
            self.here = upto
        return self.here


@pytest.mark.parametrize("spare", [0, 1, 7, 100, 10_000])
def test_the_index_is_the_same_whenever_bytes_come(raw, tmp_path, spare):
    content = raw.large_model(1, layers=2, tokens=300)
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(content)
    reference = GgufIndex(str(whole))
    arriving = Arriving(tmp_path / "m.gguf", content, spare)
    index = GgufIndex(arriving.path, arriving)
    assert index.entries == reference.entries
    assert list(index.tensors) == list(reference.tensors)
    for name, tensor in index.tensors.items():
        other = reference.tensors[name]
        assert (tensor.offset, tensor.nbytes, tensor.dims) == (other.offset, other.nbytes, other.dims)
    assert index.digest() == reference.digest()
    assert index.strings("tokenizer.ggml.tokens") == reference.strings("tokenizer.ggml.tokens")
    assert max(arriving.asked) <= index.header_bytes
    assert arriving.here <= index.header_bytes + spare
    index.close()
    reference.close()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.floats(0, 1), value=st.binary(min_size=1, max_size=8), spare=st.sampled_from([0, 5, 64]))
def test_a_malformed_file_is_refused_alike_whenever_bytes_come(raw, tmp_path, place, value, spare):
    content = bytearray(raw.small_model(keys={"words": raw.strings("words", ["a", "", "bc"])}))
    at = int(place * (len(content) - 8))
    content[at : at + len(value)] = value
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(bytes(content))
    arriving = Arriving(tmp_path / "m.gguf", bytes(content), spare)

    def outcome(path, contents=None):
        try:
            index = GgufIndex(path, contents)
        except ModelError as error:
            return error.message.split(": ", 1)[1]
        found = index.digest(), list(index.tensors)
        index.close()
        return found

    assert outcome(str(whole)) == outcome(arriving.path, arriving)


def test_a_middle_stage_never_reads_the_vocabulary(raw, tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.large_model(2, layers=4, tokens=3000))
    decoded = []
    real = GgufIndex.strings
    monkeypatch.setattr(GgufIndex, "strings", lambda self, key: decoded.append(key) or real(self, key))
    model = GgufModel(str(path))
    assert model.manifest(1, 3).token_count == 3000
    assert model.facts.has_vocabulary
    model.digest()
    model.close()
    assert decoded == []


STAGE = """
import json, sys, time, tracemalloc
from swactor_loader_gguf.ggml_types import ggml_type
from swactor_loader_gguf.model import GgufModel
def peak():  # KiB; what getrusage says is the parent's, from before exec
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
ggml_type(0)
before = peak()
start = time.process_time()
model = GgufModel(sys.argv[1])
manifest = model.manifest(1, 2)
spent = time.process_time() - start
rss = peak() - before
model.close()
tracemalloc.start()
model = GgufModel(sys.argv[1])
manifest = model.manifest(1, 2)
print(json.dumps([spent, rss, *tracemalloc.get_traced_memory(), manifest.token_count]))
"""


def test_a_middle_stage_of_a_large_vocabulary_opens_fast_and_keeps_none_of_it(raw, tmp_path):
    """262,144 tokens with scores, types and half a million merges, as the largest models have."""
    tokens = [f"token number {i}" for i in range(262_144)]
    vocabulary = {
        "tokens": raw.strings("tokenizer.ggml.tokens", tokens),
        "scores": raw.numbers("tokenizer.ggml.scores", 6, "f", [0.0] * len(tokens)),
        "types": raw.numbers("tokenizer.ggml.token_type", 5, "i", [1] * len(tokens)),
        "merges": raw.strings("tokenizer.ggml.merges", ["ab cd"] * 514_906),
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.small_model(keys=vocabulary))
    done = subprocess.run(
        [sys.executable, "-c", STAGE, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    seconds, kibibytes, traced, most, count = json.loads(done.stdout)
    print(f"{seconds:.3f} s, {kibibytes / 1024:.1f} MiB resident, {traced / 1024:.1f} KiB of objects")
    assert count == 262_144
    assert seconds < 0.5
    assert 0 < kibibytes < 100 * 1024
    assert traced < 1 << 20
    assert most < 2 * path.stat().st_size, "the header is read into memory, and goes again"


def test_a_header_without_end_is_not_fetched_to_its_end(raw, tmp_path, monkeypatch):
    monkeypatch.setattr("swactor_loader_gguf.header.MAX_HEADER", 1 << 20)
    content = raw.file([raw.array("k", 0, 3 << 20, bytes(3 << 20))])
    arriving = Arriving(tmp_path / "m.gguf", content, 64)
    with pytest.raises(ModelError, match="goes beyond 1 MiB"):
        GgufIndex(arriving.path, arriving)
    assert arriving.here < 1 << 20
