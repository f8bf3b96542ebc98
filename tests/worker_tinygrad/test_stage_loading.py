"""Weights: only the stage's own, from the map, with progress, abort and fallbacks."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_support import stored_weights
from stage_support import DATA, Pipeline, config_of, manifest_of, reference
from swactor_core import free_memory
from swactor_core.faults import RoleFailure
from swactor_core.messages import LoadPhase
from swactor_core.plan import TokenOutputPolicy
from swactor_core.spi.worker import LoadProgress, RoleError
from swactor_worker_tinygrad import backend as worker_backend
from swactor_worker_tinygrad import memory, stage_tensors
from swactor_worker_tinygrad.settings import KernelChoice, Numerics, WeightsChoice

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
    assert seen[-1] == LoadProgress(LoadPhase.READY, 1, 1)


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
    bound = files.bind(ref, internals.graph_types())
    assert (
        bound.address
        == internals.address_of(internals.buffer_of(bound.blob))
        == files.stored(ref).ctypes.data
    )
    np.testing.assert_array_equal(
        bound.values().numpy(), files.stored(ref).view(np.float32).reshape(bound.shape)
    )
    del bound
    files.close()
    files.close()


def test_bytes_that_were_let_go_can_be_read_again(backend: Any) -> None:
    from swactor_worker_tinygrad.weights import WeightFiles

    refs = manifest_of(MODEL).tensors
    files = WeightFiles("CPU")
    files.open(refs)
    before = [files.stored(ref).tobytes() for ref in refs]
    for ref in refs:
        files.let_go(ref)
    assert [files.stored(ref).tobytes() for ref in refs] == before
    files.close()


def test_rows_are_read_from_the_file_without_its_map(backend: Any, tmp_path: Path) -> None:
    from swactor_worker_tinygrad.weights import ALIGNMENT, WeightFiles

    path = tmp_path / "model.gguf"
    path.write_bytes((DATA / "llama-tied.gguf").read_bytes())
    table = next(ref for ref in manifest_of(path).tensors if ref.name == "token_embd.weight")
    files = WeightFiles("CPU")
    files.open([table])
    stored = files.stored(table).reshape(table.dims[1], -1)
    ids = np.array([3, 0, table.dims[1] - 1, 3], np.uint32)
    rows = files.read_rows(table, ids)
    assert np.array_equal(rows, stored[ids])
    assert rows.ctypes.data % ALIGNMENT == 0
    del stored
    with path.open("r+b") as file:
        file.truncate(table.offset + table.nbytes - 1)
    with pytest.raises(OSError, match=r"model.gguf ended while it was in use, before row .* of 'token_embd"):
        files.read_rows(table, ids)
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
    from swactor_worker_tinygrad import native_engine

    def full(nbytes: int) -> Any:
        raise MemoryError(f"{nbytes} bytes cannot be had on the host")

    monkeypatch.setattr(native_engine, "HostMemory", full)
    config = config_of(manifest_of(MODEL))
    with pytest.raises(RoleError, match="not enough memory") as caught:
        backend.configure(config, progress=lambda _: None, should_abort=lambda: False)
    assert caught.value.reason is RoleFailure.DEVICE_OUT_OF_MEMORY
    assert "more stages" in caught.value.hint


def test_memory_that_runs_out_while_packing_names_the_option_that_needs_none(
    packed_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own MemoryError says nothing, and the remedy is not the one of a stage that does not pack."""
    from swactor_worker_tinygrad import native_engine

    def full(nbytes: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(native_engine, "large_memory", full)
    path = DATA.parent / "variants" / "gemma3-q8.gguf"
    with pytest.raises(RoleError, match=r"not enough memory for this stage: [a-z]") as caught:
        packed_backend.configure(
            config_of(manifest_of(path)), progress=lambda _: None, should_abort=lambda: False
        )
    assert caught.value.hint.startswith("use the worker option weights=mapped, or use more stages")


def test_a_stage_that_a_control_group_would_not_hold_is_refused_before_a_weight_is_read(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[LoadProgress] = []
    leave(monkeypatch, 1 << 40)
    monkeypatch.setattr(free_memory, "group_rest", lambda: 1000)
    with pytest.raises(RoleError, match="and 1000 bytes are left in this control group") as caught:
        backend.configure(config_of(manifest_of(MODEL)), progress=said.append, should_abort=lambda: False)
    assert caught.value.reason is RoleFailure.DEVICE_OUT_OF_MEMORY
    assert said == []


def leave(monkeypatch: pytest.MonkeyPatch, nbytes: int, *, swap: int = 0) -> None:
    monkeypatch.setattr(free_memory, "machine_rest", lambda: nbytes)
    monkeypatch.setattr(free_memory, "group_rest", lambda: None)
    monkeypatch.setattr(worker_backend, "available_swap", lambda: swap)


def room_of(path: Path) -> tuple[int, int]:
    """What the KV cache of the model takes, and what packing takes out of the file."""
    parameters, tensors = stage_tensors.check_model(manifest_of(path), 64)
    cache = 4 * len(tensors.blocks) * (64 + 8) * (parameters.key_width + parameters.value_width)
    return cache, sum(ref.nbytes for ref in memory.packed_weights(tensors))


@pytest.mark.parametrize("name", ["tiny/qwen3moe", "variants/gemma3-q8", "variants/qwen3moe-q8"])
def test_packed_weights_need_room_and_mapped_ones_do_not(
    packed_backend: Any, graph_backend: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Experts, an embedding that is no head, and what no kernel reads packed stay the file's."""
    path = DATA.parent / f"{name}.gguf"
    cache, packed = room_of(path)
    assert packed < sum(ref.nbytes for ref in manifest_of(path).tensors)
    config = config_of(manifest_of(path))

    def configured(backend: Any) -> Any:
        return backend.configure(config, progress=lambda _: None, should_abort=lambda: False)

    leave(monkeypatch, cache + packed)
    role = configured(packed_backend)
    laid_out = {ref.name for ref in memory.packed_weights(role_tensors(path))}
    assert role.engine.packed_names == laid_out
    role.close()
    leave(monkeypatch, cache + packed - 1)
    with pytest.raises(RoleError, match=f"a KV cache of {cache} bytes" + " and packed" * bool(packed)):
        configured(packed_backend)
    leave(monkeypatch, cache + packed - 1, swap=1)
    configured(packed_backend).close()
    leave(monkeypatch, cache)
    monkeypatch.setattr(
        graph_backend, "settings", replace(graph_backend.settings, weights=WeightsChoice.PACKED)
    )
    configured(graph_backend).close()


def test_auto_needs_room_for_what_the_plan_says(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = DATA.parent / "variants" / "gemma3-q8.gguf"
    cache, packed = room_of(path)
    assert packed
    monkeypatch.setattr(backend, "settings", replace(backend.settings, weights=WeightsChoice.AUTO))

    def configured(*, in_memory: bool) -> Any:
        config = config_of(manifest_of(path), weights_in_memory=in_memory)
        return backend.configure(config, progress=lambda _: None, should_abort=lambda: False)

    leave(monkeypatch, cache + packed - 1)
    configured(in_memory=False).close()
    with pytest.raises(RoleError, match=f"and packed weights of {packed}") as refused:
        configured(in_memory=True)
    assert "weights=mapped" in refused.value.hint
    leave(monkeypatch, cache + packed)
    configured(in_memory=True).close()


def role_tensors(path: Path) -> Any:
    return stage_tensors.check_model(manifest_of(path), 64)[1]


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


def test_block_sizes_are_those_of_gguf(backend: Any) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from swactor_worker_tinygrad import internals
    from swactor_worker_tinygrad.native import TYPES
    from swactor_worker_tinygrad.tensor_types import BLOCKS, GRAPH_TYPES

    for number, sizes in BLOCKS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == sizes
    assert internals.graph_types() == GRAPH_TYPES
    for number, macro in TYPES.items():
        assert macro == f"TYPE_{GGMLQuantizationType(number).name}"


@pytest.mark.parametrize("name", ["IQ4_NL", "IQ3_S", "IQ2_XXS", "IQ1_M", "TQ1_0", "MXFP4", "Q1_0", "F64"])
def test_every_type_is_computed_natively(backend: Any, tmp_path: Path, name: str) -> None:
    """All but F64 from the file as they are."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from swactor_worker_tinygrad.weights import unpack_on_host

    kind = GGMLQuantizationType[name]
    rows = []
    for label in ("stored", "plain"):
        path = tmp_path / f"{label}.gguf"
        writer = GGUFWriter(str(path), "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(256)
        writer.add_feed_forward_length(256)
        writer.add_head_count(4)
        writer.add_layer_norm_rms_eps(1e-5)
        generator = np.random.default_rng(3)
        for vector in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
            writer.add_tensor(vector + ".weight", np.ones(256, np.float32))
        matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        for matrix in ("token_embd", *(f"blk.0.{matrix}" for matrix in matrices)):
            if name == "F64":
                stored = generator.standard_normal((256, 256)).view(np.uint8)
            else:
                _, stored, _ = stored_weights(name, 256, 256, seed=int(generator.integers(100)))
            if label == "stored":
                writer.add_tensor(f"{matrix}.weight", stored, raw_dtype=kind)
            else:
                writer.add_tensor(f"{matrix}.weight", unpack_on_host(stored, int(kind), 256))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        pipeline = Pipeline(backend, path, 1, max_context=8, chunk=4, policy=TokenOutputPolicy.LOGITS)
        (role,) = pipeline.roles
        assert role.facts["kernels"] == "native"
        used = {weight.ggml_type for weight in role.engine._matrices()}
        assert used == ({int(kind)} if label == "stored" and name != "F64" else {0})
        rows.append(np.frombuffer(pipeline.step([1, 20, 3], 0), "<f4"))
        pipeline.close()
    assert rows[0].std() > 0.01
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-4, atol=1e-4 * np.abs(rows[1]).max())


@pytest.mark.parametrize(
    ("setting", "value"), [("kernels", KernelChoice.NATIVE), ("numerics", Numerics.FAST)]
)
def test_native_kernels_are_refused_where_there_are_none(
    backend: Any, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    """By default such a device computes graphs; who asks for what only native kernels do hears why not."""
    wanted = replace(backend.settings, device="CPU:LLVM", **{setting: value})
    monkeypatch.setattr(backend, "settings", wanted)
    with pytest.raises(
        RoleError, match=f"CPU:LLVM has no native kernels, which {setting} = {value}"
    ) as caught:
        backend.configure(config_of(manifest_of(MODEL)), progress=lambda _: None, should_abort=lambda: False)
    assert caught.value.reason is RoleFailure.CONFIG_INVALID
    assert f"leave the worker option {setting} out" in caught.value.hint
