"""Node boot and life (spec section 8): each step on the one before it, and an end that is bounded."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Action, CancelTimer, Emit, Send, SetTimer
from swactor_core.ids import NodeId, WorkerGeneration
from swactor_core.machines.node import (
    AnnounceAvailable,
    AnnounceFault,
    CloseParts,
    Continue,
    ExitProcess,
    MembershipStarted,
    NodeLife,
    NodeState,
    PartFailed,
    PartsClosed,
    ProcessStarted,
    StartMembership,
    StartTransport,
    TransportStarted,
    WithdrawAvailable,
)
from swactor_core.messages import (
    Address,
    ArenaConstructed,
    ArenaConstructionFailed,
    ConstructArena,
    NodeFaulted,
    Shutdown,
    ShutdownMode,
    ShutdownWorker,
    StartWorker,
    TimerFired,
    WorkerCrashed,
    WorkerGone,
    WorkerRunning,
)
from swactor_testing.scripts import Script, Steps, event_strategies, walk

S = NodeState
ME = NodeId(7)
ARENA, WORKER, NODE = (
    Address(Component.ARENA_MANAGER),
    Address(Component.GPU_WORKER_CTL),
    Address(Component.NODE),
)
CPU, GPU = {"device": "CPU"}, {"device": "GPU"}


def running(backend: dict[str, Any]) -> WorkerRunning:
    return WorkerRunning(WorkerGeneration(1), backend)


def faulted(reason: FaultReason, component: Component, detail: str, cause: str = "") -> tuple[Action, ...]:
    fault = Fault(reason, component, detail, cause, node_id=ME)
    fields = {"reason": str(reason), "component": str(component), "cause": cause, "detail": detail}
    return Emit(EventName.NODE_FAULTED, fields), AnnounceFault(NodeFaulted(ME, fault))


def late(detail: str) -> Emit:
    fields = {"reason": "TeardownTimeout", "component": "Node", "detail": detail}
    return Emit(EventName.TEARDOWN_TIMED_OUT, fields)


def boot(generation: int) -> SetTimer:
    return SetTimer("boot", generation, 30.0)


def stop(generation: int = 3, *, booting: bool = False) -> tuple[Action, ...]:
    """An ordered end, whose timer has this generation; `booting` while a part was being started."""
    return (*((BOOTED,) if booting else ()), *STOPS, SetTimer("stop", generation, 12.0))


BOOTED = CancelTimer("boot")
STOPS = (
    Send(WORKER, ShutdownWorker(ShutdownMode.ABORT_IN_FLIGHT)),
    Send(ARENA, Shutdown()),
    CloseParts(),
)
UNTIMED = CancelTimer("stop")
GONE = WorkerGone("no device")
NO_WORKER = faulted(FaultReason.WORKER_FATAL, Component.GPU_WORKER_CTL, "no device")
NO_WORKER_FAULT = Fault(FaultReason.WORKER_FATAL, Component.GPU_WORKER_CTL, "no device", node_id=ME)
NO_PORT = PartFailed(Component.DRIVER, "address in use")
UNAVAILABLE = faulted(FaultReason.NODE_UNAVAILABLE, Component.DRIVER, "address in use")

STARTED: Steps = [
    (ProcessStarted(), (Emit(EventName.NODE_STARTED, {}), Send(ARENA, ConstructArena(1 << 20))))
]
WITH_ARENA: Steps = [*STARTED, (ArenaConstructed(), (Send(WORKER, StartWorker()),))]
WITH_WORKER: Steps = [*WITH_ARENA, (running(CPU), (StartTransport(), boot(1)))]
WITH_TRANSPORT: Steps = [*WITH_WORKER, (TransportStarted("host", 4433), (BOOTED, Send(NODE, Continue())))]
JOINING: Steps = [*WITH_TRANSPORT, (Continue(), (StartMembership(), boot(2)))]
AVAILABLE: Steps = [
    *JOINING,
    (MembershipStarted(), (BOOTED, Emit(EventName.NODE_AVAILABLE, {}), AnnounceAvailable(CPU))),
]
BOOT = {
    "fresh": [],
    "process": STARTED,
    "arena": WITH_ARENA,
    "worker": WITH_WORKER,
    "transport": WITH_TRANSPORT,
    "membership": JOINING,
    "available": AVAILABLE,
}
STATES = dict(
    zip(
        BOOT,
        (
            S.CONTAINER_STARTING,
            S.NODE_PROCESS_STARTING,
            S.ARENA_READY,
            S.WORKER_READY,
            S.TRANSPORT_READY,
            S.MEMBERSHIP_JOINING,
            S.NODE_AVAILABLE,
        ),
        strict=True,
    )
)
STARTING = ("worker", "membership")  # a part is being started, and a timer bounds it
TIMERS = dict(zip(BOOT, (0, 0, 0, 1, 1, 2, 2), strict=True))  # that were ever set
FAULTED: Steps = [*WITH_ARENA, (GONE, NO_WORKER)]

SCENARIOS: dict[str, tuple[Steps, StrEnum]] = {
    **{name: (steps, STATES[name]) for name, steps in BOOT.items()},
    **{
        f"stopped at: {name}": (
            [*steps, (Shutdown(), stop(timers + 1, booting=name in STARTING))],
            S.STOPPING,
        )
        for name, steps, timers in (
            *((name, BOOT[name], TIMERS[name]) for name in BOOT),
            ("faulted", FAULTED, 0),
        )
    },
    **{
        f"the worker comes again: {name}": ([*BOOT[name], (running(GPU), ())], STATES[name])
        for name in ("worker", "transport", "membership")
    },
    **{
        f"what is announced first is the last worker's: {name}": (
            [
                *BOOT[name],
                (running(GPU), ()),
                *AVAILABLE[len(BOOT[name]) : -1],
                (MembershipStarted(), (BOOTED, Emit(EventName.NODE_AVAILABLE, {}), AnnounceAvailable(GPU))),
            ],
            S.NODE_AVAILABLE,
        )
        for name in ("worker", "transport", "membership")
    },
    **{
        f"a part fails: {name}": (
            [*BOOT[name], (NO_PORT, (*((BOOTED,) if name in STARTING else ()), *UNAVAILABLE))],
            S.FAULTED,
        )
        for name in ("worker", "transport", "membership", "available")
    },
    **{
        f"the worker is lost for good: {name}": (
            [*BOOT[name], (GONE, (*((BOOTED,) if name in STARTING else ()), *NO_WORKER))],
            S.FAULTED,
        )
        for name in ("arena", "worker", "transport", "membership", "available")
    },
    **{
        f"{part} does not start in time": (
            [
                *BOOT[name],
                (
                    TimerFired("boot", TIMERS[name]),
                    faulted(FaultReason.NODE_UNAVAILABLE, component, f"{part} did not start within 30 s"),
                ),
                (started, ()),
            ],
            S.FAULTED,
        )
        for name, part, component, started in (
            ("worker", "the transport", Component.DRIVER, TransportStarted("host", 4433)),
            ("membership", "membership", Component.MEMBERSHIP, MembershipStarted()),
        )
    },
    "the arena cannot be made": (
        [
            *STARTED,
            (
                ArenaConstructionFailed("no memfd"),
                faulted(FaultReason.ARENA_BOOT_FAILED, Component.ARENA_MANAGER, "no memfd"),
            ),
        ],
        S.FAULTED,
    ),
    "what is announced is the last worker's": (
        [*AVAILABLE, (running(GPU), (AnnounceAvailable(GPU),))],
        S.NODE_AVAILABLE,
    ),
    "between two workers no run can be served": (
        [
            *AVAILABLE,
            (WorkerCrashed(WorkerGeneration(1), "died"), (WithdrawAvailable(),)),
            (running(GPU), (AnnounceAvailable(GPU),)),
        ],
        S.NODE_AVAILABLE,
    ),
    "an ordered end: worker, then parts": (
        [
            *AVAILABLE,
            (Shutdown(), stop()),
            (WorkerGone("stopped"), ()),
            (PartsClosed(), (UNTIMED, ExitProcess(None))),
        ],
        S.STOPPED,
    ),
    "an ordered end: parts, then worker": (
        [
            *AVAILABLE,
            (Shutdown(), stop()),
            (PartsClosed(), ()),
            (WorkerGone("stopped"), (UNTIMED, ExitProcess(None))),
        ],
        S.STOPPED,
    ),
    "stopped before there was a worker": (
        [*STARTED, (Shutdown(), stop(1)), (PartsClosed(), (UNTIMED, ExitProcess(None)))],
        S.STOPPED,
    ),
    "a faulted node ends with its fault": (
        [*FAULTED, (Shutdown(), stop(1)), (PartsClosed(), (UNTIMED, ExitProcess(NO_WORKER_FAULT)))],
        S.STOPPED,
    ),
    "what does not end is left behind in time, and named": (
        [
            *AVAILABLE,
            (Shutdown(), stop()),
            (
                TimerFired("stop", 3),
                (
                    late(
                        "the worker process did not end within 12 s; "
                        "transport and membership did not end within 12 s"
                    ),
                    ExitProcess(None),
                ),
            ),
        ],
        S.STOPPED,
    ),
    "the worker does not end": (
        [
            *AVAILABLE,
            (Shutdown(), stop()),
            (PartsClosed(), ()),
            (
                TimerFired("stop", 3),
                (late("the worker process did not end within 12 s"), ExitProcess(None)),
            ),
        ],
        S.STOPPED,
    ),
    "a faulted node whose parts do not close": (
        [
            *FAULTED,
            (Shutdown(), stop(1)),
            (
                TimerFired("stop", 1),
                (
                    late("transport and membership did not end within 12 s"),
                    ExitProcess(NO_WORKER_FAULT),
                ),
            ),
        ],
        S.STOPPED,
    ),
}


def make() -> NodeLife:
    return NodeLife(ME, arena_ceiling=1 << 20, boot_bound=30.0, stop_bound=12.0)


# What each state expects and ignores, stated here and not read from the table.
OF_PARTS = (
    ArenaConstructed,
    ArenaConstructionFailed,
    WorkerRunning,
    WorkerCrashed,
    TransportStarted,
    MembershipStarted,
    PartFailed,
    Continue,
)
LATE: dict[StrEnum, tuple[type[Any], ...]] = {
    # A crash while it boots: the worker's control starts another, or says that there is none.
    S.ARENA_READY: (WorkerCrashed,),
    S.WORKER_READY: (WorkerCrashed,),
    S.TRANSPORT_READY: (WorkerCrashed,),
    S.MEMBERSHIP_JOINING: (WorkerCrashed,),
    S.FAULTED: (*OF_PARTS, WorkerGone),
    S.STOPPING: (*OF_PARTS, ProcessStarted, Shutdown),
    S.STOPPED: (*OF_PARTS, ProcessStarted, WorkerGone, PartsClosed, Shutdown),
}
SCRIPT = Script(make, SCENARIOS, LATE)
EVENTS = event_strategies(NodeLife)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


@pytest.mark.parametrize(("state", "event"), SCRIPT.ignored())
def test_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT.play_ignored(state, event)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


def test_the_states_of_the_boot_are_the_specification_s() -> None:
    assert list(STATES.values()) == [
        "ContainerStarting",
        "NodeProcessStarting",
        "ArenaReady",
        "WorkerReady",
        "TransportReady",
        "MembershipJoining",
        "NodeAvailable",
    ]


def test_broken_host_closes_twice_and_fires_a_cancelled_timer() -> None:
    machine = SCRIPT.play("an ordered end: worker, then parts")
    assert machine.step(PartsClosed(), 0.0) == ()
    assert machine.step(TimerFired("stop", 3), 0.0) == ()
    assert machine.late_timers == 1


@settings(max_examples=100)
@given(st.data())
def test_any_event_in_any_state_and_one_exit(data: st.DataObject) -> None:
    exits: list[ExitProcess] = []
    announced: list[object] = []

    def check(event: object, actions: tuple[Action, ...]) -> None:
        exits.extend(a for a in actions if isinstance(a, ExitProcess))
        announced.extend(a for a in actions if isinstance(a, AnnounceFault))

    machine = SCRIPT.somewhere(data, check)
    assert isinstance(machine, NodeLife)
    walk(data, machine, EVENTS, check=check)
    assert len(exits) == (machine.state is S.STOPPED)
    assert len(announced) == (machine.fault is not None)
    if exits:
        assert exits[0].fault is machine.fault
