"""Record FSM, Edge teardown FSM (spec sections 26, 38): lease, ring, pump, and every way back, proven."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.events import EventName
from swactor_core.faults import (
    Component,
    Fault,
    FaultReason,
    LeaseRejection,
    RingFaultReason,
    StreamFaultReason,
    UninstallReason,
)
from swactor_core.fsm import Action, CancelTimer, Emit, Send, SetTimer
from swactor_core.ids import EdgeId, LeaseRequestId, NodeId, PortId, RingId
from swactor_core.machines.edge import EdgeBounds, EdgeProvisionState, EdgeRecord
from swactor_core.messages import (
    Address,
    CancelLease,
    DriverEdgeReady,
    EdgeFailed,
    EdgeReady,
    EdgeStopped,
    EstablishRecv,
    EstablishSend,
    InstallRing,
    LeaseRing,
    ProvisionRx,
    ProvisionTx,
    PumpProof,
    PumpStopped,
    QuiescenceProof,
    ReleaseRing,
    RingFault,
    RingInstalled,
    RingLeased,
    RingLeaseRejected,
    RingProof,
    RingQuiesced,
    RingReleased,
    StopEdge,
    StreamClosed,
    StreamFault,
    TimerFired,
    UninstallRing,
)
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingLayout, RingSpec
from swactor_testing.scripts import Script, Steps, event_strategies, step_or_refuse, walk

S = EdgeProvisionState
EDGE, RING, PORT, REQUEST, PEER = EdgeId(6), RingId(9), PortId(1), LeaseRequestId(3), NodeId(77)
ME = Address(Component.EDGE_ESTABLISHER, EDGE)
ARENA, DRIVER = Address(Component.ARENA_MANAGER), Address(Component.DRIVER)
HOST, TX, RX = Address(Component.GPU_WORKER_CTL), Address(Component.TX_EDGE, 6), Address(Component.RX_EDGE, 6)
OBJECT = ObjectSpec(ObjectKind.TOKENS, 64, DTypeFamily.UNSIGNED, 4, 1)
OUT, IN = RingSpec(4032, RingDirection.EGRESS), RingSpec(4032, RingDirection.INGRESS)
LAYOUT = RingLayout(RING, 0, 4096, 0, 64, 4032, 64)
BOUNDS = EdgeBounds(lease=20.0, establish=10.0, teardown=5.0)

PROVISION_TX = ProvisionTx(EDGE, PORT, PEER, OBJECT, OUT)
PROVISION_RX = ProvisionRx(EDGE, PORT, PEER, OBJECT, IN)
LEASED = RingLeased(REQUEST, EDGE, LAYOUT)
INSTALLED = RingInstalled(RING, EDGE, PORT)
READY = DriverEdgeReady(EDGE)
STOP = StopEdge(EDGE)
PUMP_STOPPED = PumpStopped(EDGE, RING)
QUIESCED = RingQuiesced(RING)
REAPED = RingQuiesced(RING, process_reaped=True)
RING_FAULT = RingFault(RING, EDGE, PORT, RingFaultReason.DEVICE_COPY_FAILED, "dma")
STREAM_FAULT = StreamFault(EDGE, StreamFaultReason.PEER_UNREACHABLE, "no route")


def bound(generation: int, seconds: float) -> SetTimer:
    return SetTimer("bound", generation, seconds)


def fired(generation: int) -> TimerFired:
    return TimerFired("bound", generation)


def failed(gate: Address, reason: FaultReason, **fields: Any) -> Send:
    component = fields.pop("component", Component.EDGE_ESTABLISHER)
    ring = fields.pop("ring_id", RING)
    return Send(gate, EdgeFailed(EDGE, Fault(reason, component, edge_id=EDGE, ring_id=ring, **fields)))


def stopped(gate: Address, unproven: str = "") -> Send:
    return Send(gate, EdgeStopped(EDGE, f"edge 6, ring 9: {unproven}" if unproven else ""))


def unproven(what: str) -> tuple[Action, ...]:
    """The bound of teardown has passed: said as an event with its reason, and to the gate."""
    fields = {
        "edge_id": EDGE,
        "ring_id": RING,
        "reason": "TeardownTimeout",
        "component": "EdgeEstablisher",
        "detail": f"edge 6, ring 9: {what}",
    }
    return Emit(EventName.TEARDOWN_TIMED_OUT, fields), stopped(TX, what)


def release(pump: PumpProof, ring: RingProof) -> Send:
    return Send(ARENA, ReleaseRing(RING, QuiescenceProof(pump, ring)))


def uninstall(reason: UninstallReason = UninstallReason.EDGE_STOPPED) -> Send:
    return Send(HOST, UninstallRing(RING, reason))


STOP_PUMP = Send(DRIVER, STOP)
NEVER = release(PumpProof.NEVER_STARTED, RingProof.NEVER_INSTALLED)
CANCEL = Send(ARENA, CancelLease(REQUEST))
UNTIMED = CancelTimer("bound")

WAITING: Steps = [
    (
        PROVISION_TX,
        (
            Emit(EventName.EDGE_PROVISION_STARTED, {"edge_id": EDGE, "direction": "Egress"}),
            Send(ARENA, LeaseRing(REQUEST, ME, EDGE, RingDirection.EGRESS, OUT)),
            bound(1, 20.0),
        ),
    )
]
INSTALLING: Steps = [
    *WAITING,
    (
        LEASED,
        (
            Send(HOST, InstallRing(RING, EDGE, PORT, RingDirection.EGRESS, LAYOUT, OBJECT)),
            bound(2, 10.0),
        ),
    ),
]
DRIVING: Steps = [
    *INSTALLING,
    (INSTALLED, (Send(DRIVER, EstablishSend(EDGE, PEER, RING, LAYOUT, TX)), bound(3, 10.0))),
]
UP: Steps = [
    *DRIVING,
    (
        READY,
        (
            UNTIMED,
            Emit(EventName.EDGE_READY, {"edge_id": EDGE, "ring_id": RING}),
            Send(TX, EdgeReady(EDGE, RING)),
        ),
    ),
]
PUMP_STOPPING: Steps = [*UP, (STOP, (STOP_PUMP, bound(4, 5.0)))]
RING_STOPPING: Steps = [*PUMP_STOPPING, (PUMP_STOPPED, (uninstall(), bound(5, 5.0)))]
RELEASING: Steps = [
    *RING_STOPPING,
    (QUIESCED, (release(PumpProof.STOPPED, RingProof.QUIESCED), bound(6, 5.0))),
]
GONE = failed(TX, FaultReason.WORKER_CRASHED, detail="the worker is gone")
WORKER_FAULT = failed(
    TX, FaultReason.DEVICE_COPY_FAILED, component=Component.WORKER, detail="dma", cause="DeviceCopyFailed"
)
DRIVER_FAULT = failed(
    TX,
    FaultReason.EDGE_ESTABLISHMENT_FAILED,
    component=Component.DRIVER,
    detail="no route",
    cause="PeerUnreachable",
)
NOT_INSTALLED = failed(
    TX,
    FaultReason.EDGE_ESTABLISHMENT_FAILED,
    detail="the worker did not install the ring within 10 s",
    cause="RingNotInstalled",
)
NOT_CONNECTED = failed(
    TX, FaultReason.EDGE_ESTABLISHMENT_FAILED, detail="the connection to the peer was not made within 10 s"
)


def rejected(reason: LeaseRejection) -> RingLeaseRejected:
    return RingLeaseRejected(REQUEST, EDGE, reason, "why")


def refused(reason: FaultReason, cause: LeaseRejection) -> tuple[Action, ...]:
    fault = failed(
        TX, reason, component=Component.ARENA_MANAGER, detail="why", cause=str(cause), ring_id=None
    )
    return UNTIMED, fault


PRESSURE = failed(
    TX, FaultReason.ARENA_PRESSURE_TIMEOUT, detail="no arena range became free within 20 s", ring_id=None
)
ANOTHER = RingLeased(LeaseRequestId(2), EDGE, LAYOUT)

SCENARIOS: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], S.NEW),
    "waiting": (WAITING, S.WAITING_FOR_LEASE),
    "installing": (INSTALLING, S.WAITING_FOR_WORKER_RING),
    "driving": (DRIVING, S.WAITING_FOR_DRIVER),
    "up": (UP, S.READY),
    "stopping its pump": (PUMP_STOPPING, S.STOPPING_PUMP),
    "stopping its ring": (RING_STOPPING, S.STOPPING_WORKER_RING),
    "releasing": (RELEASING, S.RELEASING_ARENA),
    "the whole life of a send edge": (
        [*RELEASING, (RingReleased(RING), (UNTIMED, stopped(TX)))],
        S.STOPPED,
    ),
    "a receive edge to its readiness": (
        [
            (
                PROVISION_RX,
                (
                    Emit(EventName.EDGE_PROVISION_STARTED, {"edge_id": EDGE, "direction": "Ingress"}),
                    Send(ARENA, LeaseRing(REQUEST, ME, EDGE, RingDirection.INGRESS, IN)),
                    bound(1, 20.0),
                ),
            ),
            (
                LEASED,
                (
                    Send(HOST, InstallRing(RING, EDGE, PORT, RingDirection.INGRESS, LAYOUT, OBJECT)),
                    bound(2, 10.0),
                ),
            ),
            (INSTALLED, (Send(DRIVER, EstablishRecv(EDGE, PEER, RING, LAYOUT, RX)), bound(3, 10.0))),
            (
                READY,
                (
                    UNTIMED,
                    Emit(EventName.EDGE_READY, {"edge_id": EDGE, "ring_id": RING}),
                    Send(RX, EdgeReady(EDGE, RING)),
                ),
            ),
        ],
        S.READY,
    ),
    # --- the lease ---
    "a lease that can never fit": (
        [
            *WAITING,
            (
                rejected(LeaseRejection.EXCEEDS_CEILING),
                refused(FaultReason.RING_REQUEST_TOO_LARGE, LeaseRejection.EXCEEDS_CEILING),
            ),
        ],
        S.FAILED,
    ),
    "a lease refused for another reason is not called too large; the stop of it is answered": (
        [
            *WAITING,
            (
                rejected(LeaseRejection.NO_MEMORY),
                refused(FaultReason.EDGE_ESTABLISHMENT_FAILED, LeaseRejection.NO_MEMORY),
            ),
            (STOP, (stopped(TX),)),
        ],
        S.STOPPED,
    ),
    "arena pressure has a bound, and a lease that comes after it goes back unused": (
        [*WAITING, (fired(1), (CANCEL, PRESSURE)), (LEASED, (NEVER,))],
        S.FAILED,
    ),
    "stopped while it waits: the lease granted after cancellation goes back unused": (
        [*WAITING, (STOP, (UNTIMED, CANCEL, stopped(TX))), (LEASED, (NEVER,)), (RingReleased(RING), ())],
        S.STOPPED,
    ),
    "a lease of an earlier request is given back, its refusal ignored": (
        [
            *WAITING,
            (ANOTHER, (NEVER,)),
            (RingLeaseRejected(LeaseRequestId(2), EDGE, LeaseRejection.NO_MEMORY), ()),
        ],
        S.WAITING_FOR_LEASE,
    ),
    # --- ends without a pump ---
    "the ring cannot be installed": (
        [
            *INSTALLING,
            (RING_FAULT, (WORKER_FAULT, uninstall(UninstallReason.RING_FAULTED), bound(3, 5.0))),
            (QUIESCED, (release(PumpProof.NEVER_STARTED, RingProof.QUIESCED), bound(4, 5.0))),
        ],
        S.RELEASING_ARENA,
    ),
    "stopped while the ring is being installed": (
        [*INSTALLING, (STOP, (uninstall(), bound(3, 5.0))), (INSTALLED, ())],
        S.STOPPING_WORKER_RING,
    ),
    "the worker does not install the ring in time": (
        [*INSTALLING, (fired(1), ()), (fired(2), (NOT_INSTALLED, uninstall(), bound(3, 5.0)))],
        S.STOPPING_WORKER_RING,
    ),
    "the worker dies while it installs": (
        [
            *INSTALLING,
            (REAPED, (GONE, release(PumpProof.NEVER_STARTED, RingProof.PROCESS_REAPED), bound(3, 5.0))),
            (RingReleased(RING), (UNTIMED, stopped(TX))),
        ],
        S.STOPPED,
    ),
    # --- ends with a pump ---
    "the peer cannot be reached": (
        [*DRIVING, (STREAM_FAULT, (DRIVER_FAULT, STOP_PUMP, bound(4, 5.0)))],
        S.STOPPING_PUMP,
    ),
    "the ring breaks before the driver is ready": (
        [*DRIVING, (RING_FAULT, (WORKER_FAULT, STOP_PUMP, bound(4, 5.0)))],
        S.STOPPING_PUMP,
    ),
    "the worker dies before the driver is ready": (
        [*DRIVING, (REAPED, (GONE, STOP_PUMP, bound(4, 5.0)))],
        S.STOPPING_PUMP,
    ),
    "stopped before the driver is ready, whose word comes late": (
        [*DRIVING, (STOP, (STOP_PUMP, bound(4, 5.0))), (READY, ())],
        S.STOPPING_PUMP,
    ),
    "no connection in time": (
        [*DRIVING, (fired(3), (NOT_CONNECTED, STOP_PUMP, bound(4, 5.0)))],
        S.STOPPING_PUMP,
    ),
    "the stream breaks": (
        [
            *UP,
            (
                StreamFault(EDGE, StreamFaultReason.STREAM_BROKEN, "reset"),
                (
                    failed(
                        TX,
                        FaultReason.STREAM_FAULT,
                        component=Component.DRIVER,
                        detail="reset",
                        cause="StreamBroken",
                    ),
                    STOP_PUMP,
                    bound(4, 5.0),
                ),
            ),
        ],
        S.STOPPING_PUMP,
    ),
    "the ring breaks": ([*UP, (RING_FAULT, (WORKER_FAULT, STOP_PUMP, bound(4, 5.0)))], S.STOPPING_PUMP),
    "the worker dies: fault first, proof when it is reaped": (
        [
            *UP,
            (RING_FAULT, (WORKER_FAULT, STOP_PUMP, bound(4, 5.0))),
            (REAPED, ()),
            (PUMP_STOPPED, (release(PumpProof.STOPPED, RingProof.PROCESS_REAPED), bound(5, 5.0))),
            (RingReleased(RING), (UNTIMED, stopped(TX))),
        ],
        S.STOPPED,
    ),
    "the worker is gone while the edge is up": (
        [*UP, (REAPED, (GONE, STOP_PUMP, bound(4, 5.0)))],
        S.STOPPING_PUMP,
    ),
    "the end of the stream is the worker's to judge": ([*UP, (StreamClosed(EDGE), ())], S.READY),
    "stopped before it began: nobody waits for it": ([(STOP, ())], S.STOPPED),
    # --- what cannot be proved ---
    "the pump does not stop": (
        [*PUMP_STOPPING, (fired(4), unproven("its pump did not stop within 5 s")), (STOP, ())],
        S.STOPPING_PUMP,
    ),
    "the ring does not quiesce": (
        [*RING_STOPPING, (fired(5), unproven("its ring did not quiesce within 5 s")), (STOP, ())],
        S.STOPPING_WORKER_RING,
    ),
    "the arena does not confirm": (
        [*RELEASING, (fired(6), unproven("the arena did not confirm the release within 5 s"))],
        S.RELEASING_ARENA,
    ),
    # --- what is proved after its time: nobody waits, so nothing is timed any more ---
    "the pump stops after its time": (
        [
            *PUMP_STOPPING,
            (fired(4), unproven("its pump did not stop within 5 s")),
            (PUMP_STOPPED, (uninstall(),)),
            (QUIESCED, (release(PumpProof.STOPPED, RingProof.QUIESCED),)),
            (RingReleased(RING), (stopped(TX),)),
        ],
        S.STOPPED,
    ),
    "the worker is reaped and the pump stops after its time": (
        [
            *PUMP_STOPPING,
            (fired(4), unproven("its pump did not stop within 5 s")),
            (REAPED, ()),
            (PUMP_STOPPED, (release(PumpProof.STOPPED, RingProof.PROCESS_REAPED),)),
            (RingReleased(RING), (stopped(TX),)),
        ],
        S.STOPPED,
    ),
    "the ring quiesces after its time": (
        [
            *RING_STOPPING,
            (fired(5), unproven("its ring did not quiesce within 5 s")),
            (QUIESCED, (release(PumpProof.STOPPED, RingProof.QUIESCED),)),
            (RingReleased(RING), (stopped(TX),)),
        ],
        S.STOPPED,
    ),
    "the arena confirms after its time": (
        [
            *RELEASING,
            (fired(6), unproven("the arena did not confirm the release within 5 s")),
            (RingReleased(RING), (stopped(TX),)),
        ],
        S.STOPPED,
    ),
}


def make() -> EdgeRecord:
    return EdgeRecord(EDGE, address=ME, ring_host=HOST, lease_request_id=REQUEST, bounds=BOUNDS)


# What each state expects and ignores, stated here and not read from the table.
OF_DRIVER = (DriverEdgeReady, StreamClosed, StreamFault, PumpStopped)
LATE = {
    S.WAITING_FOR_DRIVER: (RingInstalled,),
    S.READY: (RingInstalled, StreamClosed),
    S.STOPPING_PUMP: (RingInstalled, RingFault, DriverEdgeReady, StreamClosed, StreamFault, StopEdge),
    S.STOPPING_WORKER_RING: (RingInstalled, RingFault, *OF_DRIVER, StopEdge),
    S.RELEASING_ARENA: (RingInstalled, RingFault, RingQuiesced, *OF_DRIVER, StopEdge),
    # Stale events for stopped records are ignored (spec section 26).
    S.FAILED: (RingLeaseRejected, RingInstalled, RingFault, RingQuiesced, RingReleased, *OF_DRIVER),
    S.STOPPED: (
        RingLeaseRejected,
        RingInstalled,
        RingFault,
        RingQuiesced,
        RingReleased,
        *OF_DRIVER,
        StopEdge,
    ),
}
SCRIPT = Script(make, SCENARIOS, LATE)
EVENTS = event_strategies(
    EdgeRecord,
    {
        LeaseRequestId: st.sampled_from((3, 3, 2)),
        ObjectSpec: st.just(OBJECT),
        RingSpec: st.just(OUT),
        RingLayout: st.builds(
            RingLayout, st.sampled_from((RING, RingId(8))), *map(st.just, (0, 4096, 0, 64, 4032, 64))
        ),
    },
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


@pytest.mark.parametrize(("state", "event"), SCRIPT.ignored())
def test_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT.play_ignored(state, event)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() == set()


@pytest.mark.parametrize("end", ["the pump does not stop", "the ring does not quiesce", "releasing"])
def test_broken_host_tells_the_lease_twice_and_no_installed_ring_is_released_for_it(end: str) -> None:
    machine = SCRIPT.play(end)
    assert step_or_refuse(machine, LEASED) in ((), None)


def test_broken_host_forgets_the_timer_and_the_late_proofs_still_release() -> None:
    machine = SCRIPT.play("stopping its ring")
    assert machine.step(QUIESCED, 1e6)[0] == release(PumpProof.STOPPED, RingProof.QUIESCED)


def test_broken_host_fires_timers_of_every_older_generation() -> None:
    machine = SCRIPT.play("releasing")
    for generation in range(1, 6):
        assert machine.step(fired(generation), 0.0) == ()
    assert (machine.state, machine.late_timers) == (S.RELEASING_ARENA, 5)


def test_broken_host_provisions_twice() -> None:
    assert step_or_refuse(SCRIPT.play("waiting"), PROVISION_TX) is None


@settings(max_examples=100)
@given(st.data())
def test_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject) -> None:
    walk(data, SCRIPT.somewhere(data), EVENTS)


@settings(max_examples=100)
@given(st.data())
def test_the_gate_hears_of_one_failure_and_of_one_stop(data: st.DataObject) -> None:
    """And of a second stop only when the first was not proved."""
    heard: list[type] = []
    unproven: list[bool] = []

    def check(event: object, actions: tuple[Action, ...]) -> None:
        gate = (Component.TX_EDGE, Component.RX_EDGE)
        said = [a.message for a in actions if isinstance(a, Send) and a.to.component in gate]
        heard.extend(type(message) for message in said)
        unproven.extend(bool(message.unproven) for message in said if isinstance(message, EdgeStopped))

    machine = SCRIPT.somewhere(data, check)
    assert isinstance(machine, EdgeRecord)
    walk(data, machine, EVENTS, check=check)
    assert heard.count(EdgeReady) <= 1
    assert heard.count(EdgeFailed) <= 1
    begun = machine.direction is not None  # before that there is no gate to tell
    proved = begun and machine.state is S.STOPPED
    assert unproven in ([False], [True, False]) if proved else unproven in ([], [True])
    assert machine.ended == (machine.state in (S.NEW, S.STOPPED, S.FAILED))
    if EdgeStopped in heard:
        assert heard[heard.index(EdgeStopped) :] == [EdgeStopped] * len(unproven)
