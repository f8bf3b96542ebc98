"""A model's name to an open model, with a bar while it is fetched."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from swactor_core.errors import UsageError
from swactor_core.spi.loader import Loader, Model, Tokenizer

from swactor_cli.output import Output


def open_model(loader: Loader, name: str, output: Output) -> tuple[str, Model]:
    """The local path and the open model. Raises ModelError."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars = Progress(*columns, console=output.talk, transient=True) if output.interactive else None
    with bars if bars is not None else nullcontext():
        task: Any = None

        def progress(done: int, total: int) -> None:
            nonlocal task
            if bars is None:
                return
            if task is None:
                task = bars.add_task(f"fetching {name}", total=total or None)
            bars.update(task, completed=done, total=total or None)

        path = loader.resolve(name, progress)
        return path, loader.open(path, progress)


def tokenizer_of(model: Model, pre: str | None = None) -> Tokenizer | None:
    """None for a model without vocabulary; `pre` as in the model's `tokenizer`, which says what is raised."""
    if model.facts.has_vocabulary:
        return model.tokenizer(pre=pre)
    if pre is not None:
        raise UsageError("--pre was given, and the model has no vocabulary", hint="leave --pre out")
    return None
