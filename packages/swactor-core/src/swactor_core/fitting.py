"""Whether the stages of a plan find on this machine what memory they need, before any of them begins.

What nodes declare of their memory is the planner's; here it is what is free now. Pure: the caller measures.
Knows byte counts, no process and no file.
"""

from __future__ import annotations

from collections.abc import Sequence

from swactor_core.errors import UsageError
from swactor_core.memory import StageMemory
from swactor_core.plan import RunPlan
from swactor_core.planner import stage_memory
from swactor_core.spi.loader import ModelFacts
from swactor_core.spi.provider import WorkerMemory

NODE_PROCESS = 42 << 20
"""What a node's own process takes: measured, the same for every model."""


def check_free_memory(
    plan: RunPlan,
    facts: ModelFacts,
    *,
    prefill_chunk: int,
    worker: WorkerMemory | None,
    free: int | None,
    swap: int,
    where: str,
    node_process: int = NODE_PROCESS,
    file_in_memory: bool = False,
) -> str:
    """For a plan whose nodes and their workers are all yet to be started in the `free` bytes of one machine,
    `where` in words, which can page out `swap` bytes more: what is to be said to people, or an empty string.
    `node_process` bytes are a node's own, 0 where it has no process; with `file_in_memory` the model's file
    is memory that is not free already. Raises UsageError where the kernel would end a worker for want of
    memory. Nothing is known, and nothing said, without `free`, of a worker that tells nothing of its memory,
    and of one that computes in a memory of its own."""
    if free is None or worker is None or not worker.process:
        return ""
    held = stage_memory(plan, facts, prefill_chunk=prefill_chunk, workers=[worker] * len(plan.stages))
    nodes = node_process * len(held)
    stages = "1 stage here needs" if len(held) == 1 else f"{len(held)} stages here need"
    if (kept := nodes + sum(stage.kept for stage in held)) > free:
        needed = f"{stages} {kept} bytes ({_parts(held, nodes)}), and {free} bytes of memory are left {where}"
        if kept <= free + swap:
            return f"{needed}: the rest goes to swap, which is slow"
        raise UsageError(
            f"the model does not fit: {needed}" + f", with {swap} of swap" * bool(swap),
            hint="ask for fewer tokens, take a smaller model, free memory or raise the limit; --memory SIZE "
            "says what each node may take, whatever is free",
        )
    total = nodes + sum(stage.total for stage in held)
    if total > free and not file_in_memory:
        return (
            f"{stages} {total} bytes, and {free} bytes of memory are left {where}: "
            "weights that do not stay in memory are read from the file for each token, which is slow"
        )
    return ""


def _parts(held: Sequence[StageMemory], nodes: int) -> str:
    named = {
        "weights": sum(stage.weights for stage in held if not stage.in_file),
        "KV cache": sum(stage.kv for stage in held),
        "scratch": sum(stage.scratch for stage in held),
        "copies of weights": sum(stage.copies for stage in held),
        "processes of workers": sum(stage.process for stage in held),
        "and of nodes": nodes,
    }
    return ", ".join(f"{name} {nbytes}" for name, nbytes in named.items() if nbytes)
