"""`swactor-cli plan`: which node would run which layers, over which edges, what it would fetch and hold.

Loads no weight, and of a model on the web fetches nothing but its header.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from swactor_core.config import PluginChoice, choose_plugins, load_cluster_file
from swactor_core.errors import UsageError
from swactor_core.hosting import local_names, nodes_in_process
from swactor_core.ids import NodeId, RunId, node_hex, node_id_of
from swactor_core.memory import StageMemory
from swactor_core.plan import EdgeEndpoint, EdgePlan, GgufSource, RunPlan, StagePlan
from swactor_core.planner import (
    EdgeIdAllocator,
    NodeCapacity,
    RuntimeChoices,
    check_prompt_length,
    plan_run,
    positions_of,
    stage_memory,
)
from swactor_core.plugins import load_plugins
from swactor_core.spi.loader import Model
from swactor_core.spi.provider import Kind, Provider, WorkerMemory
from swactor_core.spi.worker import RoleError
from swactor_core.values import frozen

from swactor_cli.errors import ExitCode
from swactor_cli.models import Room, check_memory_here, open_model
from swactor_cli.output import Output
from swactor_cli.sizes import bytes_text, parse_bytes
from swactor_cli.worker_options import worker_settings

ORCHESTRATOR = "orchestrator"
_WEIGHTS = {"file": "in the model's file", "memory": "in memory, outside of the model's file"}


@frozen
class PlanOptions:
    """The command's options, as given. `prompt_tokens` stands for a prompt of that length."""

    model: str
    nodes: int | None
    cluster: str | None
    max_tokens: int
    prompt_tokens: int
    prefill_chunk: int
    memory: str | None
    device: str | None
    worker_options: tuple[str, ...]
    plugins: dict[str, str | None]


def plan(options: PlanOptions, output: Output) -> ExitCode:
    """Raises UsageError for what `run` would refuse for the same reasons: also for a stage whose worker, with
    these options, would hold more than its node has."""
    file = load_cluster_file(options.cluster) if options.cluster is not None else None
    settings = worker_settings(options.device, options.worker_options)
    if file is None:
        count = 2 if options.nodes is None else options.nodes
        names = {NodeId(index + 1): name for index, name in enumerate(local_names(count))}
        each = None if options.memory is None else parse_bytes(options.memory, option="--memory")
        declared = dict.fromkeys(names, each)
    else:
        ids = [node_id_of(bytes.fromhex(node.public_key)) for node in file.cluster.nodes]
        names = {node_id: node.name for node_id, node in zip(ids, file.cluster.nodes, strict=True)}
        declared = {node_id: node.memory_bytes for node_id, node in zip(ids, file.cluster.nodes, strict=True)}
        settings = file.node.worker | settings
    choice = choose_plugins(file.plugins if file is not None else PluginChoice(), options.plugins)
    plugins = load_plugins(blocked=choice.blocked)
    loader, worker = plugins.select(Kind.LOADER, choice.loader), plugins.select(Kind.WORKER, choice.worker)
    name, model = open_model(loader.make(), options.model, output)
    try:
        check_prompt_length(model.facts, options.prompt_tokens)
        choices = RuntimeChoices(
            prompt=(0,) * options.prompt_tokens,
            max_tokens=options.max_tokens,
            prefill_chunk=options.prefill_chunk,
        )
        extra = _worker_memory(model, worker, choices, settings=settings, output=output)
        room = Room()
        free = room.own if file is None else None  # what is free on other machines, only a run asks
        inventory = tuple(
            NodeCapacity(node_id, memory, extra, names[node_id], free_bytes=free)
            for node_id, memory in declared.items()
        )
        made = plan_run(
            inventory,
            model.facts,
            source=GgufSource(name, model.digest(), model.outline()),
            choices=choices,
            run_id=RunId(1),
            orchestrator=NodeId(0),
            edge_ids=EdgeIdAllocator(),
        )
        if file is None and options.memory is None:
            try:
                check_memory_here(
                    made, model.facts, output,
                    prefill_chunk=options.prefill_chunk, worker=extra, room=room,
                    node_processes=not nodes_in_process(plugins, choice), path=name,
                )  # fmt: skip
            except UsageError as error:  # the plan may be for other machines, or for a later time
                output.warning(f"a run on this machine would be refused: {error.line}")
        record = _record(made, model, inventory, names, options, remote=not os.path.isabs(name))
    finally:
        model.close()
    if output.json_lines:
        output.record(record)
    else:
        _show(record, output)
    return ExitCode.COMPLETED


def _worker_memory(
    model: Model, worker: Provider, choices: RuntimeChoices, *, settings: dict[str, Any], output: Output
) -> WorkerMemory | None:
    """What the stages' worker would hold beside the model's own; a model that it would not run is told."""
    if worker.memory is None:
        return None
    facts, chunk = model.facts, choices.prefill_chunk or 1
    try:
        return worker.memory(
            model.manifest(0, facts.num_layers),
            positions_of(facts, choices),
            prefill_chunk=chunk,
            settings=settings,
        )
    except RoleError as error:
        output.warning(f"the worker {worker.name} would refuse this model: {error.message}")
        return None


def _record(
    plan: RunPlan,
    model: Model,
    inventory: tuple[NodeCapacity, ...],
    names: dict[NodeId, str],
    options: PlanOptions,
    *,
    remote: bool,
) -> dict[str, Any]:
    """The plan in the shape of `--json`; sizes in bytes. `fetch_bytes` is what a node with an empty cache
    fetches: its tensors and the header, nothing of a file that lies on its disk. `need_bytes`, the sum of all
    that a stage holds, counts against the node's memory. `weights` are in the model's `file`, in `memory`
    outside of it, or null where the worker does not say; `weights_predicted`, where a run decides by what is
    free then."""
    workers = [node.worker for node in inventory]
    held = stage_memory(plan, model.facts, prefill_chunk=options.prefill_chunk, workers=workers)
    said = [worker for worker in workers if worker is not None]
    return {
        "type": "plan",
        "model": _model_record(model),
        "prompt_tokens": len(plan.runtime.prompt),
        "max_tokens": plan.max_tokens,
        "max_seq_len": plan.model.max_seq_len,
        "weights": None if not said else "file" if all(stage.in_file for stage in held) else "memory",
        "weights_predicted": any(worker.in_memory is not None for worker in said),
        "stages": [
            _stage_record(stage, model, names[stage.node_id], memory, node.memory_bytes, remote=remote)
            for stage, node, memory in zip(plan.stages, inventory, held, strict=True)
        ],
        "edges": [_edge_record(edge) for edge in plan.edges],
    }


def _model_record(model: Model) -> dict[str, Any]:
    facts = model.facts
    tensors, sizes = Counter[str](), Counter[str]()
    for tensor in model.manifest(0, facts.num_layers).tensors:
        tensors[tensor.type_name] += 1
        sizes[tensor.type_name] += tensor.nbytes
    return {
        "id": facts.model_id,
        "architecture": facts.architecture,
        "num_layers": facts.num_layers,
        "hidden_dim": facts.hidden_dim,
        "vocab_size": facts.vocab_size,
        "context_length": facts.context_length,
        "tied_head": facts.tied_head,
        "file_bytes": facts.file_bytes,
        "header_bytes": facts.header_bytes,
        "tensor_types": [
            {"type": name, "tensors": tensors[name], "bytes": size} for name, size in sizes.most_common()
        ],
    }


def _stage_record(
    stage: StagePlan, model: Model, node: str, held: StageMemory, declared: int | None, *, remote: bool
) -> dict[str, Any]:
    """`held` is what the stage takes of the `declared` bytes of its `node`."""
    weights = sum(t.nbytes for t in model.manifest(stage.layer_start, stage.layer_end_exclusive).tensors)
    return {
        "stage_index": stage.stage_index,
        "node": node,
        "node_id": node_hex(stage.node_id),
        "layer_start": stage.layer_start,
        "layer_end_exclusive": stage.layer_end_exclusive,
        "fetch_bytes": weights + model.facts.header_bytes if remote else 0,
        "weight_bytes": weights,
        "kv_bytes": held.kv,
        "scratch_bytes": held.scratch,
        "copies_bytes": held.copies,
        "process_bytes": held.process,
        "need_bytes": held.total,
        "memory_bytes": declared,
    }


def _edge_record(edge: EdgePlan) -> dict[str, Any]:
    return {
        "edge_id": edge.edge_id,
        "kind": str(edge.kind),
        "producer": _end_name(edge.producer),
        "consumer": _end_name(edge.consumer),
        "object_kind": str(edge.object_spec.kind),
        "row_bytes": edge.object_spec.row_bytes,
        "max_object_bytes": edge.object_spec.max_extent,
        "ring_bytes": edge.ring_capacity,
    }


def _end_name(endpoint: EdgeEndpoint) -> str:
    return ORCHESTRATOR if endpoint.stage_index is None else f"stage {endpoint.stage_index}"


def _show(record: dict[str, Any], output: Output) -> None:
    model = record["model"]
    types = ", ".join(f"{t['tensors']} {t['type']} ({bytes_text(t['bytes'])})" for t in model["tensor_types"])
    head = "tied to the embedding" if model["tied_head"] else "of its own"
    output.text(
        f"{model['id']}: {model['architecture']}, {model['num_layers']} layers of width "
        f"{model['hidden_dim']}, vocabulary {model['vocab_size']}, head {head}\n"
        f"tensors: {types}\n"
        f"context: {record['prompt_tokens']} prompt + at most {record['max_tokens']} new tokens need "
        f"{record['max_seq_len']} of {model['context_length']} places\n"
    )
    if record["weights"] is not None:
        decided = "; a run decides by the memory that is free then" * record["weights_predicted"]
        output.text(f"weights: {_WEIGHTS[record['weights']]}{decided}\n")
    output.text("\n")
    output.table(
        "stages",
        [
            *("stage", "node", "layers", "fetch", "weights", "kv cache", "scratch", "copies", "process"),
            *("needs", "memory"),
        ],
        [
            [
                str(stage["stage_index"]),
                stage["node"],
                f"{stage['layer_start']} to {stage['layer_end_exclusive'] - 1}",
                bytes_text(stage["fetch_bytes"]) if stage["fetch_bytes"] else "-",
                *(
                    bytes_text(stage[name + "_bytes"])
                    for name in ("weight", "kv", "scratch", "copies", "process", "need")
                ),
                "-" if stage["memory_bytes"] is None else bytes_text(stage["memory_bytes"]),
            ]
            for stage in record["stages"]
        ],
    )
    output.text("\n")
    output.table(
        "edges",
        ["kind", "from", "to", "objects", "row", "largest", "ring"],
        [
            [
                edge["kind"],
                edge["producer"],
                edge["consumer"],
                edge["object_kind"],
                bytes_text(edge["row_bytes"]),
                bytes_text(edge["max_object_bytes"]),
                bytes_text(edge["ring_bytes"]),
            ]
            for edge in record["edges"]
        ],
    )
