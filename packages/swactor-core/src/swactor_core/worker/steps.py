"""Role code (spec sections 16 and 29): a stage from ConfigureRole, and one step of it.

Knows the worker plug-in's interface and turns what it raises into reasons. Must not know rings or lines. An
exception that the interface does not name passes through: the device's state is then unknown, and a worker
that cannot vouch for it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pydantic_core import ValidationError

from swactor_core.errors import SwactorError
from swactor_core.faults import RoleFailure, StepFailure
from swactor_core.ids import RoleId
from swactor_core.machines.worker_effects import RoleBuilt, RoleRejected, StepComputed, StepRaised
from swactor_core.messages import LoadPhase, RoleProgress
from swactor_core.schemas import Form
from swactor_core.spi.worker import (
    LoadProgress,
    RoleError,
    StageConfig,
    StageRole,
    StepError,
    StepInput,
    WorkerBackend,
)

PROGRESS_INTERVAL = 0.1
DETAIL_CHARACTERS = 2000


class ProgressReports:
    """At most one RoleProgress per `PROGRESS_INTERVAL`, but every phase's first and last always."""

    def __init__(
        self, role_id: RoleId, emit: Callable[[RoleProgress], None], *, clock: Callable[[], float]
    ) -> None:
        self._role_id = role_id
        self._emit = emit
        self._clock = clock
        self._phase: LoadPhase | None = None
        self._next = 0.0
        self._held: RoleProgress | None = None

    def __call__(self, progress: LoadProgress) -> None:
        """Raises ValueError for a phase that there is not."""
        now, phase = self._clock(), LoadPhase(progress.phase)
        report = RoleProgress(self._role_id, phase, progress.done, progress.total)
        if phase is self._phase and now < self._next:
            self._held = report
            return
        if phase is not self._phase:
            self.finish()
        self._phase, self._next, self._held = phase, now + PROGRESS_INTERVAL, None
        self._emit(report)

    def finish(self) -> None:
        """Sends what was held back."""
        held, self._held = self._held, None
        if held is not None:
            self._emit(held)


class StageHost:
    """The one role of this worker and the output of its last step."""

    def __init__(self, backend: WorkerBackend) -> None:
        self._backend = backend
        self._config = Form(StageConfig, closed=False)
        self._role: StageRole | None = None
        self.output: Any = None

    def build(
        self,
        role_id: RoleId,
        config: dict[str, Any],
        *,
        progress: Callable[[RoleProgress], None],
        should_abort: Callable[[], bool],
    ) -> RoleBuilt | RoleRejected:
        """Blocks while the backend loads, minutes for a large stage; `should_abort` ends it early."""
        try:
            stage = self._config.validator.validate_python(config)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return RoleRejected(role_id, RoleFailure.CONFIG_INVALID, f"config.{where}: {first['msg']}")
        reports = ProgressReports(role_id, progress, clock=time.monotonic)
        try:
            self._role = self._backend.configure(stage, progress=reports, should_abort=should_abort)
        except RoleError as error:
            return RoleRejected(role_id, error.reason, describe(error))
        except MemoryError as error:
            return RoleRejected(role_id, RoleFailure.DEVICE_OUT_OF_MEMORY, describe(error))
        except SwactorError as error:
            return RoleRejected(role_id, RoleFailure.BACKEND_ERROR, describe(error))
        reports.finish()
        return RoleBuilt(role_id, dict(self._role.facts))

    def run(self, step: StepInput, should_abort: Callable[[], bool]) -> StepComputed | StepRaised:
        """One step; its output stays in `output` until the next call."""
        assert self._role is not None
        self.output = None
        started = time.perf_counter()
        try:
            self.output, extent = self._role.execute(step, should_abort)
        except StepError as error:
            return StepRaised(error.reason, describe(error))
        except MemoryError as error:
            return StepRaised(StepFailure.DEVICE_OUT_OF_MEMORY, describe(error))
        return StepComputed(extent, time.perf_counter() - started)

    def close_role(self) -> None:
        role, self._role, self.output = self._role, None, None
        if role is not None:
            role.close()

    def close(self) -> None:
        self.close_role()
        self._backend.close()


def describe(error: BaseException) -> str:
    """One bounded line for an operator: message and hint of our own errors, type and message of others."""
    if isinstance(error, SwactorError):
        text = error.message + (f" (hint: {error.hint})" if error.hint else "")
    else:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return " ".join(text.split())[:DETAIL_CHARACTERS]
