"""plugin.py: what the host sees of this plug-in."""

from __future__ import annotations

import subprocess
import sys

import pytest
from swactor_core.checks import CheckStatus
from swactor_core.plugins import PluginState, load_plugins
from swactor_core.spi.provider import Kind
from swactor_loader_gguf import cache, plugin


def test_the_entry_point_registers_the_loader():
    plugins = load_plugins(only=["swactor-loader-gguf"])
    (record,) = [record for record in plugins.records if record.state is PluginState.LOADED]
    assert record.distribution == "swactor-loader-gguf"
    provider = plugins.select(Kind.LOADER, "gguf")
    loader = provider.factory()
    assert callable(loader.resolve)
    assert callable(loader.open)


def test_the_loader_opens_a_model(data_folder):
    loader = plugin.create_loader()
    model = loader.open(loader.resolve(str(data_folder / "tiny" / "llama-gqa.gguf")))
    assert model.facts.num_layers == 4
    assert len(model.digest()) == 64
    model.close()
    model.close()


def test_registering_imports_nothing_heavy():
    program = (
        "import sys; import swactor_loader_gguf.plugin as p;"
        "p.swactor_register_loaders(); p.swactor_doctor_checks();"
        "print(sorted({'tokenizers', 'gguf', 'numpy', 'jinja2', 'httpx'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture
def checks():
    return {check.id: check for check in plugin.swactor_doctor_checks()}


def test_doctor_finds_this_machine_well(checks, monkeypatch, tmp_path):
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "free_bytes", lambda folder: 1 << 40)
    assert {name: check.run().status for name, check in checks.items()} == {
        "gguf.tokenizers": CheckStatus.OK,
        "gguf.cache": CheckStatus.OK,
    }


def test_doctor_sees_a_full_disk_and_a_cache_that_cannot_be_written(checks, monkeypatch, tmp_path):
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "free_bytes", lambda folder: 1 << 20)
    result = checks["gguf.cache"].run()
    assert (result.status, "1 MiB free" in result.detail) == (CheckStatus.WARN, True)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "file" / "below"))
    result = checks["gguf.cache"].run()
    assert result.status is CheckStatus.FAIL
    assert "SWACTOR_CACHE_DIR" in result.remedy


def test_doctor_sees_a_tokenizers_that_does_not_load(checks, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = checks["gguf.tokenizers"].run()
    assert result.status is CheckStatus.FAIL
    assert "pip install" in result.remedy
