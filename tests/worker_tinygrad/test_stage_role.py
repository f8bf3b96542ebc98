"""The step contract: what a role accepts, refuses, returns and frees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from stage_support import DATA, Pipeline, config_of, manifest_of, reference
from swactor_core.faults import StepFailure
from swactor_core.plan import SamplingPolicy, TokenOutputPolicy
from swactor_core.spi.worker import StepError, StepInput

MODEL = DATA / "llama-gqa.gguf"


def configure(backend: Any, config: Any) -> Any:
    return backend.configure(config, progress=lambda _: None, should_abort=lambda: False)


@pytest.fixture(scope="module")
def whole(backend: Any) -> Iterator[tuple[Any, Any]]:
    config = config_of(manifest_of(MODEL), max_context=16, chunk=4)
    role = configure(backend, config)
    yield config, role
    role.close()


def given(backend: Any, config: Any, ids: list[int]) -> tuple[Any, int]:
    payload = np.asarray(ids, "<u4").tobytes()
    allocation = backend.bridge.alloc_device(config.input_spec, len(payload))
    backend.bridge.host_to_device(memoryview(payload), allocation, 0)
    return allocation, len(payload)


def refused(role: Any, step: StepInput, reason: StepFailure, words: str) -> None:
    with pytest.raises(StepError, match=words) as caught:
        role.execute(step, lambda: False)
    assert caught.value.reason is reason


def test_extents_that_are_no_whole_rows_are_refused(backend: Any, whole: Any) -> None:
    config, role = whole
    allocation, extent = given(backend, config, [1, 2])
    for wrong in (0, 3, extent + 4):
        refused(role, StepInput(allocation, wrong, 0, 0), StepFailure.INVALID_INPUT_HANDLE, "rows of 4 bytes")
    backend.bridge.free_device(allocation)
    refused(
        role, StepInput(allocation, extent, 0, 0), StepFailure.INVALID_INPUT_HANDLE, "live device allocation"
    )
    refused(
        role, StepInput(object(), extent, 0, 0), StepFailure.INVALID_INPUT_HANDLE, "live device allocation"
    )


def test_positions_that_leave_a_gap_or_the_context_are_refused(backend: Any, whole: Any) -> None:
    config, role = whole
    allocation, extent = given(backend, config, [1, 2])
    role.execute(StepInput(allocation, extent, 0, 0), lambda: False)
    refused(
        role, StepInput(allocation, extent, 1, 3), StepFailure.INVALID_INPUT_HANDLE, "position 3 leaves a gap"
    )
    refused(role, StepInput(allocation, extent, 1, -1), StepFailure.INVALID_INPUT_HANDLE, "position -1")
    many, long = given(backend, config, list(range(16)))
    role.execute(StepInput(many, long, 0, 0), lambda: False)
    refused(
        role, StepInput(allocation, 4, 1, 16), StepFailure.INVALID_INPUT_HANDLE, "exceed the context of 16"
    )
    backend.bridge.free_device(many)
    backend.bridge.free_device(allocation)


def test_a_token_outside_the_vocabulary_is_refused(backend: Any, whole: Any) -> None:
    config, role = whole
    allocation, extent = given(backend, config, [1, 160])
    refused(
        role, StepInput(allocation, extent, 0, 0), StepFailure.INVALID_INPUT_HANDLE, "token id 160 is outside"
    )
    backend.bridge.free_device(allocation)


def test_abort_is_asked_between_chunks(backend: Any, whole: Any) -> None:
    config, role = whole
    allocation, extent = given(backend, config, list(range(12)))
    answers = iter([False, False, True])
    with pytest.raises(StepError, match="stopped after 8 of 12 rows") as caught:
        role.execute(StepInput(allocation, extent, 0, 0), lambda: next(answers))
    assert caught.value.reason is StepFailure.WORKER_SHUTTING_DOWN
    backend.bridge.free_device(allocation)


def test_token_ids_are_four_little_endian_bytes(backend: Any, whole: Any) -> None:
    config, role = whole
    expected = reference("llama-gqa")
    allocation, extent = given(backend, config, expected["prompt"][:16])
    made, length = role.execute(StepInput(allocation, extent, 0, 0), lambda: False)
    assert length == 4
    assert made.nbytes >= 4
    backend.bridge.free_device(allocation)


def test_activations_are_rows_of_f32(backend: Any) -> None:
    config = config_of(manifest_of(MODEL, 0, 2), max_context=16, chunk=4)
    role = configure(backend, config)
    allocation, extent = given(backend, config, [4, 5, 6, 7, 8])
    made, length = role.execute(StepInput(allocation, extent, 0, 0), lambda: False)
    assert length == 5 * 64 * 4
    raw = bytearray(length)
    backend.bridge.device_to_host(made, 0, memoryview(raw))
    assert np.isfinite(np.frombuffer(raw, "<f4")).all()
    backend.bridge.free_device(allocation)
    role.close()


def test_nothing_is_left_after_close(backend: Any) -> None:
    before = backend.bridge.live_bytes
    config = config_of(manifest_of(MODEL, 0, 2), max_context=16, chunk=4)
    role = configure(backend, config)
    allocation, extent = given(backend, config, [4])
    step = StepInput(allocation, extent, 0, 0)
    role.execute(step, lambda: False)
    role.close()
    role.close()
    refused(role, step, StepFailure.ROLE_UNAVAILABLE, "closed")
    backend.bridge.free_device(allocation)
    assert backend.bridge.live_bytes == before


def test_a_seed_repeats_and_another_differs(backend: Any) -> None:
    prompt = reference("llama-gqa")["prompt"][:8]
    made = {}
    for label, seed in (("one", 1), ("again", 1), ("two", 2)):
        policy = SamplingPolicy(temperature=1.5, seed=seed)
        pipeline = Pipeline(backend, MODEL, 1, max_context=48, sampling=policy)
        made[label] = pipeline.generate(prompt, 24)
        assert pipeline.generate(prompt, 24) == made[label], "a new prompt restarts the generator"
        pipeline.close()
    assert made["one"] == made["again"]
    assert made["one"] != made["two"]


def test_ids_beyond_the_tokens_are_never_picked(backend: Any) -> None:
    prompt = reference("llama-gqa")["prompt"]
    config = config_of(manifest_of(MODEL, token_count=40), max_context=64)
    role = configure(backend, config)
    allocation, extent = given(backend, config, prompt)
    made, length = role.execute(StepInput(allocation, extent, 0, 0), lambda: False)
    raw = bytearray(length)
    backend.bridge.device_to_host(made, 0, memoryview(raw))
    first = np.asarray(reference("llama-gqa")["first_logits"])
    assert int.from_bytes(raw, "little") == int(np.argmax(first[:40])) != int(np.argmax(first))
    backend.bridge.free_device(allocation)
    role.close()


def test_logits_that_are_not_numbers_fail_the_step(backend: Any) -> None:
    config = config_of(manifest_of(MODEL, 2, 4), max_context=16, chunk=4)
    role = configure(backend, config)
    payload = np.full(64, np.nan, "<f4").tobytes()
    allocation = backend.bridge.alloc_device(config.input_spec, len(payload))
    backend.bridge.host_to_device(memoryview(payload), allocation, 0)
    refused(role, StepInput(allocation, len(payload), 0, 0), StepFailure.TINYGRAD_ERROR, "logits hold nan")
    # and the NaN that it left in the cache does not reach the next run
    finite = np.full(64, 0.5, "<f4").tobytes()
    backend.bridge.host_to_device(memoryview(finite), allocation, 0)
    _, length = role.execute(StepInput(allocation, len(finite), 0, 0), lambda: False)
    assert length == 4
    backend.bridge.free_device(allocation)
    role.close()


def test_logits_travel_when_the_orchestrator_samples(backend: Any) -> None:
    pipeline = Pipeline(backend, MODEL, 2, max_context=64, policy=TokenOutputPolicy.LOGITS)
    expected = reference("llama-gqa")
    payload = pipeline.step(expected["prompt"], 0)
    assert len(payload) == 160 * 4
    assert int(np.argmax(np.frombuffer(payload, "<f4"))) == expected["greedy"][0]
    pipeline.close()


def test_a_full_device_fails_the_step(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(manifest_of(MODEL, 0, 2), max_context=16, chunk=4)
    role = configure(backend, config)
    allocation, extent = given(backend, config, [4, 5])

    def full(nbytes: int) -> Any:
        raise MemoryError(f"{nbytes} bytes cannot be had")

    monkeypatch.setattr(backend.bridge, "allocate", full)
    refused(role, StepInput(allocation, extent, 0, 0), StepFailure.DEVICE_OUT_OF_MEMORY, "512 bytes")
    monkeypatch.undo()
    backend.bridge.free_device(allocation)
    role.close()
