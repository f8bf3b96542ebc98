"""What a node refuses before a stage loads: another file, another understanding of the plan, bad bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from swactor_core.agreement import agreement, shared_of
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_core.ids import INPUT_PORT, OUTPUT_PORT, EdgeId, NodeId, RoleId, RunId, StageIndex, node_hex
from swactor_core.messages import (
    InboundEdgeProvision,
    OutboundEdgeProvision,
    ProvisionStage,
    StageFault,
    StageModelFacts,
    StageRuntimeFacts,
)
from swactor_core.node.stage_host import StageHost
from swactor_core.observe.bus import EventBus
from swactor_core.plan import EdgeKind, GgufSource, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec, RingDirection, RingSpec
from swactor_testing.synthetic import SyntheticLoader

NODE = NodeId(0xABC)
ROWS = ObjectSpec(ObjectKind.ACTIVATION, 64, DTypeFamily.FLOAT, 4, 2)
LOADER = SyntheticLoader()
FACTS = LOADER.open("demo").facts
DIGEST = LOADER.open("demo").digest()


def provision(**changes: Any) -> ProvisionStage:
    told = ProvisionStage(
        run_id=RunId(7),
        stage_index=StageIndex(0),
        stage_count=2,
        gguf_source=GgufSource("https://host.test/demo?signature=s", DIGEST),
        layer_start=0,
        layer_end_exclusive=1,
        inbound=InboundEdgeProvision(
            EdgeId(1), EdgeKind.TOKEN_IN, NodeId(1), ROWS, RingSpec(4096, RingDirection.INGRESS)
        ),
        outbound=OutboundEdgeProvision(
            EdgeId(2), EdgeKind.ACTIVATION, NodeId(3), ROWS, RingSpec(4096, RingDirection.EGRESS)
        ),
        model=StageModelFacts("demo", FACTS.num_layers, FACTS.hidden_dim, DTypeFamily.FLOAT, 4, 128),
        runtime=StageRuntimeFacts(RoleId(7), INPUT_PORT, OUTPUT_PORT, None, TokenOutputPolicy.TOKEN_IDS, 32),
        layer_bounds=(0, 1, FACTS.num_layers),
    )
    told = replace(told, agreement=agreement(DIGEST, shared_of(told)))
    return replace(told, **changes)


class OneModel(SyntheticLoader):
    """The synthetic model `demo` under every name."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def open(self, name: str, progress: Any = None, *, outline: str = "") -> Any:
        self.told.append(outline)
        return super().open("demo", progress)


@pytest.fixture
def sent() -> list[object]:
    return []


@pytest.fixture
def host(sent: list[object]) -> StageHost:
    return StageHost(
        None,  # type: ignore[arg-type]  # no actor is started by what is asked here
        EventBus(NODE),
        node_id=NODE,
        data_plane=None,  # type: ignore[arg-type]  # nor an edge
        loader=OneModel(),
        to_orchestrator=sent.append,
        on_stopped=lambda: None,
    )


def refused(host: StageHost, told: ProvisionStage) -> ModelError:
    with pytest.raises(ModelError) as caught:
        host._stage_config(told, lambda done, total: None)
    assert caught.value.hint
    return caught.value


def test_the_same_file_and_plan_are_configured(host: StageHost) -> None:
    config, _ = host._stage_config(provision(), lambda done, total: None)
    assert config["manifest"]["layer_end_exclusive"] == 1


def test_another_file_is_refused_with_both_digests_and_the_node(host: StageHost) -> None:
    error = refused(host, provision(gguf_source=GgufSource("https://host.test/demo?signature=s", "b" * 64)))
    assert error.cause is ModelFailure.DIFFERENT_FILE
    for said in (DIGEST, "b" * 64, node_hex(NODE), "'https://host.test/demo'"):
        assert said in error.message
    assert "signature" not in error.message


def test_another_understanding_of_the_plan_is_refused(host: StageHost) -> None:
    told = provision()
    error = refused(host, replace(told, model=replace(told.model, max_seq_len=129)))
    assert error.cause is ModelFailure.PLAN_DIFFERS
    assert told.agreement in error.message


def test_the_loader_is_told_of_files_that_it_need_not_open(host: StageHost) -> None:
    """And every stage of a run is told the same, or none loads."""
    told = provision()
    source = replace(told.gguf_source, outline="of other files")
    error = refused(host, replace(told, gguf_source=source))
    assert error.cause is ModelFailure.PLAN_DIFFERS
    told = replace(told, gguf_source=source)
    host._stage_config(replace(told, agreement=agreement(DIGEST, shared_of(told))), lambda done, total: None)
    host._stage_config(provision(), lambda done, total: None)
    loader = host._loader
    assert isinstance(loader, OneModel)
    assert loader.told == ["of other files", "of other files", ""]


def test_bounds_that_are_no_partition_are_refused_before_anything_starts(
    host: StageHost, sent: list[object]
) -> None:
    host.provision(provision(layer_bounds=(0, 2, FACTS.num_layers)))
    fault = sent[0]
    assert isinstance(fault, StageFault)
    assert "where the run's bounds say [0, 2]" in fault.fault.detail
    assert not host.active
