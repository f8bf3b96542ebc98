"""The end of a process in its pool: a membership that does not end in order costs the transport nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from swactor_core.node import peers
from swactor_core.node.peers import take_leave
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
