"""`plugins`: a record for each installed plug-in, whatever state it is in, and commands that plug-ins add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FIRST_PARTY = {
    "gguf": ("swactor-loader-gguf", {("loader", "gguf")}),
    "memfd": ("swactor-arena", {("arena", "memfd")}),
    "quic": ("swactor-transport-quic", {("transport", "quic")}),
    "swim": ("swactor-membership-swim", {("membership", "swim")}),
    "testing": (
        "swactor-testing",
        {
            ("arena", "heap"),
            ("transport", "memory"),
            ("membership", "static"),
            ("worker", "echo"),
            ("loader", "synthetic"),
        },
    ),
    "tinygrad": ("swactor-worker-tinygrad", {("worker", "tinygrad")}),
}
PROVIDER = """
    from swactor_core.hookspecs import hookimpl
    from swactor_core.spi.provider import Kind, Provider

    @hookimpl
    def swactor_register_workers():
        return [Provider(Kind.WORKER, "{name}", "of a test", dict, api_level={level})]
"""


def listed(said: Any) -> dict[str, dict[str, Any]]:
    records = [json.loads(line) for line in said.out.splitlines()]
    assert {record["type"] for record in records} == {"plugin"}
    return {record["name"]: record for record in records}


def test_the_first_party_plugins_are_listed_as_loaded(call: Any) -> None:
    said = call("plugins", "--json")
    assert (said.code, said.err) == (0, "")
    records = listed(said)
    for name, (distribution, provided) in FIRST_PARTY.items():
        record = records[name]
        assert (record["state"], record["reason"]) == ("loaded", "")
        assert record["distribution"] == distribution
        assert record["api_level"] == 1
        assert {(p["kind"], p["name"]) for p in record["providers"]} == provided
        assert all(p["summary"] for p in record["providers"])
    selected = {p["name"] for r in records.values() for p in r["providers"] if p["selected"]}
    assert selected == {"memfd", "quic", "swim", "tinygrad", "gguf"}


def test_people_get_one_line_a_plugin(call: Any) -> None:
    said = call("plugins")
    assert said.code == 0
    for name, (distribution, _) in FIRST_PARTY.items():
        line = next(line for line in said.out.splitlines() if line.startswith(name))
        assert distribution in line
        assert "loaded" in line
    assert "worker tinygrad*" in said.out


def test_option_and_environment_choose(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWACTOR_WORKER", "echo")
    chosen = listed(call("plugins", "--json"))["testing"]["providers"]
    assert [p["selected"] for p in chosen if p["name"] == "echo"] == [True]
    chosen = listed(call("plugins", "--json", "--worker", "tinygrad"))["testing"]["providers"]
    assert [p["selected"] for p in chosen if p["name"] == "echo"] == [False]


def test_a_chosen_name_that_nobody_provides_is_bad_usage(call: Any) -> None:
    said = call("plugins", "--worker", "abacus")
    assert said.code == 2
    assert "no worker plug-in named 'abacus'" in said.err
    assert "tinygrad" in said.err
    assert "Traceback" not in said.err


BROKEN = {
    "import": ("raise RuntimeError('no such driver')", "failed", "RuntimeError: no such driver"),
    "exit": ("import sys; sys.exit(3)", "failed", "SystemExit: 3"),
    "unknown hook": ("def swactor_registre_workers(): ...", "failed", "unknown hook"),
    "hook raises": (
        PROVIDER.format(name="bad", level=1).replace("return", "raise ValueError('x')\n        return"),
        "failed",
        "ValueError: x",
    ),
    "other level": (PROVIDER.format(name="bad", level=99), "incompatible", "API level 99"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_a_warning_until_it_is_chosen(spawn: Any, distribution: Any, case: str) -> None:
    source, state, reason = BROKEN[case]
    path = str(distribution("swactor-worker-bad", source))
    said = spawn("plugins", "--json", PYTHONPATH=path)
    assert said.code == 0
    record = listed(said)["swactor_worker_bad"]
    assert (record["distribution"], record["version"], record["state"]) == (
        "swactor-worker-bad",
        "1.2",
        state,
    )
    assert reason in record["reason"]
    assert record["providers"] == []
    said = spawn("plugins", "--worker", "bad", PYTHONPATH=path)
    assert said.code == 2
    assert "no worker plug-in named 'bad'" in said.err
    assert reason in said.err


def test_two_plugins_of_one_name_are_an_error_only_when_chosen(spawn: Any, distribution: Any) -> None:
    path = str(distribution("swactor-worker-twin", PROVIDER.format(name="tinygrad", level=1)))
    said = spawn("plugins", PYTHONPATH=path)
    assert said.code == 2
    assert "swactor-worker-twin 1.2" in said.err
    assert "swactor-worker-tinygrad" in said.err
    assert spawn("plugins", "--worker", "echo", PYTHONPATH=path).code == 0


def test_a_cluster_file_blocks_plugins_by_distribution_or_name(call: Any, home: Path) -> None:
    key = "ab" * 32
    file = home / "c.toml"
    file.write_text(
        f'[cluster]\nid = "c"\ngossip_key = "{key}"\norchestrators = []\n'
        '[plugins]\nworker = "echo"\nblocked = ["swactor-worker-tinygrad"]\n'
    )
    said = call("plugins", "--json", "--cluster", file)
    assert said.code == 0
    record = listed(said)["tinygrad"]
    assert (record["state"], record["reason"]) == ("blocked", "blocked by configuration")


def test_a_plugin_adds_commands(spawn: Any, distribution: Any) -> None:
    source = """
    import typer
    from swactor_core.hookspecs import hookimpl

    @hookimpl
    def swactor_add_commands(app):
        @app.command()
        def greet(name: str) -> None:
            print(f"hello {name}")
    """
    path = str(distribution("swactor-greeter", source))
    assert "greet" in spawn("--help", PYTHONPATH=path).out
    said = spawn("greet", "you", PYTHONPATH=path)
    assert (said.code, said.out) == (0, "hello you\n")


def test_a_plugin_that_fails_to_add_commands_is_a_warning(spawn: Any, distribution: Any) -> None:
    source = """
    from swactor_core.hookspecs import hookimpl

    @hookimpl
    def swactor_add_commands(app):
        raise RuntimeError("no commands today")
    """
    said = spawn("version", PYTHONPATH=str(distribution("swactor-greeter", source)))
    assert said.code == 0
    assert "no commands today" in said.err
    assert "Traceback" not in said.err


NEEDS_A_MODEL = ("run", "plan", "tune")
MODEL = Path(__file__).parent.parent / "data" / "tiny" / "llama-tied.gguf"


@pytest.mark.parametrize("kind", ["arena", "transport", "membership", "worker", "loader"])
@pytest.mark.parametrize("command", ["run", "plan", "tune", "key", "cache list", "doctor", "plugins"])
def test_a_plug_in_that_is_not_there_is_bad_usage_for_every_command(
    call: Any, command: str, kind: str
) -> None:
    """Where a command takes the option at all; `doctor` is a check of the machine, and fails."""
    arguments = [*command.split(), *([str(MODEL)] if command in NEEDS_A_MODEL else [])]
    arguments += {"run": ["--prompt-ids", "1"], "key": ["--orchestrator"]}.get(command, [])
    said = call(*arguments, f"--{kind}", "nosuch")
    assert "Traceback" not in said.err
    if "No such option" in said.err:
        assert said.code == 2
        return
    assert said.code == (1 if command == "doctor" else 2)
    assert f"no {kind} plug-in named 'nosuch'" in said.err + said.out
    assert "choose one of those" in said.err + said.out


BROKEN_FACTORY = """
    from swactor_core.hookspecs import hookimpl
    from swactor_core.spi.provider import Kind, Provider

    def make(**arguments):
        {does}

    @hookimpl
    def swactor_register_{kind}s():
        return [Provider(Kind.{upper}, "bad", "of a test", make)]
"""


@pytest.mark.parametrize("kind", ["arena", "transport", "membership", "loader"])
@pytest.mark.parametrize(
    ("does", "words", "remedy"),
    [
        (
            "import nothing_of_this_name",
            "ModuleNotFoundError: No module named 'nothing_of_this_name'",
            "install what it lacks, or its package anew",
        ),
        ("raise RuntimeError('no driver')", "RuntimeError: no driver", "tell whoever makes its package"),
    ],
)
def test_a_plug_in_whose_package_lacks_something_is_bad_usage(
    spawn: Any, distribution: Any, kind: str, does: str, words: str, remedy: str
) -> None:
    source = BROKEN_FACTORY.format(kind=kind, upper=kind.upper(), does=does)
    path = str(distribution("swactor-bad-part", source))
    said = spawn("run", MODEL, "--prompt-ids", "1", f"--{kind}", "bad", PYTHONPATH=path)
    assert said.code == 2, said.err
    assert said.out == ""
    assert f"the {kind} plug-in 'bad' cannot be used: {words}" in said.err
    assert f"{remedy}: `swactor-cli plugins` names it; or choose another with --{kind}" in said.err
    assert "defect" not in said.err


def test_a_library_of_a_plug_in_that_is_not_installed_is_named(spawn: Any, tmp_path: Path) -> None:
    (tmp_path / "aioquic.py").write_text("raise ModuleNotFoundError(\"No module named 'aioquic'\")")
    said = spawn("run", MODEL, "--prompt-ids", "1", PYTHONPATH=str(tmp_path))
    assert said.code == 2, said.err
    assert "the transport plug-in 'quic' cannot be used: ModuleNotFoundError: No module named 'aioquic'" in (
        said.err
    )
