"""The end of a child process: seen at once, whatever it leaves behind; and its pipes with it.

Must not know what the child was for: workers and nodes end alike.
"""

from __future__ import annotations

import asyncio
import os

REAP_SECONDS = 10.0


async def exited(process: asyncio.subprocess.Process) -> None:
    """Returns when the process itself has ended and its `returncode` is known. `Process.wait` waits for its
    pipes too, which a process that it started may hold open (CPython 3.11.4 and later). Raises TimeoutError
    when the loop has not heard of the end in REAP_SECONDS."""
    if process.returncode is None:
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:  # ended and reaped; the loop hears of it in one of its next turns
            descriptor = -1
        except OSError:  # no such call here
            await process.wait()
            return
        if descriptor >= 0:
            gone = asyncio.Event()
            loop.add_reader(descriptor, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
    async with asyncio.timeout(REAP_SECONDS):
        while process.returncode is None:  # noqa: ASYNC110 - the loop's own watcher reaps it at this moment
            await asyncio.sleep(0.001)


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Closes the child's pipe transports now, also where a grandchild holds the far ends."""
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
