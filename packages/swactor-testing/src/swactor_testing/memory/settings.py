"""Numbers of one endpoint, parsed from the host's settings mapping. Sizes in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from swactor_core.errors import ConfigError
from swactor_core.values import frozen


@frozen
class MemorySettings:
    """`send_bound`: accepted and unacknowledged bytes an edge. `control_window`: unread bytes of frames that
    a peer may be ahead on one channel, or one frame. `latency`: one way, of what this endpoint sends."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    send_bound: Annotated[int, Field(gt=0)] = 1 << 20
    control_window: Annotated[int, Field(gt=0)] = 256 << 10
    max_edges: Annotated[int, Field(gt=0)] = 1024
    """Edges that a peer may have open on one connection."""
    latency: Annotated[float, Field(ge=0, le=10)] = 0.0
    redial: Annotated[float, Field(gt=0, le=10)] = 0.02
    drain_timeout: Annotated[float, Field(ge=0, le=1.8)] = 1.5
    """How long close waits for what is under way; close itself is bounded by 2 s."""


_ADAPTER = TypeAdapter(MemorySettings)


def parse_settings(settings: Mapping[str, Any]) -> MemorySettings:
    """Raises ConfigError that names the offending key and its value."""
    try:
        return _ADAPTER.validate_python(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        known = ", ".join(MemorySettings.__dataclass_fields__)
        raise ConfigError(
            f"transport memory: {name} = {first['input']!r}: {first['msg']}", hint=f"known settings: {known}"
        ) from None
