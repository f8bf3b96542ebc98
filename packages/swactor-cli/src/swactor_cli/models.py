"""A model's name to an open model, with a bar while it is fetched; whether it fits on this machine.

Must not know what is done with it: every command that looks at a model opens it here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import field
from typing import TYPE_CHECKING, Any

from swactor_core import free_memory
from swactor_core.errors import ModelError, UsageError
from swactor_core.fitting import NODE_PROCESS, check_free_memory
from swactor_core.plan import RunPlan
from swactor_core.spi.loader import Loader, Model, ModelFacts, Tokenizer
from swactor_core.spi.provider import WorkerMemory
from swactor_core.values import frozen

from swactor_cli.output import Output
from swactor_cli.terminal import harmless_line

if TYPE_CHECKING:
    from rich.progress import Progress


@frozen
class Room:
    """Bytes of memory and of swap that are left at this moment, and `where`, in words."""

    free: int | None = field(default_factory=lambda: free_memory.available_memory())
    swap: int = field(default_factory=lambda: free_memory.available_swap())
    where: str = field(default_factory=lambda: free_memory.rest_in_words())

    @property
    def own(self) -> int | None:
        """Of `free` what processes may take beside pages of files."""
        return free_memory.within_limits(self.free)


def open_model(
    loader: Loader, name: str, output: Output, *, before_fetch: Callable[[], object] = lambda: None
) -> tuple[str, Model]:
    """The local path and the open model. `before_fetch` is called before anything is fetched, if anything is,
    and may raise what speaks against it. Raises ModelError."""
    bars = _bars(output) if output.interactive else None
    with bars if bars is not None else nullcontext():
        task: Any = None
        asked = False

        def progress(done: int, total: int) -> None:
            nonlocal task, asked
            if not asked:
                before_fetch()
                asked = True
            if bars is None:
                return
            if task is None:
                task = bars.add_task(harmless_line(f"fetching {name}"), total=total or None)
            bars.update(task, completed=done, total=total or None)

        path = loader.resolve(name, progress)
        return path, loader.open(path, progress)


def check_memory_here(
    plan: RunPlan,
    facts: ModelFacts,
    output: Output,
    *,
    prefill_chunk: int,
    worker: WorkerMemory | None,
    room: Room,
    node_processes: bool,
    path: str,
) -> None:
    """Of a plan whose nodes are all here and declare no memory; `room` is what was left before they started.
    Raises UsageError as `check_free_memory`."""
    said = check_free_memory(
        plan,
        facts,
        prefill_chunk=prefill_chunk,
        worker=worker,
        free=room.free,
        swap=room.swap,
        where=room.where,
        node_process=NODE_PROCESS if node_processes else 0,
        file_in_memory=free_memory.lies_in_memory(path),
    )
    if said:
        output.warning(said)


def _bars(output: Output) -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    name = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(name, *columns, console=output.talk, transient=True)


def tokenizer_of(model: Model, pre: str | None = None) -> Tokenizer | None:
    """None for a model without vocabulary; `pre` as in the model's `tokenizer`, which says what is raised."""
    if model.facts.has_vocabulary:
        return model.tokenizer(pre=pre)
    if pre is not None:
        raise UsageError("--pre was given, and the model has no vocabulary", hint="leave --pre out")
    return None


def has_tokenizer(model: Model) -> bool:
    """Whether the model's vocabulary can be used as its file says, with no other pre-tokenizer."""
    try:
        return tokenizer_of(model) is not None
    except ModelError:
        return False
