"""GpuWorkerCtl FSM (spec sections 28 and 31): one worker process at a time, its generation, rings, events.

Worker restart (spec section 39): each start is a new generation, to which nothing of the former is valid.
Owns who may talk to the worker and when; routes its events; turns its death into faults and into the
proof that its rings are reaped. Knows no pipe and no process: `SpawnWorker`, `WriteWorker`, `KillWorker`
are effects.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from swactor_core.events import EventName
from swactor_core.faults import Component, WorkerFatalReason
from swactor_core.fsm import Action, Emit, Machine, Outcome, Row, Send
from swactor_core.ids import RingId, WorkerGeneration
from swactor_core.machines.worker_absent import ANSWERED, Answered, answer, crash_words
from swactor_core.machines.worker_process import (
    ContinueRestart,
    FromWorker,
    KillWorker,
    SpawnWorker,
    WorkerPolicy,
    WriteWorker,
)
from swactor_core.machines.worker_routes import ESTABLISHER, OF_RINGS, STAGE, hearer
from swactor_core.messages import (
    Address,
    ConfigureRole,
    ExecuteStep,
    InitializeWorker,
    InstallRing,
    ProcessNotification,
    ProcessNotificationKind,
    ReleaseDeviceObject,
    ResetRole,
    RingQuiesced,
    RingReadable,
    RingWritable,
    RoleReset,
    ShutdownMode,
    ShutdownWorker,
    StartWorker,
    TimerFired,
    UninstallRing,
    WorkerCrashed,
    WorkerFatal,
    WorkerGone,
    WorkerReady,
    WorkerRunning,
    WorkerStopped,
)


class WorkerCtlState(StrEnum):
    NOT_STARTED = "NotStarted"
    SPAWNING = "Spawning"
    INITIALIZING = "Initializing"
    RUNNING = "Running"
    STOPPING = "Stopping"
    KILLING = "Killing"
    CRASHED = "Crashed"
    RESTARTING = "Restarting"
    STOPPED = "Stopped"
    FAILED = "Failed"


S = WorkerCtlState
ME = Address(Component.GPU_WORKER_CTL)
NODE = Address(Component.NODE)
_COMMANDS = (ConfigureRole, InstallRing, UninstallRing, ReleaseDeviceObject, ResetRole)
_HINTS = (RingReadable, RingWritable)
_WITHOUT_WORKER = tuple(state for state in S if state is not S.RUNNING)


class GpuWorkerCtl(Machine[WorkerCtlState]):
    NAME = "GpuWorkerCtl"
    INITIAL = S.NOT_STARTED
    TABLE = (
        Row(S.NOT_STARTED, StartWorker, "_start", (S.SPAWNING,)),
        Row(S.NOT_STARTED, ShutdownWorker, "_nothing_to_stop", (S.STOPPED,)),
        Row(S.SPAWNING, ProcessNotification, "_spawned", (S.INITIALIZING, S.FAILED, S.SPAWNING)),
        Row(S.SPAWNING, TimerFired, "_start_timeout", (S.KILLING,)),
        Row(S.SPAWNING, ShutdownWorker, "_kill_now", (S.KILLING,)),
        Row(S.INITIALIZING, FromWorker, "_initializing_event", (S.RUNNING, S.INITIALIZING, S.KILLING)),
        Row(S.INITIALIZING, ProcessNotification, "_died_initializing", (S.FAILED, S.INITIALIZING, S.KILLING)),
        Row(S.INITIALIZING, TimerFired, "_start_timeout", (S.KILLING,)),
        Row(S.INITIALIZING, ShutdownWorker, "_kill_now", (S.KILLING,)),
        *(Row(S.RUNNING, command, "_command", (S.RUNNING,)) for command in _COMMANDS),
        Row(S.RUNNING, ExecuteStep, "_execute", (S.RUNNING,)),
        *(Row(S.RUNNING, hint, "_hint", (S.RUNNING,)) for hint in _HINTS),
        Row(S.RUNNING, FromWorker, "_running_event", (S.RUNNING, S.CRASHED)),
        Row(S.RUNNING, ProcessNotification, "_died_running", (S.CRASHED, S.RUNNING)),
        Row(S.RUNNING, TimerFired, "_unanswered", (S.CRASHED,)),
        Row(S.RUNNING, ShutdownWorker, "_shutdown", (S.STOPPING,)),
        Row(S.STOPPING, FromWorker, "_stopping_event", (S.STOPPING,)),
        Row(S.STOPPING, ProcessNotification, "_reaped", (S.STOPPED, S.STOPPING)),
        Row(S.STOPPING, TimerFired, "_stop_timeout", (S.KILLING,)),
        *(
            Row(S.STOPPING, taken, "_command", (S.STOPPING,))
            for taken in (UninstallRing, ReleaseDeviceObject)
        ),
        Row(S.KILLING, ProcessNotification, "_reaped", (S.STOPPED, S.FAILED, S.KILLING)),
        Row(S.KILLING, FromWorker, None, (S.KILLING,)),
        Row(S.KILLING, TimerFired, "_unkillable", (S.FAILED,)),
        Row(S.CRASHED, ProcessNotification, "_crash_reaped", (S.RESTARTING, S.FAILED, S.CRASHED)),
        Row(S.CRASHED, FromWorker, None, (S.CRASHED,)),
        Row(S.CRASHED, TimerFired, "_unkillable", (S.FAILED,)),
        Row(S.CRASHED, ShutdownWorker, "_stop_crashed", (S.KILLING,)),
        Row(S.RESTARTING, ContinueRestart, "_start", (S.SPAWNING,)),
        Row(S.RESTARTING, ShutdownWorker, "_nothing_to_stop", (S.STOPPED,)),
        # While there is no running worker, commands of a run that is being torn down are answered from here.
        *(
            Row(state, UninstallRing, "_uninstall_without_worker", (state,))
            for state in _WITHOUT_WORKER
            if state is not S.STOPPING
        ),
        *(
            Row(state, command, "_without_worker", (state,))
            for state in _WITHOUT_WORKER
            for command in ANSWERED
            if (state, command) != (S.STOPPING, ReleaseDeviceObject)
        ),
        *(Row(state, hint, None, (state,)) for state in _WITHOUT_WORKER for hint in _HINTS),
        Row(S.RESTARTING, ProcessNotification, None, (S.RESTARTING,)),
        Row(S.RESTARTING, FromWorker, None, (S.RESTARTING,)),
        Row(S.SPAWNING, FromWorker, None, (S.SPAWNING,)),
        *(
            Row(state, late, None, (state,))
            for state in (S.STOPPED, S.FAILED)
            for late in (FromWorker, ContinueRestart)
        ),
        # A process that outlived the bound of its kill: its end is still the proof that its rings wait for.
        *(Row(state, ProcessNotification, "_late_reaped", (state,)) for state in (S.STOPPED, S.FAILED)),
        Row(S.STOPPING, ShutdownWorker, "_shutdown_again", (S.STOPPING,)),
        Row(S.KILLING, ShutdownWorker, None, (S.KILLING,)),
        Row(S.STOPPED, ShutdownWorker, "_nothing_to_stop", (S.STOPPED,)),
        Row(S.FAILED, ShutdownWorker, "_nothing_to_stop", (S.STOPPED,)),
    )

    def __init__(
        self, policy: WorkerPolicy, *, arena_ceiling: int, ring_helper_abi: int, backend: dict[str, Any]
    ) -> None:
        super().__init__()
        self.generation = WorkerGeneration(0)
        self.rings: dict[RingId, InstallRing] = {}
        self.restarts = 0
        self.stale_events = 0
        self._policy = policy
        self._initialize = (arena_ceiling, ring_helper_abi, backend)
        self._why = self._former = ""
        self._fatal: WorkerFatalReason | None = None
        self._failed = False
        self._alive = False
        self._end_told = False
        self._asked: set[RingId | ResetRole] = set()

    # --- start ---

    def _start(self, event: StartWorker | ContinueRestart, now: float) -> Outcome[WorkerCtlState]:
        self.generation = WorkerGeneration(self.generation + 1)
        self._former = f"the one before it: {self._why}" if self._why else ""
        self._why, self._fatal = "", None
        self._alive = False
        self._end_told = False
        return S.SPAWNING, (
            SpawnWorker(self.generation),
            self.set_timer("bound", now + self._policy.start_timeout),
        )

    def _spawned(self, event: ProcessNotification, now: float) -> Outcome[WorkerCtlState]:
        if event.worker_generation != self.generation:
            return S.SPAWNING, ()
        if event.kind is not ProcessNotificationKind.STARTED:
            self._why = f"the worker did not start: {event.detail}"
            return S.FAILED, (*self.cancel_timer("bound"), *self._gone(self._why))
        self._alive = True
        ceiling, abi, backend = self._initialize
        initialize = InitializeWorker(self.generation, ceiling, abi, backend)
        return S.INITIALIZING, (WriteWorker(self.generation, initialize),)

    def _initializing_event(self, event: FromWorker, now: float) -> Outcome[WorkerCtlState]:
        inner = event.event
        if event.generation != self.generation:
            return S.INITIALIZING, self._stale()
        if isinstance(inner, WorkerReady):
            fields = {"worker_generation": self.generation, "pid": inner.pid}
            self._former = ""
            return S.RUNNING, (
                *self.cancel_timer("bound"),
                Emit(EventName.WORKER_STARTED, fields),
                Send(NODE, WorkerRunning(self.generation, inner.backend)),
            )
        if isinstance(inner, WorkerFatal):
            self._why, self._fatal, self._failed = f"{inner.reason}: {inner.detail}", inner.reason, True
            return S.KILLING, self._kill(now)
        return S.INITIALIZING, self._stale()

    def _died_initializing(self, event: ProcessNotification, now: float) -> Outcome[WorkerCtlState]:
        if event.worker_generation != self.generation or event.kind is ProcessNotificationKind.STARTED:
            return S.INITIALIZING, ()
        self._why, self._failed = f"the worker died while it started: {event.detail}", True
        if event.kind is ProcessNotificationKind.ERROR:
            return S.KILLING, self._kill(now)
        return S.FAILED, (*self.cancel_timer("bound"), *self._gone(self._why))

    def _start_timeout(self, event: TimerFired, now: float) -> Outcome[WorkerCtlState]:
        self._why, self._failed = f"the worker was not ready within {self._policy.start_timeout:g} s", True
        return S.KILLING, self._kill(now)

    # --- running ---

    def _command(self, event: Any, now: float) -> Outcome[WorkerCtlState]:
        if isinstance(event, ConfigureRole):
            self.restarts = 0  # a crash from here on is that run's, and no worker that cannot live
        if isinstance(event, InstallRing):
            self.rings[event.ring_id] = event
        if isinstance(event, UninstallRing) and event.ring_id not in self.rings:
            reaped = self.state is S.RUNNING  # with an earlier generation; one that stops was never given it
            return self.state, (Send(ESTABLISHER, RingQuiesced(event.ring_id, process_reaped=reaped)),)
        write = WriteWorker(self.generation, event)
        if self.state is not S.RUNNING or not isinstance(event, UninstallRing | ResetRole):
            return self.state, (write,)
        waits = bool(self._asked)
        self._asked.add(event.ring_id if isinstance(event, UninstallRing) else event)
        bound = () if waits else (self.set_timer("answer", now + self._policy.answer_timeout),)
        return S.RUNNING, (write, *bound)

    def _execute(self, event: ExecuteStep, now: float) -> Outcome[WorkerCtlState]:
        return S.RUNNING, (WriteWorker(self.generation, event),)

    def _answered(self, asked: RingId | ResetRole) -> tuple[Action, ...]:
        """Ends the wait once nothing is asked any more."""
        self._asked.discard(asked)
        return () if self._asked else self.cancel_timer("answer")

    def _unanswered(self, event: TimerFired, now: float) -> Outcome[WorkerCtlState]:
        detail = f"the worker did not answer within {self._policy.answer_timeout:g} s"
        return S.CRASHED, self._crash(WorkerCrashed(self.generation, detail), now, kill=True)

    def _hint(self, event: RingReadable | RingWritable, now: float) -> Outcome[WorkerCtlState]:
        if event.ring_id not in self.rings:
            return S.RUNNING, self._stale()
        return S.RUNNING, (WriteWorker(self.generation, event),)

    def _running_event(self, event: FromWorker, now: float) -> Outcome[WorkerCtlState]:
        inner = event.event
        if event.generation != self.generation:
            return S.RUNNING, self._stale()
        if isinstance(inner, WorkerFatal):
            fatal = WorkerCrashed(self.generation, f"{inner.reason}: {inner.detail}", inner.reason)
            return S.CRASHED, self._crash(fatal, now, kill=True)
        return S.RUNNING, self._routed(inner)

    def _routed(self, inner: object) -> tuple[Action, ...]:
        if isinstance(inner, OF_RINGS) and inner.ring_id not in self.rings:
            return self._stale()  # of no ring that this generation has: whoever hears it could not know it
        match inner:
            case RingQuiesced():
                self.rings.pop(inner.ring_id, None)
                # Only the process's end proves a reaping: a worker cannot say that of itself.
                return (*self._answered(inner.ring_id), Send(ESTABLISHER, RingQuiesced(inner.ring_id)))
            case RoleReset():
                return (*self._answered(ResetRole(inner.role_id)), Send(STAGE, inner))
        to = hearer(inner)
        return (Send(to, inner),) if to is not None else self._stale()

    def _died_running(self, event: ProcessNotification, now: float) -> Outcome[WorkerCtlState]:
        if event.worker_generation != self.generation or event.kind is ProcessNotificationKind.STARTED:
            return S.RUNNING, ()
        kill = event.kind is ProcessNotificationKind.ERROR
        crashed = WorkerCrashed(self.generation, event.detail, cause=event.cause)
        crash = self._crash(crashed, now, kill=kill)
        if not kill:  # the process is already reaped: the notification that Crashed waits for is this one
            crash = (*crash, Send(ME, event))
        return S.CRASHED, crash

    def _crash(self, crashed: WorkerCrashed, now: float, *, kill: bool) -> tuple[Action, ...]:
        self._why = crashed.detail
        return (
            *self._waits_no_more(),
            *((KillWorker(self.generation),) if kill else ()),
            self.set_timer("bound", now + self._policy.kill_timeout),
            *self._ended(crashed.detail),
            Send(NODE, crashed),
            *crash_words(crashed, self.rings.values(), exited=not kill),
        )

    def _waits_no_more(self) -> tuple[Action, ...]:
        self._asked.clear()
        return self.cancel_timer("answer")

    def _ended(self, reason: str) -> tuple[Action, ...]:
        """The event of a generation's end, once: a crash is told when it is seen, not again when reaped."""
        if self._end_told:
            return ()
        self._end_told = True
        return (Emit(EventName.WORKER_ENDED, {"worker_generation": self.generation, "reason": reason}),)

    # --- ends ---

    def _shutdown(self, event: ShutdownWorker, now: float) -> Outcome[WorkerCtlState]:
        return S.STOPPING, (
            *self._waits_no_more(),
            WriteWorker(self.generation, event),
            self.set_timer("bound", now + self._policy.stop_timeout),
        )

    def _shutdown_again(self, event: ShutdownWorker, now: float) -> Outcome[WorkerCtlState]:
        """Who cannot wait for the work in flight may say so later; the bound of the first word stands."""
        if event.mode is ShutdownMode.GRACEFUL:
            return S.STOPPING, ()
        return S.STOPPING, (WriteWorker(self.generation, event),)

    def _stopping_event(self, event: FromWorker, now: float) -> Outcome[WorkerCtlState]:
        if event.generation != self.generation:
            return S.STOPPING, self._stale()
        if isinstance(event.event, (WorkerStopped, WorkerFatal, WorkerReady)):
            return S.STOPPING, ()  # the process exit, not the word, is the proof
        return S.STOPPING, self._routed(event.event)

    def _stop_timeout(self, event: TimerFired, now: float) -> Outcome[WorkerCtlState]:
        self._why = f"the worker did not stop within {self._policy.stop_timeout:g} s"
        return S.KILLING, self._kill(now)

    def _kill_now(self, event: ShutdownWorker, now: float) -> Outcome[WorkerCtlState]:
        self._why = "stopped while it started"
        return S.KILLING, self._kill(now)

    def _stop_crashed(self, event: ShutdownWorker, now: float) -> Outcome[WorkerCtlState]:
        return S.KILLING, self._kill(now)

    def _kill(self, now: float) -> tuple[Action, ...]:
        return KillWorker(self.generation), self.set_timer("bound", now + self._policy.kill_timeout)

    def _reaped(self, event: ProcessNotification, now: float) -> Outcome[WorkerCtlState]:
        if event.worker_generation != self.generation:
            return self.state, ()
        if event.kind is ProcessNotificationKind.STARTED and not self._alive:
            self._alive = True
            return self.state, (KillWorker(self.generation),)  # it was told to die before it was there
        never_started = event.kind is ProcessNotificationKind.ERROR and not self._alive
        if event.kind is not ProcessNotificationKind.EXITED and not never_started:
            return self.state, ()
        target = S.FAILED if self._failed else S.STOPPED
        return target, (
            *self.cancel_timer("bound"),
            *self._ended(self._why or "stopped"),
            *self._reap_rings(),
            *self._gone(self._why or "stopped"),
        )

    def _crash_reaped(self, event: ProcessNotification, now: float) -> Outcome[WorkerCtlState]:
        if event.worker_generation != self.generation or event.kind is not ProcessNotificationKind.EXITED:
            return S.CRASHED, ()
        reaped = (*self.cancel_timer("bound"), *self._reap_rings())
        if self.restarts >= self._policy.max_restarts:
            return S.FAILED, (*reaped, *self._gone(f"crashed {self.restarts + 1} times, last: {self._why}"))
        self.restarts += 1
        return S.RESTARTING, (*reaped, Send(ME, ContinueRestart()))

    def _unkillable(self, event: TimerFired, now: float) -> Outcome[WorkerCtlState]:
        return S.FAILED, self._gone(f"the worker process could not be reaped ({self._why})")

    def _late_reaped(self, event: ProcessNotification, now: float) -> Outcome[WorkerCtlState]:
        if event.worker_generation != self.generation or event.kind is not ProcessNotificationKind.EXITED:
            return self.state, ()
        return self.state, self._reap_rings()

    def _reap_rings(self) -> tuple[Action, ...]:
        rings, self.rings = self.rings, {}
        return tuple(Send(ESTABLISHER, RingQuiesced(ring_id, process_reaped=True)) for ring_id in rings)

    def _gone(self, reason: str) -> tuple[Action, ...]:
        return (Send(NODE, WorkerGone(reason, self._fatal)),)

    def _nothing_to_stop(self, event: ShutdownWorker, now: float) -> Outcome[WorkerCtlState]:
        return S.STOPPED, self._gone("stopped")

    # --- commands with no worker to take them ---

    def _uninstall_without_worker(self, event: UninstallRing, now: float) -> Outcome[WorkerCtlState]:
        if event.ring_id in self.rings:  # its process is not reaped yet: the proof follows when it is
            return self.state, ()
        return self.state, (Send(ESTABLISHER, RingQuiesced(event.ring_id, process_reaped=True)),)

    def _without_worker(self, event: Answered, now: float) -> Outcome[WorkerCtlState]:
        stopping, why = self.state is S.STOPPING, self._why or self._former
        told = answer(event, generation=self.generation, stopping=stopping, state=str(self.state), why=why)
        return self.state, (told,)

    def _stale(self) -> tuple[Action, ...]:
        self.stale_events += 1
        return ()
