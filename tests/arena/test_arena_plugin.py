"""How the arena plug-in presents itself: provider, ABI, doctor checks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from swactor_arena import checks, plugin
from swactor_arena import ring as ring_module
from swactor_arena.arena import MemfdArenas
from swactor_core.checks import CheckStatus
from swactor_core.errors import ResourceError
from swactor_core.plugins import Plugins, PluginState, load_plugins
from swactor_core.spi.provider import Kind


def test_the_provider_is_found_by_its_entry_point_and_makes_arenas() -> None:
    plugins = load_plugins(only=["swactor-arena"])
    provider = plugins.select(Kind.ARENA, "memfd")
    arena = provider.factory().create(1 << 16)
    assert arena.ceiling == 1 << 16
    arena.close()


def test_the_plugin_registers_cleanly() -> None:
    record = Plugins().register(plugin, name="memfd")
    assert record.state is PluginState.LOADED, record.reason
    assert [(p.kind, p.name) for p in record.providers] == [(Kind.ARENA, "memfd")]


def test_importing_the_plugin_loads_no_native_code() -> None:
    script = "import sys, swactor_arena.plugin; sys.exit('swactor_arena._native' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_the_doctor_finds_a_working_arena() -> None:
    results = {check.id: check.run() for check in plugin.swactor_doctor_checks()}
    assert set(results) == {"arena.native", "arena.memfd", "arena.limits"}
    assert results["arena.native"].status is CheckStatus.OK
    assert results["arena.memfd"].status is CheckStatus.OK
    assert results["arena.limits"].status in (CheckStatus.OK, CheckStatus.WARN)


def test_a_missing_extension_is_a_finding_with_a_remedy(monkeypatch) -> None:
    for name in ("arena", "ring", "memory", "_native"):
        monkeypatch.delitem(sys.modules, f"swactor_arena.{name}", raising=False)
        monkeypatch.delattr(sys.modules["swactor_arena"], name, raising=False)
    monkeypatch.setitem(sys.modules, "swactor_arena._native", None)
    for check in (checks.check_native, checks.check_memfd):
        result = check()
        assert result.status is CheckStatus.FAIL
        assert "reinstall" in result.remedy
    assert checks.check_limits().status is not CheckStatus.FAIL, "it needs no extension"


def test_a_stale_extension_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("swactor_arena.arena.EXPECTED_ABI", ring_module.EXPECTED_ABI + 1)
    with pytest.raises(ResourceError, match="ABI 2, this code needs 3"):
        MemfdArenas()
    assert checks.check_native().status is CheckStatus.FAIL


def test_the_abi_is_the_number_that_both_processes_compare() -> None:
    assert MemfdArenas().abi == ring_module.EXPECTED_ABI == 2
