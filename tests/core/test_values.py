"""Classes that are made quickly are what `dataclasses` makes of them; `value` is so but for being frozen."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from unittest import mock

import pytest
from swactor_core.values import frozen, value

T = TypeVar("T")
SLOTTED: Callable[[type[Any]], type[Any]] = dataclass(frozen=True, slots=True)
MAKERS = (SLOTTED, frozen, value)
OURS = (frozen, value)


class Family:
    """The same classes by each maker, some of which inherit from one another."""

    def __init__(self, make: Callable[[type[Any]], type[Any]]) -> None:
        @make
        class Nothing:
            pass

        @make
        class Pair:
            """Two."""

            left: int
            right: tuple[int, ...] = ()

        @make
        class Longer(Pair):
            more: str = "more"

        @make
        class Lists:
            secret: str = field(repr=False)
            names: list[str] = field(default_factory=list)
            uncounted: int = field(default=0, compare=False)
            last: str | None = field(default=None, kw_only=True)
            kind: ClassVar[str] = "lists"

        @make
        class Checked:
            count: int

            def __post_init__(self) -> None:
                if self.count < 0:
                    raise ValueError(f"count {self.count}")

            @property
            def twice(self) -> int:
                return 2 * self.count

        @make
        class OwnWords:
            x: int

            def __repr__(self) -> str:
                return "own words"

            def __eq__(self, other: object) -> bool:
                return True

            def __hash__(self) -> int:
                return 7

        @make
        class OwnEquality:
            x: int

            def __eq__(self, other: object) -> bool:
                return True

        @make
        class Held(Generic[T]):
            held: T

        self.classes = (Nothing, Pair, Longer, Lists, Checked, OwnWords, OwnEquality, Held)
        self.objects = (
            Nothing(),
            Pair(1),
            Pair(1, (2,)),
            Pair(left=1, right=(2,)),
            Longer(1, (2,)),
            Longer(1, more="x"),
            Lists("s"),
            Lists("s", ["a"], 4, last="z"),
            Lists("s", ["a"], 5, last="z"),
            Checked(3),
            OwnWords(1),
            OwnEquality(1),
            Held("x"),
        )


FAMILIES = {make: Family(make) for make in MAKERS}
THEIRS = FAMILIES[SLOTTED]


@pytest.mark.parametrize("make", OURS)
def test_fields_slots_and_patterns_are_those_of_a_dataclass(make: Any) -> None:
    for ours, theirs in zip(FAMILIES[make].classes, THEIRS.classes, strict=True):
        assert is_dataclass(ours)
        assert [(f.name, f.type, f.init, f.kw_only) for f in fields(ours)] == [
            (f.name, f.type, f.init, f.kw_only) for f in fields(theirs)
        ]
        assert ours.__match_args__ == theirs.__match_args__
        assert ours.__slots__ == theirs.__slots__
        assert not hasattr(ours, "__dict__") or "__dict__" not in ours.__slots__


@pytest.mark.parametrize("make", OURS)
def test_objects_compare_and_show_as_those_of_a_dataclass(make: Any) -> None:
    ours, theirs = FAMILIES[make].objects, THEIRS.objects
    assert [repr(each) for each in ours] == [repr(each) for each in theirs]
    table = [[a == b for b in theirs] for a in theirs]
    assert [[a == b for b in ours] for a in ours] == table
    for a in ours:
        assert a.__class__.__name__.startswith("Own") or a != object()
        for b in ours:
            if a == b and a.__class__ is b.__class__ and not hasattr(a, "names"):
                assert hash(a) == hash(b)
    with pytest.raises(TypeError, match="unhashable"):
        hash(ours[6])  # it holds a list


@pytest.mark.parametrize("make", OURS)
def test_signatures_once_made_are_those_of_a_dataclass(make: Any) -> None:
    for ours, theirs in zip(FAMILIES[make].classes, THEIRS.classes, strict=True):
        mine, wanted = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
        assert [(p.name, p.kind) for p in mine.values()] == [(p.name, p.kind) for p in wanted.values()]
        assert ours.__init__.__qualname__ == f"{ours.__qualname__}.__init__"


@pytest.mark.parametrize("make", OURS)
def test_wrong_arguments_and_wrong_values_are_refused(make: Any) -> None:
    _, pair, *_ = Family(make).classes
    checked = FAMILIES[make].classes[4]
    with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'left'"):
        pair()  # the first that is made, and made wrongly
    with pytest.raises(TypeError, match="unexpected keyword argument 'middle'"):
        pair(1, middle=2)
    with pytest.raises(ValueError, match="count -1"):
        checked(-1)
    assert checked(2).twice == 4


@pytest.mark.parametrize("make", OURS)
def test_what_makes_new_objects_of_old_ones_works(make: Any) -> None:
    pair, lists = FAMILIES[make].objects[2], FAMILIES[make].objects[7]
    assert replace(pair, right=(3,)).right == (3,)
    assert asdict(lists) == {"secret": "s", "names": ["a"], "uncounted": 4, "last": "z"}
    assert copy.copy(pair) == copy.deepcopy(pair) == pair
    assert copy.deepcopy(lists).names is not lists.names
    first, second = FAMILIES[make].classes[3]("s"), FAMILIES[make].classes[3]("s")
    assert first.names is not second.names


@pytest.mark.parametrize("make", OURS)
def test_what_is_not_made_as_dataclasses_would_is_refused(make: Any) -> None:
    for odd in (field(init=False, default=1), field(hash=False)):
        with pytest.raises(TypeError, match="odd: InitVar, init=False and hash= are not known here"):
            make(type("Odd", (), {"__annotations__": {"odd": "int"}, "odd": odd}))
    with pytest.raises(TypeError, match="odd: InitVar"):
        make(type("Odd", (), {"__annotations__": {"odd": "InitVar[int]"}}))


@frozen
class Kept:
    left: int
    right: tuple[int, ...] = ()


@value
class Passing:
    left: int


@pytest.mark.parametrize("make", OURS)
def test_an_init_that_took_the_place_of_the_first_one_keeps_it(make: Any) -> None:
    """As a test's patch does, before any object was made."""

    @make
    class Told:
        word: str

    made: list[str] = []
    first = Told.__init__

    def telling(self: Any, word: str) -> None:
        made.append(word)
        first(self, word)

    with mock.patch.object(Told, "__init__", telling):
        assert [Told("a").word, Told("b").word] == made == ["a", "b"]
    assert Told("c").word == Told("c").word == "c"
    assert made == ["a", "b"]


def test_objects_cross_processes() -> None:
    assert pickle.loads(pickle.dumps(Kept(1, (2,)))) == Kept(1, (2,))
    assert pickle.loads(pickle.dumps(Passing(1))) == Passing(1)


def test_a_frozen_object_stays_as_it_is() -> None:
    kept = Kept(1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'left'"):
        kept.left = 2  # type: ignore[misc] # that is the point
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'right'"):
        del kept.right
    with pytest.raises(FrozenInstanceError):
        kept.middle = 2  # type: ignore[attr-defined] # that is the point
    assert kept == Kept(1)


def test_a_value_has_no_place_for_what_it_does_not_declare() -> None:
    with pytest.raises(AttributeError):
        Passing(1).middle = 2  # type: ignore[attr-defined] # that is the point


def test_no_package_makes_frozen_classes_the_slow_way() -> None:
    sources = Path(__file__).parents[2].glob("packages/*/src/**/*.py")
    assert not [path for path in sources if "@dataclass(frozen=True, slots=True)" in path.read_text()]


@pytest.mark.parametrize("make", OURS)
def test_the_type_checker_is_told_that_it_is_frozen(make: Any) -> None:
    told = make.__dataclass_transform__  # PEP 681
    assert {**told, **told["kwargs"]}["frozen_default"] is True
