"""Slotted dataclasses that are made in a tenth of the time: `frozen`, and `value` for what every token makes.

`dataclasses` writes six methods of a class as text and compiles each, 0.4 ms a class, which was half of what
a node process did before anybody could tell it anything. Here only `__init__` is written so, and not before
an object is made: a process makes none of most of its classes. The rest is as `dataclass(slots=True)` has it,
but that fields are refused which are no parameter of `__init__` or have a rule of their own for the hash.
Knows no class that it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[T]) -> type[T]:
    """As `dataclass(frozen=True, slots=True)`: equality and a hash over its fields, which cannot be set."""
    return _made(kind, frozen=True)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(kind: type[T]) -> type[T]:
    """As `frozen` to the type checker, and at run time not held to it: an object is made in half the time.
    Some ninety of them are made on a token's way through one node and its worker."""
    return _made(kind, frozen=False)


def _made(kind: type[T], *, frozen: bool) -> type[T]:
    if kind.__doc__ is None:
        kind.__doc__ = kind.__name__  # else a signature is written for it
    made = dataclass(init=False, repr=False, eq=False, slots=True)(kind)
    if odd := [each.name for each in vars(made)["__dataclass_fields__"].values() if _is_odd(each)]:
        raise TypeError(
            f"{made.__qualname__}: {', '.join(odd)}: InitVar, init=False and hash= are not known here"
        )
    members = {"__init__": _initialiser_to_be(made, frozen=frozen), "__repr__": _text, **_comparison(made)}
    if frozen:
        members |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
        members |= {"__getstate__": _state, "__setstate__": _set_state}
    for name, member in members.items():
        if vars(made).get(name) is None:  # a class with an equality of its own has None for a hash
            setattr(made, name, member)
    return made


def _is_odd(one: Field[Any]) -> bool:
    return not one.init or one.hash is not None or "InitVar" in str(one.type)


def _initialiser_to_be(made: type[Any], *, frozen: bool) -> Callable[..., None]:
    """An `__init__` that puts the real one in its place, not in that of one that somebody has put there."""

    def first(self: object, *values: object, **named: object) -> None:
        real = _initialiser(made, frozen=frozen)
        if made.__init__ is first:
            made.__init__ = real
        real(self, *values, **named)

    return first


def _initialiser(made: type[Any], *, frozen: bool) -> Callable[..., None]:
    known: dict[str, Any] = {}
    parameters: dict[bool, list[str]] = {False: ["self"], True: ["*"]}
    lines = []
    for each in fields(made):
        name = given = each.name
        parameter, default = name, f"_default_{name}"
        if each.default_factory is not MISSING:
            known[default], known["_absent"] = each.default_factory, MISSING
            parameter, given = f"{name}=_absent", f"{default}() if {name} is _absent else {name}"
        elif each.default is not MISSING:
            known[default], parameter = each.default, f"{name}={default}"
        parameters[bool(each.kw_only)].append(parameter)
        if frozen:
            known[f"_set_{name}"] = getattr(made, name).__set__
        lines.append(f"_set_{name}(self, {given})" if frozen else f"self.{name} = {given}")
    lines += ["self.__post_init__()"] * hasattr(made, "__post_init__")
    taken = parameters[False] + parameters[True] * (len(parameters[True]) > 1)
    text = f"def __init__({', '.join(taken)}):\n " + "\n ".join(lines or ["pass"])
    exec(text, known)  # noqa: S102 - as `dataclasses` does: only names of fields are in it
    real: Callable[..., None] = known["__init__"]
    real.__qualname__, real.__module__ = f"{made.__qualname__}.__init__", made.__module__
    return real


def _comparison(made: type[Any]) -> dict[str, Callable[..., object]]:
    """Equality and hash; classes are told apart, also one from another that it inherits from."""
    names = [each.name for each in fields(made) if each.compare]
    # one name alone would get its value, and no tuple
    key: Callable[[object], object] = attrgetter(*names, names[0]) if names else lambda _: ()

    def equal(self: object, other: object) -> bool:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed(self: object) -> int:
        return hash(key(self))

    return {"__eq__": equal, "__hash__": hashed}


def _text(self: Any) -> str:
    shown = [f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr]
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _refuse_to_set(_: object, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(_: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[object]:
    return [getattr(self, each.name) for each in fields(self)]


def _set_state(self: Any, state: list[object]) -> None:
    for each, kept in zip(fields(self), state, strict=True):
        object.__setattr__(self, each.name, kept)
