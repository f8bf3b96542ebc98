"""The command line's root: which commands there are, one place where errors become exit codes.

Imports no heavy library: plug-ins load inside the commands, so that `--help` stays fast.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from swactor_core import __version__

from swactor_cli.errors import ExitCode, report
from swactor_cli.groups import cache_app, cluster_app
from swactor_cli.help import SectionedCommand
from swactor_cli.machine_commands import doctor, key, node, plan, plugins, tune
from swactor_cli.output import Output, open_standard_streams, settle_talk
from swactor_cli.run_command import run

app = typer.Typer(
    name="swactor-cli",
    help="Run a GGUF model as one pipeline over several nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(cls=SectionedCommand)(run)
for _command in (node, plan, tune, plugins, doctor, key):
    app.command()(_command)
app.add_typer(cluster_app, name="cluster")
app.add_typer(cache_app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        Output().text(__version__ + "\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Run a GGUF model as one pipeline over several nodes."""


@app.command()
def version() -> None:
    """Print the version."""
    Output().text(__version__ + "\n")


def _add_plugin_commands() -> None:
    """Each plug-in's own commands; one that fails is told and left out."""
    from swactor_core.plugins import load_plugins

    for failure in load_plugins().call_lifecycle("swactor_add_commands", app=app):
        Output().warning(failure)


def main() -> None:
    """Runs one command: every error that is meant for people ends here as one line and an exit code, which
    is the SystemExit that is raised."""
    arguments: Any = sys.argv[1:]
    stdout = sys.stdout
    try:
        open_standard_streams()
        _add_plugin_commands()
        code = app(arguments, prog_name="swactor-cli", standalone_mode=False)
        if not code:
            sys.stdout.flush()
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        sys.exit(_exit_code_of(error))
    finally:
        settle_talk()
        sys.stdout = stdout
    sys.exit(code if isinstance(code, int) else ExitCode.COMPLETED)


def _name_the_value(error: BaseException) -> None:
    """What the option parser says of a wrong value names the option and not the value."""
    described = getattr(error.__cause__, "errors", None)  # of pydantic, which typer asks
    if callable(described) and hasattr(error, "message"):
        first = described(include_url=False)[0]
        what = first["msg"].removeprefix("Input ").partition(", unable to parse")[0]
        error.message = f"{first['input']!r} {what}"


def _exit_code_of(error: BaseException) -> int:
    show = getattr(error, "show", None)  # a usage error of the option parser knows how to say itself
    if callable(show) and hasattr(error, "exit_code"):
        _name_the_value(error)
        said = io.StringIO()
        show(said)
        Output().say(said.getvalue().rstrip("\n"))
        return ExitCode.USAGE
    if type(error).__name__ == "Abort":
        return report(KeyboardInterrupt(), Output())
    return report(error, Output())
