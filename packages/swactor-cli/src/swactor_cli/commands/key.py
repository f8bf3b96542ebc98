"""`swactor-cli key`: the public key that a cluster file needs of this machine, made at first use."""

from __future__ import annotations

from swactor_core.config import PluginChoice, choose_plugins
from swactor_core.errors import UsageError
from swactor_core.node.identity import load_or_create_seed
from swactor_core.plugins import load_plugins

from swactor_cli.errors import ExitCode
from swactor_cli.keys import node_key_file, orchestrator_key_file, public_key_of
from swactor_cli.output import Output


def show_key(
    name: str | None, *, orchestrator: bool, plugins: dict[str, str | None], output: Output
) -> ExitCode:
    """One line on stdout; where the secret lies is talk. Raises UsageError."""
    if orchestrator == (name is not None):
        raise UsageError("give exactly one of --orchestrator and --name", hint="swactor-cli key --name a")
    file = orchestrator_key_file() if name is None else node_key_file(name)
    choice = choose_plugins(PluginChoice(), plugins)
    public_key = public_key_of(load_or_create_seed(file), load_plugins(), choice)
    output.note(f"its secret lies in {file}")
    output.text(public_key + "\n")
    return ExitCode.COMPLETED
