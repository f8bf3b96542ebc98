"""Reasons that no run records, each seen where it belongs: at a teardown, a refusal, an order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any
from unittest import mock

from fault_sources import (
    alter_commands,
    end_worker,
    worker_says,
)
from mock_run import MockRun
from reason_means import (
    FIRST_TOKEN,
    LAST,
    PLANNED,
    READY,
    C,
    drains_worker,
)
from swactor_core.faults import (
    FaultReason,
    RingFaultReason,
    StreamFaultReason,
    UninstallReason,
    WorkerStoppedReason,
)
from swactor_core.ids import EdgeId
from swactor_core.machines.run import RunOutcome
from swactor_core.machines.worker_process import FromWorker
from swactor_core.messages import (
    Address,
    InstallRing,
    RingFault,
    WorkerStopped,
)
from swactor_core.plugins import Plugins
from swactor_core.worker.rings import _RingEnd
from swactor_testing.memory.hub import HUB


def seen_teardown(plugins: Plugins) -> set[str]:
    """The outcome stands; the event of the teardown carries its own failure."""
    run = MockRun(
        plugins,
        nodes=2,
        max_tokens=100,
        at_event=FIRST_TOKEN,
        act=lambda run: (HUB.hold(sender=run.ids[LAST]), run.session.stop_run()),
    )
    assert run.play().outcome is RunOutcome.OPERATOR_STOPPED
    torn = run.events[-1]
    assert torn["component"] == str(C.RUN)
    assert "stage 1 did not say StageStopped" in torn["detail"]
    assert torn["detail"].split("; ")[0] in run.result.unproven
    return {torn["reason"]}


def seen_refusals(plugins: Plugins) -> set[str]:
    """A stranger's streams are refused with their reason, and the run never notices."""
    seen: set[str] = set()

    def act(run: MockRun) -> None:
        transport = run.pool[2].transport
        assert transport is not None
        token_in, first, _, _ = next(e["edges"] for e in run.events if e["event"] == PLANNED)

        async def disturb() -> None:
            # stage 1 waits for the first stream of its edge, stage 0 reads its own already
            for target, edge in ((run.ids[1], first), (run.ids[0], token_in), (run.ids[1], 12345)):
                stream = await transport.open_edge(target, EdgeId(edge), deadline=10.0)
                await asyncio.sleep(0)
                del stream

        run.session.orchestrator.system.start_task(disturb(), owner=Address(C.DRIVER))

    for moment in ("edge_ready", READY, FIRST_TOKEN):
        run = MockRun(plugins, max_tokens=60, at_event=moment, pool_deadline=60.0, act=act)
        HUB.delay(1.0)  # time enough for a stream that nobody asks for to be given up
        assert run.play().outcome is RunOutcome.COMPLETED
        assert list(run.result.token_ids) == run.reference
        seen |= {event["reason"] for event in run.events if event["event"] == "edge_refused"}
        HUB.clear()
    return seen


def seen_uninstalls(plugins: Plugins) -> set[str]:
    """Every ring end hears why it goes: its edge stopped, its ring is broken, or its worker ends."""
    seen: set[str] = set()
    uninstall = _RingEnd.uninstall

    def record(end: _RingEnd, command: Any) -> None:
        seen.add(str(command.reason))
        uninstall(end, command)

    ordinary = MockRun(plugins, nodes=2, max_tokens=2)
    drained = MockRun(plugins, nodes=2, max_tokens=9, at_event=READY, act=drains_worker)
    with mock.patch.object(_RingEnd, "uninstall", record):
        for run in (ordinary, drained):
            run.play()
            run.check()
    broken = MockRun(plugins, nodes=2, at_event=PLANNED)

    def act(run: MockRun) -> None:
        def note(command: Any) -> Any:
            if isinstance(command, InstallRing):
                fault = RingFault(
                    command.ring_id, command.edge_id, command.port_id, RingFaultReason.RING_STATE_INVALID, "x"
                )
                worker_says(run, LAST, fault)
            seen.add(str(getattr(command, "reason", "")))
            return command

        alter_commands(run, LAST, note)

    broken.act = act
    broken.play()
    broken.check_fault("RingFault")
    return seen


def seen_stops(plugins: Plugins) -> set[str]:
    """How a worker says that it stopped. Fatal is no word of this system's worker, whose last is WorkerFatal:
    a node that hears it waits for the process's end all the same."""
    seen: set[str] = set()
    tell = FromWorker.__init__

    def record(self: FromWorker, generation: Any, event: object) -> None:
        if isinstance(event, WorkerStopped):
            seen.add(str(event.reason))
        tell(self, generation, event)

    def fatal(run: MockRun) -> None:
        worker_says(run, LAST, WorkerStopped(WorkerStoppedReason.FATAL))
        end_worker(run, LAST)

    with mock.patch.object(FromWorker, "__init__", record):
        drained = MockRun(plugins, nodes=2, max_tokens=9, at_event=READY, act=drains_worker)
        drained.play()
        drained.check()
        ended = MockRun(plugins, nodes=2, max_tokens=9, at_event=READY, act=fatal)
        ended.play()
        ended.check_fault("WorkerCrashed")
    return seen


SEEN: dict[Callable[[Plugins], set[str]], tuple[StrEnum, ...]] = {
    seen_teardown: (FaultReason.TEARDOWN_TIMEOUT,),
    seen_refusals: (
        StreamFaultReason.WRONG_PEER,
        StreamFaultReason.DUPLICATE_STREAM,
        StreamFaultReason.UNKNOWN_EDGE,
    ),
    seen_uninstalls: tuple(UninstallReason),
    seen_stops: tuple(WorkerStoppedReason),
}
