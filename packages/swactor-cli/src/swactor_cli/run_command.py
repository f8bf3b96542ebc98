"""`swactor-cli run` as the command line declares it: its options in sections, checked against each other.

What the command does is in `commands/run.py`, imported when it is called.
"""

from __future__ import annotations

from typing import Annotated

import typer
from swactor_core.specs import PREFILL_CHUNK

from swactor_cli.options import (
    MOST_NODES,
    Arena,
    Json,
    Loader,
    Membership,
    Model,
    Quiet,
    Transport,
    Verbose,
    Worker,
    chosen_parts,
)
from swactor_cli.output import Output
from swactor_cli.terminal import set_up_logging

# Sections of `run --help`.
_PROMPT, _ANSWER, _SAMPLING = "Prompt", "Answer", "Sampling"
_PLACE, _OUTPUT = "Where it runs", "Output"


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
        typer.Option(
            min=1, max=MOST_NODES, help="Local nodes, one stage each (default 2).", rich_help_panel=_PLACE
        ),
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
    set_up_logging(verbose, quiet=quiet)
    if sample_on not in ("last-stage", "orchestrator"):
        raise UsageError(f"--sample-on {sample_on!r}", hint="use last-stage or orchestrator")
    if logits is not None and sample_on != "orchestrator":
        raise UsageError("--logits needs the logits to travel", hint="add --sample-on orchestrator")
    options = RunOptions(
        model=model,
        prompt=prompt if prompt_file is None else read_prompt(prompt_file),
        prompt_file=prompt_file,
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
        plugins=chosen_parts(
            arena=arena, transport=transport, membership=membership, worker=worker, loader=loader
        ),
    )
    output = Output(json_lines=json_lines, quiet=quiet)
    for warning in without_effect(given, RUN_NEEDS):
        output.warning(warning)
    if prompt == "-":
        output.warning("--prompt - is the text '-'; --prompt-file - reads standard input")
    raise typer.Exit(command(options, output))
