"""Commands that come in groups: `cluster` and `cache`."""

from __future__ import annotations

from typing import Annotated

import typer

from swactor_cli.options import Json, Loader, Quiet
from swactor_cli.output import Output

cluster_app = typer.Typer(help="Cluster files.", no_args_is_help=True, rich_markup_mode=None)
cache_app = typer.Typer(
    help="Fetched models and what else is kept.", no_args_is_help=True, rich_markup_mode=None
)


@cluster_app.command("new")
def cluster_new(
    nodes: Annotated[
        str, typer.Option(help="Names, or NAME=PUBLICKEY, with commas between.", show_default=False)
    ],
    out: Annotated[str, typer.Option(help="The file to write.")] = "cluster.toml",
    seed: Annotated[
        list[str] | None,
        typer.Option(help="A membership endpoint host:port; may be given again.", show_default=False),
    ] = None,
    cluster_id: Annotated[
        str | None, typer.Option("--id", help="Of the cluster; random when not given.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a whole cluster file: fresh gossip key, this machine's orchestrator key, the nodes."""
    from swactor_cli.commands.cluster import NewClusterOptions, new_cluster_file

    options = NewClusterOptions(nodes=nodes, out=out, seeds=seed or [], cluster_id=cluster_id, force=force)
    raise typer.Exit(new_cluster_file(options, Output(quiet=quiet)))


@cache_app.command("list")
def cache_list(loader: Loader = None, json_lines: Json = False) -> None:
    """List fetched models, temporary files and compiled kernels, with what they take on the disk."""
    from swactor_cli.commands.cache import list_cache

    raise typer.Exit(list_cache({"loader": loader}, Output(json_lines=json_lines)))


@cache_app.command("clear")
def cache_clear(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Files or keys, as `cache list` shows them.", show_default=False),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only what was not used for so long, like 30d.", show_default=False)
    ] = None,
    temporary: Annotated[
        bool, typer.Option("--temporary", help="What processes that were killed have left.")
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compiled kernels; the next run compiles its own again.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="All models, temporary files and compiled kernels.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, say what would go.")] = False,
    loader: Loader = None,
    json_lines: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove fetched models, temporary files and compiled kernels.

    What a process has open or is fetching stays, and exit 1 says so.
    """
    from swactor_core.spi.storage import StoredKind

    from swactor_cli.commands.cache import ClearOptions, clear_cache

    flags = {StoredKind.TEMPORARY: temporary, StoredKind.KERNELS: kernels}
    kinds = frozenset(kind for kind, meant in flags.items() if meant)
    options = ClearOptions(tuple(models or ()), kinds, older_than, everything, dry_run, {"loader": loader})
    raise typer.Exit(clear_cache(options, Output(json_lines=json_lines, quiet=quiet)))
