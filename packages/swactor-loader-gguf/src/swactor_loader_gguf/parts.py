"""The files that one model lies in: one, or the parts of a split model.

Knows how llama.cpp's gguf-split names parts and what it writes into them: `NAME-00001-of-00004.gguf`,
`split.no` from 0, `split.count`, and `split.tensors.count` of all parts together. Every part has a tensor
table and offsets of its own; the model's metadata is the first part's, which may have no tensor. Whoever has
been told the model's outline opens only the parts that it needs. Must not know what the tensors mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, NoReturn

from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_core.spi.loader import TensorRef
from swactor_core.values import frozen

from swactor_loader_gguf.cache import Progress, silent
from swactor_loader_gguf.index import GgufIndex, TensorEntry
from swactor_loader_gguf.known import shown
from swactor_loader_gguf.outline import MAX_PARTS, Outline, PartOutline
from swactor_loader_gguf.ranges import Range
from swactor_loader_gguf.reach import Unreachable
from swactor_loader_gguf.side_by_side import side_by_side

if TYPE_CHECKING:  # the HTTP client takes time to import, and most files are here
    from swactor_loader_gguf.remote import RemoteFile

_NUMBERS = r"-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf"
_PATH = re.compile(rf"(?P<prefix>.*){_NUMBERS}(?P<rest>)", re.DOTALL)
_ADDRESS = re.compile(rf"(?P<prefix>[^?#]*){_NUMBERS}(?P<rest>(?:@[^?#]*)?(?:[?#].*)?)", re.DOTALL)
_AT_ONCE = 8  # parts on the web: most of opening one is waiting for its server
_FETCH_PARTS = "put all parts of one model beside each other, under the names that they were made with"

Opener = Callable[[str, str], "RemoteFile"]
"""A name, and the tag of the content that a plan means by it, empty for the one that it has now."""


def part_name(name: str, number: int, *, address: bool = False) -> str | None:
    """The name of part `number`, from 0, of the model that the part `name` belongs to; None when `name` is
    not a part's. `name` is a path, or an address with its revision or query."""
    match = (_ADDRESS if address else _PATH).fullmatch(name)
    if match is None:
        return None
    return f"{match['prefix']}-{number + 1:05}-of-{match['count']}.gguf{match['rest']}"


@frozen
class _Opened:
    index: GgufIndex
    remote: RemoteFile | None = None

    def close(self) -> None:
        self.index.close()
        if self.remote is not None:
            self.remote.close()


class ModelFiles:
    """All parts of the model that the file `name` belongs to. `first` has the metadata; `tensors` are of all
    parts, in the parts' order, and know where they lie only once they are `placed`.

    `name` is a path, or with `opener` what that opens. Raises ModelError for a file that is malformed, and
    for parts that are missing or do not belong together. With `outline` no part is opened before it is needed
    but the first, and one that is not what the outline says is refused.
    """

    def __init__(self, name: str, opener: Opener | None = None, outline: Outline | None = None) -> None:
        self._name, self._opener, self._told = name, opener, outline
        self._remotes: dict[str, RemoteFile] = {}
        self._parts: dict[int, GgufIndex] = {}
        self._closing = ExitStack()
        try:
            if outline is None:
                self._open_all()
            else:
                self._open_told(0)
        except BaseException:
            self.close()
            raise
        self.first = self._parts[0]
        self.tensors: dict[str, TensorEntry] = {}
        self._number_of: dict[str, int] = {}
        for number, told in enumerate(self._outline.parts):
            rows = self._parts[number].tensors.values() if number in self._parts else told.tensors
            self.tensors.update((tensor.name, tensor) for tensor in rows)
            self._number_of.update((tensor.name, number) for tensor in rows)

    def close(self) -> None:
        """Unmaps the files and ends their connections. Idempotent."""
        self._closing.close()

    def placed(self, tensor: TensorEntry) -> TensorEntry:
        """The tensor with its path; opens its part where that is not done. Raises ModelError."""
        number = self._number_of[tensor.name]
        part = self._parts.get(number) or self._open_told(number)
        return part.tensors[tensor.name]

    def _open(self, name: str, wanted: str = "") -> _Opened:
        if self._opener is None:
            return _Opened(GgufIndex(name))
        remote = self._opener(name, wanted)
        try:
            return _Opened(GgufIndex(remote.path, remote), remote)
        except BaseException:
            remote.close()
            raise

    def _held(self, opened: _Opened) -> GgufIndex:
        self._closing.callback(opened.close)
        if opened.remote is not None:
            self._remotes[opened.index.path] = opened.remote
        return opened.index

    def _open_all(self) -> None:
        given = self._held(self._open(self._name))
        count = given.integer("split.count", 0, MAX_PARTS, default=1)
        if count <= 1:
            self._parts[0] = given
            return
        number = given.integer("split.no", 0, count - 1)
        match = (_PATH if self._opener is None else _ADDRESS).fullmatch(self._name)
        if match is None:
            self._refuse(
                given, f"is part {number + 1} of {count}, and its name does not end like -00001-of-00004.gguf"
            )
        if (int(match["number"]), int(match["count"])) != (number + 1, count):
            self._refuse(given, f"is part {number + 1} of {count} by its keys, and another by its name")
        others = [other for other in range(count) if other != number]
        opened = side_by_side(
            [partial(self._open_part, other) for other in others],
            most=_AT_ONCE if self._opener is not None else 1,
            give_back=_Opened.close,
        )
        self._parts = {number: given, **dict(zip(others, map(self._held, opened), strict=True))}
        self._check([self._parts[other] for other in range(count)])

    def _open_told(self, number: int) -> GgufIndex:
        """Raises ModelError, naming the part, for one that the outline was not made of."""
        assert self._told is not None
        count, told = len(self._told.parts), self._told.parts[number]
        index = self._held(
            self._open_part(number, told.tag) if count > 1 else self._open(self._name, told.tag)
        )
        if (index.digest(), self._tag_of(index)) != (told.digest, told.tag):
            which = f"part {number + 1} of {count}, {index.name}," if count > 1 else index.name
            raise ModelError(
                f"{which} is another file than the one that the plan was made for",
                hint="put the same files on every node; of an address, run again",
                cause=ModelFailure.DIFFERENT_FILE,
            )
        self._parts[number] = index
        return index

    def _open_part(self, number: int, wanted: str = "") -> _Opened:
        remote = self._opener is not None
        name = part_name(self._name, number, address=remote)
        me = shown(self._name) if remote else self._name
        if name is None:
            raise ModelError(
                f"{me} is not named like a part of a model, and the plan was made for parts",
                hint=_FETCH_PARTS,
                cause=ModelFailure.PARTS_INVALID,
            )
        try:
            return self._open(name, wanted)
        except ModelError as error:
            if error.cause is not ModelFailure.NOT_FOUND:
                raise
            missing = os.path.basename(shown(name) if remote else name)
            raise ModelError(
                f"part {number + 1} of {me} is missing: {missing}",
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
        return sum(part.file_bytes for part in self._outline.parts)

    @property
    def header_bytes(self) -> int:
        return sum(part.header_bytes for part in self._outline.parts)

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of header, tensor table and size of every file."""
        return self._outline.digest()

    def outline(self) -> str:
        """What `Outline.unpacked` reads, or nothing."""
        return self._outline.packed()

    @cached_property
    def _outline(self) -> Outline:
        return self._told or Outline(
            [
                PartOutline(
                    part.digest(),
                    self._tag_of(part),
                    part.file_bytes,
                    part.header_bytes,
                    tuple(part.tensors.values()),
                )
                for _, part in sorted(self._parts.items())
            ]
        )

    def _tag_of(self, part: GgufIndex) -> str:
        remote = self._remotes.get(part.path)
        return "" if remote is None else remote.tag

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
