"""The end of a process in its pool: a membership that does not end in order costs the transport nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swactor_core.messages import ArenaConstructed, ArenaConstructionFailed
from swactor_core.node import peers
from swactor_core.node.node import Node
from swactor_core.node.peers import take_leave
from swactor_core.orchestrator.orchestrator import Orchestrator
from swactor_testing import virtual_time


class Part:
    """Membership or transport; `fails` is what its end does."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.ended = False

    async def end(self) -> None:
        if self.fails == "hangs":
            await asyncio.Event().wait()
        if self.fails:
            raise OSError(self.fails)
        self.ended = True

    leave = close = end


def part(fails: str = "") -> Any:
    return Part(fails)


async def test_both_end_and_neither_need_be_there() -> None:
    membership, transport = part(), part()
    await take_leave(membership, transport)
    assert membership.ended
    assert transport.ended
    await take_leave(None, None)


def test_a_membership_that_hangs_is_given_up_and_the_transport_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ends() -> float:
        transport = part()
        await take_leave(part("hangs"), transport)
        assert transport.ended
        await take_leave(None, part("hangs"))
        return asyncio.get_running_loop().time() - virtual_time.START

    assert virtual_time.run(ends(), bound=60.0) == pytest.approx(2 * peers.CLOSE_BOUND)
    assert [record.message for record in caplog.records] == [
        "membership did not close within 4 s",
        "the transport did not close within 4 s",
    ]


async def test_a_membership_that_fails_is_heard_of_when_the_transport_is_closed() -> None:
    transport = part()
    with pytest.raises(OSError, match="no socket"):
        await take_leave(part("no socket"), transport)
    assert transport.ended


@pytest.mark.parametrize("kind", [Node, Orchestrator])
async def test_what_fails_in_it_leaves_no_task_and_no_arena(kind: Any) -> None:
    ended: list[str] = []

    async def shutdown() -> None:
        ended.append("tasks")

    async def close_links() -> None:
        ended.append("links")

    process: Any = SimpleNamespace(
        membership=part("no socket"),
        transport=part(),
        system=SimpleNamespace(shutdown=shutdown),
        data_plane=SimpleNamespace(arena=SimpleNamespace(close=lambda: ended.append("arena"))),
        _links=SimpleNamespace(close=close_links),
    )
    process._membership, process._transport = process.membership, process.transport
    process._close_parts = lambda: Node._close_parts(process)
    with pytest.raises(OSError, match="no socket"):
        await kind.close(process)
    assert ended[-2:] == ["tasks", "arena"]


@pytest.mark.parametrize("message", [ArenaConstructed(), ArenaConstructionFailed("no memory")])
async def test_an_arena_that_is_there_after_its_start_was_interrupted_concerns_nobody(message: Any) -> None:
    ready = asyncio.get_running_loop().create_future()
    ready.cancel()
    Orchestrator.receive(cast(Any, SimpleNamespace(_arena_ready=ready)), message)
