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
from swactor_core.specs import PREFILL_CHUNK

from swactor_cli.errors import ExitCode, report
from swactor_cli.groups import cache_app, cluster_app
from swactor_cli.help import SectionedCommand
from swactor_cli.options import (
    Arena,
    Cluster,
    Json,
    Loader,
    Membership,
    Model,
    PrefillChunk,
    Quiet,
    Transport,
    Verbose,
    Worker,
)
from swactor_cli.output import Output, open_standard_streams

app = typer.Typer(
    name="swactor-cli",
    help="Run a GGUF model as one pipeline over several nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

# Sections of `run --help`.
_PROMPT, _ANSWER, _SAMPLING = "Prompt", "Answer", "Sampling"
_PLACE, _OUTPUT = "Where it runs", "Output"

app.add_typer(cluster_app, name="cluster")
app.add_typer(cache_app, name="cache")


def _set_up_logging(verbose: int, *, quiet: bool) -> None:
    """Raises ConfigError for a SWACTOR_LOG that names no level."""
    from swactor_core.errors import ConfigError

    chosen = os.environ.get("SWACTOR_LOG", "").strip().upper() or ("ERROR" if quiet else "WARNING")
    level = {0: chosen, 1: "INFO"}.get(verbose, "DEBUG")
    if level not in _LEVELS:
        raise ConfigError(f"SWACTOR_LOG is {level[:40]!r}", hint=f"set it to one of {', '.join(_LEVELS)}")
    os.environ["SWACTOR_LOG"] = level  # node processes talk as much
    logging.basicConfig(level=level, format="%(name)s: %(message)s", stream=sys.stderr)


def _chosen(
    arena: str | None, transport: str | None, membership: str | None, worker: str | None, loader: str | None
) -> dict[str, str | None]:
    return {
        "arena": arena,
        "transport": transport,
        "membership": membership,
        "worker": worker,
        "loader": loader,
    }


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


@app.command(cls=SectionedCommand)
def run(
    context: typer.Context,
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Option(help="The user's text.", show_default=False, rich_help_panel=_PROMPT),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            help="A file with the user's text in UTF-8; - is standard input.",
            show_default=False,
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    prompt_ids: Annotated[
        str | None,
        typer.Option(help="Token ids, like 1,2,3.", show_default=False, rich_help_panel=_PROMPT),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="A system text in front of the user's.", show_default=False, rich_help_panel=_PROMPT
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="No chat template: the text as it is. Ids are so anyway.", rich_help_panel=_PROMPT
        ),
    ] = False,
    pre: Annotated[
        str | None,
        typer.Option(
            help="Pre-tokenizer to use in place of the one that the file names.",
            show_default=False,
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to generate at most.", rich_help_panel=_ANSWER)
    ] = 128,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the answer before this text; repeatable.", show_default=False, rich_help_panel=_ANSWER
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on after an end-of-generation token.", rich_help_panel=_ANSWER),
    ] = False,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="0 is greedy: then nothing is drawn, and top-k, top-p, min-p and seed change nothing.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Only the K likeliest tokens; 0: off.", rich_help_panel=_SAMPLING)
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Only the likeliest with this mass; 1: off.", rich_help_panel=_SAMPLING
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Only within this share of the likeliest; 0: off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    repeat_penalty: Annotated[
        float, typer.Option(help="Weakens tokens seen before; 1: off.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Off a logit for each time it was seen.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Off a logit that was seen at all.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    repeat_last_n: Annotated[
        int,
        typer.Option(
            min=-1, help="Tokens that penalties look back on; -1: all, 0: none.", rich_help_panel=_SAMPLING
        ),
    ] = 64,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=VALUE",
            help="Add to a token's logit, such as 42=-1.5 or 42=-inf; repeatable.",
            show_default=False,
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=(1 << 64) - 1,
            help="Of the sampler; random when not given.",
            show_default=False,
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    sample_on: Annotated[
        str,
        typer.Option(
            help="`last-stage` (token ids travel) or `orchestrator` (logits).", rich_help_panel=_SAMPLING
        ),
    ] = "last-stage",
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Local nodes, one stage each (default 2).", rich_help_panel=_PLACE),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Run on the nodes of this cluster file.", rich_help_panel=_PLACE)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="What a stage's worker may take on each local node, like 8GiB.",
            show_default=False,
            rich_help_panel=_PLACE,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Compute device of local nodes, such as CPU or CUDA.", rich_help_panel=_PLACE),
    ] = None,
    worker_option: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE for the worker plug-in of local nodes, such as threads=2; repeatable.",
            rich_help_panel=_PLACE,
        ),
    ] = None,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, max=4096, help="Prompt tokens per compute step.", rich_help_panel=_PLACE)
    ] = PREFILL_CHUNK,
    token_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds that one token may take, the first with its prompt.",
            rich_help_panel=_PLACE,
        ),
    ] = 300.0,
    pool_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds to wait for all nodes of a cluster to be there and free.",
            rich_help_panel=_PLACE,
        ),
    ] = 60.0,
    logits: Annotated[
        str | None,
        typer.Option(
            help="Write each row of logits (f32) here; needs --sample-on orchestrator.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(help="Write lifecycle events here, one JSON object a line.", rich_help_panel=_OUTPUT),
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
    """Stream a model's answer through a pipeline of nodes."""
    from swactor_core.errors import UsageError

    from swactor_cli.combinations import (
        RUN_EXCLUDES,
        RUN_NEEDS,
        given_options,
        refuse_exclusive,
        without_effect,
    )
    from swactor_cli.commands.run import RunOptions
    from swactor_cli.commands.run import run as command
    from swactor_cli.prompts import read_prompt
    from swactor_cli.sampling_options import sampling_policy

    given = given_options(context)
    refuse_exclusive(given, RUN_EXCLUDES)
    _set_up_logging(verbose, quiet=quiet)
    if sample_on not in ("last-stage", "orchestrator"):
        raise UsageError(f"--sample-on {sample_on!r}", hint="use last-stage or orchestrator")
    if logits is not None and sample_on != "orchestrator":
        raise UsageError("--logits needs the logits to travel", hint="add --sample-on orchestrator")
    options = RunOptions(
        model=model,
        prompt=prompt if prompt_file is None else read_prompt(prompt_file),
        prompt_ids=prompt_ids,
        system=system,
        raw=raw,
        pre=pre,
        nodes=nodes,
        cluster=cluster,
        max_tokens=max_tokens,
        sampling=sampling_policy(
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            repeat_last_n=repeat_last_n,
            logit_bias=logit_bias or (),
        ),
        sample_on_orchestrator=sample_on == "orchestrator",
        ignore_eos=ignore_eos,
        stops=tuple(stop or ()),
        prefill_chunk=prefill_chunk,
        token_timeout=token_timeout,
        pool_timeout=pool_timeout,
        memory=memory,
        device=device,
        worker_options=tuple(worker_option or ()),
        events=events,
        logits=logits,
        plugins=_chosen(arena, transport, membership, worker, loader),
    )
    output = Output(json_lines=json_lines, quiet=quiet)
    for warning in without_effect(given, RUN_NEEDS):
        output.warning(warning)
    raise typer.Exit(command(options, output))


@app.command()
def node(
    context: typer.Context,
    cluster: Annotated[str, typer.Option(help="The cluster file.", show_default=False)],
    name: Annotated[str, typer.Option(help="Which of its nodes this is.", show_default=False)],
    bind: Annotated[str | None, typer.Option(help="Address to listen on (default 0.0.0.0).")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="UDP port of the data plane; 0: any.")
    ] = None,
    membership_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="UDP port of membership; 0: any.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Address that others reach this node at (default: found out).")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="What a stage's worker may take here, like 8GiB.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Compute device, such as CPU or CUDA.")] = None,
    worker_option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the worker plug-in, such as threads=2; repeatable."),
    ] = None,
    key_file: Annotated[
        str | None, typer.Option(help="The node's key (default: by name in the state folder).")
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
    """Serve as one node of a cluster.

    Runs until Ctrl-C or a fault; --json gives its lifecycle events.
    """
    from swactor_cli.combinations import NODE_EXCLUDES, given_options, refuse_exclusive
    from swactor_cli.commands.node import NodeOptions, run_node

    refuse_exclusive(given_options(context), NODE_EXCLUDES)
    _set_up_logging(verbose, quiet=quiet)
    options = NodeOptions(
        cluster=cluster,
        name=name,
        bind=bind,
        port=port,
        membership_port=membership_port,
        advertise=advertise,
        memory=memory,
        device=device,
        worker_options=tuple(worker_option or ()),
        key_file=key_file,
        plugins=_chosen(arena, transport, membership, worker, loader),
    )
    raise typer.Exit(run_node(options, Output(json_lines=json_lines, quiet=quiet)))


@app.command()
def plan(
    context: typer.Context,
    model: Model,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes, one stage each (default 2).")] = None,
    cluster: Cluster = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 32,
    prefill_chunk: PrefillChunk = PREFILL_CHUNK,
    memory: Annotated[
        str | None, typer.Option(help="What a stage's worker may take on each of --nodes, like 8GiB.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Compute device, such as CPU or CUDA.")] = None,
    worker_option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the worker plug-in, such as weights=packed; repeatable."),
    ] = None,
    worker: Worker = None,
    loader: Loader = None,
    json_lines: Json = False,
) -> None:
    """Show how a model would be split over nodes.

    Reads the file's header, loads no weight.
    """
    from swactor_cli.combinations import PLAN_EXCLUDES, given_options, refuse_exclusive
    from swactor_cli.commands.plan import PlanOptions
    from swactor_cli.commands.plan import plan as command

    refuse_exclusive(given_options(context), PLAN_EXCLUDES)
    options = PlanOptions(
        model=model,
        nodes=nodes,
        cluster=cluster,
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        prefill_chunk=prefill_chunk,
        memory=memory,
        device=device,
        worker_options=tuple(worker_option or ()),
        plugins={"worker": worker, "loader": loader},
    )
    raise typer.Exit(command(options, Output(json_lines=json_lines)))


@app.command()
def tune(
    model: Model,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes, one stage each.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a run, prompt and answer.")] = 160,
    prefill_chunk: PrefillChunk = PREFILL_CHUNK,
    device: Annotated[str | None, typer.Option(help="Compute device, such as CPU or CUDA.")] = None,
    worker_option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the worker plug-in, such as kernels=graph; repeatable."),
    ] = None,
    worker: Worker = None,
    loader: Loader = None,
    json_lines: Json = False,
) -> None:
    """Compile a model's kernels on this machine, ahead of its first run.

    Configures each stage once as a run would; the next start finds all of it on disk.
    """
    from swactor_cli.commands.tune import TuneOptions
    from swactor_cli.commands.tune import tune as command

    options = TuneOptions(
        model=model,
        nodes=nodes,
        tokens=tokens,
        prefill_chunk=prefill_chunk,
        device=device,
        worker_options=tuple(worker_option or ()),
        plugins={"worker": worker, "loader": loader},
    )
    raise typer.Exit(command(options, Output(json_lines=json_lines)))


@app.command()
def plugins(
    cluster: Cluster = None,
    arena: Arena = None,
    transport: Transport = None,
    membership: Membership = None,
    worker: Worker = None,
    loader: Loader = None,
    json_lines: Json = False,
) -> None:
    """List the installed plug-ins.

    What became of each; exit 1 when a selected one cannot be used.
    """
    from swactor_cli.commands.plugins import PluginOptions, list_plugins

    options = PluginOptions(cluster, _chosen(arena, transport, membership, worker, loader))
    raise typer.Exit(list_plugins(options, Output(json_lines=json_lines)))


@app.command()
def doctor(
    cluster: Cluster = None,
    arena: Arena = None,
    transport: Transport = None,
    membership: Membership = None,
    worker: Worker = None,
    loader: Loader = None,
    json_lines: Json = False,
) -> None:
    """Check this machine and its plug-ins.

    Exit 1 when a check fails.
    """
    from swactor_cli.commands.doctor import doctor as command
    from swactor_cli.commands.plugins import PluginOptions

    options = PluginOptions(cluster, _chosen(arena, transport, membership, worker, loader))
    raise typer.Exit(command(options, Output(json_lines=json_lines)))


@app.command()
def key(
    name: Annotated[str | None, typer.Option(help="A node of this machine.", show_default=False)] = None,
    orchestrator: Annotated[
        bool, typer.Option("--orchestrator", help="The key that runs models on clusters.")
    ] = False,
    transport: Transport = None,
    quiet: Quiet = False,
) -> None:
    """Print a public key of this machine.

    A cluster file needs it. The key is made at first use.
    """
    from swactor_cli.commands.key import show_key

    output = Output(quiet=quiet)
    raise typer.Exit(
        show_key(name, orchestrator=orchestrator, plugins={"transport": transport}, output=output)
    )


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
    """Entry point: every error that is meant for people ends here as one line and an exit code."""
    open_standard_streams()
    arguments: Any = sys.argv[1:]
    try:
        _add_plugin_commands()
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
