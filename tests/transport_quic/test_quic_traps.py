"""Whether the tests would notice: each known trap has its test, and transports broken by hand fail theirs."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from swactor_transport_quic import congestion
from swactor_transport_quic.compat import Connection
from swactor_transport_quic.edges import QuicSendEdge
from swactor_transport_quic.path_size import PathSize

HERE = Path(__file__).parent


def neighbour(name: str) -> ModuleType:
    """Another module of this folder, as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"checks_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_trap_has_its_tests():
    told = ast.get_docstring(ast.parse((HERE / "conftest.py").read_text()))
    named = re.findall(r"\btest_\w+\b(?!\.py)", told)
    there = {
        node.name
        for file in HERE.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(named) > 40
    assert set(named) <= there


def test_a_transport_that_never_falls_back_is_noticed(monkeypatch):
    monkeypatch.setattr(PathSize, "fall_back", lambda self, now: False)
    with pytest.raises(AssertionError):
        neighbour("test_quic_path_size").test_a_path_that_narrows_is_searched_again()
    with pytest.raises(AssertionError):
        neighbour("test_quic_path_size").test_a_black_hole_is_left_within_seconds_and_the_path_is_found_anew()


def test_a_transport_that_takes_lost_probes_for_congestion_is_noticed(monkeypatch):
    class NoPacket:
        pass

    monkeypatch.setattr(congestion, "SizeProbe", NoPacket)
    check = neighbour("test_quic_path_size").test_a_connection_finds_its_path_and_bytes_are_whole
    with pytest.raises(AssertionError, match="a lost probe is no congestion"):
        check(1_500, 1_452, False)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders that look at their own bound alone."""

    def room(self: Any) -> int:
        return self._bound - self._half.unacknowledged

    monkeypatch.setattr(QuicSendEdge, "room", room)


@pytest.mark.usefixtures("greedy")
async def test_a_sender_that_ignores_credit_is_noticed(pair):
    check = neighbour("test_quic_without_waiting")
    with pytest.raises(AssertionError):
        await check.test_an_offer_without_credit_takes_nothing_and_its_watcher_hears_of_credit(pair)


async def test_a_transport_that_never_pings_is_noticed(make_node, make_relay, flow, monkeypatch):
    monkeypatch.setattr(Connection, "send_ping", lambda self, uid: None)
    check = neighbour("test_quic_life").test_an_idle_connection_outlives_its_idle_timeout
    with pytest.raises(AssertionError):
        await check(make_node, make_relay, flow)
