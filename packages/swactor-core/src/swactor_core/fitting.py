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
    swap: int = 0,
    where: str,
) -> str:
    """For a plan whose nodes and their workers are all yet to be started in the `free` bytes of one machine,
    `where` in words: what is to be said to people, or an empty string. Raises UsageError where the kernel
    would end a worker for want of memory, of which it pages out `swap` bytes first. Nothing is known, and
    nothing said, without `free`, of a worker that tells nothing of its memory, and of one that computes in a
    memory of its own."""
    if free is None or worker is None or not worker.process:
        return ""
    held = stage_memory(plan, facts, prefill_chunk=prefill_chunk, workers=[worker] * len(plan.stages))
    nodes = NODE_PROCESS * len(held)
    if (kept := nodes + sum(stage.kept for stage in held)) > free + swap:
        raise UsageError(
            f"the model does not fit: {len(held)} stages here need {kept} bytes ({_parts(held, nodes)}), and "
            f"{free} bytes of memory are left {where}",
            hint="ask for fewer tokens, take a smaller model, free memory or raise the limit; --memory SIZE "
            "says what each node may take, whatever is free",
        )
    if (total := nodes + sum(stage.total for stage in held)) > free:
        return (
            f"{len(held)} stages here need {total} bytes, and {free} bytes of memory are left {where}: "
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
