"""What is known of a model's files without having them: which content each is, tensor tables of parts.

Whoever plans a run has opened all parts and tells the stages; a stage opens the first part and those that
hold its tensors, and compares each with what it was told. Pure: text in, text out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_core.values import frozen

from swactor_loader_gguf.index import TensorEntry

MAX_PARTS = 4096
LONGEST = 1 << 20
"""Characters of a packed outline: it is a part of one message. A model that needs more has none, and its
stages open every part."""

_LONGEST_TEXT = 1 << 28


@frozen
class PartOutline:
    """One part. `digest` is of header, tensor table and size; `tag` tells the content of an address from
    others that it may have had, empty where nothing does. Rows of `tensors` have no path; those of the first
    part are not told: every stage opens it."""

    digest: str
    tag: str
    file_bytes: int
    header_bytes: int
    tensors: tuple[TensorEntry, ...]


class Outline:
    """All parts of one model, in their order."""

    def __init__(self, parts: Sequence[PartOutline]) -> None:
        self.parts = tuple(parts)

    def digest(self) -> str:
        """The model's: SHA-256, in hexadecimal, of the parts' digests."""
        digests = [part.digest for part in self.parts]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def packed(self) -> str:
        """For a message; empty when there is nothing to tell, and when it would be too long for one."""
        if len(self.parts) == 1 and not self.parts[0].tag:
            return ""
        rows = [
            [part.digest, part.tag, part.file_bytes, part.header_bytes, [_row(each) for each in part.tensors]]
            for part in (replace(self.parts[0], tensors=()), *self.parts[1:])
        ]
        text = json.dumps(rows, separators=(",", ":")).encode()
        packed = base64.b64encode(zlib.compress(text, 9)).decode()
        return packed if len(packed) <= LONGEST else ""

    @classmethod
    def unpacked(cls, packed: str) -> Outline:
        """Raises ModelError for what `packed` has not made."""
        if len(packed) > LONGEST:
            _refuse(f"{len(packed)} characters")
        try:
            inflate = zlib.decompressobj()
            text = inflate.decompress(base64.b64decode(packed, validate=True), _LONGEST_TEXT)
            if not inflate.eof:
                _refuse("it is cut short, or too long")
            parts = [_part(row) for row in json.loads(text)]
        except (binascii.Error, zlib.error, ValueError, TypeError, RecursionError) as error:
            _refuse(str(error))
        if not 1 <= len(parts) <= MAX_PARTS:
            _refuse(f"{len(parts)} parts")
        return cls(parts)


def _row(tensor: TensorEntry) -> list[Any]:
    return [tensor.name, tensor.ggml_type, list(tensor.dims), tensor.offset, tensor.nbytes, tensor.room]


def _part(row: Any) -> PartOutline:
    """Raises ValueError or TypeError."""
    digest, tag, file_bytes, header_bytes, rows = row
    if not isinstance(tag, str):
        raise TypeError("a tag that is no text")
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError("a digest that is none")
    tensors = tuple(_tensor(each) for each in rows)
    return PartOutline(digest, tag, _count(file_bytes), _count(header_bytes), tensors)


def _tensor(row: Any) -> TensorEntry:
    name, ggml_type, dims, offset, nbytes, room = row
    if not isinstance(name, str):
        raise TypeError("a name that is no text")
    sizes = tuple(_count(dim) for dim in dims)
    stored = None if nbytes is None else _count(nbytes)
    return TensorEntry(name, _count(ggml_type), sizes, _count(offset), stored, _count(room), "")


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} where a count belongs")
    return value


def _refuse(why: str) -> NoReturn:
    raise ModelError(
        f"what the plan says of the model's parts cannot be read: {why}",
        hint="run the same version of swactor on every node",
        cause=ModelFailure.PLAN_DIFFERS,
    )
