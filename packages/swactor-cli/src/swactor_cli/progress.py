"""Shows what a run waits for: pool, weights per stage with a bar, edges, barrier; then streams its tokens.

On a terminal the waiting is live on stderr and gone when text begins; elsewhere only the result is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swactor_core.machines.pool import ReportPool
from swactor_core.machines.run_effects import RunState
from swactor_core.messages import LoadPhase, StageProgress
from swactor_core.orchestrator.orchestrator import RunListener

from swactor_cli.answer import Answer
from swactor_cli.output import Output, OutputLost
from swactor_cli.terminal import harmless_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PHASES = {
    LoadPhase.DOWNLOAD: "fetching",
    LoadPhase.WEIGHTS: "loading weights",
    LoadPhase.SEARCH: "searching kernels",
    LoadPhase.COMPILE: "compiling kernels",
    LoadPhase.READY: "ready",
}
STATES = {
    RunState.PROVISIONING: "provisioning stages",
    RunState.WAITING_READY: "preparing stages and edges",
    RunState.RUNNING: "prefill",
    RunState.TEARING_DOWN: "tearing down",
}


class Display(RunListener):
    """Shows an answer and everything before it.

    When stdout cannot be written any more, `lost` says why and `stop` is called once: nobody reads on."""

    def __init__(self, output: Output, answer: Answer) -> None:
        self._output = output
        self._answer = answer
        self._certain = ""
        self.text = ""
        self.lost: OutputLost | None = None
        self.stop: Callable[[], None] = lambda: None
        self._bars: Progress | None = None
        self._pool_bar: TaskID
        self._stage_bars: dict[int, TaskID] = {}

    def __enter__(self) -> Display:
        if self._output.interactive:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[note]}", markup=False),
                TimeElapsedColumn(),
                console=self._output.talk,
                transient=True,
            )
            self._bars.start()
            self._pool_bar = self._bars.add_task("pool", total=None, note="starting nodes")
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bars()

    def _end_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def pool(self, report: ReportPool) -> None:
        if self._bars is not None:
            note = f"{report.ready} of {report.total} nodes" + (
                f", {report.waiting[0]}" if report.waiting else ""
            )
            self._bars.update(
                self._pool_bar, total=report.total, completed=report.ready, note=harmless_line(note)
            )

    def state(self, state: RunState) -> None:
        if self._bars is not None and state in STATES:
            self._bars.update(self._pool_bar, description="run", note=STATES[state])

    def progress(self, progress: StageProgress) -> None:
        if self._bars is None:
            return
        bar = self._stage_bars.get(progress.stage_index)
        if bar is None:
            bar = self._bars.add_task(f"stage {progress.stage_index}", total=None, note="")
            self._stage_bars[progress.stage_index] = bar
        note = PHASES[progress.phase]
        self._bars.update(bar, total=progress.total or None, completed=progress.done, note=note)

    def enough(self, token_id: int) -> bool:
        self._certain = self._answer.push(token_id)
        return self._answer.stopped

    def token(self, sequence: int, token_id: int) -> None:
        self._end_bars()
        text, self._certain = self._certain, ""
        self.text += text
        if self.lost is not None:
            return
        try:
            if self._output.json_lines:
                self._output.record({"type": "token", "id": token_id, "text": text})
            else:
                self._output.text(text)
        except OutputLost as error:
            self.lost = error
            self.stop()

    def finish(self) -> None:
        """Writes what was held back, and ends the line. Raises OutputLost."""
        self._end_bars()
        rest = self._answer.finish()
        self.text += rest
        if self.lost is not None:
            raise self.lost
        if not self._output.json_lines:
            self._output.text(rest + "\n" if self.text else rest)
