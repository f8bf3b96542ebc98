"""agreement.py: the digest differs with the file and with every shared word of the plan, and only then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from swactor_core.agreement import agreement, bounds_fault, shared_of
from swactor_core.ids import INPUT_PORT, OUTPUT_PORT, EdgeId, NodeId, RoleId, RunId, StageIndex
from swactor_core.messages import (
    InboundEdgeProvision,
    OutboundEdgeProvision,
    ProvisionStage,
    StageModelFacts,
    StageRuntimeFacts,
)
from swactor_core.plan import EdgeKind, GgufSource, SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingSpec

ROWS = ObjectSpec(ObjectKind.ACTIVATION, 64, DTypeFamily.FLOAT, 4, 2)
FILE = "f" * 64


def provision(**changes: Any) -> ProvisionStage:
    told = ProvisionStage(
        run_id=RunId(7),
        stage_index=StageIndex(1),
        stage_count=3,
        gguf_source=GgufSource("/models/m.gguf", FILE),
        layer_start=2,
        layer_end_exclusive=4,
        inbound=InboundEdgeProvision(
            EdgeId(1), EdgeKind.ACTIVATION, NodeId(1), ROWS, RingSpec(4096, RingDirection.INGRESS)
        ),
        outbound=OutboundEdgeProvision(
            EdgeId(2), EdgeKind.ACTIVATION, NodeId(3), ROWS, RingSpec(4096, RingDirection.EGRESS)
        ),
        model=StageModelFacts("m", 6, 2, DTypeFamily.FLOAT, 4, 128),
        runtime=StageRuntimeFacts(RoleId(7), INPUT_PORT, OUTPUT_PORT, None, TokenOutputPolicy.TOKEN_IDS, 32),
        layer_bounds=(0, 2, 4, 6),
    )
    return replace(told, **changes)


def agreed(digest: str = FILE, **changes: Any) -> str:
    return agreement(digest, shared_of(provision(**changes)))


def test_stages_of_one_run_agree() -> None:
    last = provision().runtime
    mine = {
        "stage_index": StageIndex(2),
        "layer_start": 4,
        "layer_end_exclusive": 6,
        "gguf_source": GgufSource("/elsewhere/m.gguf", FILE),
        "runtime": replace(last, sampling=SamplingPolicy(0.7, 1)),
    }
    assert agreed(**mine) == agreed()
    assert len(agreed()) == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": RunId(8)},
        {"layer_bounds": (0, 3, 4, 6)},
        {"model": replace(provision().model, max_seq_len=129)},
        {"model": replace(provision().model, hidden_dim=4)},
        {"model": replace(provision().model, dtype_family=DTypeFamily.UNSIGNED)},
        {"gguf_source": replace(provision().gguf_source, outline="of other files")},
        {"runtime": replace(provision().runtime, prefill_chunk=33)},
        {"runtime": replace(provision().runtime, token_output_policy=TokenOutputPolicy.LOGITS)},
        {"runtime": replace(provision().runtime, weights_in_memory=True)},
    ],
)
def test_another_plan_is_another_digest(changes: dict[str, Any]) -> None:
    assert agreed(**changes) != agreed()


def test_another_file_is_another_digest() -> None:
    assert agreed("e" * 64) != agreed()


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((0, 2, 4, 6), ""),
        ((), ""),
        ((0, 2, 6), "for 3 stages"),
        ((1, 2, 4, 6), "for 3 stages"),
        ((0, 2, 4, 5), "for 3 stages"),
        ((0, 4, 2, 6), "not ascending"),
        ((0, 0, 4, 6), "not ascending"),
        ((0, 3, 4, 6), "where the run's bounds say [3, 4]"),
    ],
)
def test_bounds_are_a_partition_around_this_stage(bounds: tuple[int, ...], words: str) -> None:
    fault = bounds_fault(provision(layer_bounds=bounds))
    assert (words in fault) if words else fault == ""
