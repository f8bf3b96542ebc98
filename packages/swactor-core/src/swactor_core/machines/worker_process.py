"""What passes between GpuWorkerCtl and the worker's process: its policy, what is read of it, what is asked.

Data only; the adapters that know processes and pipes are `node/worker_process.py` and `worker_inline.py`.
"""

from __future__ import annotations

from swactor_core.fsm import Effect
from swactor_core.ids import WorkerGeneration
from swactor_core.values import frozen, value


@frozen
class WorkerPolicy:
    """Seconds for start, ordered stop, and the answer to what tears a run down: below the bounds of who waits
    for it, so that a worker that hangs is reaped in time to prove its rings. `max_restarts` is how many
    crashes are followed by a restart before a run asks for a role again: what kills a worker that loads a
    model, as a lack of memory does, ends that run and not the node."""

    start_timeout: float = 60.0
    stop_timeout: float = 5.0
    kill_timeout: float = 5.0
    answer_timeout: float = 4.0
    max_restarts: int = 3


@frozen
class ContinueRestart:
    """Self-sent: teardown facts of the dead generation are out, the next may start."""


@value
class FromWorker:
    """A worker event of `generation`, as the process adapter read it; older generations are dropped."""

    generation: WorkerGeneration
    event: object


@frozen
class SpawnWorker(Effect):
    generation: WorkerGeneration


@value
class WriteWorker(Effect):
    """One command line to the worker of this generation."""

    generation: WorkerGeneration
    command: object


@frozen
class KillWorker(Effect):
    generation: WorkerGeneration
