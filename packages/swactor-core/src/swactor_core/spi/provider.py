"""What a plug-in hands out at start-up: a named factory for one kind of part.

Knows what can be asked before a part is made. Must not know any plug-in, nor what its parts do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from swactor_core.errors import PluginError, SwactorError, remedy_of_lack
from swactor_core.values import frozen

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


@frozen
class WorkerMemory:
    """Bytes that a worker takes of a model in one run, beside what the model's facts tell.

    Copies of weights: `layers` has those that come with each layer of the whole model, `embedding` those of
    the first stage, `head` those of the last, and a stage that is both has `shared` less. `scratch` is any
    stage's; `process` what the process takes by itself, at its largest, 0 where the device's memory is
    another. `in_file` says that weights may stay pages of the model's file, which the kernel drops when
    memory is short and reads again: a stage that is larger than the memory is slow then, and lives.
    `in_memory` is what a worker takes instead that follows a plan's `weights_in_memory`; None of one that
    does the same whatever the plan says.
    """

    layers: tuple[int, ...]
    embedding: int = 0
    head: int = 0
    shared: int = 0
    scratch: int = 0
    process: int = 0
    in_file: bool = False
    in_memory: WorkerMemory | None = None

    def planned(self, *, weights_in_memory: bool) -> WorkerMemory:
        """What it takes in a run whose plan says so."""
        return (self.in_memory or self) if weights_in_memory else self


class WorkerMemoryOf(Protocol):
    """What a worker would hold of a model's stages, beyond weights, cache and scratch."""

    def __call__(
        self, manifest: StageManifest, max_context: int, *, prefill_chunk: int, settings: Mapping[str, object]
    ) -> WorkerMemory:
        """`manifest` is the whole model's, `max_context` are the positions of the run. Opens no file and no
        device. Raises ConfigError for a setting that the factory would refuse, and RoleError as
        `check_model`."""


@frozen
class Provider:
    """`factory` returns the part, as the docstring of the kind's `spi` module says; heavy imports belong
    inside it. `capabilities` are facts a host or test asks for by name; a missing one is False, but for
    `crosses_processes`. What the runtime asks (`hosting.py`): `crosses_processes` of an arena, a transport
    and a membership, `udp` of the latter two, and `in_process` of a worker: that several may live in one
    process, on its event loop.

    A worker's `check_model(manifest of the whole model, positions of the run)` raises RoleError for a model
    that its `configure` would refuse in one stage, and for no other; it opens no file and looks at no device.
    None where a worker cannot tell beforehand. Its `check_settings(settings)` raises ConfigError for settings
    that its factory would refuse whatever the machine has; None where only the factory can tell. Its
    `check_machine(settings)` raises ResourceError for what its factory would miss on this machine and can be
    found out at once, such as a compiler; None where nothing can. Its `memory`
    says what settings do to the memory of stages, also of a node that said in its facts, under `settings`,
    which it has; None: nothing is said. A loader's `cache()` gives what it keeps on this machine's disk; None
    where it keeps nothing. `storage()` of any kind gives what else is kept there.
    """

    kind: Kind
    name: str
    summary: str
    factory: Callable[..., Any]
    api_level: int = API_LEVEL
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    check_model: Callable[[StageManifest, int], None] | None = None
    check_settings: Callable[[Mapping[str, Any]], object] | None = None
    check_machine: Callable[[Mapping[str, Any]], object] | None = None
    memory: WorkerMemoryOf | None = None
    cache: Callable[[], ModelCache] | None = None
    storage: Callable[[], Storage] | None = None

    @property
    def crosses_processes(self) -> bool:
        """Whether parts in different processes can meet over it; True where nothing is said."""
        return bool(self.capabilities.get("crosses_processes", True))

    def make(self, **arguments: Any) -> Any:
        """The part, by `factory`. Raises PluginError for what only a broken plug-in's factory raises, most of
        all when something that it imports is not installed; its own SwactorErrors pass, and what the machine
        lacks."""
        try:
            return self.factory(**arguments)
        except SwactorError:
            raise
        except Exception as error:  # a plug-in may raise anything
            if remedy_of_lack(error):
                raise
            lacks = isinstance(error, ImportError)
            remedy = (
                "install what it lacks, or its package anew" if lacks else "tell whoever makes its package"
            )
            raise PluginError(
                f"the {self.kind} plug-in {self.name!r} cannot be used: {type(error).__name__}: {error}",
                hint=f"{remedy}: `swactor-cli plugins` names it; or choose another with --{self.kind}",
            ) from error
