"""The end of a child process is seen at once, whoever holds its pipes (spec section 31)."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest
from swactor_core.node.process_end import exited

LEAVES_A_CHILD = "import os, time; os.fork() or time.sleep(20); os._exit(3)"


async def start(code: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=pipe, stderr=pipe, start_new_session=True
    )


async def test_a_process_that_leaves_a_child_on_its_pipes_has_ended() -> None:
    process = await start(LEAVES_A_CHILD)
    began = time.monotonic()
    try:
        await asyncio.wait_for(exited(process), 15)
        assert process.returncode == 3
        assert time.monotonic() - began < 15
    finally:
        os.killpg(process.pid, 9)
        process._transport.close()


@pytest.mark.parametrize("later", [False, True], ids=["while it lives", "after its end"])
async def test_the_exit_code_is_known(later: bool) -> None:
    process = await start("import sys; sys.exit(5)")
    if later:
        await process.wait()
    await asyncio.wait_for(exited(process), 15)
    assert process.returncode == 5
    await asyncio.wait_for(process.wait(), 15)
