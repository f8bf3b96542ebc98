"""The worker's process adapter (spec section 28): spawn, NDJSON lines, kill, and the news of its end.

One line a message; stdout is events, stderr is talk whose last lines explain a death. The end of the process
is reported after its last event was read, by the child watcher, within milliseconds; nothing polls. Knows no
machine: it performs GpuWorkerCtl's effects and tells it what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable

from swactor_core.actors import ActorSystem
from swactor_core.codec import MAX_LINE, CodecError, MessageCodec
from swactor_core.errors import remedy_of_lack
from swactor_core.fsm import Effect
from swactor_core.ids import WorkerGeneration
from swactor_core.machines.worker_ctl import ME
from swactor_core.machines.worker_process import FromWorker, KillWorker, SpawnWorker, WriteWorker
from swactor_core.messages import (
    WORKER_COMMANDS,
    ProcessNotification,
    ProcessNotificationKind,
)
from swactor_core.node.event_pipe import EventPipe
from swactor_core.node.process import born_deaf
from swactor_core.node.process_end import close_pipes, exited

log = logging.getLogger(__name__)

STDERR_LINES = 200
"""Room for the stacks of all threads that Python prints when it dies of a signal."""
STDERR_CHARACTERS = 2_000
"""Of a line that is kept: the last one becomes part of a fault."""
FATAL_HEADING = "Fatal Python error: "
MAX_UNREAD_COMMANDS = 16 * 1024 * 1024
DRAIN_BOUND = 1.0

_COMMANDS = MessageCodec(WORKER_COMMANDS)


class WorkerProcess:
    """At most one live child. `modules` are those of the plug-ins that it needs, where they are known, and it
    need not look for them. `arena` gives (fd, ceiling) once the arena stands; `lost_page` is asked why a
    page of what the child had mapped could not be read, and gives words and a fault's cause."""

    def __init__(
        self,
        system: ActorSystem,
        *,
        worker: str,
        arena_name: str,
        blocked: tuple[str, ...],
        modules: tuple[str, ...] = (),
        arena: Callable[[], tuple[int, int]],
        lost_page: Callable[[], tuple[str, str]] = lambda: ("", ""),
    ) -> None:
        self._system = system
        self._arguments = ["--worker", worker, "--arena", arena_name]
        for name in blocked:
            self._arguments += ["--block-plugin", name]
        for name in modules if all(modules) else ():
            self._arguments += ["--plugin-module", name]
        self._arena = arena
        self._lost_page = lost_page
        self._process: asyncio.subprocess.Process | None = None
        self._generation = WorkerGeneration(0)

    def perform(self, effect: Effect) -> None:
        match effect:
            case WriteWorker():
                self._write(effect.generation, effect.command)
            case SpawnWorker(generation):
                self._generation = generation
                self._system.start_task(self._live(generation), owner=ME)
            case KillWorker(generation):
                self._kill(generation)

    def _notify(
        self,
        generation: WorkerGeneration,
        kind: ProcessNotificationKind,
        pid: int,
        detail: str,
        *,
        cause: str = "",
    ) -> None:
        self._system.tell(ME, ProcessNotification(generation, kind, pid, detail, cause))

    def _write(self, generation: WorkerGeneration, command: object) -> None:
        process = self._process
        if process is None or generation != self._generation or process.stdin is None:
            return
        try:
            line = _COMMANDS.encode(command)
        except CodecError as error:
            self._notify(
                generation, ProcessNotificationKind.ERROR, process.pid, f"cannot command it: {error}"
            )
            return
        process.stdin.write(line + b"\n")
        if process.stdin.transport.get_write_buffer_size() > MAX_UNREAD_COMMANDS:
            detail = f"the worker does not read its commands: {MAX_UNREAD_COMMANDS} bytes are waiting"
            self._notify(generation, ProcessNotificationKind.ERROR, process.pid, detail)

    def _kill(self, generation: WorkerGeneration) -> None:
        process = self._process
        if process is not None and generation == self._generation and process.returncode is None:
            process.kill()

    async def _live(self, generation: WorkerGeneration) -> None:
        """One child's whole life: start, events, end."""
        fd, ceiling = self._arena()
        environment = {**os.environ, "SWACTOR_ARENA_FD": str(fd), "SWACTOR_ARENA_BYTES": str(ceiling)}
        try:
            events = EventPipe(
                lambda event: self._system.deliver(ME, FromWorker(generation, event)),
                lambda why: self._bad_event(generation, why),
            )
        except OSError as error:
            self._not_started(generation, error)
            return
        try:
            with born_deaf():
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "swactor_core.worker",
                    *self._arguments,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=events.writer,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(fd,) if fd >= 0 else (),
                    env=environment,
                    limit=MAX_LINE,
                )
        except OSError as error:
            self._not_started(generation, error)
            events.close()
            return
        except BaseException:
            events.close()
            raise
        finally:
            events.close_writer()
        self._process = process
        self._notify(generation, ProcessNotificationKind.STARTED, process.pid, "")
        talk: deque[str] = deque(maxlen=STDERR_LINES)
        assert process.stderr is not None
        stderr = asyncio.ensure_future(_read_talk(process.stderr, talk))
        try:
            events.ended.add_done_callback(lambda _: self._after_events(generation, process))
            with contextlib.suppress(TimeoutError):  # it has ended, only how is not known
                await exited(process)
            # A grandchild may hold the pipes open; what the worker itself wrote is there at once.
            await asyncio.wait((events.ended, stderr), timeout=DRAIN_BOUND)
        finally:
            stderr.cancel()
            events.close()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            close_pipes(process)
            if self._process is process:
                self._process = None
        self._tell_end(generation, process, last_words=last_words(talk))

    def _not_started(self, generation: WorkerGeneration, error: OSError) -> None:
        remedy = remedy_of_lack(error)
        detail = f"cannot start the worker: {error}" + (f" ({remedy})" if remedy else "")
        self._notify(generation, ProcessNotificationKind.ERROR, 0, detail)

    def _tell_end(
        self, generation: WorkerGeneration, process: asyncio.subprocess.Process, *, last_words: str
    ) -> None:
        lost, cause = self._lost_page() if process.returncode == -signal.SIGBUS else ("", "")
        code = process.returncode
        detail = f"the worker process {process.pid} "
        detail += "ended, and nobody was told how" if code is None else exit_text(code)
        detail += f": {lost}" if lost else ""
        detail += f"; it said: {last_words}" if last_words else ""
        self._notify(generation, ProcessNotificationKind.EXITED, process.pid, detail, cause=cause)

    def _after_events(self, generation: WorkerGeneration, process: asyncio.subprocess.Process) -> None:
        """A worker's last event comes right before its end: one that lives on can tell nothing any more."""

        def look() -> None:
            if process.returncode is None:
                detail = "the worker closed its event stream and lives"
                self._notify(generation, ProcessNotificationKind.ERROR, process.pid, detail)

        asyncio.get_running_loop().call_later(DRAIN_BOUND, look)

    def _bad_event(self, generation: WorkerGeneration, why: str) -> None:
        pid = 0 if self._process is None else self._process.pid
        self._notify(generation, ProcessNotificationKind.ERROR, pid, f"bad event from the worker: {why}")


async def _read_talk(stderr: asyncio.StreamReader, talk: deque[str]) -> None:
    while True:
        try:
            line = await stderr.readline()
        except ValueError:  # a line over the limit: skip what was buffered of it
            continue
        if not line:
            return
        text = line.decode(errors="replace").rstrip()
        if text:
            talk.append(text[:STDERR_CHARACTERS])
            log.info("worker: %s", text)


def last_words(talk: Iterable[str]) -> str:
    """Of what a process wrote before its end, what says why: its last line, but of a stack that Python prints
    at a fatal signal the heading and the innermost frame."""
    lines = list(talk)
    fatal = max((i for i, line in enumerate(lines) if line.startswith(FATAL_HEADING)), default=None)
    if fatal is None:
        return lines[-1].strip() if lines else ""
    inside = itertools.dropwhile(lambda line: not line.startswith("Current thread"), lines[fatal:])
    frame = next((line.strip() for line in inside if line.startswith("  File ")), "")
    return f"{lines[fatal]}, {frame}" if frame else lines[fatal]


def exit_text(code: int | None) -> str:
    """How a process ended, for people."""
    if code is None:
        return "has not ended"
    if code < 0:
        try:
            memory = ", as the kernel does when memory is short" if code == -signal.SIGKILL else ""
            return f"was ended by {signal.Signals(-code).name}{memory}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"exited with {code}"
