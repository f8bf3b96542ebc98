"""Messages to JSON objects and back: one object a line (worker) or a frame (control).

The border where untrusted JSON becomes typed data: unknown types, unknown shapes and wrong values raise
CodecError and nothing else. Payload bytes never pass here: payload isolation (spec sections 28 and 39).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import SchemaValidator, ValidationError, core_schema

from swactor_core.schemas import Form

MAX_LINE = 4 * 1024 * 1024
_JSON = SchemaValidator(core_schema.any_schema())
"""Any JSON value; without the Python layers of `json`, which count on a token's way."""
_TYPE_FIRST = b'{"type":"'


class CodecError(ValueError):
    """Not a message of this border; the text says why."""


class MessageCodec:
    """Encodes and decodes exactly the given dataclasses, told apart by a `type` member with their name."""

    def __init__(self, types: Iterable[type[Any]]) -> None:
        self._forms = {t.__name__: Form(t, closed=True) for t in types}
        heads = {name: _TYPE_FIRST + name.encode() + b'"' for name in self._forms}
        self._written = {name: (heads[name], form) for name, form in self._forms.items()}
        self._read = {heads[name]: form for name, form in self._forms.items()}

    def encode(self, message: object) -> bytes:
        """One JSON object without a line break. Raises CodecError for a type of another border, for text
        that no JSON holds: lone surrogates, such as file names that are not UTF-8; and for what the other
        side would not take, more than MAX_LINE bytes."""
        name = type(message).__name__
        written = self._written.get(name)
        if written is None:
            raise CodecError(f"{name} does not cross this border")
        head, form = written
        try:
            body = form.serializer.to_json(message)
        except ValueError as error:  # pydantic's PydanticSerializationError is one
            raise CodecError(f"{name} cannot be written: {error}") from error
        line: bytes = head + (b"}" if body == b"{}" else b"," + body[1:])
        if len(line) > MAX_LINE:
            raise CodecError(f"{name} of {len(line)} bytes, at most {MAX_LINE}")
        return line

    def decode(self, data: bytes) -> Any:
        """The message of one JSON object. Raises CodecError."""
        if len(data) > MAX_LINE:
            raise CodecError(f"message of {len(data)} bytes, at most {MAX_LINE}")
        head, _, fields = data.partition(b",")
        form = self._read.get(head)
        if form is not None and fields[:1] == b'"':  # as `encode` writes it: validated while it is parsed
            try:
                return form.validator.validate_json(b"{" + fields)
            except ValidationError:
                pass  # said below, in the words of the whole line
        return self._decode_any(data)

    def _decode_any(self, data: bytes) -> Any:
        try:
            fields = _JSON.validate_json(data)
        except ValidationError as error:
            raise CodecError(f"not JSON: {error.errors(include_url=False)[0]['msg']}") from None
        name = fields.pop("type", None) if isinstance(fields, dict) else None
        form = self._forms.get(name) if isinstance(name, str) else None
        if form is None:
            raise CodecError(f"unknown message type {name!r}")
        try:
            return form.validator.validate_python(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(p) for p in first["loc"])
            raise CodecError(f"{name}.{where}: {first['msg']}") from None
