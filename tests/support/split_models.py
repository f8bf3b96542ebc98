"""A GGUF file cut into the parts that gguf-split would make of it. Not tests themselves."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from swactor_loader_gguf.index import GgufIndex, TensorEntry

ALIGNMENT = 32


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def split(path: str, folder: Path, shares: Sequence[Sequence[str]]) -> list[Path]:
    """Part k has the tensors whose names begin with one of `shares[k]`; the first has the metadata too."""
    whole, raw = GgufIndex(path), Path(path).read_bytes()
    last = max(entry.offset + entry.nbytes for entry in whole.entries.values())
    metadata, count = raw[24:last], len(whole.entries)
    paths = []
    for number, share in enumerate(shares):
        mine = [tensor for tensor in whole.tensors.values() if tensor.name.startswith(tuple(share))]
        keys = metadata if number == 0 else b""
        keys += _string("split.no") + struct.pack("<IH", 2, number)
        keys += _string("split.count") + struct.pack("<IH", 2, len(shares))
        keys += _string("split.tensors.count") + struct.pack("<Ii", 5, len(whole.tensors))
        paths.append(folder / f"m-{number + 1:05}-of-{len(shares):05}.gguf")
        paths[-1].write_bytes(_part(raw, mine, keys, 3 + (count if number == 0 else 0)))
    whole.close()
    return paths


def _part(raw: bytes, tensors: list[TensorEntry], keys: bytes, key_count: int) -> bytes:
    table, data = b"", b""
    for tensor in tensors:
        assert tensor.nbytes is not None
        table += _string(tensor.name) + struct.pack("<I", len(tensor.dims))
        table += struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, tensor.ggml_type, len(data))
        data += raw[tensor.offset : tensor.offset + tensor.nbytes]
        data += bytes(-len(data) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), key_count) + keys + table
    return head + bytes(-len(head) % ALIGNMENT) + data
