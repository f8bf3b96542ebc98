"""A node that begins anew because its clock was set back (spec section 8), and one that was told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from swactor_core.faults import Component, Fault, FaultReason
from swactor_core.ids import NodeId
from swactor_core.node import __main__ as process
from swactor_core.node import serve as served
from swactor_core.node.serve import serve
from swactor_core.spi.membership import Member, MemberState

ME = NodeId(7)
FORMER = Member("a", ME, 90, 0, MemberState.LEFT, b"key", "127.0.0.1", 1, "127.0.0.1", 2)
REPLACED = Fault(FaultReason.NODE_UNAVAILABLE, Component.MEMBERSHIP, "the others hold a former life of it")


class OutlivedNode:
    """The others hold a former life in its place, and say so when it is let go on."""

    built: list[OutlivedNode]

    def __init__(self, settings: object, plugins: object, *, epoch: int | None = None) -> None:
        self.epoch = epoch
        self.node_id = ME
        self.replaced_by = FORMER if epoch is None else None
        self.stopped = asyncio.Event()
        self.heard = asyncio.Event()
        self.built.append(self)

    def stop(self) -> None:
        self.stopped.set()

    async def run(self) -> Fault | None:
        await (self.heard if self.replaced_by is not None else self.stopped).wait()
        return REPLACED if self.replaced_by is not None else None


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[OutlivedNode]:
    OutlivedNode.built = []
    monkeypatch.setattr(served, "Node", OutlivedNode)
    monkeypatch.setattr(served, "refuse_separate_processes", lambda plugins, choice: None)
    return OutlivedNode.built


@pytest.fixture
def lifeline() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def begin(reader: int) -> asyncio.Future[Fault | None]:
    settings: Any = SimpleNamespace(plugins=None)
    return asyncio.ensure_future(serve(settings, settings, stop_on=(), lifeline=reader))


async def test_it_begins_anew_with_a_later_epoch(
    nodes: list[OutlivedNode], lifeline: tuple[int, int]
) -> None:
    serving = begin(lifeline[0])
    await asyncio.sleep(0)
    nodes[0].heard.set()
    while len(nodes) < 2:  # noqa: ASYNC110 - a turn or two of this loop
        await asyncio.sleep(0)
    assert nodes[1].epoch == FORMER.epoch + 1
    nodes[1].stop()
    assert await asyncio.wait_for(serving, 10) is None


async def test_it_does_not_when_whoever_started_it_has_let_it_go(nodes: list[OutlivedNode]) -> None:
    reader, writer = os.pipe()
    serving = begin(reader)
    await asyncio.sleep(0)
    os.close(writer)
    await asyncio.wait_for(nodes[0].stopped.wait(), 10)
    nodes[0].heard.set()
    assert await asyncio.wait_for(serving, 10) == REPLACED
    assert len(nodes) == 1
    os.close(reader)


async def test_a_second_signal_is_heard_while_something_blocks_the_loop(
    nodes: list[OutlivedNode], lifeline: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a plug-in; the first is the loop's own."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    settings: Any = SimpleNamespace(plugins=None)
    serving = asyncio.ensure_future(serve(settings, settings, stop_on=[signal.SIGUSR1]))
    await asyncio.sleep(0)
    signal.raise_signal(signal.SIGUSR1)
    assert codes == []
    signal.raise_signal(signal.SIGUSR1)
    assert (codes, nodes[0].stopped.is_set()) == ([served.ABRUPT], False)
    nodes[0].heard.set()
    await asyncio.wait_for(nodes[0].stopped.wait(), 10)
    assert await asyncio.wait_for(serving, 10) == REPLACED
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)


def test_the_last_words_are_those_of_the_node_that_ended_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent would hear of one that began anew only what its former life had to say."""
    said: list[tuple[int, Fault]] = []

    async def served_twice(*_: Any, on_built: Any, **__: Any) -> Fault:
        for epoch in (90, 91):
            on_built(SimpleNamespace(epoch=epoch))
        return REPLACED

    settings = SimpleNamespace(plugins=SimpleNamespace(blocked=()))
    for name in ("die_with_parent", "first_to_go", "ignore_terminal_interrupt", "load_plugins"):
        monkeypatch.setattr(process, name, lambda *_, **__: None)
    monkeypatch.setenv("SWACTOR_PARENT", "1")
    monkeypatch.setattr(process, "_read_line", lambda _: b"{}")
    monkeypatch.setattr(process, "validated", lambda *_, **__: settings)
    monkeypatch.setattr(process, "serve", served_twice)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: 0))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: 1, write=len, flush=lambda: None))
    monkeypatch.setattr(process, "say_last_words", lambda node, fault, _: said.append((node.epoch, fault)))
    assert process.main() == 1
    assert said == [(91, REPLACED)]
