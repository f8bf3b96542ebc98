"""Files for the loader's tests: raw GGUF bytes, written here byte by byte, and the demo model."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

DATA = Path(__file__).parents[1] / "data"


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key_value(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def u32(key: str, value: int) -> bytes:
    return key_value(key, 4, struct.pack("<I", value))


def f32(key: str, value: float) -> bytes:
    return key_value(key, 6, struct.pack("<f", value))


def text(key: str, value: str | bytes) -> bytes:
    return key_value(key, 8, string(value))


def array(key: str, kind: int, count: int, payload: bytes) -> bytes:
    return key_value(key, 9, struct.pack("<IQ", kind, count) + payload)


def strings(key: str, values: list) -> bytes:
    return array(key, 8, len(values), b"".join(map(string, values)))


def numbers(key: str, kind: int, code: str, values: list) -> bytes:
    return array(key, kind, len(values), struct.pack(f"<{len(values)}{code}", *values))


def tensor(name: str | bytes, dims: tuple, kind: int, offset: int) -> bytes:
    head = string(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", dim) for dim in dims)
    return head + struct.pack("<IQ", kind, offset)


def gguf_file(
    keys: list[bytes],
    tensors: list[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment if tensors else 0) + data


def small_model(**changes) -> bytes:
    """A whole llama-shaped model of two blocks in F32, small enough to be cut at every byte."""
    keys = {
        "general.architecture": text("general.architecture", "llama"),
        "llama.block_count": u32("llama.block_count", 2),
        "llama.context_length": u32("llama.context_length", 64),
        "llama.embedding_length": u32("llama.embedding_length", 8),
        "llama.attention.head_count": u32("llama.attention.head_count", 2),
        "llama.rope.freq_base": f32("llama.rope.freq_base", 10000.0),
    }
    keys.update(changes.pop("keys", {}))
    names = changes.pop(
        "names",
        [
            ("token_embd.weight", (8, 4), 0),
            ("blk.0.attn_q.weight", (8, 8), 0),
            ("blk.1.attn_q.weight", (8, 8), 0),
            ("output_norm.weight", (8,), 0),
        ],
    )
    rows, offset = [], 0
    for name, dims, kind in names:
        rows.append(tensor(name, dims, kind, offset))
        count = 1
        for dim in dims:
            count *= dim
        offset += count * 4 + -(count * 4) % 32
    return gguf_file([value for value in keys.values() if value is not None], rows, bytes(offset), **changes)


@pytest.fixture(scope="session")
def raw():
    """The builders above."""
    return SimpleNamespace(
        string=string,
        key_value=key_value,
        u32=u32,
        f32=f32,
        text=text,
        array=array,
        strings=strings,
        numbers=numbers,
        tensor=tensor,
        file=gguf_file,
        small_model=small_model,
    )


@pytest.fixture(scope="session")
def data_folder() -> Path:
    return DATA


@pytest.fixture(scope="session")
def demo_path() -> str:
    """The demo model, fetched once into the user's cache."""
    from swactor_loader_gguf.sources import resolve

    return resolve("demo")


@pytest.fixture(scope="session")
def demo_tokenizer(demo_path):
    from swactor_loader_gguf.model import GgufModel

    model = GgufModel(demo_path)
    tokenizer = model.tokenizer()
    model.close()
    return tokenizer


@pytest.fixture(scope="session")
def vectors_folder() -> Path:
    """llama.cpp's test vocabularies and chat templates, fetched once into the user's cache."""
    script = DATA.parents[1] / "scripts" / "fetch_vocab_vectors"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        pytest.fail(f"the test vectors cannot be fetched:\n{done.stderr}", pytrace=False)
    return Path(done.stdout.strip())
