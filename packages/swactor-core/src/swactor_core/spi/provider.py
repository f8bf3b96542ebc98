"""What a plug-in hands out at start-up: a named factory for one kind of part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from swactor_core.spi.loader import ModelCache, StageManifest
    from swactor_core.spi.storage import Storage

API_LEVEL = 1


class Kind(StrEnum):
    ARENA = "arena"
    TRANSPORT = "transport"
    MEMBERSHIP = "membership"
    WORKER = "worker"
    LOADER = "loader"
    SINK = "sink"


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Bytes of one stage that the model's facts do not tell. `copies` grow with the model or the run (weights
    laid out a second time, a mixture's rows); `process` is what the worker's process takes whatever it runs,
    at its largest."""

    copies: int
    process: int


class StageMemoryOf(Protocol):
    """What a worker would hold of a stage, beyond weights, cache and scratch."""

    def __call__(
        self, manifest: StageManifest, max_context: int, *, prefill_chunk: int, settings: Mapping[str, object]
    ) -> WorkerMemory:
        """`max_context` are the positions of the run. Opens no file and no device. Raises ConfigError for a
        setting that the factory would refuse, and RoleError as `check_model`."""


@dataclass(frozen=True, slots=True)
class Provider:
    """`factory` is called with the kind's context and returns the part; heavy imports belong inside it.

    Factories by kind: arena `(ArenaContext) -> ArenaFactory part`, see each `spi` module's docstring.
    `capabilities` are facts a host or test asks for by name; a missing one is False, but for
    `crosses_processes`. What the runtime asks (`hosting.py`): `crosses_processes` of an arena, a transport
    and a membership, and `in_process` of a worker: that several may live in one process, on its event loop.

    A worker's `check_model(manifest of the whole model, positions of the run)` raises RoleError for a model
    that its `configure` would refuse in one stage, and for no other; it opens no file and looks at no device.
    None where a worker cannot tell beforehand. Its `memory` says what settings do to the memory of a stage;
    None: nothing is said. A loader's `cache()` gives what it keeps on this machine's
    disk; None where it keeps nothing. `storage()` of any kind gives what else is kept there.
    """

    kind: Kind
    name: str
    summary: str
    factory: Callable[..., Any]
    api_level: int = API_LEVEL
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    check_model: Callable[[StageManifest, int], None] | None = None
    memory: StageMemoryOf | None = None
    cache: Callable[[], ModelCache] | None = None
    storage: Callable[[], Storage] | None = None

    @property
    def crosses_processes(self) -> bool:
        """Whether parts in different processes can meet over it; True where nothing is said."""
        return bool(self.capabilities.get("crosses_processes", True))
