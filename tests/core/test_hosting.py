"""Where nodes and workers live is decided from capabilities, whatever the parts are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from swactor_core.config import PluginChoice
from swactor_core.errors import PluginError, UsageError
from swactor_core.hosting import nodes_in_process, refuse_separate_processes, uses_udp, worker_in_process
from swactor_core.plugins import REGISTRATION_HOOKS, Plugins
from swactor_core.spi.provider import Kind, Provider

CHOICE = PluginChoice(arena="a", transport="t", membership="m", worker="w", loader="l")
STAYS = {"crosses_processes": False}


def plugins(**capabilities: dict[str, Any]) -> Plugins:
    """Providers `a`, `t`, `m`, `w` with these capabilities."""
    made = Plugins()
    hooks = {}
    for kind in (Kind.ARENA, Kind.TRANSPORT, Kind.MEMBERSHIP, Kind.WORKER):
        name = kind.value[0]
        provider = Provider(kind, name, "of a test", dict, capabilities=capabilities.get(name, {}))
        hooks[REGISTRATION_HOOKS[kind]] = lambda provider=provider: [provider]
    made.register(SimpleNamespace(__name__="given", **hooks), name="given")
    return made


@pytest.mark.parametrize("said", [{}, {"crosses_processes": True}])
def test_parts_that_cross_or_say_nothing_have_processes(said: dict[str, Any]) -> None:
    given = plugins(a=said, t=said, m=said)
    assert not nodes_in_process(given, CHOICE)
    assert not worker_in_process(given, CHOICE)
    refuse_separate_processes(given, CHOICE)


@pytest.mark.parametrize(("part", "kind"), [("t", "transport"), ("m", "membership")])
def test_a_part_that_stays_keeps_the_nodes(part: str, kind: str) -> None:
    given = plugins(**{part: STAYS})
    assert nodes_in_process(given, CHOICE)
    assert not worker_in_process(given, CHOICE)
    with pytest.raises(UsageError, match=f"the {kind} '{part}' does not leave its process") as refused:
        refuse_separate_processes(given, CHOICE)
    assert f"another {kind}" in refused.value.hint


@pytest.mark.parametrize(("part", "needed"), [("t", True), ("m", True), ("w", False), ("", False)])
def test_datagrams_are_needed_by_parts_that_say_so(part: str, needed: bool) -> None:
    assert uses_udp(plugins(**{part: {"udp": True}}), CHOICE) is needed


def test_an_arena_that_stays_keeps_the_worker_and_not_the_nodes() -> None:
    given = plugins(a=STAYS, w={"in_process": True})
    assert worker_in_process(given, CHOICE)
    assert not nodes_in_process(given, CHOICE)
    refuse_separate_processes(given, CHOICE)


@pytest.mark.parametrize("said", [{}, {"in_process": False}])
def test_a_worker_that_needs_a_process_refuses_such_an_arena(said: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"arena 'a' does not leave .* worker 'w'") as refused:
        worker_in_process(plugins(a=STAYS, w=said), CHOICE)
    assert "none is installed" in refused.value.hint


@pytest.mark.parametrize("ask", [nodes_in_process, worker_in_process, refuse_separate_processes])
def test_a_part_that_is_not_there_is_named(ask: Any) -> None:
    with pytest.raises(PluginError, match=r"no .* plug-in named"):
        ask(Plugins(), CHOICE)
