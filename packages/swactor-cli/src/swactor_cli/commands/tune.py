"""`swactor-cli tune`: pays now, on this machine, what a worker pays the first time it runs a model's stages.

Configures each stage as a run would, one after the other in this process, and lets it go again: what the
worker plug-in keeps on disk for the next time (compiled kernels) is then there, and so are fetched weights.
"""

from __future__ import annotations

import time
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn
from swactor_core.config import PluginChoice, choose_plugins
from swactor_core.hosting import (
    local_names,
    memory_of_workers,
    refuse_this_machine,
    refuse_unfit_model,
    refuse_wrong_settings,
)
from swactor_core.ids import NodeId, RunId
from swactor_core.machines.provisioning import provision_stage, stage_config
from swactor_core.messages import LoadPhase
from swactor_core.plan import GgufSource
from swactor_core.planner import EdgeIdAllocator, NodeCapacity, RuntimeChoices, plan_run, positions_of
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind
from swactor_core.spi.worker import LoadProgress
from swactor_core.values import frozen

from swactor_cli.errors import ExitCode
from swactor_cli.models import Room, open_model
from swactor_cli.output import Output
from swactor_cli.progress import PHASES
from swactor_cli.terminal import harmless_line
from swactor_cli.worker_options import worker_settings


@frozen
class TuneOptions:
    """The command's options, as given. `tokens` is the length of a run, prompt and answer."""

    model: str
    nodes: int
    tokens: int
    prefill_chunk: int
    device: str | None
    worker_options: tuple[str, ...]
    plugins: dict[str, str | None]


def tune(options: TuneOptions, output: Output) -> ExitCode:
    """Raises what `run` raises of the same model, and RoleError for a stage that cannot be configured."""
    choice = choose_plugins(PluginChoice(), options.plugins)
    plugins = load_plugins(blocked=choice.blocked)
    settings = worker_settings(options.device, options.worker_options)
    refuse_wrong_settings(plugins, choice, settings)
    name, model = open_model(
        plugins.select(Kind.LOADER, choice.loader).make(),
        options.model,
        output,
        before_fetch=lambda: refuse_this_machine(plugins, choice, settings),
    )
    try:
        whole, chunk = model.manifest(0, model.facts.num_layers), options.prefill_chunk
        choices = RuntimeChoices(prompt=(0,), max_tokens=options.tokens - 1, prefill_chunk=chunk)
        positions = positions_of(model.facts, choices)
        say = memory_of_workers(plugins, choice, whole, positions=positions, prefill_chunk=chunk)
        mine, free = say({"worker": choice.worker, "settings": settings}), Room().own
        made = plan_run(
            tuple(
                NodeCapacity(NodeId(index + 1), None, mine, name, free_bytes=free)
                for index, name in enumerate(local_names(options.nodes))
            ),
            model.facts,
            source=GgufSource(name, model.digest(), model.outline()),
            choices=choices,
            run_id=RunId(1),
            orchestrator=NodeId(0),
            edge_ids=EdgeIdAllocator(),
        )
        refuse_unfit_model(plugins, choice, whole, positions=positions)
        backend = plugins.select(Kind.WORKER, choice.worker).make(settings=settings)
        try:
            for stage in made.stages:
                layers = stage.layer_start, stage.layer_end_exclusive
                model.fetch(*layers)
                provision = provision_stage(made, stage, prefill_chunk=options.prefill_chunk)
                began = time.monotonic()
                with _Bar(output, stage.stage_index) as bar:
                    role = backend.configure(
                        stage_config(provision, model.manifest(*layers)),
                        progress=bar.show,
                        should_abort=lambda: False,
                    )
                facts = dict(role.facts)
                role.close()
                _say(output, stage.stage_index, layers, time.monotonic() - began, facts)
        finally:
            backend.close()
    finally:
        model.close()
    return ExitCode.COMPLETED


def _say(output: Output, index: int, layers: tuple[int, int], seconds: float, facts: dict[str, Any]) -> None:
    start, end = layers
    if output.json_lines:
        stage = {"stage_index": index, "layer_start": start, "layer_end_exclusive": end}
        output.record({"type": "tuned", **facts, **stage, "seconds": round(seconds, 6)})
    else:
        said = ", ".join(f"{name} {value}" for name, value in facts.items())
        output.text(f"stage {index}, layers {start} to {end - 1}: ready after {seconds:.2f} s ({said})\n")


class _Bar:
    """How far a stage is, on a terminal."""

    def __init__(self, output: Output, index: int) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        self._bars = Progress(*columns, console=output.talk, transient=True) if output.interactive else None
        self._stage = f"stage {index}"
        self._output, self._searching = output, False

    def __enter__(self) -> _Bar:
        if self._bars is not None:
            self._bars.start()
            self._task = self._bars.add_task(self._stage)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, progress: LoadProgress) -> None:
        if self._bars is not None:
            phase = PHASES.get(progress.phase, progress.phase)  # straight from the plug-in
            what = harmless_line(f"{self._stage}: {phase}")
            self._bars.update(self._task, description=what, completed=progress.done, total=progress.total)
        elif progress.phase == LoadPhase.SEARCH and not self._searching:
            self._searching = True
            self._output.note(f"{self._stage}: {PHASES[LoadPhase.SEARCH]}, which takes minutes")
