"""Pool readiness (spec section 9): known, alive, available, stable for the window; never a decision."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.fsm import Action, CancelTimer, Emit, Send, SetTimer
from swactor_core.ids import NodeId
from swactor_core.machines.pool import (
    BeginPool,
    MemberChanged,
    PlanCommitted,
    PoolAborted,
    PoolGate,
    PoolReady,
    PoolState,
    ReportPool,
)
from swactor_core.messages import (
    Address,
    NodeAvailable,
    NodeFaulted,
    NodeLost,
    Shutdown,
    TimerFired,
    WatchRefused,
)
from swactor_core.spi.membership import Member, MemberState
from swactor_testing.scripts import Script, Steps, event_strategies, walk

S = PoolState
A, B, STRANGER = NodeId(1), NodeId(2), NodeId(3)
RUN = Address(Component.RUN)


def member(node: NodeId, state: MemberState = MemberState.ALIVE, epoch: int = 1) -> MemberChanged:
    name = f"node-{node}"
    return MemberChanged(Member(name, node, epoch, 0, state, b"key", "host", 1, "host", 2))


def available(node: NodeId, epoch: int = 1) -> NodeAvailable:
    return NodeAvailable(node, epoch, f"node-{node}", 1 << 30)


def report(*waiting: str) -> ReportPool:
    return ReportPool(2 - len(waiting), 2, waiting)


def lost(node: NodeId, by_membership: bool = True) -> NodeLost:
    return NodeLost(node, by_membership, "gone")


def ready(*epochs: int) -> Send:
    nodes = zip((A, B), epochs or (1, 1), strict=True)
    return Send(RUN, PoolReady(tuple(available(node, epoch) for node, epoch in nodes)))


def aborted(reason: FaultReason, component: Component, detail: str, **where: Any) -> Send:
    return Send(RUN, PoolAborted(Fault(reason, component, detail, **where)))


UNKNOWN = "{:016x}: not in membership"
WINDOW, DEADLINE = CancelTimer("window"), CancelTimer("deadline")
FAULT = Fault(FaultReason.WORKER_FATAL, Component.GPU_WORKER_CTL, "no device", node_id=A)
ALL_KNOWN = Emit(EventName.POOL_READY, {"nodes": [f"{A:016x}", f"{B:016x}"]})


def window(generation: int) -> SetTimer:
    return SetTimer("window", generation, 2.0)


BEGUN: Steps = [
    (BeginPool(), (SetTimer("deadline", 1, 60.0), report(UNKNOWN.format(A), UNKNOWN.format(B)))),
]
ONE: Steps = [
    *BEGUN,
    (member(A), (report("node-1: not available yet", UNKNOWN.format(B)),)),
    (available(A), (report(UNKNOWN.format(B)),)),
]
CONVERGING: Steps = [
    *ONE,
    (available(B), (report(UNKNOWN.format(B)),)),
    (member(B), (window(2), report())),
]
READY: Steps = [*CONVERGING, (TimerFired("window", 2), (DEADLINE, ALL_KNOWN, ready()))]
COMMITTED: Steps = [*READY, (PlanCommitted(), ())]
SUSPECT = report("node-2: Suspect in membership")
UNAVAILABLE = report("node-2: not available yet")
LOST_B = Emit(EventName.POOL_LOST, {"waiting": ["node-2: Suspect in membership"]})
GONE_B = Emit(EventName.POOL_LOST, {"waiting": ["node-2: gone"]})
RESTARTED_B = Emit(EventName.POOL_LOST, {"waiting": ["node-2: not available yet"]})


def waiting(node: NodeId, by_membership: bool = True) -> Send:
    reason = FaultReason.MEMBERSHIP_LOST if by_membership else FaultReason.NODE_UNAVAILABLE
    component = Component.MEMBERSHIP if by_membership else Component.POOL
    return aborted(reason, component, "gone", node_id=node)


REFUSED = aborted(FaultReason.PROVISIONING_REJECTED, Component.NODE, "node-1: not authorised", node_id=A)
PATIENT: dict[str, tuple[Steps, StrEnum]] = {
    "fresh": ([], S.WAITING_FOR_NODES),
    "begun": (BEGUN, S.WAITING_FOR_NODES),
    "converging": (CONVERGING, S.CONVERGING),
    "ready": (READY, S.POOL_READY),
    "committed": (COMMITTED, S.COMMITTED),
    "its whole life": ([*COMMITTED, (Shutdown(), ())], S.CLOSED),
    "strangers do not matter: waiting": (
        [
            *BEGUN,
            (member(STRANGER), ()),
            (available(STRANGER), ()),
            (lost(STRANGER), ()),
            (NodeFaulted(STRANGER, FAULT), ()),
        ],
        S.WAITING_FOR_NODES,
    ),
    "strangers do not matter: converging": (
        [
            *CONVERGING,
            (member(STRANGER, MemberState.DEAD), ()),
            (available(STRANGER), ()),
            (lost(STRANGER), ()),
            (NodeFaulted(STRANGER, FAULT), ()),
        ],
        S.CONVERGING,
    ),
    "strangers do not matter: ready": (
        [
            *READY,
            (member(STRANGER, MemberState.DEAD), ()),
            (available(STRANGER), ()),
            (lost(STRANGER), ()),
            (NodeFaulted(STRANGER, FAULT), ()),
        ],
        S.POOL_READY,
    ),
    "strangers do not matter: committed": (
        [
            *COMMITTED,
            (member(STRANGER, MemberState.DEAD), ()),
            (lost(STRANGER), ()),
            (NodeFaulted(STRANGER, FAULT), ()),
        ],
        S.COMMITTED,
    ),
    "news without change do not begin the window again": (
        [*CONVERGING, (member(B), ()), (available(A), ())],
        S.CONVERGING,
    ),
    "a change begins the window again; the old timer is late": (
        [
            *CONVERGING,
            (NodeAvailable(B, 1, "node-2", 5), (window(3), report())),
            (TimerFired("window", 2), ()),
        ],
        S.CONVERGING,
    ),
    "a suspect ends the window": (
        [*CONVERGING, (member(B, MemberState.SUSPECT), (WINDOW, SUSPECT)), (TimerFired("window", 2), ())],
        S.WAITING_FOR_NODES,
    ),
    "a new life of a node must say that it is available again": (
        [
            *CONVERGING,
            (member(B, epoch=2), (WINDOW, UNAVAILABLE)),
            (available(B), (UNAVAILABLE,)),
            (available(B, epoch=2), (window(3), report())),
        ],
        S.CONVERGING,
    ),
    "an old word of availability ends the window": (
        [*CONVERGING, (available(B, epoch=0), (WINDOW, UNAVAILABLE))],
        S.WAITING_FOR_NODES,
    ),
    "a lost node is waited for: converging": (
        [*CONVERGING, (lost(B), (WINDOW, report("node-2: gone")))],
        S.WAITING_FOR_NODES,
    ),
    "a lost node is waited for: waiting": (
        [*ONE, (lost(A), (report("node-1: gone", UNKNOWN.format(B)),))],
        S.WAITING_FOR_NODES,
    ),
    "a lost node is waited for: ready": (
        [*READY, (lost(B), (GONE_B, report("node-2: gone"))), (available(B), (window(3), report()))],
        S.CONVERGING,
    ),
    "ready, then suspect, then ready again": (
        [
            *READY,
            (member(A), ()),
            (available(A), ()),
            (member(B, MemberState.SUSPECT), (LOST_B, SUSPECT)),
            (member(B), (window(3), report())),
            (TimerFired("window", 3), (ALL_KNOWN, ready())),
        ],
        S.POOL_READY,
    ),
    "ready, then a new life that is not available yet": (
        [*READY, (available(B, epoch=2), (RESTARTED_B, UNAVAILABLE))],
        S.WAITING_FOR_NODES,
    ),
    "a node that is busy is waited for, and the reason is said": (
        [
            *ONE,
            (WatchRefused(B, "busy", final=False), (report(UNKNOWN.format(B)),)),
            (member(B), (report("node-2: busy"),)),
            (available(B), (window(2), report())),
            (WatchRefused(STRANGER, "busy", final=True), ()),
            (WatchRefused(B, "busy", final=False), (WINDOW, report("node-2: busy"))),
        ],
        S.WAITING_FOR_NODES,
    ),
    "a node that became busy when all were ready": (
        [
            *READY,
            (WatchRefused(STRANGER, "busy", final=True), ()),
            (
                WatchRefused(B, "busy", final=False),
                (Emit(EventName.POOL_LOST, {"waiting": ["node-2: busy"]}), report("node-2: busy")),
            ),
        ],
        S.WAITING_FOR_NODES,
    ),
    # --- the end of waiting ---
    "a node that never will serve this orchestrator: waiting": (
        [*ONE, (WatchRefused(A, "not authorised", final=True), (DEADLINE, REFUSED))],
        S.ABORTED,
    ),
    "a node that never will serve this orchestrator: converging": (
        [*CONVERGING, (WatchRefused(A, "not authorised", final=True), (WINDOW, DEADLINE, REFUSED))],
        S.ABORTED,
    ),
    "a node that never will serve this orchestrator: ready": (
        [*READY, (WatchRefused(A, "not authorised", final=True), (REFUSED,))],
        S.ABORTED,
    ),
    "the deadline names who is missing": (
        [
            *ONE,
            (
                TimerFired("deadline", 1),
                (
                    aborted(
                        FaultReason.POOL_TIMEOUT,
                        Component.POOL,
                        f"pool not ready within 60 s; waiting for {UNKNOWN.format(B)}",
                    ),
                ),
            ),
        ],
        S.ABORTED,
    ),
    "the deadline comes while the pool converges": (
        [
            *CONVERGING,
            (
                TimerFired("deadline", 1),
                (
                    WINDOW,
                    aborted(
                        FaultReason.POOL_TIMEOUT,
                        Component.POOL,
                        "pool not ready within 60 s; waiting for the pool to stay stable",
                    ),
                ),
            ),
        ],
        S.ABORTED,
    ),
    "a candidate faults: waiting": (
        [*ONE, (NodeFaulted(A, FAULT), (DEADLINE, Send(RUN, PoolAborted(FAULT))))],
        S.ABORTED,
    ),
    "a candidate faults: converging": (
        [*CONVERGING, (NodeFaulted(A, FAULT), (WINDOW, DEADLINE, Send(RUN, PoolAborted(FAULT))))],
        S.ABORTED,
    ),
    "a candidate faults: ready": (
        [*READY, (NodeFaulted(A, FAULT), (Send(RUN, PoolAborted(FAULT)),))],
        S.ABORTED,
    ),
    "closed after it aborted": (
        [*ONE, (NodeFaulted(A, FAULT), (DEADLINE, Send(RUN, PoolAborted(FAULT)))), (Shutdown(), ())],
        S.CLOSED,
    ),
    "closed while it waits": ([*ONE, (Shutdown(), (DEADLINE,))], S.CLOSED),
    "closed while it converges": ([*CONVERGING, (Shutdown(), (WINDOW, DEADLINE))], S.CLOSED),
    "closed when ready": ([*READY, (Shutdown(), ())], S.CLOSED),
    # --- committed ---
    "a commit that finds the pool lost": (
        [
            *READY,
            (member(B, MemberState.SUSPECT), (LOST_B, SUSPECT)),
            (
                PlanCommitted(),
                (aborted(FaultReason.MEMBERSHIP_LOST, Component.POOL, "node-2: Suspect in membership"),),
            ),
        ],
        S.COMMITTED,
    ),
    "a commit that finds the pool converging": (
        [
            *CONVERGING,
            (
                PlanCommitted(),
                (
                    WINDOW,
                    DEADLINE,
                    aborted(FaultReason.MEMBERSHIP_LOST, Component.POOL, "pool was converging"),
                ),
            ),
        ],
        S.COMMITTED,
    ),
    "a suspect is not yet lost": ([*COMMITTED, (member(B, MemberState.SUSPECT), ())], S.COMMITTED),
    "a dead node is lost": (
        [
            *COMMITTED,
            (
                member(B, MemberState.DEAD),
                (Send(RUN, NodeLost(B, True, "node-2 is Dead in membership")),),
            ),
        ],
        S.COMMITTED,
    ),
    "a restarted node is lost": (
        [*COMMITTED, (member(B, epoch=2), (Send(RUN, NodeLost(B, True, "node-2 has restarted")),))],
        S.COMMITTED,
    ),
    "evidence of links and nodes goes to the run": (
        [
            *COMMITTED,
            (lost(A, by_membership=False), (Send(RUN, lost(A, by_membership=False)),)),
            (NodeFaulted(A, FAULT), (Send(RUN, NodeFaulted(A, FAULT)),)),
        ],
        S.COMMITTED,
    ),
}
IMPATIENT: dict[str, tuple[Steps, StrEnum]] = {
    "a lost node aborts: waiting": ([*ONE, (lost(A), (DEADLINE, waiting(A)))], S.ABORTED),
    "a lost node aborts: converging": (
        [*CONVERGING, (lost(B, False), (WINDOW, DEADLINE, waiting(B, False)))],
        S.ABORTED,
    ),
    "a node that membership lost, whose link ends for it, is lost to membership": (
        [
            *ONE,
            (member(A, MemberState.DEAD), (report("node-1: Dead in membership", UNKNOWN.format(B)),)),
            (
                lost(A, by_membership=False),
                (
                    DEADLINE,
                    aborted(
                        FaultReason.MEMBERSHIP_LOST,
                        Component.MEMBERSHIP,
                        "node-1 is Dead in membership",
                        node_id=A,
                    ),
                ),
            ),
        ],
        S.ABORTED,
    ),
    "a lost node aborts: ready": ([*READY, (lost(B), (waiting(B),))], S.ABORTED),
}


def make(wait_for_lost: bool = True) -> PoolGate:
    return PoolGate((A, B), convergence_window=2.0, deadline=60.0, wait_for_lost=wait_for_lost)


# What each state expects and ignores, stated here and not read from the table.
OF_NODES = (MemberChanged, NodeAvailable, NodeFaulted, NodeLost, WatchRefused)
LATE: dict[StrEnum, tuple[type[Any], ...]] = {
    S.COMMITTED: (NodeAvailable, WatchRefused),
    S.ABORTED: (*OF_NODES, PlanCommitted),
    S.CLOSED: (*OF_NODES, PlanCommitted, Shutdown),
}
SCRIPT = Script(make, PATIENT, LATE)
SCRIPT_IMPATIENT = Script(lambda: make(wait_for_lost=False), IMPATIENT)


@pytest.mark.parametrize("name", PATIENT)
def test_scenario(name: str) -> None:
    SCRIPT.play(name)


@pytest.mark.parametrize("name", IMPATIENT)
def test_impatient_scenario(name: str) -> None:
    SCRIPT_IMPATIENT.play(name)


@pytest.mark.parametrize(("state", "event"), SCRIPT.ignored())
def test_what_is_only_expected_late_changes_nothing(state: StrEnum, event: type[Any]) -> None:
    SCRIPT.play_ignored(state, event)


def test_every_transition_of_the_table_is_taken() -> None:
    assert SCRIPT.missing() - SCRIPT_IMPATIENT.taken() == set()


def test_broken_host_forgets_the_window_timer_and_nothing_is_called_ready() -> None:
    machine = SCRIPT.play("converging")
    machine.step(member(B), 1e6)
    assert machine.state is S.CONVERGING


def test_broken_host_fires_the_window_timer_twice() -> None:
    machine = SCRIPT.play("ready")
    assert machine.step(TimerFired("window", 2), 0.0) == ()
    assert machine.late_timers == 1


EVENTS = event_strategies(
    PoolGate,
    {
        MemberChanged: st.builds(
            member, st.sampled_from((A, B, STRANGER)), st.sampled_from(MemberState), st.integers(1, 2)
        ),
        NodeAvailable: st.builds(available, st.sampled_from((A, B, STRANGER)), st.integers(1, 2)),
    },
)


@settings(max_examples=100)
@given(st.data(), st.sampled_from((SCRIPT, SCRIPT_IMPATIENT)))
def test_any_event_in_any_state_transitions_or_is_refused(data: st.DataObject, script: Script) -> None:
    walk(data, script.somewhere(data), EVENTS)


@settings(max_examples=100)
@given(st.data())
def test_ready_means_that_every_candidate_is_alive_and_available_in_its_present_life(
    data: st.DataObject,
) -> None:
    members: dict[NodeId, Member] = {}
    nodes: dict[NodeId, NodeAvailable] = {}

    def check(event: object, actions: tuple[Action, ...]) -> None:
        match event:
            case MemberChanged(now):
                members[now.node_id] = now
            case NodeAvailable():
                nodes[event.node_id] = event
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, PoolReady):
                assert [n.node_id for n in action.message.nodes] == [A, B]
                for node in action.message.nodes:
                    assert members[node.node_id].state is MemberState.ALIVE
                    assert members[node.node_id].epoch == node.epoch
                    assert nodes[node.node_id] == node

    walk(data, SCRIPT.somewhere(data, check), EVENTS, steps=25, check=check)


def test_a_candidate_that_membership_never_showed_has_its_name_of_the_cluster() -> None:
    gate = PoolGate((A, B), convergence_window=2.0, deadline=60.0, wait_for_lost=True, names={A: "a"})
    (_, shown) = gate.step(BeginPool(), 0.0)
    assert shown == report("a: not in membership", UNKNOWN.format(B))
