"""`value`: what is made with every token, as a frozen slotted dataclass is, in a third of the time.

A frozen dataclass sets each field through `object.__setattr__`; some ninety of them are made on a token's way
through one node and its worker. Knows no class that it makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(kind: type[T]) -> type[T]:
    """A slotted dataclass with equality and a hash over its fields. The type checker holds it frozen; at run
    time nothing does."""
    return dataclass(slots=True, unsafe_hash=True)(kind)
