"""Values from annotations: a Hypothesis strategy, or the plainest value, for any message of the vocabulary.

Knows dataclasses, named tuples, enums, NewTypes and containers of them, as the messages use them; nothing of
what a message means.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from swactor_core.values import frozen

JSON_LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8)


@frozen
class Leaves:
    """What stands at the leaves of a built value, by plain type; `overrides` goes before everything."""

    integers: SearchStrategy[int]
    floats: SearchStrategy[float]
    texts: SearchStrategy[str]
    objects: SearchStrategy[Any]
    overrides: Mapping[Any, SearchStrategy[Any]]


def small(overrides: Mapping[Any, SearchStrategy[Any]] | None = None) -> Leaves:
    """Few distinct values, so that identities of different messages meet."""
    texts = st.sampled_from(("", "why"))
    return Leaves(st.integers(0, 2), st.sampled_from((0.0, 0.5)), texts, st.integers(0, 1), overrides or {})


def wide() -> Leaves:
    """All that may cross a border as JSON: 64-bit identities, finite floats, any text, nested settings."""
    objects = st.recursive(
        JSON_LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    )
    finite = st.floats(allow_nan=False, allow_infinity=False)
    return Leaves(st.integers(0, 2**64 - 1), finite, st.text(max_size=12), objects, {})


def values(annotation: Any, leaves: Leaves) -> SearchStrategy[Any]:
    """Instances of `annotation`. Raises TypeError for one that no message uses."""
    if annotation in leaves.overrides:
        return leaves.overrides[annotation]
    if isinstance(annotation, NewType):
        return values(annotation.__supertype__, leaves)
    plain: dict[Any, SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: leaves.integers,
        float: leaves.floats,
        str: leaves.texts,
        bytes: st.binary(max_size=4),
        type(None): st.none(),
        object: leaves.objects,
        Any: leaves.objects,
    }
    if annotation in plain:
        return plain[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return st.sampled_from(annotation)
    names = _field_names(annotation)
    if names is not None:
        hints = get_type_hints(annotation)
        return st.builds(annotation, **{name: values(hints[name], leaves) for name in names})
    return _container(annotation, leaves)


def _field_names(annotation: Any) -> tuple[str, ...] | None:
    """What a dataclass or a named tuple is built from; None for anything else."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return tuple(f.name for f in fields(annotation) if f.init)
    return getattr(annotation, "_fields", None)


def _container(annotation: Any, leaves: Leaves) -> SearchStrategy[Any]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(option, leaves) for option in inner))
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(values(inner[0], leaves), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(part, leaves) for part in inner))
    if origin is dict:
        return st.dictionaries(values(inner[0], leaves), values(inner[1], leaves), max_size=2)
    raise TypeError(f"no values for {annotation!r}")


def plainest(annotation: Any) -> Any:
    """One value, always the same: 1, "", the first member, None, the empty tuple, and messages of these."""
    if isinstance(annotation, NewType):
        return plainest(annotation.__supertype__)
    plain = {bool: False, int: 1, float: 1.0, str: "", bytes: b"", type(None): None, object: None, Any: None}
    if annotation in plain:
        return plain[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return next(iter(annotation))
    names = _field_names(annotation)
    if names is not None:
        hints = get_type_hints(annotation)
        return annotation(**{name: plainest(hints[name]) for name in names})
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return None if type(None) in inner else plainest(inner[0])
    if origin is tuple:
        return () if inner[-1] is Ellipsis else tuple(plainest(part) for part in inner)
    if origin is dict:
        return {}
    raise TypeError(f"no value for {annotation!r}")
