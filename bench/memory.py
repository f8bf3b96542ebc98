"""What `swactor-cli plan` says of a stage's memory beside what its worker process holds.

    python bench/memory.py [MODEL] [--nodes N] [--prompt N] [--tokens N] [--chunk N] [--kinds native,graph]

Every stage of the plan is run by a worker of its own, one after the other: a prompt of ids (rows of random
activations on a later stage), then single tokens. "planned" is weights, cache, scratch, copies and process as
the command has them, "held" the resident set behind prompt and answer, "peak" the most that it ever was.
"file", "buffers", "anonymous" and "libraries" are the held set by what the pages belong to: the model, the
device's allocations and the rings, Python's and packed memory, code. "ready" is what was held before any
role. MiB. A worker that is not shown fills the caches on disk first; with `--cold` it fills Python's only.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from kinds import settings_of
from swactor_core.ids import NodeId, RunId
from swactor_core.machines.provisioning import provision_stage
from swactor_core.memory import StageMemory
from swactor_core.plan import GgufSource, RunPlan, StagePlan
from swactor_core.planner import EdgeIdAllocator, NodeCapacity, RuntimeChoices, plan_run, stage_memory
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf.model import GgufModel
from swactor_testing import worker_kit
from swactor_testing.resident import Resident, held_by_stage


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=32, help="rows of one step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", default="native:mapped,native:packed,native:packed:fast,graph")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    worker_kit.WAIT = 300.0  # graphs take long to capture, and to run
    loader = GgufLoader()
    path = options.model if Path(options.model).exists() else loader.resolve(options.model)
    model = loader.open(str(path))
    facts = model.facts
    plan = plan_run(
        [NodeCapacity(NodeId(index + 1)) for index in range(options.nodes)],
        facts,
        source=GgufSource(str(path), model.digest()),
        choices=RuntimeChoices(
            prompt=(0,) * options.prompt, max_tokens=options.tokens, prefill_chunk=options.chunk
        ),
        run_id=RunId(1),
        orchestrator=NodeId(0),
        edge_ids=EdgeIdAllocator(),
    )
    worker = load_plugins().select(Kind.WORKER, "tinygrad")
    assert worker.memory is not None
    whole, places = model.manifest(0, facts.num_layers), plan.model.max_seq_len
    print(f"{Path(path).name}, prompt {options.prompt}, {options.tokens} tokens, chunks of {options.chunk}")
    print(
        "kind                stage  layers weights     kv scratch copies process planned    held        peak"
        "     file  buffers anonymous libraries ready"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
        for kind in options.kinds.split(","):
            settings: dict[str, object] = {**settings_of(kind), "threads": options.threads}
            more = worker.memory(whole, places, prefill_chunk=options.chunk, settings=settings)
            memories = stage_memory(
                plan, facts, prefill_chunk=options.chunk, workers=[more] * len(plan.stages)
            )
            for stage, memory in zip(plan.stages, memories, strict=True):
                ready, held = measured(
                    plan, stage,
                    model=model, options=options, settings=settings, environment=environment, folder=folder,
                )  # fmt: skip
                print(row(kind, stage, memory, ready, held), flush=True)
    model.close()


def measured(
    plan: RunPlan,
    stage: StagePlan,
    *,
    model: GgufModel,
    options: argparse.Namespace,
    settings: dict[str, object],
    environment: dict[str, str],
    folder: str,
) -> tuple[Resident, Resident]:
    """What a worker of this stage holds when it is ready, and behind its last token: of the second of two."""
    manifest = model.manifest(stage.layer_start, stage.layer_end_exclusive)
    provision = provision_stage(plan, stage, prefill_chunk=options.chunk)
    for tokens in (2, options.tokens):
        if options.cold:
            environment["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=folder)
        found = held_by_stage(
            provision, manifest, settings,
            worker="tinygrad", prompt=options.prompt, tokens=tokens, environment=environment,
        )  # fmt: skip
    return found


def row(kind: str, stage: StagePlan, memory: StageMemory, ready: Resident, held: Resident) -> str:
    """A line of the table, in MiB but for how far the plan is off."""
    parts = (memory.weights, memory.kv, memory.scratch, memory.copies, memory.process)
    pages = (held.file, held.buffers, held.anonymous, held.libraries)
    said = " ".join(f"{part / 2**20:7.1f}" for part in (*parts, sum(parts), held.total))
    of_held = " ".join(f"{part / 2**20:8.1f}" for part in pages)
    return (
        f"{kind:19} {stage.stage_index:5} {stage.layer_start:3}-{stage.layer_end_exclusive - 1:<3} {said}"
        f" {sum(parts) / held.total - 1:+5.0%} {held.peak / 2**20:7.1f} {of_held} {ready.total / 2**20:6.1f}"
    )


if __name__ == "__main__":
    main()
