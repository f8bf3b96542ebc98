"""`swactor-cli run`: a prompt through a pipeline, on a local pool of node processes or on a cluster."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from swactor_core.config import PluginChoice, choose_plugins, load_cluster_file
from swactor_core.errors import UsageError
from swactor_core.machines.run import RunOutcome
from swactor_core.node.identity import load_or_create_seed, state_directory
from swactor_core.observe.bus import JsonLinesSink
from swactor_core.orchestrator.orchestrator import RunRequest, RunResult
from swactor_core.orchestrator.session import ClusterSession, LocalSession
from swactor_core.plan import GgufSource, SamplingPolicy, TokenOutputPolicy
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind

from swactor_cli.errors import ExitCode
from swactor_cli.models import open_model, tokenizer_of
from swactor_cli.output import Output
from swactor_cli.progress import Display
from swactor_cli.prompts import prompt_ids_of
from swactor_cli.statistics import statistics, summary

EXIT_OF = {
    RunOutcome.COMPLETED: ExitCode.COMPLETED,
    RunOutcome.FAULTED: ExitCode.FAULTED,
    RunOutcome.OPERATOR_STOPPED: ExitCode.OPERATOR_STOPPED,
}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The command's options, as given."""

    model: str
    prompt: str | None
    prompt_ids: str | None
    raw: bool
    nodes: int | None
    cluster: str | None
    max_tokens: int
    sampling: SamplingPolicy
    sample_on_orchestrator: bool
    ignore_eos: bool
    prefill_chunk: int
    device: str | None
    events: str | None
    logits: str | None
    plugins: dict[str, str | None]


def run(options: RunOptions, output: Output) -> ExitCode:
    """Raises SwactorError for what cannot begin; a run that began ends in its outcome's exit code."""
    if options.nodes is not None and options.cluster is not None:
        raise UsageError("--nodes and --cluster exclude each other", hint="a cluster file names its nodes")
    file = load_cluster_file(options.cluster) if options.cluster is not None else None
    choice = choose_plugins(file.plugins if file is not None else PluginChoice(), options.plugins)
    plugins = load_plugins(blocked=choice.blocked)
    for kind in (Kind.ARENA, Kind.TRANSPORT, Kind.MEMBERSHIP, Kind.WORKER):
        plugins.select(kind, getattr(choice, kind))
    loader = plugins.select(Kind.LOADER, choice.loader).factory()
    path, model = open_model(loader, options.model, output)
    with ExitStack() as closing:
        closing.callback(model.close)
        tokenizer = tokenizer_of(model)
        prompt = prompt_ids_of(
            options.prompt, options.prompt_ids, raw=options.raw, facts=model.facts, tokenizer=tokenizer
        )
        if len(prompt) > model.facts.context_length:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, the model's context holds {model.facts.context_length}"
            )
        stop = tokenizer is not None and not options.ignore_eos
        ends = tokenizer.end_of_generation if tokenizer is not None and stop else frozenset()
        local = file is None
        request = RunRequest(
            source=GgufSource(str(Path(path).resolve()) if local else options.model, model.digest()),
            facts=model.facts,
            prompt=prompt,
            max_tokens=options.max_tokens,
            end_of_generation=tuple(sorted(ends)),
            sampling=options.sampling,
            token_output_policy=(
                TokenOutputPolicy.LOGITS if options.sample_on_orchestrator else TokenOutputPolicy.TOKEN_IDS
            ),
            token_count=model.manifest(0, 1).token_count,
            prefill_chunk=options.prefill_chunk,
        )
        logits = closing.enter_context(_logits_file(options.logits)) if options.logits else None
        sinks = []
        if options.events is not None:
            sink = JsonLinesSink(options.events)
            closing.callback(sink.close)
            sinks.append(sink)
        objects = options.events is not None

        def make_session() -> LocalSession | ClusterSession:
            if file is None:
                worker = {"device": options.device} if options.device else {}
                nodes = 2 if options.nodes is None else options.nodes
                return LocalSession(
                    plugins, choice, nodes=nodes, worker=worker, objects=objects, sinks=tuple(sinks)
                )
            seed = load_or_create_seed(state_directory() / "orchestrator.key")
            return ClusterSession(plugins, file, choice, seed=seed, objects=objects, sinks=tuple(sinks))

        display = Display(output, tokenizer.stream() if tokenizer is not None else None)
        with display:
            result = asyncio.run(_drive(make_session, request, display, logits))
        return _finish(result, display, output)


def _logits_file(path: str) -> BinaryIO:
    try:
        return Path(path).open("wb")
    except OSError as error:
        raise UsageError(
            f"--logits {path!r}: {error.strerror}", hint="name a file that can be written"
        ) from None


async def _drive(
    make_session: Callable[[], LocalSession | ClusterSession],
    request: RunRequest,
    display: Display,
    logits: BinaryIO | None,
) -> RunResult:
    """Session up, run, session down; the first Ctrl-C stops the run in order, the second all at once."""
    session = make_session()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    interrupts = 0
    begun = False

    def interrupted() -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            if isinstance(session, LocalSession):
                session.pool.kill()
            os._exit(ExitCode.OPERATOR_STOPPED)
        if begun:
            session.stop_run()
        else:
            main.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupted)
    gc.freeze()  # start-up objects live long: do not walk them again on the token path
    try:
        async with session:
            begun = True
            return await session.run(
                request,
                listener=display,
                on_logits=(lambda sequence, row: _write(logits, row)) if logits is not None else None,
            )
    except asyncio.CancelledError:
        if interrupts:
            raise KeyboardInterrupt from None
        raise


def _write(file: BinaryIO, row: bytes) -> None:
    file.write(row)


def _finish(result: RunResult, display: Display, output: Output) -> ExitCode:
    display.finish()
    figures = statistics(result)
    if output.json_lines:
        record: dict[str, Any] = {
            "type": "result",
            "outcome": str(result.outcome),
            "token_ids": list(result.token_ids),
            "text": display.text,
            "stats": figures,
        }
        if result.fault is not None:
            record["fault"] = {
                "reason": str(result.fault.reason),
                "component": str(result.fault.component),
                "cause": result.fault.cause,
                "detail": result.fault.detail,
                "stage_index": result.fault.stage_index,
            }
        output.record(record)
    if result.fault is not None:
        output.error(result.fault.line())
    elif not output.json_lines or output.interactive:
        output.note(summary(figures))
    if result.outcome is RunOutcome.OPERATOR_STOPPED:
        output.note("stopped by the operator")
    for unproven in result.unproven:
        output.warning(f"not proven at teardown: {unproven}")
    return EXIT_OF[result.outcome]
