"""What only a session can set, with real processes: tiny rings, held workers, a stop at an exact moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import event_checker
import pytest
from local_command import until
from swactor_core.config import PluginChoice
from swactor_core.faults import FaultReason
from swactor_core.hosting import memory_of_workers
from swactor_core.ids import NodeId, RunId
from swactor_core.machines.run import RunOutcome, RunState
from swactor_core.orchestrator.orchestrator import RunListener, RunRequest
from swactor_core.orchestrator.session import LocalSession
from swactor_core.plan import GgufSource, TokenOutputPolicy
from swactor_core.planner import EdgeIdAllocator, NodeCapacity, plan_run, stage_memory
from swactor_core.plugins import Plugins, load_plugins
from swactor_core.spi.provider import Kind
from swactor_testing.echo import reference_tokens

SMALL_RING = 1024


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def request_for(plugins: Plugins, path: str, prompt: tuple[int, ...], **choices: Any) -> RunRequest:
    model = plugins.select(Kind.LOADER, "gguf").factory().open(path)
    try:
        return RunRequest(
            source=GgufSource(str(Path(path)), model.digest()),
            facts=model.facts,
            prompt=prompt,
            token_count=model.facts.vocab_size,
            **choices,
        )
    finally:
        model.close()


@pytest.mark.parametrize("ring", [64, SMALL_RING])
@pytest.mark.parametrize("policy", list(TokenOutputPolicy))
async def test_objects_larger_than_the_ring_stream_through(
    plugins: Plugins, tiny_model: Any, ring: int, policy: TokenOutputPolicy
) -> None:
    """A prompt of 300 tokens is 1 200 bytes of ids and 76 800 of activations, a row of logits 640 bytes."""
    prompt = tuple((7 * index) % 160 for index in range(300))
    events: list[dict[str, Any]] = []
    choice = PluginChoice(worker="echo")
    request = request_for(
        plugins, tiny_model("llama-gqa"), prompt,
        max_tokens=8, ring_capacity=ring, token_output_policy=policy,
    )  # fmt: skip
    session = LocalSession(plugins, choice, nodes=3, objects=True, sinks=(events.append,))
    async with session:
        result = await session.run(request)
        pids = session.pool.pids
    assert result.fault is None
    assert result.outcome is RunOutcome.COMPLETED
    assert result.unproven == ()
    assert list(result.token_ids) == reference_tokens(prompt, 8, num_layers=4, vocab_size=160)
    event_checker.check(events)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), within=5, what="nodes are left")


async def test_a_run_is_stopped_while_a_large_object_is_stuck_in_small_rings(
    plugins: Plugins, tiny_model: Any
) -> None:
    """The workers hold every step, so that the prompt's record fills all rings on its way and stays there."""
    prompt = tuple((3 * index) % 160 for index in range(500))
    events: list[dict[str, Any]] = []
    request = request_for(plugins, tiny_model("llama-gqa"), prompt, max_tokens=8, ring_capacity=64)
    computing = asyncio.Event()

    def sink(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "execute_step_started":
            computing.set()

    choice = PluginChoice(worker="echo")
    session = LocalSession(plugins, choice, nodes=2, worker={"hold": "execute"}, objects=True, sinks=(sink,))
    async with session:
        running = asyncio.ensure_future(session.run(request))
        async with asyncio.timeout(30):
            await computing.wait()
        session.stop_run()
        async with asyncio.timeout(10):
            result = await running
    assert result.outcome is RunOutcome.OPERATOR_STOPPED
    assert result.unproven == ()
    event_checker.check(events)


async def test_an_asynchronous_device_changes_no_token(plugins: Plugins, tiny_model: Any) -> None:
    """Copies complete late: a ring byte released, or an allocation freed, too early would show in the ids."""
    prompt = tuple((11 * index) % 160 for index in range(200))
    request = request_for(plugins, tiny_model("llama-gqa"), prompt, max_tokens=8, ring_capacity=SMALL_RING)
    async with LocalSession(
        plugins, PluginChoice(worker="echo"), nodes=2, worker={"copy_polls": 2}
    ) as session:
        result = await session.run(request)
    assert list(result.token_ids) == reference_tokens(prompt, 8, num_layers=4, vocab_size=160)


async def test_an_arena_that_cannot_hold_the_rings_is_a_typed_fault(
    plugins: Plugins, tiny_model: Any
) -> None:
    events: list[dict[str, Any]] = []
    request = request_for(plugins, tiny_model("llama-gqa"), (1, 2), max_tokens=4, ring_capacity=4 << 20)
    session = LocalSession(
        plugins, PluginChoice(worker="echo"), nodes=2, arena_ceiling=1 << 20, sinks=(events.append,)
    )
    async with session:
        result = await session.run(request)
    assert result.outcome is RunOutcome.FAULTED
    assert result.fault is not None
    assert str(result.fault.reason) == "RingRequestTooLarge"
    assert str(result.fault.component) == "ArenaManager"
    event_checker.check(events)


class _StopsIn(RunListener):
    """Stops the run in the very step in which it enters `state`."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.stop: Callable[[], None] = lambda: None

    def state(self, state: RunState) -> None:
        if state is self._state:
            self.stop()


@pytest.mark.parametrize("state", [RunState.PROVISIONING, RunState.WAITING_READY, RunState.RUNNING])
async def test_a_stop_right_behind_a_step_of_the_run_finds_everything_to_stop(
    plugins: Plugins, tiny_model: Any, state: RunState
) -> None:
    """StopRun may reach a node in the same breath as its ProvisionStage."""
    events: list[dict[str, Any]] = []
    request = request_for(plugins, tiny_model("llama-gqa"), (1, 2), max_tokens=8)
    listener = _StopsIn(state)
    session = LocalSession(
        plugins, PluginChoice(worker="echo"), nodes=2, objects=True, sinks=(events.append,)
    )
    async with session:
        listener.stop = session.stop_run
        result = await session.run(request, listener=listener)
    assert result.outcome is RunOutcome.OPERATOR_STOPPED
    assert result.unproven == ()
    event_checker.check(events)


async def test_a_node_s_own_worker_options_count_in_its_memory(plugins: Plugins) -> None:
    """Graphs copy Q2_K as f32. Nobody but the nodes says which options their workers have; with the memory
    that they declare, nothing is loaded, and the fault names what is needed and what is there."""
    path = str(Path(__file__).parent.parent / "data" / "quants" / "Q2_K.gguf")
    choice, prompt = PluginChoice(), (1, 2, 3)
    request = request_for(plugins, path, prompt, max_tokens=2)
    model = plugins.select(Kind.LOADER, "gguf").factory().open(path)
    manifest = model.manifest(0, model.facts.num_layers)
    model.close()
    say = memory_of_workers(plugins, choice, manifest, positions=5, prefill_chunk=32)
    needs = {}
    for kernels in ("native", "graph"):
        worker = say({"worker": "tinygrad", "settings": {"kernels": kernels}})
        plan = plan_run(
            [NodeCapacity(NodeId(1), None, worker)], request.facts,
            source=request.source, choices=request.choices(),
            run_id=RunId(1), orchestrator=NodeId(0), edge_ids=EdgeIdAllocator(),
        )  # fmt: skip
        (memory,) = stage_memory(plan, request.facts, prefill_chunk=32, workers=[worker])
        needs[kernels] = memory.total
    assert needs["graph"] > needs["native"] + (4 << 20)
    request = replace(request, worker_memory=say)
    for kernels, memory_bytes in (("graph", needs["graph"] - 1), ("native", needs["native"])):
        events: list[dict[str, Any]] = []
        session = LocalSession(
            plugins, choice,
            nodes=1, worker={"kernels": kernels}, memory_bytes=memory_bytes, sinks=(events.append,),
        )  # fmt: skip
        async with session:
            result = await session.run(request)
        if kernels == "native":
            assert result.outcome is RunOutcome.COMPLETED
            assert any(event["event"].startswith("stage_") for event in events)
            continue
        assert result.fault is not None
        assert result.fault.reason is FaultReason.PLAN_INVALID
        assert f"needs {needs['graph']} bytes" in result.fault.detail
        assert "copies of weights" in result.fault.detail
        assert f"has {memory_bytes}" in result.fault.detail
        assert not any(event["event"].startswith("stage_") for event in events), "a stage was provisioned"
