"""Commands that look at a model or at this machine, and `node`, as the command line declares them.

What each does is in `commands/`, imported when it is called.
"""

from __future__ import annotations

from typing import Annotated

import typer
from swactor_core.specs import PREFILL_CHUNK

from swactor_cli.options import (
    MOST_NODES,
    Arena,
    Cluster,
    Device,
    Json,
    Loader,
    Membership,
    Model,
    PrefillChunk,
    Quiet,
    Transport,
    Verbose,
    Worker,
    chosen_parts,
)
from swactor_cli.output import Output
from swactor_cli.terminal import set_up_logging


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
    device: Device = None,
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
    set_up_logging(verbose, quiet=quiet)
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
        plugins=chosen_parts(
            arena=arena, transport=transport, membership=membership, worker=worker, loader=loader
        ),
    )
    raise typer.Exit(run_node(options, Output(json_lines=json_lines, quiet=quiet)))


def plan(
    context: typer.Context,
    model: Model,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=MOST_NODES, help="Nodes, one stage each (default 2).")
    ] = None,
    cluster: Cluster = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 32,
    prefill_chunk: PrefillChunk = PREFILL_CHUNK,
    memory: Annotated[
        str | None, typer.Option(help="What a stage's worker may take on each of --nodes, like 8GiB.")
    ] = None,
    device: Device = None,
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


def tune(
    model: Model,
    nodes: Annotated[int, typer.Option(min=1, max=MOST_NODES, help="Nodes, one stage each.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a run, prompt and answer.")] = 160,
    prefill_chunk: PrefillChunk = PREFILL_CHUNK,
    device: Device = None,
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

    options = PluginOptions(
        cluster,
        chosen_parts(arena=arena, transport=transport, membership=membership, worker=worker, loader=loader),
    )
    raise typer.Exit(list_plugins(options, Output(json_lines=json_lines)))


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

    options = PluginOptions(
        cluster,
        chosen_parts(arena=arena, transport=transport, membership=membership, worker=worker, loader=loader),
    )
    raise typer.Exit(command(options, Output(json_lines=json_lines)))


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
