"""Weights: only the stage's own, from the map, with progress, abort and fallbacks."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stage_support import DATA, Pipeline, config_of, manifest_of, reference
from swactor_core.faults import RoleFailure
from swactor_core.spi.worker import LoadProgress, RoleError

MODEL = DATA / "llama-gqa.gguf"


def test_progress_counts_bytes_then_kernels_then_ready(backend: Any) -> None:
    seen: list[LoadProgress] = []
    config = config_of(manifest_of(MODEL, 1, 3))
    backend.configure(config, progress=seen.append, should_abort=lambda: False).close()
    phases = [made.phase for made in seen]
    assert phases == sorted(phases, key=["weights", "compile", "ready"].index)
    weights = [made for made in seen if made.phase == "weights"]
    total = sum(ref.nbytes for ref in config.manifest.tensors)
    assert [made.done for made in weights] == sorted(made.done for made in weights)
    assert (weights[-1].done, weights[-1].total) == (total, total)
    compiled = [made for made in seen if made.phase == "compile"]
    assert compiled[-1].done == compiled[-1].total == len(compiled)
    assert seen[-1] == LoadProgress("ready", 1, 1)


@pytest.mark.parametrize(
    ("asked", "words"), [(0, "loading weights"), (3, "loading weights"), (20, "compiling")]
)
def test_abort_is_asked_between_tensors_and_kernels(backend: Any, asked: int, words: str) -> None:
    count = 0

    def abort() -> bool:
        nonlocal count
        count += 1
        return count > asked

    config = config_of(manifest_of(MODEL, 1, 3))
    with pytest.raises(RoleError, match=words) as caught:
        backend.configure(config, progress=lambda _: None, should_abort=abort)
    assert caught.value.reason is RoleFailure.BACKEND_ERROR


def test_files_are_closed_after_failure_and_after_close(backend: Any, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(MODEL.read_bytes())

    def mapped() -> bool:
        return str(copy) in Path("/proc/self/maps").read_text()

    config = config_of(manifest_of(copy))
    role = backend.configure(config, progress=lambda _: None, should_abort=lambda: False)
    assert mapped()
    role.close()
    gc.collect()
    assert not mapped()
    with pytest.raises(RoleError):
        backend.configure(config, progress=lambda _: None, should_abort=lambda: True)
    gc.collect()
    assert not mapped()
    assert not any(os.path.realpath(f"/proc/self/fd/{fd}") == str(copy) for fd in os.listdir("/proc/self/fd"))


def test_weights_are_the_file_itself(backend: Any) -> None:
    from swactor_worker_tinygrad import internals
    from swactor_worker_tinygrad.weights import WeightFiles

    files = WeightFiles("CPU")
    ref = next(ref for ref in manifest_of(MODEL).tensors if ref.name == "blk.0.attn_q.weight")
    files.open([ref])
    bound = files.bind(ref)
    assert internals.address_of(internals.buffer_of(bound.blob)) == files.stored(ref).ctypes.data
    np.testing.assert_array_equal(
        bound.values().numpy(), files.stored(ref).view(np.float32).reshape(bound.shape)
    )
    del bound
    files.close()
    files.close()


def test_a_misaligned_file_is_copied_and_gives_the_same_ids(either: Any, tmp_path: Path) -> None:
    shifted = tmp_path / "shifted.gguf"
    shifted.write_bytes(b"\0" * 9 + MODEL.read_bytes())
    expected = reference("llama-gqa")
    pipeline = Pipeline(either, MODEL, 1)
    for role in pipeline.roles:
        role.close()
    base = pipeline.configs[0]
    tensors = tuple(replace(ref, path=str(shifted), offset=ref.offset + 9) for ref in base.manifest.tensors)
    config = replace(base, manifest=replace(base.manifest, tensors=tensors))
    pipeline.configs = [config]
    pipeline.roles = [either.configure(config, progress=lambda _: None, should_abort=lambda: False)]
    assert pipeline.generate(expected["prompt"], 6) == expected["greedy"][:6]
    pipeline.close()


def test_a_stage_spread_over_files_reads_each(backend: Any, tmp_path: Path) -> None:
    second = tmp_path / "second.gguf"
    second.write_bytes(MODEL.read_bytes())
    base = config_of(manifest_of(MODEL))
    tensors = tuple(
        replace(ref, path=str(second)) if ref.name.startswith(("blk.2", "blk.3")) else ref
        for ref in base.manifest.tensors
    )
    config = replace(base, manifest=replace(base.manifest, tensors=tensors))
    expected = reference("llama-gqa")
    pipeline = Pipeline(backend, MODEL, 1)
    pipeline.close()
    pipeline.configs = [config]
    pipeline.roles = [backend.configure(config, progress=lambda _: None, should_abort=lambda: False)]
    assert pipeline.generate(expected["prompt"], 6) == expected["greedy"][:6]
    pipeline.close()


def test_a_device_without_memory_is_a_typed_failure(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from swactor_worker_tinygrad import internals

    def full(device: str, nbytes: int) -> Any:
        raise MemoryError(f"{nbytes} bytes cannot be had on {device}")

    monkeypatch.setattr(internals, "new_buffer", full)
    config = config_of(manifest_of(MODEL))
    with pytest.raises(RoleError, match="not enough memory") as caught:
        backend.configure(config, progress=lambda _: None, should_abort=lambda: False)
    assert caught.value.reason is RoleFailure.DEVICE_OUT_OF_MEMORY
    assert "more stages" in caught.value.hint


def test_two_stages_of_one_process_do_not_disturb_each_other(backend: Any) -> None:
    expected = {name: reference(name) for name in ("llama-gqa", "llama-widehead")}
    pipelines = {name: Pipeline(backend, DATA / f"{name}.gguf", 2) for name in expected}
    made = {name: [] for name in expected}
    for name, pipeline in pipelines.items():
        made[name].append(int.from_bytes(pipeline.step(expected[name]["prompt"], 0), "little"))
    for index in range(5):
        for name, pipeline in pipelines.items():
            position = len(expected[name]["prompt"]) + index
            made[name].append(int.from_bytes(pipeline.step(made[name][-1:], position), "little"))
    for name, pipeline in pipelines.items():
        assert made[name] == expected[name]["greedy"][:6]
        pipeline.close()
