"""Captures a stage's graphs in a process of its own: what capturing leaves in a heap ends with it.

Knows how that process is started, heard and ended. `python -m swactor_worker_tinygrad.capturing PID` is it:
settings and stage come pickled on standard input from the worker that it belongs to, progress goes out, a
line each. It writes graphs to the disk and nothing else; whoever started it reads them there.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from swactor_core.faults import RoleFailure
from swactor_core.messages import LoadPhase
from swactor_core.node.process import die_with_parent
from swactor_core.spi.worker import LoadProgress, RoleError, StageConfig

from swactor_worker_tinygrad import environment
from swactor_worker_tinygrad.settings import WorkerSettings

log = logging.getLogger(__name__)

POLL_MILLISECONDS = 50
END_SECONDS = 10.0


def keeps_graphs() -> bool:
    """Whether another process would find what this one keeps: not where the folder is only this one's."""
    return any(Path(os.environ["CACHEDB"]).is_relative_to(root) for root in environment.cache_roots())


def capture_apart(
    wanted: WorkerSettings,
    config: StageConfig,
    *,
    progress: Callable[[LoadProgress], None],
    should_abort: Callable[[], bool],
) -> None:
    """Returns when that process has ended, for whatever reason: what it did not keep is the caller's to
    capture, and then the caller has the error too. Raises RoleError when aborted."""
    command = [sys.executable, "-m", "swactor_worker_tinygrad.capturing", str(os.getpid())]
    try:
        with tempfile.TemporaryFile() as stage:
            stage.write(pickle.dumps((asdict(wanted), config)))
            stage.seek(0)
            started = subprocess.Popen(command, stdin=stage, stdout=subprocess.PIPE)
    except OSError as error:  # no further process is allowed, or none of this interpreter; a full disk
        log.warning("graphs could not be captured in a process of their own: %s", error)
        return
    with started as child:
        assert child.stdout is not None
        try:
            for done, total in _steps(child.stdout.fileno(), should_abort):
                progress(LoadProgress(LoadPhase.COMPILE, done, total))
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the process that captures graphs did not end in %g s", END_SECONDS)
        finally:
            child.kill()
    if child.returncode != 0:
        log.warning("graphs could not be captured in a process of their own: status %d", child.returncode)


def _steps(descriptor: int, should_abort: Callable[[], bool]) -> Iterator[tuple[int, int]]:
    """The (steps done, all steps) that come, until the other end is closed. Raises RoleError when aborted."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    rest = b""
    while True:
        if should_abort():
            raise RoleError(RoleFailure.BACKEND_ERROR, "stopped while compiling kernels")
        if not poll.poll(POLL_MILLISECONDS):
            continue
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            done, total = line.split()
            yield int(done), int(total)


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    settings, config = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the worker that this process belongs to
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no progress

    def say(done: int, total: int) -> None:
        os.write(out, b"%d %d\n" % (done, total))

    from swactor_worker_tinygrad.backend import create

    backend = create(settings)
    try:
        backend.capture(config, say)
    except RoleError as error:
        log.warning("%s", error.message)
        return 1
    finally:
        backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
