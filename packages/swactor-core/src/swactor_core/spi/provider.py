"""What a plug-in hands out at start-up: a named factory for one kind of part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

API_LEVEL = 1


class Kind(StrEnum):
    ARENA = "arena"
    TRANSPORT = "transport"
    MEMBERSHIP = "membership"
    WORKER = "worker"
    LOADER = "loader"
    SINK = "sink"


@dataclass(frozen=True, slots=True)
class Provider:
    """`factory` is called with the kind's context and returns the part; heavy imports belong inside it.

    Factories by kind: arena `(ArenaContext) -> ArenaFactory part`, see each `spi` module's docstring.
    `capabilities` are facts a host or test asks for by name; a missing one is False.
    """

    kind: Kind
    name: str
    summary: str
    factory: Callable[..., Any]
    api_level: int = API_LEVEL
    capabilities: Mapping[str, Any] = field(default_factory=dict)
