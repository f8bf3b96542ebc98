"""The echo backend computes what its docstring says, whatever the split, and refuses what it cannot do."""

from __future__ import annotations

import dataclasses
import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.errors import ConfigError
from swactor_core.faults import RoleFailure, StepFailure
from swactor_core.messages import LoadPhase, ObjectLoaded, RoleConfigured, WorkerReady
from swactor_core.plan import TokenOutputPolicy
from swactor_core.plugins import load_plugins
from swactor_core.specs import RingDirection
from swactor_core.spi.provider import Kind
from swactor_core.spi.worker import LoadProgress, RoleError, StageConfig, StepError, StepInput
from swactor_testing.echo import MODULUS, EchoBackend, EchoBridge, EchoRole, LateBridge, reference_tokens
from swactor_testing.worker_kit import (
    NodeProducer,
    WorkerProcess,
    activation_spec,
    configure,
    execute,
    record,
    stage_config,
    token_spec,
)

SPLITS = st.sampled_from([(0, 6), (0, 1, 6), (0, 2, 4, 6), (0, 1, 2, 3, 4, 5, 6)])


def never() -> bool:
    return False


def role(config: StageConfig, progress: list[LoadProgress] | None = None) -> EchoRole:
    seen: list[LoadProgress] = [] if progress is None else progress
    return EchoBackend({}).configure(config, progress=seen.append, should_abort=never)


def run(roles: list[EchoRole], batch: list[int], sequence: int, position: int) -> bytes:
    data = struct.pack(f"<{len(batch)}I", *batch)
    for stage in roles:
        output, extent = stage.execute(StepInput(bytearray(data), len(data), sequence, position), never)
        assert len(output) == extent
        data = bytes(output)
    return data


@settings(deadline=None)
@given(st.lists(st.integers(0, 130), min_size=1, max_size=12), SPLITS, st.integers(2, 131))
def test_every_split_is_the_reference(prompt: list[int], bounds: tuple[int, ...], vocab: int) -> None:
    roles = [
        role(stage_config(start, end, num_layers=6, vocab_size=vocab)) for start, end in pairwise(bounds)
    ]
    batch, position, generated = prompt, 0, []
    for sequence in range(4):
        (token,) = struct.unpack("<I", run(roles, batch, sequence, position))
        position += len(batch)
        batch = [token]
        generated.append(token)
    assert generated == reference_tokens(prompt, 4, num_layers=6, vocab_size=vocab)


def test_the_first_stage_makes_the_documented_rows() -> None:
    rows = struct.unpack("<16f", run([role(stage_config(0, 2))], [4, 9], 0, 0))
    first, second = (4 + 1) * 1, (4 + 1) * 1 + (9 + 1) * 2
    layers = 1 + 2
    assert rows[:8] == tuple((first + j) % MODULUS + layers for j in range(8))
    assert rows[8:] == tuple((second + j) % MODULUS + layers for j in range(8))


def test_the_reference_depends_on_every_token_and_its_position() -> None:
    def first(*prompt: int) -> int:
        return reference_tokens(prompt, 1, num_layers=4, vocab_size=60_000)[0]

    answers = [first(1, 2, 3), first(1, 3, 2), first(2, 3), first(1, 2, 3, 0), first(1, 2, 4), first(0, 2, 7)]
    assert len(set(answers)) == len(answers)


def test_prefill_resets_the_context_and_a_gap_is_refused() -> None:
    stage = [role(stage_config(0, 4))]
    first = run(stage, [1, 2], 0, 0)
    run(stage, [3], 1, 2)
    with pytest.raises(StepError, match="position 9, but the context holds 3 rows") as caught:
        run(stage, [3], 2, 9)
    assert caught.value.reason is StepFailure.TINYGRAD_ERROR
    assert run(stage, [1, 2], 0, 0) == first


def test_the_context_has_an_end() -> None:
    stage = [role(stage_config(0, 4, max_context=3))]
    run(stage, [1, 2, 3], 0, 0)
    with pytest.raises(StepError, match="4 rows, the context has room for 3"):
        run(stage, [1], 1, 3)


def test_logits_have_their_maximum_at_the_token() -> None:
    stage = [role(stage_config(0, 4, policy=TokenOutputPolicy.LOGITS))]
    logits = struct.unpack("<101f", run(stage, [5, 6], 0, 0))
    assert logits.index(max(logits)) == reference_tokens([5, 6], 1, num_layers=4, vocab_size=101)[0]
    assert sorted(logits)[-2] < max(logits)


def test_token_ids_may_have_eight_bytes() -> None:
    config = stage_config(0, 4)
    wide = dataclasses.replace(config, input_spec=dataclasses.replace(config.input_spec, dtype_width_bytes=8))
    stage = role(wide)
    output, _ = stage.execute(StepInput(bytearray(struct.pack("<2Q", 5, 6)), 16, 0, 0), never)
    assert list(struct.unpack("<I", output)) == reference_tokens([5, 6], 1, num_layers=4, vocab_size=101)


def test_progress_counts_layers_and_ends_ready() -> None:
    progress: list[LoadProgress] = []
    role(stage_config(1, 3), progress)
    assert progress == [
        *(LoadProgress(LoadPhase.WEIGHTS, n, 2) for n in range(3)),
        LoadProgress(LoadPhase.READY, 1, 1),
    ]


def test_an_abort_ends_configure_and_execute() -> None:
    with pytest.raises(RoleError, match="aborted"):
        EchoBackend({"hold": "configure"}).configure(
            stage_config(0, 4), progress=lambda report: None, should_abort=lambda: True
        )
    stage = role(stage_config(0, 4))
    with pytest.raises(StepError) as caught:
        stage.execute(StepInput(bytearray(4), 4, 0, 0), lambda: True)
    assert caught.value.reason is StepFailure.WORKER_SHUTTING_DOWN


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (stage_config(2, 2), "layers 2..2 of 4"),
        (stage_config(3, 5), "layers 3..5 of 4"),
        (stage_config(0, 6000, num_layers=6000), "6000 layers leave"),
        (
            dataclasses.replace(
                stage_config(0, 4), input_spec=dataclasses.replace(token_spec(4), dtype_width_bytes=2)
            ),
            "echo has no 2-byte Unsigned",
        ),
    ],
)
def test_a_config_it_cannot_do_is_refused(config: StageConfig, text: str) -> None:
    with pytest.raises(RoleError, match=text) as caught:
        role(config)
    assert caught.value.reason is RoleFailure.CONFIG_INVALID


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"speed": 1}, "no setting 'speed'"),
        ({"memory_bytes": "lots"}, "memory_bytes is 'lots'"),
        ({"copy_polls": -1}, "copy_polls is -1"),
        ({"hold": "everything"}, "hold is 'everything'"),
    ],
)
def test_a_wrong_setting_is_named(chosen: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EchoBackend(chosen)


def test_device_memory_is_counted_and_copies_stay_inside() -> None:
    bridge = EchoBridge(10)
    allocation = bridge.alloc_device(token_spec(4), 8)
    with pytest.raises(MemoryError, match="2 bytes left, asked for 4"):
        bridge.alloc_device(token_spec(4), 4)
    for call in (
        lambda: bridge.host_to_device(memoryview(bytes(4)), allocation, 5),
        lambda: bridge.device_to_host(allocation, 5, memoryview(bytearray(4))),
    ):
        with pytest.raises(OSError, match="copy of 4 bytes"):
            call()
    bridge.free_device(allocation)
    assert bridge.live == 0
    bridge.free_device(bridge.alloc_device(token_spec(4), 10))


def test_a_late_copy_shows_what_was_released_too_early() -> None:
    bridge = LateBridge(64, polls=1)
    allocation = bridge.alloc_device(token_spec(4), 4)
    source = bytearray(b"data")
    event = bridge.host_to_device(memoryview(source), allocation, 0)
    assert not bridge.copy_event_complete(event)
    assert bytes(allocation) == bytes(4)
    source[:] = b"lost"
    assert bridge.copy_event_complete(event)
    assert bytes(allocation) == b"lost"
    with pytest.raises(OSError, match="copy of 8 bytes into 4"):
        bridge.host_to_device(memoryview(bytes(8)), allocation, 0)


def test_the_plugin_registers_both_mocks() -> None:
    plugins = load_plugins(only=["swactor-testing"])
    assert plugins.select(Kind.ARENA, "heap").factory().abi == HEAP_ABI
    assert plugins.select(Kind.WORKER, "echo").factory(settings={}).facts()["device"] == "echo"


HEAP_ABI = 1


# --- faults by script ---


@pytest.mark.parametrize(("layer", "hit"), [(None, True), (0, True), (1, True), (2, False)])
def test_a_step_fails_where_the_settings_say(layer: int | None, hit: bool) -> None:
    where = {} if layer is None else {"fault_layer": layer}
    backend = EchoBackend({"fail_at": 1, **where})
    role = backend.configure(stage_config(0, 2), progress=lambda _: None, should_abort=lambda: False)
    for sequence in range(3):
        step = StepInput(bytearray(4), 4, sequence, sequence)
        if hit and sequence == 1:
            with pytest.raises(StepError, match="fail_at") as failed:
                role.execute(step, lambda: False)
            assert failed.value.reason is StepFailure.TINYGRAD_ERROR
            return
        role.execute(step, lambda: False)
    assert not hit


def test_a_worker_ends_where_the_settings_say() -> None:
    backend = EchoBackend({"exit_at": 0})
    role = backend.configure(stage_config(0, 2), progress=lambda _: None, should_abort=lambda: False)
    with pytest.raises(SystemExit) as end:
        role.execute(StepInput(bytearray(4), 4, 0, 0), lambda: False)
    assert end.value.code == 7


def test_a_copy_fails_where_the_settings_say() -> None:
    bridge = EchoBackend({"fail_copy": 2}).bridge
    allocation = bridge.alloc_device(token_spec(1), 4)
    bridge.host_to_device(memoryview(b"abcd"), allocation, 0)
    with pytest.raises(OSError, match="copy 2 failed"):
        bridge.device_to_host(allocation, 0, memoryview(bytearray(4)))
    bridge.host_to_device(memoryview(b"abcd"), allocation, 0)


def test_a_worker_process_ends_where_the_settings_say() -> None:
    """The same setting in a process of its own: it is that process's end."""
    with WorkerProcess() as worker:
        worker.initialize({"exit_at": 0})
        worker.expect(WorkerReady)
        producer = NodeProducer(worker.install(RingDirection.INGRESS, token_spec(4), capacity=256), worker)
        worker.install(RingDirection.EGRESS, activation_spec(4, 8), capacity=1024)
        worker.send(configure(stage_config(0, 2)))
        worker.expect(RoleConfigured)
        producer.write(record(1, 0, bytes(4)))
        worker.send(execute(worker.expect(ObjectLoaded), 32, position=0))
        assert worker.exit_code() == 7
