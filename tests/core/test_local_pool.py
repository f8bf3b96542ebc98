"""What a local pool hears of a child that ends, whatever the child leaves behind."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
from swactor_core.config import ClusterConfig, NodeSettings
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.ids import NodeId
from swactor_core.messages import NodeFaulted
from swactor_core.node.control import CONTROL
from swactor_core.orchestrator import local_pool
from swactor_core.orchestrator.local_pool import LocalPool

NODE = NodeId(7)
WORDS = NodeFaulted(NODE, Fault(FaultReason.INTERNAL, Component.NODE, "its end"))
CHATTER = b"what a library prints\n" * 100
SETTINGS = NodeSettings(
    name="a",
    cluster=ClusterConfig(id="c", gossip_key="00" * 32, orchestrators=("11" * 32,), seeds=("127.0.0.1:1",)),
    key="22" * 32,
)
# It leaves a child that holds both of its pipes, says its last words and ends.
SCRIPT = """
import os, subprocess, sys
left = subprocess.Popen(["sleep", "600"])
os.write(2, b"%d\\n" % left.pid)
os.write(2, b"error: it broke\\n")
os.write(1, bytes.fromhex(sys.argv[1]))
os._exit(1)
"""


async def _child(words: bytes) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, words.hex(), stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("before", [b"", CHATTER], ids=["alone", "behind-chatter"])
async def test_last_words_are_heard_though_a_grandchild_holds_the_pipes(
    monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(local_pool, "_spawn", lambda: _child(before + CONTROL.encode(WORDS) + b"\n"))
    heard: list[object] = []
    ended: asyncio.Future[tuple[NodeId, str]] = asyncio.get_running_loop().create_future()
    pool = LocalPool(lambda _, message: heard.append(message), lambda *end: ended.set_result(end))
    await pool.start(SETTINGS, NODE)
    try:
        assert await asyncio.wait_for(ended, 20.0) == (NODE, "a: it broke")
        assert heard == [WORDS]
    finally:
        os.kill(int(pool._children[0].talk[0]), 9)
        await pool.stop()
    assert all(watcher.done() for watcher in pool._watchers)


async def test_a_child_whose_end_nobody_can_tell_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(process: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(local_pool, "_spawn", lambda: asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    ))  # fmt: skip
    monkeypatch.setattr(local_pool, "exited", unknown)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    pool = LocalPool(lambda *_: None, lambda _, detail: ended.set_result(detail))
    await pool.start(SETTINGS, NODE)
    assert await asyncio.wait_for(ended, 20.0) == "a: its process ended"
    monkeypatch.undo()
    await pool.stop()
    assert pool._children[0].process.returncode is not None
