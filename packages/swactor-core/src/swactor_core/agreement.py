"""The one digest that all stages of a run agree on before they load (spec sections 12 and 15).

It is of the model's file (header, tensor table, tokenizer, size), of what the loader tells of files that a
stage need not open, and of what of the plan every stage is told. The orchestrator makes it of its own file
and plan; each node makes it again of the file that it has found and the message that it has got, and refuses
to load when they differ. Pure.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from itertools import pairwise

from swactor_core.ids import RunId
from swactor_core.messages import ProvisionStage, StageModelFacts
from swactor_core.plan import TokenOutputPolicy
from swactor_core.values import frozen


@frozen
class Shared:
    """What every stage of a run is told alike. `layer_bounds` are where the stages' layer ranges begin, and
    the number of layers: [stage_count + 1]; `outline` is the model's (`GgufSource`)."""

    run_id: RunId
    layer_bounds: tuple[int, ...]
    model: StageModelFacts
    token_output_policy: TokenOutputPolicy
    prefill_chunk: int
    outline: str = ""
    weights_in_memory: bool = False


def shared_of(provision: ProvisionStage) -> Shared:
    """What a node has been told that all others must have been told too."""
    runtime = provision.runtime
    return Shared(
        provision.run_id,
        provision.layer_bounds,
        provision.model,
        runtime.token_output_policy,
        runtime.prefill_chunk,
        provision.gguf_source.outline,
        runtime.weights_in_memory,
    )


def agreement(model_digest: str, shared: Shared) -> str:
    """64 hexadecimal digits: BLAKE2b over the model's digest and `shared`, as JSON with sorted keys."""
    text = json.dumps({"model_digest": model_digest, **asdict(shared)}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"swactor.run").hexdigest()


def bounds_fault(provision: ProvisionStage) -> str:
    """Why the run's layer ranges, as this node was told them, are no partition with this stage's range in its
    place; empty when they are. A message without bounds, of a plan made by hand, has nothing to check."""
    bounds, index = provision.layer_bounds, provision.stage_index
    if not bounds:
        return ""
    if len(bounds) != provision.stage_count + 1 or bounds[0] != 0 or bounds[-1] != provision.model.num_layers:
        return f"layer bounds {list(bounds)} for {provision.stage_count} stages"
    if any(start >= end for start, end in pairwise(bounds)):
        return f"layer bounds {list(bounds)} are not ascending"
    mine = (provision.layer_start, provision.layer_end_exclusive)
    if bounds[index : index + 2] != mine:
        return f"layers {mine[0]}..{mine[1]} where the run's bounds say {list(bounds[index : index + 2])}"
    return ""
