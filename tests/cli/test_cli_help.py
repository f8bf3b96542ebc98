"""Help: there for every command, on stdout, and without the weight of a plug-in."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from swactor_cli.app import app

COMMANDS = {
    (): ["run", "node", "plan", "tune", "plugins", "doctor", "key", "cluster", "version"],
    ("run",): ["--prompt", "--prompt-ids", "--nodes", "--cluster", "--max-tokens", "--seed", "--json"],
    ("node",): ["--cluster", "--name", "--bind", "--port", "--membership-port", "--advertise", "--memory"],
    ("plan",): ["--nodes", "--cluster", "--max-tokens", "--prompt-tokens", "--json"],
    ("tune",): ["--nodes", "--tokens", "--prefill-chunk", "--device", "--worker-option", "--json"],
    ("plugins",): ["--json", "--cluster"],
    ("doctor",): ["--json", "--cluster"],
    ("key",): ["--name", "--orchestrator"],
    ("cluster", "new"): ["--nodes", "--out", "--seed", "--force"],
    ("version",): [],
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_on_stdout_and_names_the_options(call: Any, command: tuple[str, ...]) -> None:
    said = call(*command, "--help")
    assert said.code == 0
    assert said.err == ""
    for option in COMMANDS[command]:
        assert option in said.out, option


def test_every_command_is_in_the_table_above() -> None:
    names = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback is not None}
    assert {c[0] for c in COMMANDS if c} == names | {"cluster"}


def test_help_imports_no_heavy_library(home: Any) -> None:
    program = (
        "import sys; sys.argv = ['swactor-cli', '--help']\n"
        "from swactor_cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'tinygrad', 'aioquic', 'tokenizers', 'numpy', 'gguf', 'jinja2', 'cryptography'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "[]"


def test_no_command_shows_the_help_and_is_a_usage_error(call: Any) -> None:
    said = call()
    assert said.code == 2
    assert "Commands:" in said.out + said.err


@pytest.mark.parametrize("arguments", [("--version",), ("version",)])
def test_the_version_is_one_line(call: Any, arguments: tuple[str, ...]) -> None:
    from importlib.metadata import version

    said = call(*arguments)
    assert (said.code, said.out, said.err) == (0, version("swactor-cli") + "\n", "")
