"""What a run's event stream must look like (spec section 40), as data, and a judge of recorded streams.

Knows event names, identities and their partial order; knows no process and no command. `check` takes the
events in the order in which they were written and raises `EventViolation` with everything that is wrong.

Order is judged by `number` between events of one process and by `time` between processes: all processes of a
local run read the same clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swactor_core.events import EventName
from swactor_core.faults import Component, FaultReason

Event = dict[str, Any]

OUTCOMES = ("run_completed", "run_faulted", "run_stopped")

# Every event occurs at most once for each value of these identities (within one run).
IDENTITY: dict[str, tuple[str, ...]] = {
    "node_started": ("node_id",),
    "node_available": ("node_id",),
    "node_faulted": ("node_id",),
    "worker_started": ("node_id", "worker_generation"),
    "worker_ended": ("node_id", "worker_generation"),
    "run_planned": (),
    "stage_provision_started": ("stage_index",),
    "weights_download_started": ("stage_index",),
    "weights_downloaded": ("stage_index",),
    "weights_loaded": ("stage_index",),
    "stage_ready": ("stage_index",),
    "stage_faulted": ("stage_index",),
    "stage_stopped": ("stage_index",),
    "stop_run_sent": ("stage_index",),
    "edge_provision_started": ("node_id", "edge_id"),
    "edge_ready": ("node_id", "edge_id"),
    "ring_leased": ("node_id", "ring_id"),
    "ring_released": ("node_id", "ring_id"),
    "readiness_barrier_passed": (),
    "prompt_injected": (),
    "object_loaded": ("stage_index", "sequence"),
    "execute_step_started": ("stage_index", "sequence"),
    "object_produced": ("stage_index", "sequence"),
    "step_completed": ("stage_index", "sequence"),
    "token_received": ("sequence",),
    "run_completed": (),
    "run_faulted": (),
    "run_stopped": (),
    "run_torn_down": (),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Each `after` was preceded by a `before` that agrees in `same`. With `every`, by one `before` of every
    stage. `shift` is added to the identity named by its key before the two are compared. `unordered`: the two
    reach the orchestrator on different ways, so that of a run that it did not finish one may be missing."""

    before: str
    after: str
    same: tuple[str, ...] = ()
    every: bool = False
    shift: tuple[str, int] | None = None
    only_stage: str = ""
    unordered: bool = False


ORDER: tuple[Rule, ...] = (
    # a node's boot, before anything of a run happens on it
    Rule("node_started", "worker_started", ("node_id",)),
    Rule("worker_started", "node_available", ("node_id",)),
    Rule("node_available", "stage_provision_started", ("node_id",)),
    Rule("worker_started", "worker_ended", ("node_id", "worker_generation")),
    # planning
    Rule("pool_ready", "run_planned"),
    Rule("run_planned", "stage_provision_started"),
    Rule("run_planned", "edge_provision_started"),
    # a stage's preparation
    Rule("stage_provision_started", "weights_download_started", ("stage_index",)),
    Rule("weights_download_started", "weights_downloaded", ("stage_index",)),
    Rule("weights_downloaded", "weights_loaded", ("stage_index",)),
    Rule("weights_loaded", "stage_ready", ("stage_index",)),
    # an edge end
    Rule("edge_provision_started", "ring_leased", ("node_id", "edge_id")),
    Rule("ring_leased", "edge_ready", ("node_id", "edge_id", "ring_id")),
    Rule("ring_leased", "ring_released", ("node_id", "edge_id", "ring_id")),
    # the barrier, and no prompt before it
    Rule("stage_ready", "readiness_barrier_passed", every=True),
    Rule("readiness_barrier_passed", "prompt_injected"),
    Rule("prompt_injected", "object_loaded"),
    # a step of a stage
    Rule("stage_ready", "execute_step_started", ("stage_index",)),
    Rule("object_loaded", "execute_step_started", ("stage_index", "sequence")),
    Rule("execute_step_started", "object_produced", ("stage_index", "sequence")),
    Rule("execute_step_started", "step_completed", ("stage_index", "sequence")),
    Rule("step_completed", "execute_step_started", ("stage_index",), shift=("sequence", 1)),
    # the token's path: stage by stage, home, and only then the next sequence
    # (an object's bytes may be loaded downstream before their producer's node has handled ObjectProduced)
    Rule("execute_step_started", "object_loaded", ("sequence",), shift=("stage_index", 1), unordered=True),
    Rule("execute_step_started", "token_received", ("sequence",), only_stage="last", unordered=True),
    Rule("token_received", "object_loaded", (), shift=("sequence", 1), only_stage="first"),
    Rule("token_received", "token_received", (), shift=("sequence", 1)),
    Rule("token_received", "run_completed"),
    # the end
    Rule("stop_run_sent", "stage_stopped", ("stage_index",)),
)

# Of the orchestrator, after the one outcome: teardown, and nothing that is new run work.
NEW_WORK = ("run_planned", "readiness_barrier_passed", "prompt_injected", "token_received")

OF_NODE = ("node_started", "worker_started", "node_available")
OF_RUN = ("pool_ready", "run_planned", "readiness_barrier_passed", "prompt_injected")
OF_STAGE = (
    "stage_provision_started",
    "weights_download_started",
    "weights_downloaded",
    "weights_loaded",
    "stage_ready",
    "stop_run_sent",
    "stage_stopped",
)
OF_EDGE_END = ("edge_provision_started", "ring_leased", "edge_ready", "ring_released")
OF_STEP = ("object_loaded", "execute_step_started", "object_produced", "step_completed")

PUMP_PROOFS = ("Stopped", "NeverStarted")
RING_PROOFS = ("Quiesced", "ProcessReaped", "NeverInstalled")


class EventViolation(AssertionError):
    """The stream breaks its contract; the message lists every breach."""


def check(
    events: Sequence[Event],
    *,
    killed_nodes: Collection[str] = (),
    torn_down: bool = True,
    unproven: bool = False,
    veterans: bool = False,
) -> None:
    """Judges one run's stream.

    `killed_nodes` are ids of nodes that were ended from outside: nothing is asked of their teardown.
    `torn_down` False: the orchestrator itself was ended, the stream may stop anywhere. `unproven` True: the
    teardown may name what it could not prove, and only those rings may stay leased. `veterans` True: nodes
    may have served earlier runs, whose events are not in this stream.
    """
    stream = _Stream(events, frozenset(killed_nodes), torn_down, unproven, veterans)
    breaches = list(stream.breaches())
    if breaches:
        raise EventViolation("\n".join(breaches))


class _Stream:
    def __init__(
        self,
        events: Sequence[Event],
        killed: frozenset[str],
        torn_down: bool,
        unproven: bool,
        veterans: bool,
    ) -> None:
        self.events = events
        self.killed = killed
        self.torn_down = torn_down
        self.unproven = unproven
        self.veterans = veterans
        self.by_name: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            self.by_name[event["event"]].append(event)
        plans = self.by_name["run_planned"]
        self.stages: dict[int, str] = {}
        self.home = ""
        if plans:
            self.home = plans[0]["node_id"]
            self.stages = {stage["stage_index"]: stage["node_id"] for stage in plans[0]["stages"]}

    def breaches(self) -> Iterator[str]:
        yield from self._known()
        yield from self._numbered()
        yield from self._once()
        yield from self._ordered()
        yield from self._faults_typed()
        yield from self._rings()
        if self.torn_down:
            yield from self._ended()
            yield from self._complete()

    def _known(self) -> Iterator[str]:
        names = {str(name) for name in EventName}
        for event in self.events:
            if event["event"] not in names:
                yield f"unknown event {event['event']!r}"
            for key in ("time", "number", "node_id"):
                if key not in event:
                    yield f"{event['event']} has no {key}"
        runs = {event["run_id"] for event in self.events if "run_id" in event}
        if len(runs) > 1:
            yield f"events of {len(runs)} runs in one stream"

    def _numbered(self) -> Iterator[str]:
        """No event of a process is lost, repeated or out of its order, from the first of the run on."""
        latest: dict[str, int] = {}
        begun: set[str] = set()
        boot = ("node_started", "worker_started", "worker_ended", "node_available", "node_faulted")
        for event in self.events:
            node, number = event["node_id"], event["number"]
            before = latest.get(node)
            latest[node] = number
            # A node of a cluster has had runs before: of those, it tells its own life only.
            first = node not in begun and (self.veterans or event["event"] in boot)
            begun |= {node} if event["event"] not in boot else set()
            if before is None:
                continue
            if number <= before:
                yield f"{_of(event)} has number {number} after {before}"
            elif number != before + 1 and not first:
                yield f"{number - before - 1} events of node {node} are missing before {_of(event)}"

    def _once(self) -> Iterator[str]:
        for name, identity in IDENTITY.items():
            counts = Counter(tuple(e.get(key) for key in identity) for e in self.by_name[name])
            for value, count in counts.items():
                if count > 1:
                    yield f"{name} occurs {count} times for {dict(zip(identity, value, strict=True))}"
                if None in value:
                    yield f"{name} lacks one of its identities {identity}"

    def _ordered(self) -> Iterator[str]:
        for rule in ORDER:
            yield from self._judge(rule)

    def _judge(self, rule: Rule) -> Iterator[str]:
        last = max(self.stages, default=0)
        for after in self.by_name[rule.after]:
            if self._exempt(rule, after):
                continue
            if rule.every:
                for stage in self.stages:
                    found = [b for b in self.by_name[rule.before] if b.get("stage_index") == stage]
                    if not any(_precedes(before, after) for before in found):
                        yield f"{_of(after)} without {rule.before} of stage {stage} before it"
                continue
            wanted = {key: after.get(key) for key in rule.same}
            if rule.shift is not None:
                key, distance = rule.shift
                wanted[key] = after[key] - distance
            if rule.only_stage == "last":
                wanted["stage_index"] = last
            found = [b for b in self.by_name[rule.before] if all(b.get(k) == v for k, v in wanted.items())]
            if not any(_precedes(before, after) for before in found):
                yield f"{_of(after)} without {rule.before} {wanted or ''} before it"

    def _exempt(self, rule: Rule, after: Event) -> bool:
        """Firsts have no predecessor; and boot events of a node that another orchestrator watched are its."""
        if rule.unordered and (self.killed or not self.torn_down):
            return True
        if rule.only_stage == "first" and after.get("stage_index") != 0:
            return True
        if rule.shift is not None and after[rule.shift[0]] == 0:
            return True
        # After a crash the worker's end may be all that is left of a generation that began unwatched.
        if rule.before == "node_started":
            return not any(e["node_id"] == after["node_id"] for e in self.by_name["node_started"])
        return rule.after == "worker_ended" and not self.by_name["worker_started"]

    def _faults_typed(self) -> Iterator[str]:
        reasons, components = {str(r) for r in FaultReason}, {str(c) for c in Component}
        for name in ("run_faulted", "stage_faulted", "node_faulted"):
            for event in self.by_name[name]:
                if event.get("reason") not in reasons:
                    yield f"{name} has no stable reason: {event.get('reason')!r}"
                if event.get("component") not in components:
                    yield f"{name} does not say which component detected it: {event.get('component')!r}"

    def _rings(self) -> Iterator[str]:
        """Every leased ring is released once, with a proof that can be true on that node."""
        released = {(e["node_id"], e["ring_id"]): e for e in self.by_name["ring_released"]}
        dead_workers = {e["node_id"] for e in self.by_name["worker_ended"]}
        ready = {(e["node_id"], e["ring_id"]) for e in self.by_name["edge_ready"]}
        excused = self._excused_rings()
        for leased in self.by_name["ring_leased"]:
            ring = (leased["node_id"], leased["ring_id"])
            given_back = released.pop(ring, None)
            if given_back is None:
                if (
                    self.torn_down
                    and leased["node_id"] not in self.killed
                    and leased["edge_id"] not in excused
                ):
                    yield f"ring {ring[1]} of node {ring[0]} was leased and never released"
                continue
            proof = given_back.get("proof", {})
            if proof.get("pump") not in PUMP_PROOFS or proof.get("ring") not in RING_PROOFS:
                yield f"ring {ring[1]} of node {ring[0]} was released with the proof {proof}"
                continue
            if ring in ready and proof["pump"] != "Stopped":
                yield f"ring {ring[1]} of node {ring[0]} had a pump, its proof says {proof['pump']}"
            if ring in ready and proof["ring"] == "NeverInstalled":
                yield f"ring {ring[1]} of node {ring[0]} was ready, its proof says NeverInstalled"
            if proof["ring"] == "ProcessReaped" and ring[0] not in dead_workers:
                yield f"ring {ring[1]} of node {ring[0]}: ProcessReaped, but its worker has not ended"
        for node, ring_id in released:
            yield f"ring {ring_id} of node {node} was released and never leased"

    def _excused_rings(self) -> set[int]:
        """Edge ids that the teardown says it could not prove."""
        if not self.unproven:
            return set()
        said = " ".join(text for e in self.by_name["run_torn_down"] for text in e["unproven"])
        return {e["edge_id"] for e in self.by_name["ring_leased"] if str(e["edge_id"]) in said}

    def _ended(self) -> Iterator[str]:
        outcomes = [e for e in self.events if e["event"] in OUTCOMES]
        if len(outcomes) != 1:
            yield f"{len(outcomes)} outcomes, not one of {OUTCOMES}: {[e['event'] for e in outcomes]}"
        if not self.events or self.events[-1]["event"] != "run_torn_down":
            yield f"the last event is {self.events[-1]['event'] if self.events else None}, not run_torn_down"
        if not outcomes:
            return
        home = outcomes[0]["node_id"]
        position = self.events.index(outcomes[0])
        for event in self.events[position + 1 :]:
            if event["node_id"] == home and event["event"] in NEW_WORK:
                yield f"{_of(event)} after {outcomes[0]['event']}"
        for torn in self.by_name["run_torn_down"]:
            said = torn.get("outcome")
            if said != {"run_completed": "completed", "run_faulted": "faulted"}.get(
                outcomes[0]["event"], "operator-stopped"
            ):
                yield f"{outcomes[0]['event']}, but run_torn_down says {said!r}"
            allowed = self.unproven or self.killed
            if torn.get("unproven") and not allowed:
                yield f"teardown could not prove {torn['unproven']}"

    def _complete(self) -> Iterator[str]:
        """What must not be missing, by how the run ended."""
        provisioned = {e["stage_index"] for e in self.by_name["stage_provision_started"]}
        sent = {e["stage_index"] for e in self.by_name["stop_run_sent"]}
        stopped = {e["stage_index"] for e in self.by_name["stage_stopped"]}
        for stage in sorted(provisioned - stopped):
            if self.stages.get(stage) not in self.killed:
                yield f"stage {stage} was provisioned and has no stage_stopped"
        for stage in sorted(provisioned - sent):
            if self.stages.get(stage) not in self.killed:
                yield f"stage {stage} was provisioned and has no stop_run_sent"
        if not self.by_name["run_completed"]:
            return
        yield from self._missing(OF_RUN, {()}, ())
        yield from self._missing(OF_NODE, {(node,) for node in self.stages.values()}, ("node_id",))
        # A node may have been ended after the last token: nothing is asked of its teardown.
        stages = {(stage,) for stage, node in self.stages.items() if node not in self.killed}
        edge_ends = {(node, edge) for node, edge in self._edge_ends() if node not in self.killed}
        yield from self._missing(OF_STAGE, stages, ("stage_index",))
        yield from self._missing(OF_EDGE_END, edge_ends, ("node_id", "edge_id"))
        tokens = {e["sequence"] for e in self.by_name["token_received"]}
        if tokens != set(range(len(tokens))):
            yield f"token_received has the sequences {sorted(tokens)}"
        said = self.by_name["run_completed"][0].get("tokens")
        if said != len(tokens):
            yield f"run_completed says {said} tokens of {len(tokens)}"
        if any(self.by_name[name] for name in OF_STEP):
            steps = {(stage, sequence) for stage in self.stages for sequence in tokens}
            yield from self._missing(OF_STEP, steps, ("stage_index", "sequence"))

    def _edge_ends(self) -> set[tuple[object, ...]]:
        """Edge i runs from the end before stage i to stage i; the last one home."""
        if not self.stages:
            return set()
        edges = self.by_name["run_planned"][0]["edges"]
        places = [self.home, *(self.stages[stage] for stage in sorted(self.stages)), self.home]
        return {(places[i + side], edge) for i, edge in enumerate(edges) for side in (0, 1)}

    def _missing(
        self, names: Iterable[str], identities: set[tuple[object, ...]], keys: tuple[str, ...]
    ) -> Iterator[str]:
        for name in names:
            have = {tuple(event.get(key) for key in keys) for event in self.by_name[name]}
            for identity in sorted(identities - have, key=str):
                yield f"{name} is missing {dict(zip(keys, identity, strict=True)) or ''}".rstrip()


def _precedes(before: Event, after: Event) -> bool:
    if before is after:
        return False
    if before["node_id"] == after["node_id"]:
        return bool(before["number"] < after["number"])
    return bool(before["time"] <= after["time"])


def _of(event: Event) -> str:
    keys = ("stage_index", "edge_id", "ring_id", "sequence", "worker_generation")
    identity = ", ".join(f"{key} {event[key]}" for key in keys if key in event)
    return f"{event['event']}({identity})"
