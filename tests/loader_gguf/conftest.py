"""Files for the loader's tests: raw GGUF bytes, written here byte by byte, and the demo model."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from web_servers import Misbehaving, Nginx

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


def large_model(seed: int, *, layers: int = 16, tokens: int = 500) -> bytes:
    """A llama-shaped model whose blocks are 1 MiB of noise each, with a vocabulary that nobody can read."""
    words = [f"word {number}" for number in range(tokens)]
    keys = [
        text("general.architecture", "llama"),
        u32("llama.block_count", layers),
        u32("llama.context_length", 64),
        u32("llama.embedding_length", 512),
        u32("llama.attention.head_count", 2),
        strings("tokenizer.ggml.tokens", words),
    ]
    shapes = {"token_embd.weight": (512, tokens), "output_norm.weight": (512,)}
    shapes |= {f"blk.{layer}.attn_q.weight": (512, 512) for layer in range(layers)}
    rows, offset = [], 0
    for name, dims in shapes.items():
        rows.append(tensor(name, dims, 0, offset))
        offset += 4 * dims[0] * (dims[1] if len(dims) > 1 else 1)
    return gguf_file(keys, rows, random.Random(seed).randbytes(offset))


def split_model(count: int = 4, *, total: int | None = None, metadata_only: bool = False) -> list[bytes]:
    """The parts of a model of four blocks as gguf-split makes them."""
    names = ["token_embd.weight", *(f"blk.{i}.attn_q.weight" for i in range(4)), "output_norm.weight"]
    held = len(names) if total is None else total
    data_parts = count - 1 if metadata_only else count
    shares = [names[i::data_parts] for i in range(data_parts)]
    if metadata_only:
        shares.insert(0, [])
    parts = []
    for number, share in enumerate(shares):
        keys = [
            key_value("split.no", 2, struct.pack("<H", number)),
            key_value("split.count", 2, struct.pack("<H", count)),
            key_value("split.tensors.count", 5, struct.pack("<i", held)),
        ]
        if number == 0:
            keys += [
                text("general.architecture", "llama"),
                u32("llama.block_count", 4),
                u32("llama.context_length", 64),
                u32("llama.embedding_length", 8),
                u32("llama.attention.head_count", 2),
            ]
        rows = [
            tensor(name, (8, 8) if "norm" not in name else (8,), 0, 256 * i) for i, name in enumerate(share)
        ]
        data = b"".join(name.encode().ljust(256, b".") for name in share)
        parts.append(gguf_file(keys, rows, data))
    return parts


@pytest.fixture(autouse=True)
def online(monkeypatch):
    """Nothing forbids the network, and no server is known to be silent: ports are used again."""
    for name in ("SWACTOR_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    if (asking := sys.modules.get("swactor_loader_gguf.asking")) is not None:
        asking._silent_since.clear()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def nginx(tmp_path):
    """Serves the folder `served`."""
    root, folder = tmp_path / "served", tmp_path / "nginx"
    root.mkdir()
    folder.mkdir()
    server = Nginx(root, folder)
    yield server
    server.stop()


@pytest.fixture
def misbehaving():
    server = Misbehaving()
    yield server
    server.stop()


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
        large_model=large_model,
        split_model=split_model,
    )


@pytest.fixture
def large(raw):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return raw.large_model(seed)


@pytest.fixture
def small(raw, misbehaving, cache):
    """A small model behind the bad server; (its address, its bytes, the server's behaviour)."""
    content = raw.small_model()
    misbehaving.behaviour.content = content
    return f"{misbehaving.url}/m.gguf", content, misbehaving.behaviour


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
