"""The files that one model lies in: one, or the parts of a split model.

Knows how llama.cpp's gguf-split names parts and what it writes into them: `NAME-00001-of-00004.gguf`,
`split.no` from 0, `split.count`, and `split.tensors.count` of all parts together. Every part has a tensor
table and offsets of its own; the model's metadata is the first part's, which may have no tensor. Must not
know what the tensors mean.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_core.spi.loader import TensorRef

from swactor_loader_gguf.cache import Progress, silent
from swactor_loader_gguf.index import GgufIndex, TensorEntry
from swactor_loader_gguf.ranges import Range
from swactor_loader_gguf.reach import Unreachable

if TYPE_CHECKING:  # the HTTP client takes time to import, and most files are here
    from swactor_loader_gguf.remote import RemoteFile

MAX_PARTS = 4096
_PART = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_FETCH_PARTS = "put all parts of one model beside each other, under the names that they were made with"

Opener = Callable[[str], "RemoteFile"]


def part_name(name: str, number: int) -> str | None:
    """The name of part `number`, from 0, of the model that the part `name` belongs to; None when `name` is
    not a part's. `name` is a path, or an address up to its query."""
    match = _PART.fullmatch(name)
    return None if match is None else f"{match['prefix']}-{number + 1:05}-of-{match['count']}.gguf"


class ModelFiles:
    """All parts of the model that the file `name` belongs to. `first` has the metadata; `tensors` are of all
    parts, in the parts' order.

    `name` is a path, or with `opener` what that opens. Raises ModelError for a file that is malformed, and
    for parts that are missing or do not belong together.
    """

    def __init__(self, name: str, opener: Opener | None = None) -> None:
        self._opener = opener
        self._remotes: dict[str, RemoteFile] = {}
        self._closing = ExitStack()
        try:
            given = self._open(name)
            count = given.integer("split.count", 0, MAX_PARTS, default=1)
            self.parts = [given] if count <= 1 else self._open_all(name, given, count)
        except BaseException:
            self.close()
            raise
        self.first = self.parts[0]
        self.tensors: dict[str, TensorEntry] = {}
        for part in self.parts:
            self.tensors.update(part.tensors)

    def close(self) -> None:
        """Unmaps the files and ends their connections. Idempotent."""
        self._closing.close()

    def _open(self, name: str) -> GgufIndex:
        if self._opener is None:
            index = GgufIndex(name)
        else:
            remote = self._opener(name)
            self._closing.callback(remote.close)
            index = GgufIndex(remote.path, remote)
            self._remotes[index.path] = remote
        self._closing.callback(index.close)
        return index

    def _open_all(self, name: str, given: GgufIndex, count: int) -> list[GgufIndex]:
        number = given.integer("split.no", 0, count - 1)
        match = _PART.fullmatch(name if self._opener is None else re.split(r"[?#]", name, maxsplit=1)[0])
        if match is None:
            self._refuse(
                given, f"is part {number + 1} of {count}, and its name does not end like -00001-of-00004.gguf"
            )
        if (int(match["number"]), int(match["count"])) != (number + 1, count):
            self._refuse(given, f"is part {number + 1} of {count} by its keys, and another by its name")
        parts = [given if other == number else self._open_part(name, given, other) for other in range(count)]
        self._check(parts)
        return parts

    def _open_part(self, name: str, given: GgufIndex, number: int) -> GgufIndex:
        plain, mark, query = name.partition("?") if self._opener is not None else (name, "", "")
        sibling = part_name(plain, number)
        assert sibling is not None
        try:
            return self._open(sibling + mark + query)
        except ModelError as error:
            if error.cause is not ModelFailure.NOT_FOUND:
                raise
            raise ModelError(
                f"part {number + 1} of {given.name} is missing: {os.path.basename(sibling)}",
                hint=_FETCH_PARTS,
                cause=ModelFailure.PARTS_INVALID,
            ) from error

    def _check(self, parts: list[GgufIndex]) -> None:
        """Raises ModelError, naming the file, for parts that cannot be of one model."""
        total, count = parts[0].integer("split.tensors.count", 0, 1 << 20), len(parts)
        held: dict[str, str] = {}
        for number, part in enumerate(parts):
            stated = part.integer("split.no", 0, MAX_PARTS), part.integer("split.count", 0, MAX_PARTS)
            if stated != (number, count):
                self._refuse(
                    part, f"says that it is part {stated[0] + 1} of {stated[1]}, not {number + 1} of {count}"
                )
            tensors = part.integer("split.tensors.count", 0, 1 << 20)
            if tensors != total:
                self._refuse(
                    part, f"is of a model of {tensors} tensors, and {parts[0].name} of one of {total}"
                )
            for key in ("general.architecture", "general.name"):
                mine, theirs = part.text(key, default=""), parts[0].text(key, default="")
                if mine and mine != theirs:
                    self._refuse(part, f"has {key} {mine!r}, and {parts[0].name} has {theirs!r}")
            for tensor in part.tensors:
                if tensor in held:
                    self._refuse(part, f"has the tensor {tensor!r}, which {held[tensor]} has too")
                held[tensor] = part.name
        if len(held) != total:
            self._refuse(parts[-1], f"and its other parts hold {len(held)} tensors together, not {total}")

    def _refuse(self, part: GgufIndex, what: str) -> NoReturn:
        raise ModelError(f"{part.name} {what}", hint=_FETCH_PARTS, cause=ModelFailure.PARTS_INVALID)

    @property
    def file_bytes(self) -> int:
        return sum(part.file_bytes for part in self.parts)

    @property
    def header_bytes(self) -> int:
        return sum(part.header_bytes for part in self.parts)

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of header, tensor table and size of every file."""
        if len(self.parts) == 1:
            return self.first.digest()
        return hashlib.sha256("".join(part.digest() for part in self.parts).encode()).hexdigest()

    def to_fetch(self, tensors: tuple[TensorRef, ...]) -> int:
        """Bytes of `tensors` that are not on this machine."""
        return sum(self._remotes[path].missing(ranges) for path, ranges in self._by_remote(tensors).items())

    def fetch(self, tensors: tuple[TensorRef, ...], progress: Progress = silent) -> None:
        """Makes the bytes of `tensors` readable. Raises ModelError, and whatever `progress` raises."""
        wanted = self._by_remote(tensors)
        total = sum(end - start for ranges in wanted.values() for start, end in ranges)
        before = 0
        for path, ranges in wanted.items():
            nbytes = sum(end - start for start, end in ranges)
            share = _share(progress, before, nbytes, total)
            try:
                self._remotes[path].fetch(ranges, share)
            except Unreachable as error:
                raise error.lacking(self.to_fetch(tensors)) from error
            before += nbytes

    def _by_remote(self, tensors: tuple[TensorRef, ...]) -> dict[str, list[Range]]:
        wanted: dict[str, list[Range]] = {}
        for ref in tensors:
            if ref.path in self._remotes:
                wanted.setdefault(ref.path, []).append((ref.offset, ref.offset + ref.nbytes))
        return wanted


def _share(progress: Progress, before: int, nbytes: int, total: int) -> Progress:
    """Progress of one file as progress of all. Gaps between tensors count in the file, not in the whole."""
    return lambda done, file_total: progress(before + min(done, nbytes), total)
