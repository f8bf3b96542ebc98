"""The judge of event streams is judged: a good stream passes, and each single breach is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import event_checker
import pytest
from event_checker import EventViolation, check

HOME, NODES = "aa", ("b0", "b1")
EDGES = (70, 71, 72)


class _Clock:
    """Stamps events as the processes of a run would: one clock, a number per process."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def __call__(self, node: str, name: str, **fields: Any) -> None:
        self._numbers[node] = self._numbers.get(node, 0) + 1
        stamp = {
            "event": name,
            "time": 1000 + len(self.events),
            "number": self._numbers[node],
            "node_id": node,
        }
        run = (
            {}
            if name in (*event_checker.OF_NODE, "pool_ready", "ring_leased", "ring_released")
            else {"run_id": 9}
        )
        self.events.append({**stamp, **run, **fields})


def good(tokens: int = 3, outcome: str = "run_completed") -> list[dict[str, Any]]:
    """A whole run of two stages that generates `tokens` tokens."""
    say = _Clock()
    for node in NODES:
        say(node, "node_started")
        say(node, "worker_started", worker_generation=1, pid=7)
        say(node, "node_available")
    say(HOME, "pool_ready")
    stages = [{"stage_index": i, "node_id": node, "layers": [i, i + 1]} for i, node in enumerate(NODES)]
    say(HOME, "run_planned", stages=stages, edges=list(EDGES))
    for edge in (EDGES[0], EDGES[2]):
        say(HOME, "edge_provision_started", edge_id=edge, direction="Egress")
        say(HOME, "ring_leased", ring_id=edge, edge_id=edge)
        say(HOME, "edge_ready", ring_id=edge, edge_id=edge)
    for stage, node in enumerate(NODES):
        say(node, "stage_provision_started", stage_index=stage)
        say(node, "weights_download_started", stage_index=stage)
        for edge in EDGES[stage : stage + 2]:
            say(node, "edge_provision_started", edge_id=edge, stage_index=stage)
            say(node, "ring_leased", ring_id=edge, edge_id=edge)
            say(node, "edge_ready", ring_id=edge, edge_id=edge, stage_index=stage)
        say(node, "weights_downloaded", stage_index=stage)
        say(node, "weights_loaded", stage_index=stage)
        say(node, "stage_ready", stage_index=stage)
    say(HOME, "readiness_barrier_passed")
    say(HOME, "prompt_injected", sequence=0, tokens=2)
    for sequence in range(tokens):
        for stage, node in enumerate(NODES):
            step = {"stage_index": stage, "sequence": sequence}
            say(node, "object_loaded", edge_id=EDGES[stage], **step)
            say(node, "execute_step_started", step_id=sequence + 1, **step)
            say(node, "object_produced", edge_id=EDGES[stage + 1], **step)
            say(node, "step_completed", step_id=sequence + 1, **step)
        say(HOME, "token_received", sequence=sequence, token_id=5)
    fields = {"run_faulted": {"reason": "StreamFault", "component": "Driver"}}.get(outcome, {})
    say(HOME, outcome, tokens=tokens, **fields)
    for stage in range(2):
        say(HOME, "stop_run_sent", stage_index=stage)
    proof = {"pump": "Stopped", "ring": "Quiesced"}
    for stage, node in enumerate(NODES):
        for edge in EDGES[stage : stage + 2]:
            say(node, "ring_released", ring_id=edge, edge_id=edge, proof=proof)
        say(node, "stage_stopped", stage_index=stage, unproven=[])
    for edge in (EDGES[0], EDGES[2]):
        say(HOME, "ring_released", ring_id=edge, edge_id=edge, proof=proof)
    said = {"run_completed": "completed", "run_faulted": "faulted", "run_stopped": "operator-stopped"}[
        outcome
    ]
    say(HOME, "run_torn_down", outcome=said, unproven=[])
    return say.events


Events = list[dict[str, Any]]


def first(events: Events, name: str, **identity: Any) -> dict[str, Any]:
    return next(e for e in events if e["event"] == name and all(e.get(k) == v for k, v in identity.items()))


def drop(name: str, **identity: Any) -> Callable[[Events], Events]:
    """As if the system had never said it: later numbers of that process close the gap."""

    def edit(events: Events) -> Events:
        gone = first(events, name, **identity)
        for event in events:
            if event["node_id"] == gone["node_id"] and event["number"] > gone["number"]:
                event["number"] -= 1
        events.remove(gone)
        return events

    return edit


def repeat(name: str, **identity: Any) -> Callable[[Events], Events]:
    def edit(events: Events) -> Events:
        event = first(events, name, **identity)
        later = [e for e in events if e["node_id"] == event["node_id"] and e["number"] > event["number"]]
        for other in later:
            other["number"] += 1
        events.insert(events.index(event) + 1, {**event, "number": event["number"] + 1})
        return events

    return edit


def late(name: str, **identity: Any) -> Callable[[Events], Events]:
    """Said at the very end of its process instead of when it should be."""

    def edit(events: Events) -> Events:
        event = first(events, name, **identity)
        drop(name, **identity)(events)
        last = max(e["number"] for e in events if e["node_id"] == event["node_id"])
        event["number"], event["time"] = last + 1, 900_000
        events.insert(len(events) - 1, event)
        if event["node_id"] == HOME:
            events[-1]["number"], event["number"] = last + 1, last
        return events

    return edit


def change(name: str, **fields: Any) -> Callable[[Events], Events]:
    def edit(events: Events) -> Events:
        first(events, name).update(fields)
        return events

    return edit


def append(name: str, node: str, **fields: Any) -> Callable[[Events], Events]:
    def edit(events: Events) -> Events:
        last = max(e["number"] for e in events if e["node_id"] == node)
        events.append(
            {"event": name, "node_id": node, "number": last + 1, "time": 950_000, "run_id": 9, **fields}
        )
        return events

    return edit


def lose(name: str) -> Callable[[Events], Events]:
    """Said, but not in the file."""

    def edit(events: Events) -> Events:
        events.remove(first(events, name))
        return events

    return edit


NEVER_MISSING = (
    *event_checker.OF_NODE,
    *event_checker.OF_RUN,
    *event_checker.OF_STAGE,
    *event_checker.OF_EDGE_END,
    *event_checker.OF_STEP,
    "token_received",
    "run_completed",
    "run_torn_down",
)

BREACHES: dict[str, tuple[Callable[[Events], Events], str]] = {
    **{f"no {name}": (drop(name), name) for name in NEVER_MISSING},
    **{f"twice {name}": (repeat(name), name) for name in NEVER_MISSING if name in event_checker.IDENTITY},
    "the stage is ready after the barrier": (late("stage_ready", stage_index=1), "readiness_barrier_passed"),
    "weights are loaded after stage_ready": (late("weights_loaded", stage_index=0), "stage_ready"),
    "the prompt comes before the barrier": (late("readiness_barrier_passed"), "prompt_injected"),
    "a step without its object": (late("object_loaded", stage_index=0, sequence=1), "execute_step_started"),
    "two steps at once": (late("step_completed", stage_index=0, sequence=1), "execute_step_started"),
    "stage 1 is ahead of stage 0": (
        late("execute_step_started", stage_index=0, sequence=0),
        "execute_step_started",
    ),
    "the next sequence before the token": (late("token_received", sequence=0), "token_received"),
    "an event is lost": (lose("object_loaded"), "missing before"),
    "a second outcome": (repeat("run_completed"), "outcomes"),
    "two different outcomes": (
        append("run_faulted", HOME, reason="StreamFault", component="Driver"),
        "2 outcomes",
    ),
    "the teardown says another outcome": (change("run_torn_down", outcome="faulted"), "run_torn_down says"),
    "something after the teardown": (
        append("edge_ready", NODES[0], edge_id=70, ring_id=70),
        "the last event",
    ),
    "new work after the outcome": (late("token_received", sequence=2), "after run_completed"),
    "a ring without proof": (change("ring_released", proof={}), "proof"),
    "a proof that cannot be": (
        change("ring_released", proof={"pump": "NeverStarted", "ring": "Quiesced"}),
        "pump",
    ),
    "a ready ring that was never installed": (
        change("ring_released", proof={"pump": "Stopped", "ring": "NeverInstalled"}),
        "NeverInstalled",
    ),
    "reaped without a dead process": (
        change("ring_released", proof={"pump": "Stopped", "ring": "ProcessReaped"}),
        "its worker has not ended",
    ),
    "a release of a ring that was never leased": (
        append(
            "ring_released", NODES[0], ring_id=99, edge_id=70, proof={"pump": "Stopped", "ring": "Quiesced"}
        ),
        "never leased",
    ),
    "unproven": (
        change("run_torn_down", unproven=["edge 70, ring 70: its pump did not stop"]),
        "could not prove",
    ),
    "a name nobody knows": (change("pool_ready", event="pool_is_ready"), "unknown event"),
    "another run's events": (change("run_completed", run_id=10), "2 runs"),
    "the count of tokens is wrong": (change("run_completed", tokens=7), "7 tokens of 3"),
}


@pytest.mark.parametrize("outcome", event_checker.OUTCOMES)
def test_a_good_stream_passes(outcome: str) -> None:
    check(good(outcome=outcome))


@pytest.mark.parametrize("name", BREACHES)
def test_each_breach_is_found(name: str) -> None:
    edit, word = BREACHES[name]
    with pytest.raises(EventViolation, match=word):
        check(edit(copy.deepcopy(good())))


def test_a_fault_must_be_typed() -> None:
    for fields in ({"reason": "it broke"}, {"component": "somebody"}, {"reason": None}):
        with pytest.raises(EventViolation, match="run_faulted"):
            check(change("run_faulted", **fields)(good(outcome="run_faulted")))


def test_a_stopped_run_must_stop_every_provisioned_stage() -> None:
    for name in ("stop_run_sent", "stage_stopped"):
        with pytest.raises(EventViolation, match=name):
            check(drop(name, stage_index=1)(good(outcome="run_stopped")))


def test_nothing_is_asked_of_a_killed_node() -> None:
    events = drop("stage_stopped", stage_index=1)(good(outcome="run_faulted"))
    events = drop("ring_released", node_id=NODES[1])(events)
    with pytest.raises(EventViolation):
        check(copy.deepcopy(events))
    check(events, killed_nodes=[NODES[1]])


def test_every_prefix_of_a_good_stream_is_what_a_killed_orchestrator_leaves() -> None:
    events = good()
    for length in range(len(events)):
        check(events[:length], torn_down=False)
    for length in range(1, len(events)):
        with pytest.raises(EventViolation):
            check(events[:length])


def test_unproven_excuses_only_the_rings_it_names() -> None:
    events = change("run_torn_down", unproven=["edge 71, ring 71: its ring did not quiesce"])(
        drop("ring_released", ring_id=71, node_id=NODES[0])(good(outcome="run_faulted"))
    )
    check(copy.deepcopy(events), unproven=True)
    with pytest.raises(EventViolation, match="ring 70"):
        check(drop("ring_released", ring_id=70, node_id=NODES[0])(events), unproven=True)


def test_every_rule_speaks_of_known_events() -> None:
    names = {str(name) for name in event_checker.EventName}
    spoken = {name for rule in event_checker.ORDER for name in (rule.before, rule.after)}
    assert spoken | set(event_checker.IDENTITY) <= names
