"""Plug-in discovery and selection: every way to be broken is a record, and only its selection an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from swactor_core.errors import PluginError
from swactor_core.hookspecs import ALL_SPECS, hookimpl
from swactor_core.plugins import (
    REGISTRATION_HOOKS,
    PluginRecord,
    Plugins,
    PluginState,
    load_modules,
    load_plugins,
)
from swactor_core.spi.provider import API_LEVEL, Kind, Provider

GOOD = """
from swactor_core.hookspecs import hookimpl
from swactor_core.spi.provider import Kind, Provider

@hookimpl
def swactor_register_transports():
    return [Provider(Kind.TRANSPORT, "carrier-pigeon", "birds", dict)]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a distribution with one plug-in module where importlib.metadata finds it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str, version: str = "1.0") -> None:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[swactor]\n{module} = {module}\n")

    return write


def plugin(name: str = "given", **hooks: Callable[..., Any]) -> ModuleType:
    """A plug-in object with these hooks, marked as implementations."""
    module = ModuleType(name)
    for hook, function in hooks.items():
        setattr(module, hook, hookimpl(function))
    return module


def provider(kind: Kind = Kind.LOADER, name: str = "tiny", api_level: int = API_LEVEL) -> Provider:
    return Provider(kind, name, "for tests", dict, api_level)


def registered(*providers: Any, name: str = "given") -> tuple[Plugins, PluginRecord]:
    plugins = Plugins()
    record = plugins.register(plugin(name, swactor_register_loaders=lambda: providers), name=name)
    return plugins, record


def one(plugins: Plugins, name: str) -> PluginRecord:
    return next(record for record in plugins.records if record.name == name)


# --- discovery ---


def test_another_process_loads_the_modules_that_it_is_told(install: Callable[..., None]) -> None:
    install("owl-post", GOOD.replace("carrier-pigeon", "owl"))
    install("broken-post", "raise RuntimeError('no birds')")
    module = load_plugins(only=["owl-post"]).module_of(Kind.TRANSPORT, "owl")
    assert module == "owl_post"
    told = load_modules([module, module, "broken_post", "no_such_post"])
    assert [(record.name, str(record.state)) for record in told.records] == [
        ("owl_post", "loaded"), ("broken_post", "failed"), ("no_such_post", "failed"),
    ]  # fmt: skip
    assert told.select(Kind.TRANSPORT, "owl").summary == "birds"
    with pytest.raises(PluginError, match="broken_post failed: RuntimeError: no birds"):
        told.select(Kind.WORKER, "tinygrad")


def test_a_plugin_that_is_no_module_has_none_to_be_told() -> None:
    plugins, _ = registered(provider())
    assert plugins.module_of(Kind.LOADER, "tiny") == ""
    with pytest.raises(PluginError, match="no loader plug-in named 'other'"):
        plugins.module_of(Kind.LOADER, "other")


def test_an_installed_plugin_is_found_loaded_and_selected(install: Callable[..., None]) -> None:
    install("pigeon-post", GOOD, "2.1")
    plugins = load_plugins(only=["pigeon-post"])
    record = one(plugins, "pigeon_post")
    assert (record.distribution, record.version, record.module) == ("pigeon-post", "2.1", "pigeon_post")
    assert (record.state, record.reason) == (PluginState.LOADED, "")
    assert plugins.select(Kind.TRANSPORT, "carrier-pigeon").summary == "birds"
    assert plugins.providers(Kind.TRANSPORT) == record.providers


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("raise RuntimeError('no device')", "RuntimeError: no device"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_a_record_and_stops_nothing(
    install: Callable[..., None], source: str, reason: str
) -> None:
    install("bad-bird", source)
    install("pigeon-post", GOOD)
    plugins = load_plugins(only=["bad-bird", "pigeon-post"])
    bad = one(plugins, "bad_bird")
    assert bad.state is PluginState.FAILED
    assert bad.reason.startswith(reason)
    assert plugins.select(Kind.TRANSPORT, "carrier-pigeon")


def test_selecting_from_a_broken_plugin_quotes_its_record(install: Callable[..., None]) -> None:
    install("bad-bird", "raise RuntimeError('no device')")
    plugins = load_plugins(only=["bad-bird"])
    with pytest.raises(PluginError, match="bad-bird failed: RuntimeError: no device") as error:
        plugins.select(Kind.TRANSPORT, "carrier-pigeon")
    assert "no transport plug-in named 'carrier-pigeon' (have: none)" in error.value.message
    assert "pip install" in error.value.hint


@pytest.mark.parametrize("how", ["pigeon-post", "pigeon_post"])
def test_a_blocked_plugin_is_not_even_imported(install: Callable[..., None], how: str) -> None:
    install("pigeon-post", "raise RuntimeError('was imported')")
    installed = {"pigeon-post"}
    record = one(load_plugins(blocked=[how], only=installed), "pigeon_post")
    assert (record.state, record.reason) == (PluginState.BLOCKED, "blocked by configuration")


def test_only_with_no_names_loads_nothing(install: Callable[..., None]) -> None:
    install("pigeon-post", GOOD)
    plugins = load_plugins(only=[])
    assert plugins.records
    assert {record.state for record in plugins.records} == {PluginState.BLOCKED}


def test_records_come_in_order_of_name(install: Callable[..., None]) -> None:
    for name in ("zebra", "aardvark"):
        install(name, "")
    names = [record.name for record in load_plugins(only=[]).records]
    assert names == sorted(names)
    assert {"aardvark", "zebra"} <= set(names)


# --- registration ---


def test_every_kind_has_its_hook_and_every_hook_its_specification() -> None:
    hooks = {name for specs in ALL_SPECS for name in vars(specs) if name.startswith("swactor_")}
    assert set(REGISTRATION_HOOKS) == set(Kind)
    assert set(REGISTRATION_HOOKS.values()) == {
        hook for hook in hooks if hook.startswith("swactor_register_")
    }


def test_every_specification_is_documented_and_typed() -> None:
    for specs in ALL_SPECS:
        for name, hook in vars(specs).items():
            if name.startswith("swactor_"):
                assert hook.__doc__, name
                assert "return" in hook.__annotations__, name


@pytest.mark.parametrize("kind", Kind)
def test_a_provider_of_each_kind_is_taken_from_its_hook(kind: Kind) -> None:
    plugins = Plugins()
    hook = {REGISTRATION_HOOKS[kind]: lambda: [provider(kind, "mine")]}
    assert plugins.register(plugin(**hook), name="given").state is PluginState.LOADED
    assert plugins.select(kind, "mine").kind is kind


def test_a_hook_that_returns_none_registers_nothing() -> None:
    plugins = Plugins()
    record = plugins.register(plugin(swactor_register_loaders=lambda: None), name="given")
    assert (record.state, record.providers) == (PluginState.LOADED, [])


@pytest.mark.parametrize(
    ("offered", "state", "reason"),
    [
        (
            provider(api_level=99),
            PluginState.INCOMPATIBLE,
            f"written for API level 99, this swactor has {API_LEVEL}",
        ),
        (provider(Kind.WORKER), PluginState.FAILED, "is not a provider of kind loader"),
        ("tiny", PluginState.FAILED, "PluginError: 'tiny' is not a provider of kind loader"),
    ],
)
def test_a_wrong_provider_takes_the_whole_plugin_out(offered: Any, state: PluginState, reason: str) -> None:
    plugins, record = registered(provider(name="fine"), offered)
    assert record.state is state
    assert reason in record.reason
    assert record.providers == []
    assert plugins.providers(Kind.LOADER) == []
    assert plugins.manager.list_name_plugin() == []
    with pytest.raises(PluginError, match="no loader plug-in named 'fine'"):
        plugins.select(Kind.LOADER, "fine")


def test_a_hook_that_raises_is_a_record() -> None:
    def swactor_register_loaders() -> list[Provider]:
        raise OSError("disk on fire")

    plugins = Plugins()
    record = plugins.register(plugin(swactor_register_loaders=swactor_register_loaders), name="given")
    assert (record.state, record.reason) == (PluginState.FAILED, "OSError: disk on fire")


def test_a_hook_that_no_specification_knows_is_named() -> None:
    plugins = Plugins()
    record = plugins.register(plugin(swactor_register_loader=lambda: ()), name="given")
    assert record.state is PluginState.FAILED
    assert "unknown hook 'swactor_register_loader'" in record.reason


def test_a_hook_with_a_wrong_signature_is_a_record() -> None:
    plugins = Plugins()
    record = plugins.register(plugin(swactor_node_started=lambda node: None), name="given")
    assert record.state is PluginState.FAILED
    assert "node" in record.reason


def test_the_same_plugin_twice_is_a_record_and_the_first_stays() -> None:
    plugins = Plugins()
    module = plugin(swactor_register_loaders=lambda: [provider()])
    assert plugins.register(module, name="first").state is PluginState.LOADED
    second = plugins.register(module, name="second")
    assert (second.state, second.reason) == (PluginState.FAILED, "this plug-in is registered already")
    assert plugins.manager.has_plugin("first")
    assert plugins.select(Kind.LOADER, "tiny")


def test_a_name_taken_by_another_plugin_is_a_record() -> None:
    plugins = Plugins()
    plugins.register(plugin(), name="given")
    record = plugins.register(plugin(), name="given")
    assert record.state is PluginState.FAILED
    assert "given" in record.reason


# --- selection ---


def test_two_providers_of_one_name_are_an_error_that_names_both() -> None:
    plugins = Plugins()
    for distribution, version in (("one-loader", "1.0"), ("other-loader", "2.0")):
        offer = plugin(swactor_register_loaders=lambda: [provider()])
        plugins.register(offer, name=distribution, distribution=distribution, version=version)
    with pytest.raises(PluginError, match="two plug-ins provide loader 'tiny'") as error:
        plugins.select(Kind.LOADER, "tiny")
    assert "one-loader 1.0 and other-loader 2.0" in error.value.message
    assert error.value.hint == "uninstall or block one of them"


def test_the_same_name_in_two_kinds_is_no_conflict() -> None:
    plugins = Plugins()
    hooks = {
        REGISTRATION_HOOKS[kind]: (lambda kind=kind: [provider(kind)]) for kind in (Kind.LOADER, Kind.WORKER)
    }
    plugins.register(plugin(**hooks), name="given")
    assert plugins.select(Kind.LOADER, "tiny").kind is Kind.LOADER
    assert plugins.select(Kind.WORKER, "tiny").kind is Kind.WORKER


def test_an_absent_provider_says_what_there_is() -> None:
    plugins, _ = registered(provider(name="b"), provider(name="a"))
    with pytest.raises(PluginError, match=r"no loader plug-in named 'c' \(have: a, b\)"):
        plugins.select(Kind.LOADER, "c")


def test_the_remedy_for_an_absent_provider_names_what_there_is_and_no_more() -> None:
    plugins, _ = registered(provider(name="quick"), provider(name="other"))
    with pytest.raises(PluginError) as caught:
        plugins.select(Kind.LOADER, "qiuck")
    assert caught.value.hint.startswith("did you mean 'quick'? choose one of those; `pip install")
    with pytest.raises(PluginError) as caught:
        plugins.select(Kind.WORKER, "qiuck")
    assert "have: none" in caught.value.message
    assert caught.value.hint == "`pip install 'swactor[all]'` brings one of each kind"


# --- life events ---


def test_each_plugin_hears_a_life_event_in_its_own_guard() -> None:
    heard: list[Any] = []

    def raises(node_id: int) -> None:
        raise RuntimeError("not today")

    plugins = Plugins()
    plugins.register(plugin(swactor_node_started=raises), name="bad")
    plugins.register(plugin(swactor_node_started=lambda node_id: heard.append(node_id)), name="good")
    plugins.register(plugin(swactor_node_started=lambda: heard.append("fewer arguments")), name="short")
    failures = plugins.call_lifecycle("swactor_node_started", node_id=7)
    assert failures == ["bad: swactor_node_started: RuntimeError: not today"]
    assert sorted(heard, key=str) == [7, "fewer arguments"]


def test_the_plugins_of_this_workspace_load() -> None:
    plugins = load_plugins()
    ours = [record for record in plugins.records if record.distribution.startswith("swactor-")]
    assert ours
    assert {record.state for record in ours} == {PluginState.LOADED}, [record.reason for record in ours]
