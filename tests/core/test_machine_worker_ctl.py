"""GpuWorkerCtl FSM (spec sections 28, 31): one process at a time, its generation, rings, and every end."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_worker_ctl_words import (
    ABORT,
    BROKEN,
    CONFIGURE,
    CRASHED,
    DEAD,
    DRIVER,
    EDGE,
    ESTABLISHER,
    EXECUTE,
    EXITED,
    FATAL,
    FATAL_CRASH,
    FATAL_REASON,
    HANDLE,
    INITIALIZING,
    INSTALL,
    KILLED_STARTING,
    LAYOUT,
    ME,
    OBJECT,
    POLICY,
    PORT,
    REAPED_RING,
    RELEASE,
    RESET,
    RESTARTING,
    RING,
    ROLE,
    RUNNING,
    SHUTDOWN,
    SPAWNING,
    STAGE,
    STOPPING,
    UNINSTALL,
    UNKILLABLE,
    UNTIMED,
    S,
    crash,
    ended,
    fired,
    gone,
    kill,
    process,
    said,
    spawn,
    timer,
    write,
)
from swactor_core.events import EventName
from swactor_core.faults import (
    Component,
    ObjectFailure,
    ReleaseFailure,
    RingFaultReason,
    RoleFailure,
    StepFailure,
    UninstallReason,
    WorkerStoppedReason,
)
from swactor_core.fsm import Action, CancelTimer, Emit, Send, SetTimer
from swactor_core.ids import (
    ObjectId,
    RingId,
    RoleId,
    Sequence,
    StepId,
    WorkerGeneration,
)
from swactor_core.machines.worker_ctl import GpuWorkerCtl, WorkerCtlState
from swactor_core.machines.worker_process import (
    ContinueRestart,
    FromWorker,
    KillWorker,
    SpawnWorker,
    WriteWorker,
)
from swactor_core.machines.worker_routes import OF_RINGS
from swactor_core.messages import (
    WORKER_EVENTS,
    Address,
    DeviceObjectReleased,
    ExecuteStep,
    InstallRing,
    LoadPhase,
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
    ProcessNotification,
    ProcessNotificationKind,
    ReleaseFailed,
    RingFault,
    RingInstalled,
    RingQuiesced,
    RingReadable,
    RingWritable,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    RoleReset,
    ShutdownWorker,
    StartWorker,
    StepCompleted,
    StepFailed,
    TimerFired,
    UninstallRing,
    WorkerCrashed,
    WorkerFatal,
    WorkerReady,
    WorkerStopped,
)
from swactor_core.specs import RingDirection
from swactor_testing.scripts import Script, Steps, event_strategies, step_or_refuse, walk
from swactor_testing.values import small, values

SCENARIOS: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], S.NOT_STARTED),
    "spawning": (SPAWNING, S.SPAWNING),
    "initializing": (INITIALIZING, S.INITIALIZING),
    "running, with a ring": (RUNNING, S.RUNNING),
    "stopping": (STOPPING, S.STOPPING),
    "crashed": (CRASHED, S.CRASHED),
    "restarting": (RESTARTING, S.RESTARTING),
    "being killed": (KILLED_STARTING, S.KILLING),
    "its whole life: the process exit is the proof, not the word": (
        [
            *STOPPING,
            (said(WorkerStopped(WorkerStoppedReason.GRACEFUL)), ()),
            (process("Exited", "exited with 0"), (UNTIMED, ended("stopped"), REAPED_RING, gone("stopped"))),
        ],
        S.STOPPED,
    ),
    "nothing to stop": ([(SHUTDOWN, (gone("stopped"),)), (SHUTDOWN, (gone("stopped"),))], S.STOPPED),
    # --- the start ---
    "it cannot be started": (
        [*SPAWNING, (process("Error", "no python"), (UNTIMED, gone("the worker did not start: no python")))],
        S.FAILED,
    ),
    "it is not there in time: killed as soon as it is": (
        [
            *SPAWNING,
            (fired(1), kill(2)),
            (process("Started"), (KillWorker(WorkerGeneration(1)),)),
            (
                process("Exited", "killed"),
                (
                    UNTIMED,
                    ended("the worker was not ready within 60 s"),
                    gone("the worker was not ready within 60 s"),
                ),
            ),
        ],
        S.FAILED,
    ),
    "stopped while it starts, and it never started": (
        [
            *KILLED_STARTING,
            (
                process("Error", "no python"),
                (UNTIMED, ended("stopped while it started"), gone("stopped while it started")),
            ),
        ],
        S.STOPPED,
    ),
    "old news while it spawns": ([*SPAWNING, (process("Exited", generation=0), ())], S.SPAWNING),
    "it is fatal at start": (
        [
            *INITIALIZING,
            (FATAL, kill(2)),
            (process("Error", "stdout closed"), ()),
            (EXITED, (UNTIMED, ended(FATAL_REASON), gone(FATAL_REASON, FATAL.event.reason))),
        ],
        S.FAILED,
    ),
    "it dies at start": (
        [
            *INITIALIZING,
            (EXITED, (UNTIMED, gone("the worker died while it started: exited with 1"))),
        ],
        S.FAILED,
    ),
    "its pipe breaks at start": ([*INITIALIZING, (BROKEN, kill(2))], S.KILLING),
    "it is not ready in time": ([*INITIALIZING, (fired(1), kill(2))], S.KILLING),
    "stopped while it initializes": ([*INITIALIZING, (SHUTDOWN, kill(2))], S.KILLING),
    "it talks out of turn, or is another generation": (
        [
            *INITIALIZING,
            (said(RoleConfigured(ROLE)), ()),
            (said(FATAL.event, generation=0), ()),
            (process("Started"), ()),
            (process("Exited", generation=0), ()),
        ],
        S.INITIALIZING,
    ),
    # --- running ---
    "commands": (
        [
            *RUNNING,
            (CONFIGURE, (write(CONFIGURE),)),
            (EXECUTE, (write(EXECUTE),)),
            (RELEASE, (write(RELEASE),)),
            (RESET, (write(RESET), SetTimer("answer", 2, 4.0))),
            (said(RoleReset(ROLE)), (CancelTimer("answer"), Send(STAGE, RoleReset(ROLE)))),
            (RingReadable(RING), (write(RingReadable(RING)),)),
            (RingWritable(RING), (write(RingWritable(RING)),)),
            (RingReadable(RingId(8)), ()),
            (RingWritable(RingId(8)), ()),
            (UNINSTALL, (write(UNINSTALL), SetTimer("answer", 3, 4.0))),
            (
                said(RingQuiesced(RING)),
                (CancelTimer("answer"), Send(ESTABLISHER, RingQuiesced(RING))),
            ),
            (UNINSTALL, (REAPED_RING,)),
        ],
        S.RUNNING,
    ),
    "a worker cannot say of itself that it was reaped": (
        [
            *RUNNING,
            (UNINSTALL, (write(UNINSTALL), SetTimer("answer", 2, 4.0))),
            (
                said(RingQuiesced(RING, process_reaped=True)),
                (CancelTimer("answer"), Send(ESTABLISHER, RingQuiesced(RING))),
            ),
        ],
        S.RUNNING,
    ),
    "one wait for all answers of a teardown": (
        [
            *RUNNING,
            (UNINSTALL, (write(UNINSTALL), SetTimer("answer", 2, 4.0))),
            (RESET, (write(RESET),)),
            (said(RingQuiesced(RING)), (Send(ESTABLISHER, RingQuiesced(RING)),)),
            (said(RoleReset(RoleId(99))), (Send(STAGE, RoleReset(RoleId(99))),)),
            (said(RoleReset(ROLE)), (CancelTimer("answer"), Send(STAGE, RoleReset(ROLE)))),
        ],
        S.RUNNING,
    ),
    "it hangs in a teardown: killed, so that its rings are proven": (
        [
            *RUNNING,
            (UNINSTALL, (write(UNINSTALL), SetTimer("answer", 2, 4.0))),
            (RESET, (write(RESET),)),
            (
                TimerFired("answer", 2),
                crash("the worker did not answer within 4 s", 3, kill=True),
            ),
            (EXITED, (UNTIMED, REAPED_RING, Send(ME, ContinueRestart()))),
        ],
        S.RESTARTING,
    ),
    "it dies, or is stopped, while it is waited for": (
        [
            *RUNNING,
            (RESET, (write(RESET), SetTimer("answer", 2, 4.0))),
            (SHUTDOWN, (CancelTimer("answer"), write(SHUTDOWN), timer(3, 5.0))),
            (UNINSTALL, (write(UNINSTALL),)),
        ],
        S.STOPPING,
    ),
    "old news while it runs": (
        [*RUNNING, (process("Started"), ()), (process("Exited", generation=0), ())],
        S.RUNNING,
    ),
    "the event of an old generation is dropped": (
        [*RUNNING, (said(FATAL.event, generation=0), ())],
        S.RUNNING,
    ),
    # --- crashes ---
    "the process exits: told once, reaped at once, restarted": (
        [
            *RUNNING,
            (EXITED, (*crash("exited with 1", 2, cause="ModelContentChanged"), Send(ME, EXITED))),
            (EXITED, (UNTIMED, REAPED_RING, Send(ME, ContinueRestart()))),
            (ContinueRestart(), spawn(2, 3)),
        ],
        S.SPAWNING,
    ),
    "it is fatal while it runs": (
        [*RUNNING, (FATAL, FATAL_CRASH)],
        S.CRASHED,
    ),
    "it crashes too often": (DEAD, S.FAILED),
    "a run that asks for a role ends the row of crashes: what it dies of is that run's": (
        [
            *DEAD[:-2],
            (CONFIGURE, (WriteWorker(WorkerGeneration(2), CONFIGURE),)),
            DEAD[-2],
            (
                process("Exited", "again", generation=2),
                (UNTIMED, Send(ME, ContinueRestart())),
            ),
        ],
        S.RESTARTING,
    ),
    "old news while it is crashed": (
        [*CRASHED, (process("Error"), ()), (process("Exited", generation=0), ())],
        S.CRASHED,
    ),
    "a crashed process that cannot be reaped: the proof comes late, but comes": (
        [*UNKILLABLE, (UNINSTALL, ()), (process("Exited", generation=0), ()), (EXITED, (REAPED_RING,))],
        S.FAILED,
    ),
    "stopped when crashed: its end is told once": (
        [
            *CRASHED,
            (SHUTDOWN, kill(3)),
            (EXITED, (UNTIMED, REAPED_RING, gone("bad event"))),
        ],
        S.STOPPED,
    ),
    "stopped between two generations": (
        [*RESTARTING, (SHUTDOWN, (gone("stopped"),)), (ContinueRestart(), ())],
        S.STOPPED,
    ),
    "an old crash is not the reason of a later stop": (
        [
            *DEAD[:-2],
            (SHUTDOWN, (write(SHUTDOWN, 2), timer(4, 5.0))),
            (process("Exited", generation=2), (UNTIMED, ended("stopped", 2), gone("stopped"))),
        ],
        S.STOPPED,
    ),
    # --- stops ---
    "it need not finish what it does: an abort goes on to it, a second graceful word does not": (
        [*STOPPING, (SHUTDOWN, ()), (ABORT, (write(ABORT),))],
        S.STOPPING,
    ),
    "it does not stop in time": (
        [
            *STOPPING,
            (UNINSTALL, (write(UNINSTALL),)),
            (process("Error"), ()),
            (process("Exited", generation=0), ()),
            (said(FATAL.event, generation=0), ()),
            (
                fired(2),
                (KillWorker(WorkerGeneration(1)), timer(3, 3.0)),
            ),
            (
                EXITED,
                (
                    UNTIMED,
                    ended("the worker did not stop within 5 s"),
                    REAPED_RING,
                    gone("the worker did not stop within 5 s"),
                ),
            ),
        ],
        S.STOPPED,
    ),
    "it quiesces its rings while it stops": (
        [*STOPPING, (said(RingQuiesced(RING)), (Send(ESTABLISHER, RingQuiesced(RING)),))],
        S.STOPPING,
    ),
    "it cannot be killed": (
        [
            *KILLED_STARTING,
            (fired(2), (gone("the worker process could not be reaped (stopped while it started)"),)),
        ],
        S.FAILED,
    ),
    "a failed worker has nothing to stop, and its late end is still the proof": (
        [*UNKILLABLE, (SHUTDOWN, (gone("stopped"),)), (EXITED, (REAPED_RING,)), (EXITED, ())],
        S.STOPPED,
    ),
}


# Commands of a run that is being torn down, in each state without a running worker: why it has none.
WITHOUT_WORKER = {
    S.NOT_STARTED: "",
    S.SPAWNING: "",
    S.INITIALIZING: "",
    S.STOPPING: "",
    S.KILLING: "stopped while it started",
    S.CRASHED: "bad event",
    S.RESTARTING: "bad event",
    S.STOPPED: "",
    S.FAILED: "the worker did not start: no python",
}
OTHER = RingId(8)
INSTALL_OTHER = InstallRing(OTHER, EDGE, PORT, RingDirection.EGRESS, LAYOUT, OBJECT)
UNINSTALL_OTHER = UninstallRing(OTHER, UninstallReason.EDGE_STOPPED)


def no_ring(detail: str, reason: RingFaultReason = RingFaultReason.WORKER_PROCESS_EXITED) -> Send:
    return Send(ESTABLISHER, RingFault(OTHER, EDGE, PORT, reason, detail))


def without_worker(state: WorkerCtlState, why: str) -> tuple[Steps, StrEnum]:
    prefix = next(steps for steps, end in SCENARIOS.values() if end is state)
    shutting = state is S.STOPPING
    reason = RingFaultReason.WORKER_SHUTTING_DOWN if shutting else RingFaultReason.WORKER_PROCESS_EXITED
    detail = f"worker is {state}: {why}" if why else f"worker is {state}"
    crashed = WorkerCrashed(WorkerGeneration(0 if state is S.NOT_STARTED else 1), detail)
    steps: Steps = [
        *prefix,
        (INSTALL_OTHER, (no_ring(detail, reason),)),
        # A worker that stops is still there: that it never had the ring is the proof, not its end.
        (UNINSTALL_OTHER, (Send(ESTABLISHER, RingQuiesced(OTHER, process_reaped=not shutting)),)),
    ]
    failure = StepFailure.WORKER_SHUTTING_DOWN if shutting else StepFailure.WORKER_PROCESS_EXITED
    lost = ReleaseFailed(HANDLE, ReleaseFailure.STALE_GENERATION)
    return [
        *steps,
        (RESET, (Send(STAGE, RoleReset(ROLE)),)),
        (CONFIGURE, (Send(STAGE, crashed),)),
        (EXECUTE, (Send(STAGE, StepFailed(ROLE, StepId(1), failure, detail)),)),
        # While it drains the worker still gives its objects back itself.
        (RELEASE, (write(RELEASE),) if shutting else (Send(STAGE, lost),)),
    ], state


SCENARIOS |= {f"without a worker: {s}": without_worker(s, why) for s, why in WITHOUT_WORKER.items()}
BETWEEN = no_ring("worker is Spawning: the one before it: bad event")
SCENARIOS["a run that comes between two workers hears what ended the first"] = (
    [*RESTARTING, (ContinueRestart(), spawn(2, 3)), (INSTALL_OTHER, (BETWEEN,))],
    S.SPAWNING,
)


def make() -> GpuWorkerCtl:
    return GpuWorkerCtl(POLICY, arena_ceiling=1 << 20, ring_helper_abi=1, backend={"threads": 2})


# What each state expects and ignores, stated here and not read from the table.
HINTS = (RingReadable, RingWritable)
LATE: dict[StrEnum, tuple[type[Any], ...]] = {
    S.NOT_STARTED: HINTS,
    S.SPAWNING: (*HINTS, FromWorker),  # the generation before this one still talks
    S.INITIALIZING: HINTS,
    S.STOPPING: HINTS,
    S.KILLING: (*HINTS, FromWorker, ShutdownWorker),
    S.CRASHED: (*HINTS, FromWorker),
    S.RESTARTING: (*HINTS, FromWorker, ProcessNotification),
    S.STOPPED: (*HINTS, FromWorker, ContinueRestart),
    S.FAILED: (*HINTS, FromWorker, ContinueRestart),
}
SCRIPT = Script(make, SCENARIOS, LATE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


@pytest.mark.parametrize(("state", "event"), SCRIPT.ignored())
def test_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT.play_ignored(state, event)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


RX, TX = Address(Component.RX_EDGE, EDGE), Address(Component.TX_EDGE, EDGE)
ROUTES: list[tuple[object, Address]] = [
    (RingReadable(RING), DRIVER),
    (RingWritable(RING), DRIVER),
    (RingInstalled(RING, EDGE, PORT), ESTABLISHER),
    (RingFault(RING, EDGE, PORT, RingFaultReason.HEADER_MALFORMED), ESTABLISHER),
    (RingQuiesced(RING), ESTABLISHER),
    (ObjectLoaded(RING, EDGE, PORT, ObjectId(1), Sequence(0), 8, HANDLE), RX),
    (ObjectFailed(RING, EDGE, PORT, None, None, ObjectFailure.EOF_MID_OBJECT), RX),
    (ObjectProduced(RING, EDGE, PORT, ObjectId(1), Sequence(0), 8), TX),
    (RoleProgress(ROLE, LoadPhase.WEIGHTS, 1, 2), STAGE),
    (RoleConfigured(ROLE), STAGE),
    (RoleFailed(ROLE, RoleFailure.BACKEND_ERROR), STAGE),
    (RoleReset(ROLE), STAGE),
    (StepCompleted(ROLE, StepId(1)), STAGE),
    (StepFailed(ROLE, StepId(1), StepFailure.TINYGRAD_ERROR), STAGE),
    (DeviceObjectReleased(HANDLE), STAGE),
    (ReleaseFailed(HANDLE, ReleaseFailure.UNKNOWN_HANDLE), STAGE),
]


@pytest.mark.parametrize("name", ["running, with a ring", "stopping"])
@pytest.mark.parametrize(("event", "to"), ROUTES)
def test_every_worker_event_has_one_hearer(name: str, event: object, to: Address) -> None:
    assert SCRIPT.play(name).step(said(event), 0.0) == (Send(to, event),)


def test_the_routes_above_are_all_events_but_the_worker_s_own_life() -> None:
    own = {WorkerReady, WorkerFatal, WorkerStopped}
    assert {type(event) for event, _ in ROUTES} == set(WORKER_EVENTS) - own


@pytest.mark.parametrize(
    "event", [WorkerStopped(WorkerStoppedReason.GRACEFUL), WorkerReady(1, WorkerGeneration(1), 1, {})]
)
def test_a_word_of_its_life_out_of_turn_is_counted_and_dropped(event: object) -> None:
    machine = SCRIPT.play("running, with a ring")
    assert isinstance(machine, GpuWorkerCtl)
    assert machine.step(said(event), 0.0) == ()
    assert machine.stale_events == 1


@pytest.mark.parametrize("state", [state for state in S if state is not S.NOT_STARTED])
def test_a_fatal_worker_in_every_state(state: WorkerCtlState) -> None:
    """It ends what it was to do; where its process is already being ended, only the exit counts."""
    machine = SCRIPT.reach(state)
    assert isinstance(machine, GpuWorkerCtl)
    fatal = FromWorker(machine.generation, FATAL.event)
    actions = machine.step(fatal, 0.0)
    if state in (S.INITIALIZING, S.RUNNING):
        assert KillWorker(machine.generation) in actions
        assert machine.state is (S.KILLING if state is S.INITIALIZING else S.CRASHED)
    else:
        assert (machine.state, actions) == (state, ())


def test_broken_host_tells_an_exit_twice_and_one_restart_follows() -> None:
    machine = SCRIPT.play("restarting")
    assert machine.step(EXITED, 0.0) == ()
    assert machine.step(ContinueRestart(), 0.0)[0] == SpawnWorker(WorkerGeneration(2))
    assert step_or_refuse(machine, ContinueRestart()) is None
    assert machine.step(EXITED, 0.0) == ()


@pytest.mark.parametrize("event", [event for event, _ in ROUTES if isinstance(event, OF_RINGS)])
def test_broken_worker_speaks_of_a_ring_that_it_does_not_have(event: object) -> None:
    machine = SCRIPT.play("running, with a ring")
    assert isinstance(machine, GpuWorkerCtl)
    assert machine.step(said(replace(event, ring_id=OTHER)), 0.0) == ()  # type: ignore[type-var]
    assert machine.stale_events == 1


def test_broken_host_starts_twice() -> None:
    assert step_or_refuse(SCRIPT.play("spawning"), StartWorker()) is None


def test_broken_host_forgets_the_kill_timer_and_the_exit_still_ends_it() -> None:
    machine = SCRIPT.play("being killed")
    machine.step(EXITED, 1e6)
    assert machine.state is S.STOPPED


EVENTS = event_strategies(
    GpuWorkerCtl,
    {
        InstallRing: st.sampled_from((INSTALL, INSTALL_OTHER)),
        UninstallRing: st.sampled_from((UNINSTALL, UNINSTALL_OTHER)),
        ExecuteStep: st.just(EXECUTE),
        WorkerGeneration: st.sampled_from((1, 1, 1, 0, 2)),
    },
)
_SAID = st.one_of(*(values(event, small({RingId: st.just(RING)})) for event in WORKER_EVENTS))
EVENTS[FromWorker] = st.builds(FromWorker, st.sampled_from((1, 1, 2)).map(WorkerGeneration), _SAID)


@settings(max_examples=100)
@given(st.data())
def test_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject) -> None:
    walk(data, SCRIPT.somewhere(data), EVENTS)


@settings(max_examples=500)
@given(st.data())
def test_a_ring_is_called_reaped_only_when_its_process_is_gone_or_never_had_it(data: st.DataObject) -> None:
    holding: set[int] = set()
    told: list[int] = []
    generation = 0

    def check(event: object, actions: tuple[Action, ...]) -> None:
        nonlocal generation
        if isinstance(event, ProcessNotification):
            exited = event.kind is ProcessNotificationKind.EXITED
            if exited and event.worker_generation == generation:
                holding.clear()
        for action in actions:
            match action:
                case SpawnWorker(spawned):
                    generation = spawned
                case WriteWorker(_, InstallRing(ring_id)):
                    holding.add(ring_id)
                case Send(_, RingQuiesced(ring_id, process_reaped=False)):
                    holding.discard(ring_id)
                case Send(_, RingQuiesced(ring_id, process_reaped=True)):
                    assert ring_id not in holding
                case Emit(EventName.WORKER_ENDED):
                    told.append(generation)

    walk(data, SCRIPT.somewhere(data, check), EVENTS, steps=25, check=check)
    assert len(told) == len(set(told)), "the end of a generation was told twice"
