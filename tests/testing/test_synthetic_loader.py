"""The synthetic loader: the same model from the same name, a tokenizer that loses nothing, and no file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swactor_core.errors import ModelError
from swactor_core.ids import NodeId, RunId
from swactor_core.plan import GgufSource
from swactor_core.planner import EdgeIdAllocator, NodeCapacity, RuntimeChoices, plan_run
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind
from swactor_testing.synthetic import BEGIN, END, LAYERS, VOCABULARY, SyntheticLoader

LOADER = SyntheticLoader()
MODEL = LOADER.open("demo")


def test_a_name_is_one_model_wherever_it_stands() -> None:
    here, there = LOADER.open(LOADER.resolve("demo")), LOADER.open("/no/such/folder/demo")
    assert here.digest() == there.digest()
    assert here.facts == there.facts
    assert here.tokenizer().encode("ab") == there.tokenizer().encode("ab")
    assert len(here.digest()) == 64


def test_another_name_is_another_model() -> None:
    other = LOADER.open("other")
    assert other.digest() != MODEL.digest()
    assert other.tokenizer().encode("hello") != MODEL.tokenizer().encode("hello")


@given(st.text())
def test_text_comes_back(text: str) -> None:
    tokenizer = MODEL.tokenizer()
    ids = tokenizer.encode(text)
    assert all(0 <= token < BEGIN for token in ids)
    stream = tokenizer.stream()
    assert "".join([*(stream.push(token) for token in ids), stream.finish()]) == text


def test_every_byte_has_a_token_of_its_own() -> None:
    assert len({MODEL.tokenizer().encode(chr(byte))[0] for byte in range(128)}) == 128


def test_a_character_is_never_split() -> None:
    tokenizer = MODEL.tokenizer()
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("€")] == ["", "", "€"]
    stream.push(tokenizer.encode("€")[0])
    assert stream.finish() == "\ufffd"


def test_control_tokens() -> None:
    tokenizer = MODEL.tokenizer()
    assert tokenizer.end_of_generation == {END}
    assert tokenizer.prompt_ids("a") == [BEGIN, *tokenizer.encode("a")]
    assert tokenizer.prompt_ids("") == []
    assert [tokenizer.stream().push(token) for token in (BEGIN, END)] == ["", ""]
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.chat_ids([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("nodes", [1, LAYERS])
def test_its_facts_make_a_plan(nodes: int) -> None:
    plan = plan_run(
        tuple(NodeCapacity(NodeId(index + 1)) for index in range(nodes)),
        MODEL.facts,
        source=GgufSource("demo", MODEL.digest()),
        choices=RuntimeChoices(prompt=(BEGIN, 1), max_tokens=3, end_of_generation=(END,)),
        run_id=RunId(1),
        orchestrator=NodeId(99),
        edge_ids=EdgeIdAllocator(),
    )
    for stage in plan.stages:
        manifest = MODEL.manifest(stage.layer_start, stage.layer_end_exclusive)
        assert (manifest.first, manifest.last) == (
            stage.stage_index == 0,
            stage.stage_index == nodes - 1,
        )
        assert manifest.vocab_size == manifest.token_count == VOCABULARY
        assert manifest.tensors == ()


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 3), (0, LAYERS + 1)])
def test_a_range_outside_is_refused(start: int, end: int) -> None:
    with pytest.raises(ModelError, match=f"of a model of {LAYERS}"):
        MODEL.manifest(start, end)


@pytest.mark.parametrize("name", ["", "/"])
def test_no_name_is_no_model(name: str) -> None:
    with pytest.raises(ModelError, match="names no model"):
        LOADER.resolve(name)


def test_it_is_found_by_name_and_crosses_processes() -> None:
    provider = load_plugins().select(Kind.LOADER, "synthetic")
    assert provider.crosses_processes is True
    assert isinstance(provider.factory(), SyntheticLoader)
