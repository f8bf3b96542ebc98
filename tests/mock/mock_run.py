"""One run on mocks, its events, and what must hold of every run's end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import event_checker
from swactor_core.config import PluginChoice
from swactor_core.ids import NodeId
from swactor_core.machines.run import RunBounds, RunOutcome, RunState
from swactor_core.node.node import Node
from swactor_core.orchestrator.inline_pool import InProcessPool
from swactor_core.orchestrator.orchestrator import PoolBounds, RunListener, RunRequest, RunResult
from swactor_core.orchestrator.session import LocalSession
from swactor_core.plan import GgufSource
from swactor_core.plugins import Plugins
from swactor_core.spi.provider import Kind
from swactor_testing import virtual_time
from swactor_testing.echo import reference_tokens
from swactor_testing.static import CLUSTERS, StaticCluster

MOCKS = PluginChoice(transport="memory", membership="static", worker="echo", loader="synthetic", arena="heap")
PROMPT = "hello"
LONGEST = 20.0
PATIENCE = 1500.0
"""Virtual seconds of a whole session, at most: a run may take 900 s to its barrier."""
TEARDOWN = 15.5
"""Virtual seconds from an outcome to the end of its teardown, at most (`RunBounds.teardown`)."""


class Script(RunListener):
    """Calls `act` once: when the run enters `at`, or has the token of that sequence."""

    def __init__(self, at: RunState | int | None, act: Callable[[], None]) -> None:
        self._at = at
        self._act = act
        self.done = False

    def state(self, state: RunState) -> None:
        self._perhaps(state)

    def token(self, sequence: int, token_id: int) -> None:
        self._perhaps(sequence)

    def _perhaps(self, at: RunState | int) -> None:
        if at == self._at and type(at) is type(self._at) and not self.done:
            self.done = True
            self._act()


@dataclass
class MockRun:
    """Options of a run, and after `go` what came of it."""

    plugins: Plugins
    nodes: int = 3
    max_tokens: int = 12
    choice: PluginChoice = MOCKS
    model: str = "demo"
    digest: str | None = None
    prompt: str = PROMPT
    bounds: RunBounds = field(default_factory=RunBounds)
    ring_capacity: int | None = None
    pool_deadline: float = 10.0
    at: RunState | int | None = None
    act: Callable[[MockRun], Any] = lambda run: None
    watch: Callable[[dict[str, Any]], None] = lambda event: None
    """Hears of every event, before `act`."""
    at_event: int | str | None = None
    """Calls `act` right after the event of this number, or the first of this name, was seen; before the run
    itself for -1."""
    seed: int | None = None
    """Of keys and ids; by chance for None."""
    prefill_chunk: int = 32
    session_options: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    """The loop's time of each event."""

    _acted: bool = field(default=False, init=False)
    session: LocalSession = field(init=False)
    result: RunResult = field(init=False)
    reference: list[int] = field(init=False)

    async def go(self) -> RunResult:
        """The whole run, session up and down. Whatever its end, it ends in order: one outcome, every lease
        given back, every actor stopped, nothing unproven."""
        with seeded(self.seed):
            request = self._request()
            self.session = LocalSession(
                self.plugins,
                self.choice,
                nodes=self.nodes,
                objects=True,
                sinks=(self._seen,),
                **self.session_options,
            )
            self.session._pool = PoolBounds(convergence_window=0.05, deadline=self.pool_deadline)
            script = Script(self.at, lambda: self.act(self))
            virtual = isinstance(asyncio.get_running_loop(), virtual_time.VirtualTimeLoop)
            async with asyncio.timeout(PATIENCE if virtual else LONGEST):
                async with self.session:
                    if self.at_event == -1:
                        self.act(self)
                    self.result = await self.session.run(request, listener=script)
        assert script.done or self.at is None, f"the run never came to {self.at}"
        return self.result

    def play(self) -> RunResult:
        """`go` in virtual time, of a test that is no coroutine."""
        return virtual_time.run(self.go(), bound=PATIENCE)

    def _seen(self, event: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.watch(event)
        self.events.append(event)
        self.moments.append(loop.time())
        now = self.at_event in (len(self.events) - 1, event["event"])
        if now and not self._acted:
            self._acted = True
            loop.call_soon(self.act, self)

    def _request(self) -> RunRequest:
        model = self.plugins.select(Kind.LOADER, self.choice.loader).factory().open(self.model)
        tokenizer = model.tokenizer()
        prompt = tuple(tokenizer.prompt_ids(self.prompt))
        facts = model.facts
        tokens = reference_tokens(
            prompt, self.max_tokens, num_layers=facts.num_layers, vocab_size=facts.vocab_size
        )
        ends = [i for i, token in enumerate(tokens) if token in tokenizer.end_of_generation]
        self.reference = tokens[: ends[0] + 1] if ends else tokens
        return RunRequest(
            source=GgufSource(self.model, model.digest() if self.digest is None else self.digest),
            facts=facts,
            prompt=prompt,
            max_tokens=self.max_tokens,
            end_of_generation=tuple(tokenizer.end_of_generation),
            token_count=facts.vocab_size,
            bounds=self.bounds,
            ring_capacity=self.ring_capacity,
            prefill_chunk=self.prefill_chunk,
        )

    # parts

    @property
    def pool(self) -> list[Node]:
        assert isinstance(self.session.pool, InProcessPool)
        return self.session.pool.nodes

    @property
    def ids(self) -> list[NodeId]:
        return [node.node_id for node in self.pool]

    @property
    def home(self) -> NodeId:
        return self.session.orchestrator.node_id

    @property
    def cluster(self) -> StaticCluster:
        [cluster] = CLUSTERS.values()
        return cluster

    # what must hold

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]

    def check(self, *, killed: tuple[NodeId, ...] = (), unproven: bool = False) -> None:
        """The event stream keeps its contract, nothing is leased and no actor lives."""
        killed_names = [f"{node_id:016x}" for node_id in killed]
        event_checker.check(self.events, killed_nodes=killed_names, unproven=unproven)
        for part in (self.session.orchestrator, *self.pool):
            assert part.data_plane.leased == 0, f"node {part.node_id:016x} has leases"
            assert not part.system._mailboxes
            assert not part.system._tasks
            assert part.data_plane.arena.arena is None

    def check_bounds(self) -> None:
        """The teardown took no longer than it may."""
        names = self.names()
        begun = next(i for i, name in enumerate(names) if name in event_checker.OUTCOMES)
        took = self.moments[names.index("run_torn_down")] - self.moments[begun]
        assert took <= TEARDOWN, f"teardown took {took:g} s"

    def check_fault(self, *reasons: str, killed: tuple[NodeId, ...] = ()) -> None:
        """One outcome, faulted, for one of the reasons, in result and events alike."""
        assert self.result.outcome is RunOutcome.FAULTED
        assert self.result.fault is not None
        assert str(self.result.fault.reason) in reasons, self.result.fault.line()
        outcomes = [e for e in self.events if e["event"] in event_checker.OUTCOMES]
        assert [e["event"] for e in outcomes] == ["run_faulted"]
        assert outcomes[0]["reason"] == str(self.result.fault.reason)
        assert list(self.result.token_ids) == self.reference[: len(self.result.token_ids)]
        if not killed:
            assert self.result.unproven == ()
        self.check(killed=killed)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Keys and ids of a session by chance of this seed, so that a run can be had again as it was."""
    if seed is None:
        yield
        return
    chance = random.Random(seed)
    with mock.patch.multiple(
        secrets,
        token_bytes=lambda count=32: chance.randbytes(count),
        token_hex=lambda count=32: chance.randbytes(count).hex(),
        randbits=chance.getrandbits,
    ):
        yield
