"""Real processes: one is stopped and continued, then killed. Nobody is told; only the protocol can know."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from swactor_core.ids import node_id_of
from swactor_core.spi.membership import Member, MembershipContext, MemberState
from swactor_membership_swim.driver import SwimMembership
from swactor_membership_swim.settings import LOCAL

CHILD = """
import asyncio, sys
from swactor_core.ids import node_id_of
from swactor_core.spi.membership import MembershipContext
from swactor_membership_swim.driver import SwimMembership

name, *seed = sys.argv[1:]

async def main():
    key = name.encode().ljust(32)
    membership = SwimMembership(MembershipContext(
        "test", bytes(32), name, node_id_of(key), 1, key, "node", "127.0.0.1", 1, "127.0.0.1", 0,
        ((seed[0], int(seed[1])),), lambda m: print(m.name, m.state, flush=True), {"profile": "local"}))
    await membership.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_stopped_process_accuses_nobody_and_a_killed_one_is_found_in_time() -> None:
    news = asyncio.Event()
    changes: list[tuple[float, Member]] = []
    loop = asyncio.get_running_loop()

    def on_change(member: Member) -> None:
        changes.append((loop.time(), member))
        news.set()

    async def until(name: str, state: MemberState) -> float:
        async with asyncio.timeout(20):
            while {m.name: m.state for m in membership.members()}.get(name) is not state:
                news.clear()
                await news.wait()
        return loop.time()

    key = b"parent".ljust(32)
    identity = ("test", bytes(32), "parent", node_id_of(key), 1, key, "orchestrator")
    membership = SwimMembership(
        MembershipContext(*identity, "127.0.0.1", 1, "127.0.0.1", 0, (), on_change, {"profile": "local"})
    )
    await membership.start()
    seed = [membership.address[0], str(membership.address[1])]
    children = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, name, *seed, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
        )
        for name in ("steady", "victim")
    ]
    try:
        for name in ("steady", "victim"):
            await until(name, MemberState.ALIVE)
        children[1].send_signal(signal.SIGSTOP)
        await until("victim", MemberState.DEAD)
        children[1].send_signal(signal.SIGCONT)
        await until("victim", MemberState.ALIVE)
        children[1].send_signal(signal.SIGKILL)
        killed = loop.time()
        found = await until("victim", MemberState.DEAD)
        assert found - killed <= LOCAL.detection_bound(2) + 2.0  # a busy machine
        assert membership.members()[1].state is MemberState.ALIVE, "the steady one stayed"
        output, _ = await children[1].communicate()
        accused = [line for line in output.decode().splitlines() if not line.endswith("Alive")]
        assert accused == [], "the stopped process judged its peers"
        assert {m.name for _, m in changes if m.state is MemberState.DEAD} == {"victim"}
    finally:
        for child in children:
            if child.returncode is None:
                child.kill()
                await child.communicate()
        await membership.close()
