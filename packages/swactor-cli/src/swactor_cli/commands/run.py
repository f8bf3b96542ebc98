"""`swactor-cli run`: a prompt through a pipeline, on a local pool of node processes or on a cluster.

Knows the order in which a run is prepared, and what is said of its end. Must not know how a run is decided or
what its nodes do: a session is all that it sees of them.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

from swactor_core.checks import CheckStatus
from swactor_core.config import offline
from swactor_core.errors import ResourceError, UsageError
from swactor_core.hosting import memory_of_workers, refuse_unfit_model
from swactor_core.ids import NodeId, RunId, node_hex
from swactor_core.machines.run import RunBounds
from swactor_core.machines.run_effects import RunOutcome
from swactor_core.node.identity import key_in_use, later_epoch, load_or_create_seed
from swactor_core.orchestrator.local_pool import NodesAhead
from swactor_core.orchestrator.orchestrator import RunRequest, RunResult
from swactor_core.orchestrator.session import ClusterSession, LocalSession
from swactor_core.plan import GgufSource, RunPlan, SamplingPolicy, TokenOutputPolicy
from swactor_core.planner import EdgeIdAllocator, NodeCapacity, plan_run, positions_of
from swactor_core.spi.loader import Model, Tokenizer
from swactor_core.spi.provider import Kind
from swactor_core.unwaited import EventLoop
from swactor_core.values import frozen

from swactor_cli.answer import Answer
from swactor_cli.checks import check_udp
from swactor_cli.errors import ExitCode
from swactor_cli.interrupts import Interrupts, held, over
from swactor_cli.keys import orchestrator_key_file
from swactor_cli.models import Room, check_memory_here, has_tokenizer, open_model, tokenizer_of
from swactor_cli.output import Output, OutputLost, pending, wait_for_nobody
from swactor_cli.pools import ChosenPool, choose_pool
from swactor_cli.progress import Display
from swactor_cli.prompts import check_prompt, check_text, prompt_ids_of
from swactor_cli.sampling_options import fitted
from swactor_cli.side_files import SideFiles, check_place
from swactor_cli.statistics import statistics, summary

EXIT_OF = {
    RunOutcome.COMPLETED: ExitCode.COMPLETED,
    RunOutcome.FAULTED: ExitCode.FAULTED,
    RunOutcome.OPERATOR_STOPPED: ExitCode.OPERATOR_STOPPED,
}


@frozen
class RunOptions:
    """The command's options, as given. `prompt` is the text of `prompt_file` where that is given."""

    model: str
    prompt: str | None
    prompt_file: str | None
    prompt_ids: str | None
    system: str | None
    raw: bool
    pre: str | None
    nodes: int | None
    cluster: str | None
    max_tokens: int
    sampling: SamplingPolicy
    sample_on_orchestrator: bool
    ignore_eos: bool
    stops: tuple[str, ...]
    prefill_chunk: int
    token_timeout: float
    pool_timeout: float
    memory: str | None
    device: str | None
    worker_options: tuple[str, ...]
    events: str | None
    logits: str | None
    plugins: dict[str, str | None]


def run(options: RunOptions, output: Output) -> ExitCode:
    """Raises SwactorError for what cannot begin; a run that began ends in its outcome's exit code."""
    check_prompt(
        options.prompt, options.prompt_ids, raw=options.raw, system=options.system, stops=options.stops
    )
    for option, path in (("--events", options.events), ("--logits", options.logits)):
        check_place(option, path)
    pool = choose_pool(
        options.cluster,
        options.plugins,
        nodes=options.nodes,
        memory=options.memory,
        device=options.device,
        worker_options=options.worker_options,
    )
    with ExitStack() as closing:
        path, model = _opened(options, pool, closing, output)
        runner = closing.enter_context(asyncio.Runner(loop_factory=EventLoop))
        ahead, room = NodesAhead(), Room()
        if pool.starts_processes:
            _start_ahead(pool, ahead, runner, closing)
        tokenizer = tokenizer_of(model, options.pre)
        request = _request(options, model, tokenizer, _uri(path, options.model, local=pool.local))
        _note_bare_prompt(options, tokenizer, output)
        answer = Answer(tokenizer.stream() if tokenizer is not None else None, options.stops)
        request = _with_memory(request, pool, model, room, path=path, output=output)
        if pool.local and offline() and model.to_fetch(0, model.facts.num_layers):
            model.fetch(0, model.facts.num_layers)  # which says what is missing: nodes here have this cache
        inputs = {
            "the model": path,
            "the prompt file": options.prompt_file,
            "the cluster file": options.cluster,
        }
        side = SideFiles(options.events, options.logits, inputs=inputs)
        closing.callback(side.close)
        seed, epoch = b"", None
        if not pool.local:
            seed = load_or_create_seed(orchestrator_key_file())
            closing.enter_context(key_in_use(orchestrator_key_file()))
            epoch = later_epoch(orchestrator_key_file())
        make_session = partial(_session, options, pool, side, seed=seed, epoch=epoch, ahead=ahead)

        display = Display(output, answer)
        interrupts = Interrupts()
        interrupts.catch()
        wait_for_nobody()
        try:
            result = runner.run(_drive(make_session, request, display, side, output, interrupts))
        finally:
            over(runner.get_loop(), pending)
        side.finish()
        return _finish(result, display, side, output)


def _opened(options: RunOptions, pool: ChosenPool, closing: ExitStack, output: Output) -> tuple[str, Model]:
    """The model's place on this machine and the model, which `closing` closes. What speaks against this
    machine is said before anything is fetched, and in any case."""
    able = cache(pool.refuse_this_machine)
    loader = pool.plugins.select(Kind.LOADER, pool.choice.loader).make()
    path, model = open_model(loader, options.model, output, before_fetch=able)
    closing.callback(model.close)
    able()
    if options.pre is not None and options.prompt_ids is not None and has_tokenizer(model):
        raise UsageError(
            "--pre and --prompt-ids exclude each other", hint="ids are not tokenized: leave --pre out"
        )
    return path, model


def _start_ahead(pool: ChosenPool, ahead: NodesAhead, runner: asyncio.Runner, closing: ExitStack) -> None:
    """Node processes import what they need while the prompt is made. Raises ResourceError."""
    if pool.uses_udp and (udp := check_udp()).status is CheckStatus.FAIL:
        raise ResourceError(udp.detail, hint=udp.remedy)  # its nodes would wait for one another
    closing.callback(lambda: runner.run(ahead.close()))
    with held():
        runner.run(ahead.start(len(pool.names)))


def _note_bare_prompt(options: RunOptions, tokenizer: Tokenizer | None, output: Output) -> None:
    watched = not output.json_lines or output.interactive
    bare = tokenizer is not None and not tokenizer.has_chat_template
    if watched and bare and options.prompt is not None and not options.raw:
        output.note("the model has no chat template: the prompt goes to it as it is")


def _with_memory(
    request: RunRequest, pool: ChosenPool, model: Model, room: Room, *, path: str, output: Output
) -> RunRequest:
    """The request with what the pool's workers say of their memory. Raises UsageError or ModelError, before
    any node has its settings, for a model that no plan fits, or that no worker would run. `room` is what was
    left here before they started."""
    plugins, choice = pool.plugins, pool.choice
    positions = positions_of(request.facts, request.choices())
    whole = model.manifest(0, model.facts.num_layers)
    say = memory_of_workers(plugins, choice, whole, positions=positions, prefill_chunk=request.prefill_chunk)
    mine = say({"worker": plugins.select(Kind.WORKER, choice.worker).name, "settings": pool.worker})
    free = room.own if pool.local else None
    inventory = [
        NodeCapacity(NodeId(i + 1), pool.memory_bytes, mine, name, free_bytes=free)
        for i, name in enumerate(pool.names)
    ]
    plan = _check_plan(request, inventory, output)
    if pool.local and pool.memory_bytes is None:
        check_memory_here(
            plan, request.facts, output,
            prefill_chunk=request.prefill_chunk, worker=mine, room=room,
            node_processes=pool.starts_processes, path=path,
        )  # fmt: skip
    refuse_unfit_model(plugins, choice, whole, positions=positions)
    return replace(request, worker_memory=say)


def _session(
    options: RunOptions,
    pool: ChosenPool,
    side: SideFiles,
    *,
    seed: bytes,
    epoch: int | None,
    ahead: NodesAhead,
) -> LocalSession | ClusterSession:
    """`seed` is of this machine's key, which a cluster knows, `epoch` the latest under it; `ahead` holds
    processes of a local pool."""
    if pool.file is None:
        return LocalSession(
            pool.plugins, pool.choice,
            nodes=len(pool.names), worker=pool.worker, memory_bytes=pool.memory_bytes,
            objects=side.objects, sinks=side.sinks, ahead=ahead,
        )  # fmt: skip
    return ClusterSession(
        pool.plugins, pool.file, pool.choice,
        seed=seed, epoch=epoch, pool_deadline=options.pool_timeout,
        objects=side.objects, sinks=side.sinks,
    )  # fmt: skip


def _request(options: RunOptions, model: Model, tokenizer: Tokenizer | None, uri: str) -> RunRequest:
    """What is asked of the orchestrator. Raises UsageError for a prompt or a policy that the model cannot
    have."""
    prompt = prompt_ids_of(
        options.prompt,
        options.prompt_ids,
        raw=options.raw,
        facts=model.facts,
        tokenizer=tokenizer,
        system=options.system,
    )
    if options.stops and tokenizer is None:
        raise UsageError("--stop was given, and the model has no vocabulary", hint="leave --stop out")
    suppressed = tokenizer.suppressed if tokenizer is not None else frozenset()
    ends = tokenizer.end_of_generation if tokenizer is not None and not options.ignore_eos else frozenset()
    return RunRequest(
        source=GgufSource(uri, model.digest(), model.outline()),
        facts=model.facts,
        prompt=prompt,
        max_tokens=options.max_tokens,
        end_of_generation=tuple(sorted(ends)),
        sampling=fitted(options.sampling, model.facts.vocab_size, suppressed),
        token_output_policy=(
            TokenOutputPolicy.LOGITS if options.sample_on_orchestrator else TokenOutputPolicy.TOKEN_IDS
        ),
        token_count=model.manifest(0, 1).token_count,
        prefill_chunk=options.prefill_chunk,
        bounds=RunBounds(execution=options.token_timeout),
    )


def _uri(name: str, given: str, *, local: bool) -> str:
    """What every node is to open: `name` is the loader's for it, `given` the operator's. Raises UsageError
    for a path that cannot be told to a node."""
    if not os.path.isabs(name):
        return name  # an address is the same everywhere
    uri = name if local else given
    check_text("the model's path", uri)
    return uri


def _check_plan(request: RunRequest, inventory: list[NodeCapacity], output: Output) -> RunPlan:
    """Raises UsageError, before any process starts, for what no plan can be made of. What the nodes of a
    cluster declare of their memory and their workers is known only when they are there."""
    plan = plan_run(
        inventory,
        request.facts,
        source=request.source,
        choices=request.choices(),
        run_id=RunId(1),
        orchestrator=NodeId(0),
        edge_ids=EdgeIdAllocator(),
    )
    if plan.max_tokens < request.max_tokens:
        output.note(
            f"the model's context of {request.facts.context_length} tokens has room for {plan.max_tokens} "
            f"of the {request.max_tokens} tokens asked for"
        )
    return plan


async def _drive(
    make_session: Callable[[], LocalSession | ClusterSession],
    request: RunRequest,
    display: Display,
    side: SideFiles,
    output: Output,
    interrupts: Interrupts,
) -> RunResult:
    """Session up, run, session down; the first Ctrl-C stops the run in order, the second all at once."""
    session = make_session()
    display.stop = side.stop = session.stop_run
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    begun = False

    def first() -> None:
        if begun:
            session.stop_run()
        else:
            main.cancel()

    def second() -> None:
        if isinstance(session, LocalSession):
            session.pool.kill()
        output.restore_terminal()
        os._exit(ExitCode.OPERATOR_STOPPED)

    interrupts.attach(loop, first, second)
    gc.freeze()  # start-up objects live long: do not walk them again on the token path
    try:
        with display:
            async with session:
                begun = True
                return await session.run(request, listener=display, on_logits=side.write_logits)
    except asyncio.CancelledError:
        if interrupts.count:
            raise KeyboardInterrupt from None
        raise


def _finish(result: RunResult, display: Display, side: SideFiles, output: Output) -> ExitCode:
    """The result on stdout, what went wrong on stderr. Raises OutputLost or ResourceError when the run was
    stopped for it."""
    figures = statistics(result)
    try:
        display.finish()
        if output.json_lines:
            output.record(_record(result, figures, display.text))
        output.drain()
    except OutputLost as error:
        display.lost = error
    if result.fault is not None:
        output.error(result.fault.line(), result.fault.remedy)
    elif display.lost is None and (not output.json_lines or output.interactive):
        output.note(summary(figures))
    if result.waited_for:
        output.warning(f"the token was waited for at {result.waited_for}")
    for unproven in result.unproven:
        output.warning(f"not proven at teardown: {unproven}")
    if side.events_error:
        output.warning(side.events_error)
    if result.fault is None:
        if display.lost is not None:
            raise display.lost
        if side.logits_error is not None:
            raise side.logits_error
    if result.outcome is RunOutcome.OPERATOR_STOPPED:
        output.note("stopped by the operator")
    return EXIT_OF[result.outcome]


def _record(result: RunResult, figures: dict[str, Any], text: str) -> dict[str, Any]:
    """The last line of `--json`."""
    record: dict[str, Any] = {
        "type": "result",
        "outcome": str(result.outcome),
        "finish_reason": None if result.finish_reason is None else str(result.finish_reason),
        "token_ids": list(result.token_ids),
        "text": text,
        "stats": figures,
    }
    if result.fault is not None:
        fault = result.fault
        record["fault"] = {
            "reason": str(fault.reason),
            "component": str(fault.component),
            "cause": fault.cause,
            "detail": fault.detail,
            "stage_index": fault.stage_index,
            "node_id": None if fault.node_id is None else node_hex(fault.node_id),
            "node_name": fault.node_name or None,
            "edge_id": fault.edge_id,
            "ring_id": fault.ring_id,
        }
    return record
