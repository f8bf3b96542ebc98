"""A bounds-checked, lazy index of one GGUF file: metadata positions and the tensor table.

Knows the container format (versions 2 and 3, little-endian) and no model: architectures, roles and
vocabularies are read through the typed getters by others. The file is hostile until proven otherwise: every
length is compared with the bytes that are left before anything is allocated, products are Python integers,
and arrays are walked, never decoded, until someone asks. Every error is a ModelError with field and offset.

Format: the GGUF specification in ggml's `docs/gguf.md`.
"""

from __future__ import annotations

import hashlib
import re
import struct
from enum import IntEnum
from itertools import pairwise
from operator import itemgetter
from typing import NoReturn

from swactor_core.specs import align_up
from swactor_core.values import frozen

from swactor_loader_gguf.ggml_types import ggml_type, type_name
from swactor_loader_gguf.header import U32, U64, Contents, HeaderReader

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 63  # ggml keeps 64 with the closing zero
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 24  # all string arrays of a file together: bounds the time of an open

# What is often taken for a model, by its first bytes.
_OTHER_FILES = {
    b"vers": "it may be git-lfs's pointer to a model: `git lfs pull` brings the model itself",
    b"<": "it is a web page, not a model: download the file itself",
    b"\n": "it may be a web page, not a model: download the file itself",
    b"{": "it is text, perhaps a server's message, not a model: download the file itself",
    b"PK": "it is a zip archive or a PyTorch model: give a GGUF file, or convert it with llama.cpp's tools",
    b"\x1f\x8b": "it is packed with gzip: unpack it",
    b"(\xb5/\xfd": "it is packed with zstd: unpack it",
    b"\0\0\0\0": "the file may have been fetched in part: fetch it again",
} | dict.fromkeys(
    (b"tjgg", b"fmgg", b"lmgg", b"algg"),
    "it is a GGML file from before GGUF: convert the model again with current tools",
)

# Names of files that were cut anywhere, unlike those that llama.cpp's gguf-split makes.
_PIECE = re.compile(r"[.-](?:part-?[0-9]+of[0-9]+|split-?[a-z]|part-?[a-z0-9]{1,3})$", re.IGNORECASE)
_JOIN = "it is a piece of a file: join all pieces, in order, with cat, and give the whole file"

_MIN_KEY_RECORD = 8 + 1 + 4 + 1  # key length, one byte of key, type, one byte of value
_MIN_TENSOR_RECORD = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, n_dims, one dimension, type, offset


class ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_FORMATS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "B",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_SIZES = {kind: struct.calcsize("<" + code) for kind, code in _FORMATS.items()}


@frozen
class Entry:
    """One metadata value: where it lies, not what it says. `count` is 1 for a scalar; `offset` is of the
    value's first byte (a string's or array's first element after its length)."""

    key: str
    kind: ValueType
    is_array: bool
    count: int
    offset: int
    nbytes: int


@frozen
class TensorEntry:
    """One row of the tensor table. `offset` is absolute in the file at `path`; `nbytes` is None for a type
    without known layout, whose extent then is at most `room`, the bytes up to the next tensor or the end of
    the file."""

    name: str
    ggml_type: int
    dims: tuple[int, ...]
    offset: int
    nbytes: int | None
    room: int
    path: str

    @property
    def stored_bytes(self) -> int:
        return self.room if self.nbytes is None else self.nbytes


class GgufIndex(HeaderReader):
    """The index of the file at `path`, which stays open until `close`; `contents` brings the bytes of a file
    that is not whole yet.

    Raises ModelError, naming field and byte offset, for whatever is not a whole GGUF file of version 2 or 3,
    and, now or when a value is asked for, for a file that is shortened while it is read.
    """

    def __init__(self, path: str, contents: Contents | None = None) -> None:
        super().__init__(path, contents)
        self._strings_left = MAX_STRINGS
        self.entries: dict[str, Entry] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            self._read()
        except BaseException:
            self.close()
            raise
        state = hashlib.sha256(U64.pack(self.file_bytes))
        with memoryview(self._data) as view, view[: self.header_bytes] as header:
            state.update(header)
        self._digest = state.hexdigest()
        self._data = b""  # the vocabulary is most of it, and few ask for that

    # reading: one pass from the magic to the end of the tensor table

    def _read(self) -> None:
        self._read_version()
        start = self._position
        tensor_count = self._count("tensor count", cap=MAX_TENSORS)
        key_count = self._count("metadata count", cap=MAX_KEYS)
        least = tensor_count * _MIN_TENSOR_RECORD + key_count * _MIN_KEY_RECORD
        if least > self.file_bytes - self._position:
            self.fail(
                f"{tensor_count} tensors and {key_count} metadata keys need at least {least} bytes and the "
                f"file has {self.file_bytes - self._position} left",
                start,
            )
        for number in range(key_count):
            self._read_entry(number)
        self.alignment = self._alignment()
        table = [self._read_tensor(number) for number in range(tensor_count)]
        self.header_bytes = self._position
        self.data_offset = align_up(self.header_bytes, self.alignment)
        self._place_tensors(table)

    def _read_version(self) -> None:
        at = self._take(4, "magic")
        magic = self._data[at : at + 4]
        if magic != MAGIC:
            hint = next((hint for start, hint in _OTHER_FILES.items() if magic.startswith(start)), "")
            if self._data[8:9] == b"{":
                hint = "it is a safetensors file: give a GGUF file, or convert it with llama.cpp's tools"
            if _PIECE.search(self.name):
                hint = _JOIN
            self.fail(f"magic is {magic!r}, not {MAGIC!r}", at, hint=hint or "give a GGUF file")
        at = self._position
        self.version = self._u32("version")
        if self.version in VERSIONS:
            return
        if self.version and self.version & 0xFFFF == 0:
            self.fail("the file is big-endian", at, hint="convert it with gguf-convert-endian")
        self.fail(
            f"version is {self.version}, not 2 or 3", at, hint="convert the model again with current tools"
        )

    def _read_entry(self, number: int) -> None:
        start = self._position
        key = self._name(f"metadata key {number}", cap=MAX_KEY_BYTES)
        if key in self.entries:
            self.fail(f"metadata key {key!r} occurs twice", start)
        kind = self._value_type(key)
        if kind is ValueType.ARRAY:
            self.entries[key] = self._read_array(key)
        elif kind is ValueType.STRING:
            length = self._u64(f"length of {key!r}")
            self.entries[key] = Entry(key, kind, False, 1, self._take(length, repr(key)), length)
        else:
            size = _SIZES[kind]
            at = self._take(size, repr(key))
            if kind is ValueType.BOOL and self._data[at] > 1:
                self.fail(f"{key!r} is a bool of value {self._data[at]}, not 0 or 1", at)
            self.entries[key] = Entry(key, kind, False, 1, at, size)

    def _value_type(self, key: str) -> ValueType:
        at = self._position
        number = self._u32(f"type of {key!r}")
        try:
            return ValueType(number)
        except ValueError:
            self.fail(f"{key!r} has the unknown value type {number}", at)

    def _read_array(self, key: str) -> Entry:
        at = self._position
        kind = self._value_type(key)
        if kind is ValueType.ARRAY:
            self.fail(f"{key!r} is an array of arrays, which is not supported", at)
        count = self._u64(f"length of {key!r}")
        start = self._position
        if kind is ValueType.STRING:
            self._walk_strings(key, count)
        else:
            self._take(count * _SIZES[kind], repr(key))
        return Entry(key, kind, True, count, start, self._position - start)

    def _walk_strings(self, key: str, count: int) -> None:
        """Moves past `count` strings by their lengths; a large vocabulary has half a million of them."""
        position, end = self._position, self.file_bytes
        if count * 8 > end - position:
            self.fail(f"{key!r} claims {count} strings in the {end - position} bytes left", position)
        if count > self._strings_left:
            self.fail(f"{key!r} has {count} strings, too many for one file", position)
        self._strings_left -= count
        unpack = U64.unpack_from
        self._need(min(position + count * 8, end))
        last, data = self._readable - 8, self._data
        for number in range(count):
            if position > last:
                if position > end - 8:
                    self.fail(f"{key!r} ends inside the length of string {number} of {count}", position)
                self._need(position + 8)
                last, data = self._readable - 8, self._data
            position += 8 + unpack(data, position)[0]
            if position > end:
                self.fail(
                    f"string {number} of {key!r} is longer than the file", position if position < end else end
                )
        self._position = position
        if position > self._readable:
            self._need(position)

    def _alignment(self) -> int:
        entry = self.entries.get("general.alignment")
        if entry is None:
            return DEFAULT_ALIGNMENT
        if entry.is_array or entry.kind is not ValueType.UINT32:
            self.fail_value("general.alignment is not a 32-bit unsigned integer", entry.offset)
        value = int(U32.unpack_from(self._data, entry.offset)[0])
        if value & (value - 1) or not 1 <= value <= MAX_ALIGNMENT:
            self.fail_value(
                f"general.alignment is {value}, not a power of two up to {MAX_ALIGNMENT}", entry.offset
            )
        return value

    def _read_tensor(self, number: int) -> tuple[str, int, tuple[int, ...], int, int]:
        """(name, type, dims, offset within the data, position of that offset)."""
        start = self._position
        name = self._name(f"name of tensor {number}", cap=MAX_NAME_BYTES)
        at = self._position
        n_dims = self._u32(f"dimension count of {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            self.fail(f"{name!r} has {n_dims} dimensions, not 1 to {MAX_DIMS}", at)
        at = self._position
        dims = tuple(self._u64(f"dimensions of {name!r}") for _ in range(n_dims))
        if not all(1 <= dim < 1 << 63 for dim in dims):
            self.fail(f"{name!r} has the dimensions {dims}, of which one is not positive", at)
        kind_number = self._u32(f"type of {name!r}")
        at = self._position
        offset = self._u64(f"offset of {name!r}")
        if name in self.tensors:
            self.fail(f"tensor {name!r} occurs twice", start)
        kind = ggml_type(kind_number)
        if kind is not None and dims[0] % kind.block:
            self.fail(
                f"{name!r} is {kind.name} and its rows of {dims[0]} are not a multiple of {kind.block}", start
            )
        # Claims the name; `_place_tensors` knows the data's beginning and puts the row in.
        self.tensors[name] = TensorEntry(name, kind_number, dims, offset, None, 0, self.path)
        return name, kind_number, dims, offset, at

    def _place_tensors(self, table: list[tuple[str, int, tuple[int, ...], int, int]]) -> None:
        """Absolute offsets, checked: aligned, inside the file, no byte in two tensors."""
        placed: list[tuple[int, int | None, int, str]] = []
        for name, number, dims, offset, at in table:
            if offset % self.alignment:
                self.fail(f"offset {offset} of {name!r} is not a multiple of {self.alignment}", at)
            start, nbytes = self.data_offset + offset, _stored_bytes(number, dims)
            if start + (nbytes or 1) > self.file_bytes:
                self.fail(
                    f"{name!r} ({type_name(number)}, {dims}) ends at byte {start + (nbytes or 1)} of a file "
                    f"of {self.file_bytes}",
                    at,
                    hint=_JOIN if _PIECE.search(self.name) else "the file is cut short; fetch it again",
                )
            placed.append((start, nbytes, at, name))
        placed.sort(key=itemgetter(0))
        ends = [*(later[0] for later in placed[1:]), self.file_bytes][: len(placed)]
        for (start, nbytes, _, name), (later, _, at, other) in pairwise(placed):
            if start + (nbytes or 1) > later:
                self.fail(f"tensors {name!r} and {other!r} overlap", at)
        for (start, nbytes, _, name), end in zip(placed, ends, strict=True):
            row = self.tensors[name]
            self.tensors[name] = TensorEntry(
                name, row.ggml_type, row.dims, start, nbytes, end - start, self.path
            )

    # typed access

    def scalar(self, entry: Entry) -> int | float | bool | str:
        """The value of a scalar entry. Raises ModelError for text that is not UTF-8."""
        if entry.kind is ValueType.STRING:
            raw = self._bytes(entry.offset, entry.nbytes)
            try:
                return raw.decode("utf-8")
            except UnicodeDecodeError as error:
                self.fail(f"{entry.key!r} is not valid UTF-8", entry.offset + error.start)
        value: int | float = struct.unpack(
            "<" + _FORMATS[entry.kind], self._bytes(entry.offset, entry.nbytes)
        )[0]
        return bool(value) if entry.kind is ValueType.BOOL else value

    def numbers(self, entry: Entry) -> tuple[int | float | bool, ...]:
        """The elements of a numeric or bool array."""
        values = struct.unpack(
            f"<{entry.count}{_FORMATS[entry.kind]}", self._bytes(entry.offset, entry.nbytes)
        )
        return tuple(map(bool, values)) if entry.kind is ValueType.BOOL else values

    def _typed(self, key: str, kinds: tuple[ValueType, ...], what: str) -> Entry | None:
        entry = self.entries.get(key)
        if entry is not None and (entry.is_array or entry.kind not in kinds):
            held = f"array of {entry.kind.name}" if entry.is_array else entry.kind.name
            self.fail_value(f"{key!r} is {held}, not {what}", entry.offset)
        return entry

    def _missing(self, key: str) -> NoReturn:
        self.fail(f"{key!r} is missing", 0, hint="the file is not a complete language model")

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """An integer in low..high. Raises ModelError: absent without default, another type, out of range."""
        entry = self._typed(key, _INTEGERS, "an integer")
        if entry is None:
            return default if default is not None else self._missing(key)
        value = int(self.scalar(entry))
        if not low <= value <= high:
            self.fail_value(f"{key!r} is {value}, not in {low} to {high}", entry.offset)
        return value

    def integers(self, key: str, low: int, high: int, *, default: int | None = None) -> int | tuple[int, ...]:
        """As `integer`, or a tuple where the file has an array with one element a layer."""
        entry = self.entries.get(key)
        if entry is None or not entry.is_array:
            return self.integer(key, low, high, default=default)
        if entry.kind not in _INTEGERS or entry.count > MAX_KEYS:
            self.fail_value(
                f"{key!r} is {entry.count} of {entry.kind.name}, not integers a layer", entry.offset
            )
        values = tuple(int(value) for value in self.numbers(entry))
        if not all(low <= value <= high for value in values):
            self.fail_value(f"{key!r} has an element outside {low} to {high}", entry.offset)
        return values

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string. Raises ModelError: absent without default, another type, not UTF-8."""
        entry = self._typed(key, (ValueType.STRING,), "a string")
        if entry is None:
            return default if default is not None else self._missing(key)
        return str(self.scalar(entry))

    def flag(self, key: str, default: bool) -> bool:
        """A bool. Raises ModelError for another type."""
        entry = self._typed(key, (ValueType.BOOL,), "a bool")
        return default if entry is None else bool(self.scalar(entry))

    def array(self, key: str, kinds: tuple[ValueType, ...]) -> Entry | None:
        """The entry of an array of one of `kinds`, or None. Raises ModelError for anything else."""
        entry = self.entries.get(key)
        if entry is not None and (not entry.is_array or entry.kind not in kinds):
            held = f"an array of {entry.kind.name}" if entry.is_array else entry.kind.name
            self.fail_value(
                f"{key!r} is {held}, not an array of {' or '.join(k.name for k in kinds)}", entry.offset
            )
        return entry

    def strings(self, key: str) -> list[bytes]:
        """The elements of a string array, undecoded; empty when absent. Copies them: ask when needed."""
        entry = self.array(key, (ValueType.STRING,))
        if entry is None:
            return []
        result, position, data = [], 0, self._bytes(entry.offset, entry.nbytes)
        try:
            for _ in range(entry.count):
                end = position + 8 + U64.unpack_from(data, position)[0]
                result.append(data[position + 8 : end])
                position = end
        except (struct.error, OverflowError):
            position = -1
        if position != entry.nbytes:
            self.fail(f"{key!r} is not what it was when the file was opened", entry.offset)
        return result

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the header with its tensor table and of the file's size."""
        return self._digest


_INTEGERS = (
    ValueType.UINT8,
    ValueType.INT8,
    ValueType.UINT16,
    ValueType.INT16,
    ValueType.UINT32,
    ValueType.INT32,
    ValueType.UINT64,
    ValueType.INT64,
)


def _stored_bytes(number: int, dims: tuple[int, ...]) -> int | None:
    kind = ggml_type(number)
    if kind is None:
        return None
    rows = 1
    for dim in dims[1:]:
        rows *= dim
    return dims[0] // kind.block * kind.block_bytes * rows
