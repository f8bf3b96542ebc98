"""How a dataclass is validated and written: the schemas that pydantic would make of it, without its import.

Knows the few types that fields have here. pydantic's own way to a schema, which reads everything that Python
can say of a type, takes longer to import than the rest of a worker's messages; `pydantic_core`, which does
the work, does not. `tests/core/test_schemas.py` holds these schemas against pydantic's.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from pydantic_core import CoreSchema, SchemaSerializer, SchemaValidator, core_schema

_PLAIN: dict[Any, Callable[[], CoreSchema]] = {
    int: core_schema.int_schema,
    float: core_schema.float_schema,
    str: core_schema.str_schema,
    bool: core_schema.bool_schema,
    Any: core_schema.any_schema,
}


class Form:
    """Validator and serializer of one dataclass, each made when it is first asked for. `closed`: what
    the dataclass has not is an error, also in those inside of it; else it is ignored."""

    def __init__(self, kind: type[Any], *, closed: bool) -> None:
        self._kind, self._closed = kind, closed

    @cached_property
    def _schema(self) -> CoreSchema:
        return schema_of(self._kind, closed=self._closed)

    @cached_property
    def validator(self) -> SchemaValidator:
        return SchemaValidator(self._schema)

    @cached_property
    def serializer(self) -> SchemaSerializer:
        return SchemaSerializer(self._schema)


def schema_of(kind: Any, *, closed: bool) -> CoreSchema:
    """The schema of a field's type. Raises TypeError for a type that no border here has."""
    if kind in _PLAIN:
        return _PLAIN[kind]()
    if isinstance(kind, NewType):
        return schema_of(kind.__supertype__, closed=closed)
    if isinstance(kind, type) and issubclass(kind, StrEnum | IntEnum):
        return core_schema.enum_schema(kind, list(kind), sub_type="str" if issubclass(kind, str) else "int")
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, closed=closed)
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        choices = [schema_of(each, closed=closed) for each in inside if each is not type(None)]
        made = choices[0] if len(choices) == 1 else core_schema.union_schema([*choices])
        return made if len(choices) == len(inside) else core_schema.nullable_schema(made)
    if origin is tuple:
        many = len(inside) == 2 and inside[1] is Ellipsis
        items = [schema_of(each, closed=closed) for each in (inside[:1] if many else inside)]
        return core_schema.tuple_schema(items, variadic_item_index=0 if many else None)
    if origin is dict:
        return core_schema.dict_schema(*(schema_of(each, closed=closed) for each in inside))
    raise TypeError(f"{kind!r} crosses no border")


def _dataclass(kind: type[Any], *, closed: bool) -> CoreSchema:
    hints, known = get_type_hints(kind), fields(kind)
    members = [
        core_schema.dataclass_field(each.name, _defaulted(each, schema_of(hints[each.name], closed=closed)))
        for each in known
    ]
    return core_schema.dataclass_schema(
        kind,
        core_schema.dataclass_args_schema(kind.__name__, members),
        [each.name for each in known],
        slots="__slots__" in vars(kind),
        config={"title": kind.__name__, **({"extra_fields_behavior": "forbid"} if closed else {})},
    )


def _defaulted(field: Field[Any], schema: CoreSchema) -> CoreSchema:
    if field.default is not MISSING:
        return core_schema.with_default_schema(schema, default=field.default)
    if field.default_factory is not MISSING:
        return core_schema.with_default_schema(schema, default_factory=field.default_factory)
    return schema
