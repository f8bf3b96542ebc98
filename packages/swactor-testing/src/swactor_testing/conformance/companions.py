"""A peer beside the endpoint under test that is killed or stopped as a whole: a process where it can be one.

Knows the transport interface, processes and signals. What the peer does is its plan, in `doomed.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from swactor_core.spi.transport import Peer
from swactor_core.values import frozen

from swactor_testing.conformance.bounds import meanwhile, until, within
from swactor_testing.conformance.doomed import Plan, peer_from_json
from swactor_testing.conformance.transport_rig import Endpoint, TransportRig, TransportTests

STARTS_WITHIN = 60.0
"""Seconds for a child to have started, on a busy machine: no plug-in's promise."""

_PROGRAM = "from swactor_testing.conformance.doomed import main; main()"


@frozen
class Companion:
    """`peer` is how others know it. `kill` ends it without a word; `silence` stops it, so that it
    acknowledges nothing, until `resume`."""

    peer: Peer
    kill: Callable[[], None]
    silence: Callable[[], Awaitable[None]]
    resume: Callable[[], None]


class CompanionTests(TransportTests):
    """Peers to be killed and stopped."""

    def vanish(self, endpoint: Endpoint) -> None:
        """Ends an endpoint of this process as a kill ends a process. Heirs that do not cross processes have
        to say how; all others are killed in earnest."""
        raise NotImplementedError("a transport that stays in one process must say how an endpoint vanishes")

    def silence(self, endpoint: Endpoint) -> None:
        """From now on nothing of what an endpoint of this process sends arrives, no acknowledgement either,
        until `resume`. Heirs that do not cross processes have to say how; other processes are stopped."""
        raise NotImplementedError(
            "a transport that stays in one process must say how an endpoint is silenced"
        )

    def resume(self, endpoint: Endpoint) -> None:
        """Ends a `silence`: what was kept arrives."""
        raise NotImplementedError("a transport that stays in one process must say how a silence ends")

    @contextlib.asynccontextmanager
    async def companion(self, rig: TransportRig, plan: Plan) -> AsyncIterator[Companion]:
        """A peer that acts on `plan` until the block ends."""
        if not self.capabilities.crosses_processes:
            here = await rig.start("doomed")
            here.transport.set_peer(plan.peer)
            async with meanwhile(plan.act(here.transport)):

                async def silence() -> None:
                    self.silence(here)

                yield Companion(here.peer(), lambda: self.vanish(here), silence, lambda: self.resume(here))
            return
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, self.capabilities.provider),
            *(json.dumps(plan.to_json()), json.dumps(dict(self.capabilities.settings))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=dict(os.environ),
        )

        async def stop() -> None:
            child.send_signal(signal.SIGSTOP)
            await until(rig.patience, lambda: _is_stopped(child.pid), "the child's process to be stopped")

        try:
            assert child.stdout is not None
            line = await within(STARTS_WITHIN, child.stdout.readline(), "the child to say where it listens")
            assert line, "the child has ended before it listened"
            peer = peer_from_json(json.loads(line))
            yield Companion(peer, child.kill, stop, lambda: child.send_signal(signal.SIGCONT))
        finally:
            if child.returncode is None:
                child.kill()
            await within(rig.patience, child.wait(), "the child's end")
            assert child.stdin is not None
            child.stdin.close()


def _is_stopped(process: int) -> bool:
    """proc(5): the state is the first field behind the command's name in brackets."""
    return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
