"""What is made with every token has all of a frozen dataclass but the frozenness at run time."""

from __future__ import annotations

from dataclasses import field, is_dataclass, replace

import pytest
from swactor_core.values import value


@value
class Pair:
    left: int
    right: tuple[int, ...] = ()


@value
class Other:
    left: int
    right: tuple[int, ...] = ()


@value
class Named:
    names: list[str] = field(default_factory=list)


def test_equality_and_hash_are_of_the_fields_and_the_class() -> None:
    assert Pair(1, (2,)) == Pair(1, (2,)) != Pair(1)
    assert hash(Pair(1, (2,))) == hash(Pair(1, (2,)))
    assert {Pair(1): "a"}[Pair(left=1)] == "a"
    assert Pair(1) != Other(1)
    assert repr(Pair(1)) == "Pair(left=1, right=())"


def test_it_is_slotted_and_a_dataclass() -> None:
    assert is_dataclass(Pair)
    assert replace(Pair(1), right=(3,)) == Pair(1, (3,))
    assert not hasattr(Pair(1), "__dict__")
    with pytest.raises(AttributeError):
        Pair(1).middle = 2  # type: ignore[attr-defined] # that is the point


def test_defaults_are_made_anew() -> None:
    assert Named().names is not Named().names


def test_the_type_checker_is_told_that_it_is_frozen() -> None:
    told = value.__dataclass_transform__  # type: ignore[attr-defined] # PEP 681
    assert {**told, **told["kwargs"]}["frozen_default"] is True
