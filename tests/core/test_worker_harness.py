"""The harness inside the test, with the echo backend: runs over split stages, failures of role code, ends."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.errors import ModelError
from swactor_core.faults import (
    RoleFailure,
    StepFailure,
    UninstallReason,
    WorkerFatalReason,
    WorkerStoppedReason,
)
from swactor_core.ids import RingId, RoleId
from swactor_core.machines.worker import WorkerState
from swactor_core.machines.worker_effects import ControlClosed, ExitCode, MalformedCommand
from swactor_core.messages import (
    ConfigureRole,
    DeviceObjectReleased,
    LoadPhase,
    ObjectFailed,
    ObjectLoaded,
    ObjectProduced,
    ResetRole,
    RingFault,
    RingInstalled,
    RingQuiesced,
    RingReadable,
    RingWritable,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    RoleReset,
    ShutdownMode,
    ShutdownWorker,
    StepCompleted,
    StepFailed,
    UninstallRing,
    WorkerFatal,
    WorkerReady,
    WorkerStopped,
)
from swactor_core.plan import TokenOutputPolicy
from swactor_core.specs import OBJECT_HEADER_BYTES, RingDirection
from swactor_core.spi.provider import Kind, Provider
from swactor_core.spi.worker import LoadProgress, RoleError, StageConfig, StepError, StepInput
from swactor_core.worker.steps import PROGRESS_INTERVAL, ProgressReports
from swactor_testing.echo import EchoBackend, EchoRole, reference_tokens
from swactor_testing.worker_kit import (
    GENERATION,
    IN_RING,
    OUT_RING,
    ROLE,
    InProcessWorker,
    NodeConsumer,
    NodeProducer,
    configure,
    execute,
    record,
    ring_layout,
    stage_config,
    token_spec,
)
from swactor_testing.worker_kit import install as install_command

GRACEFUL = ShutdownWorker(ShutdownMode.GRACEFUL)
ABORT = ShutdownWorker(ShutdownMode.ABORT_IN_FLIGHT)
SPLITS = [[(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]]

ECHO = {"numerics": "exact", "kernels": "echo"}  # what its role says of itself


class Stage:
    """One in-process worker with a configured stage and both rings; the node's side is this class."""

    def __init__(
        self,
        layers: tuple[int, int] = (0, 4),
        *,
        capacity: int = 256,
        settings: dict[str, object] | None = None,
        policy: TokenOutputPolicy = TokenOutputPolicy.TOKEN_IDS,
        backend: Callable[[dict[str, Any]], EchoBackend] = EchoBackend,
    ) -> None:
        self.backends: list[EchoBackend] = []

        def create(chosen: dict[str, Any]) -> EchoBackend:
            self.backends.append(backend(chosen))
            return self.backends[-1]

        self.config = stage_config(*layers, policy=policy)
        self.worker = InProcessWorker(create)
        self.worker.initialize(settings)
        self.worker.send(configure(self.config))
        assert self.worker.said(RoleConfigured) == [RoleConfigured(ROLE, ECHO)]
        spec_in, spec_out = self.config.input_spec, self.config.output_spec
        ingress = self.worker.install(RingDirection.INGRESS, spec_in, capacity=capacity)
        egress = self.worker.install(RingDirection.EGRESS, spec_out, capacity=capacity)
        self.producer = NodeProducer(ingress, self.worker)
        self.consumer = NodeConsumer(egress, self.worker)
        self.steps = 0
        self._heard = 0

    @property
    def live(self) -> int:
        """Device allocations that were not freed."""
        return self.backends[-1].bridge.live

    def turn(self) -> bool:
        """Answers what the worker has said since and lets copies finish; False when nothing happened."""
        if self.worker.harness.copying:
            self.worker.harness.progress()
            return True
        if self._heard == len(self.worker.events):
            return False
        event = self.worker.events[self._heard]
        self._heard += 1
        if isinstance(event, RingWritable):
            self.producer.on_writable(event)
        elif isinstance(event, RingReadable):
            self.consumer.read()
        return True

    def settle(self) -> None:
        for _ in range(100_000):
            if not self.turn():
                return
        raise AssertionError("the worker does not come to rest")

    def load(self, payload: bytes, sequence: int = 0) -> ObjectLoaded:
        """Sends one object in and lets everything settle."""
        self.producer.write(record(sequence, sequence, payload))
        self.settle()
        return self.worker.said(ObjectLoaded)[-1]

    def step(self, payload: bytes, sequence: int, position: int, *, release: bool = True) -> bytes:
        """One object through the stage: the output's payload."""
        loaded = self.load(payload, sequence)
        rows = len(payload) // self.config.input_spec.row_bytes
        spec = self.config.output_spec
        extent = spec.row_bytes * (1 if self.config.manifest.last else rows)
        before = len(self.consumer.data)
        self.worker.send(execute(loaded, extent, position=position, step=sequence, release=release))
        self.settle()
        assert len(self.worker.said(StepCompleted)) == self.steps + 1, self.worker.events[-2:]
        self.steps += 1
        return self.consumer.data[before + OBJECT_HEADER_BYTES :]


def tokens(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def generate(stages: list[Stage], prompt: list[int], count: int) -> list[int]:
    batch, position, result = prompt, 0, []
    for sequence in range(count):
        payload = tokens(*batch)
        for stage in stages:
            payload = stage.step(payload, sequence, position)
        position += len(batch)
        batch = [int.from_bytes(payload, "little")]
        result += batch
    return result


@pytest.mark.parametrize("polls", [0, 2])
@pytest.mark.parametrize("capacity", [13, 256])
@pytest.mark.parametrize("split", SPLITS, ids=len)
def test_any_split_generates_the_reference_tokens(
    split: list[tuple[int, int]], capacity: int, polls: int
) -> None:
    stages = [Stage(layers, capacity=capacity, settings={"copy_polls": polls}) for layers in split]
    prompt = [7, 100, 0, 55, 2]
    assert generate(stages, prompt, 5) == reference_tokens(prompt, 5, num_layers=4, vocab_size=101)
    assert [stage.live for stage in stages] == [0] * len(stages)


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=9),
    st.integers(5, 300),
    st.integers(0, 3),
    st.sampled_from(SPLITS),
)
def test_any_prompt_and_ring_generates_the_reference_tokens(
    prompt: list[int], capacity: int, polls: int, split: list[tuple[int, int]]
) -> None:
    stages = [Stage(layers, capacity=capacity, settings={"copy_polls": polls}) for layers in split]
    assert generate(stages, prompt, 3) == reference_tokens(prompt, 3, num_layers=4, vocab_size=101)


def test_logits_travel_when_the_plan_says_so() -> None:
    stage = Stage(policy=TokenOutputPolicy.LOGITS)
    row = struct.unpack("<101f", stage.step(tokens(7, 8), 0, 0))
    assert row.index(max(row)) == reference_tokens([7, 8], 1, num_layers=4, vocab_size=101)[0]


def test_events_of_one_step_come_in_order_and_once() -> None:
    stage = Stage()
    stage.step(tokens(1, 2), 0, 0)
    kinds = [type(event) for event in stage.worker.events if not isinstance(event, RoleProgress)]
    assert kinds == [
        WorkerReady,
        RoleConfigured,
        RingInstalled,
        RingInstalled,
        RingWritable,
        ObjectLoaded,
        RingReadable,
        ObjectProduced,
        StepCompleted,
        DeviceObjectReleased,
    ]
    assert stage.worker.said(StepCompleted)[0].compute_seconds > 0


def test_bytes_committed_before_the_ring_was_installed_are_found() -> None:
    stage = Stage()
    layout = ring_layout(RingId(5), 256, offset=stage.worker.arena.ceiling // 2)
    ring = stage.worker.arena.create_ring(layout)
    producer = NodeProducer(ring, stage.worker)
    producer.write(record(0, 0, tokens(9)))
    assert stage.worker.said(ObjectLoaded) == []
    stage.worker.send(install_command(layout, RingDirection.INGRESS, token_spec(4)))
    assert len(stage.worker.said(ObjectLoaded)) == 1


def test_a_blocked_output_waits_for_the_consumer_and_the_next_step_must_wait() -> None:
    stage = Stage((0, 2), capacity=64)
    loaded = stage.load(tokens(1, 2, 3))
    stage.worker.send(execute(loaded, 96, position=0))
    assert stage.worker.said(StepCompleted) == []
    stage.worker.send(execute(loaded, 96, position=0, step=1))
    (failed,) = stage.worker.said(StepFailed)
    assert (failed.step_id, failed.reason) == (1, StepFailure.ROLE_UNAVAILABLE)
    stage.settle()
    assert len(stage.worker.said(StepCompleted)) == 1
    assert len(stage.consumer.data) == OBJECT_HEADER_BYTES + 96


class Failing(EchoBackend):
    """Raises `error` where `place` says."""

    def __init__(self, settings: dict[str, Any], place: str, error: BaseException) -> None:
        if place == "create":
            raise error
        super().__init__(settings)
        self._place, self._error = place, error

    def facts(self) -> dict[str, Any]:
        if self._place == "facts":
            raise self._error
        return super().facts()

    def configure(self, config: StageConfig, **keywords: Any) -> EchoRole:
        if self._place == "configure":
            raise self._error
        role = super().configure(config, **keywords)
        if self._place == "execute":
            role.execute = self._raise  # type: ignore[method-assign] # a role whose code is broken
        return role

    def _raise(self, step: StepInput, should_abort: Callable[[], bool]) -> tuple[bytearray, int]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ModelError("no such file", hint="give a path"), "no such file (hint: give a path)"),
        (ImportError("no module\nnamed x"), "ImportError: no module named x"),
    ],
)
@pytest.mark.parametrize("place", ["create", "facts"])
def test_a_backend_that_cannot_start_is_fatal(place: str, error: Exception, detail: str) -> None:
    worker = InProcessWorker(lambda settings: Failing(settings, place, error))
    worker.initialize()
    assert worker.events == [WorkerFatal(WorkerFatalReason.BACKEND_INIT_FAILED, detail)]


def test_where_a_factory_is_broken_is_shown_though_its_error_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*, settings: dict[str, Any]) -> Any:
        raise ZeroDivisionError("in a factory")

    provider = Provider(Kind.WORKER, "bad", "of a test", broken)
    worker = InProcessWorker(lambda settings: provider.make(settings=settings))
    worker.initialize()
    (fatal,) = worker.events
    assert isinstance(fatal, WorkerFatal)
    assert "the worker plug-in 'bad' cannot be used: ZeroDivisionError: in a factory" in fatal.detail
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "in broken" in shown
    assert worker.harness.exit_code is ExitCode.FATAL


@pytest.mark.parametrize(
    ("error", "reason", "detail"),
    [
        (
            RoleError(RoleFailure.UNSUPPORTED_TENSOR_TYPE, "IQ1_S", hint="requantise it"),
            RoleFailure.UNSUPPORTED_TENSOR_TYPE,
            "IQ1_S (hint: requantise it)",
        ),
        (MemoryError("12 GiB"), RoleFailure.DEVICE_OUT_OF_MEMORY, "MemoryError: 12 GiB"),
        (ModelError("cut short"), RoleFailure.BACKEND_ERROR, "cut short"),
    ],
)
def test_a_role_that_cannot_be_built_fails_and_another_may_come(
    error: Exception, reason: RoleFailure, detail: str
) -> None:
    backends: list[Failing] = []

    def create(settings: dict[str, Any]) -> Failing:
        backends.append(Failing(settings, "configure", error))
        return backends[-1]

    worker = InProcessWorker(create)
    worker.initialize()
    worker.send(configure(stage_config(0, 4)))
    assert worker.events[-1] == RoleFailed(ROLE, reason, detail)
    backends[0]._place = ""
    worker.send(configure(stage_config(0, 4)))
    assert worker.events[-1] == RoleConfigured(ROLE, ECHO)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"max_context": "many"}, "config.max_context"),
        ({"manifest": {}}, "config.manifest.architecture"),
        ({"token_output_policy": "Words"}, "config.token_output_policy"),
    ],
)
def test_a_config_of_the_wrong_shape_fails_and_names_the_field(change: dict[str, Any], where: str) -> None:
    worker = InProcessWorker(EchoBackend)
    worker.initialize()
    good = configure(stage_config(0, 4))
    worker.send(ConfigureRole(ROLE, {**good.config, **change}))
    (failed,) = worker.said(RoleFailed)
    assert failed.reason is RoleFailure.CONFIG_INVALID
    assert failed.detail.startswith(where)


@pytest.mark.parametrize(
    ("error", "reason", "detail"),
    [
        (StepError(StepFailure.TINYGRAD_ERROR, "no kernel"), StepFailure.TINYGRAD_ERROR, "no kernel"),
        (MemoryError(), StepFailure.DEVICE_OUT_OF_MEMORY, "MemoryError"),
    ],
)
def test_a_step_that_fails_leaves_the_worker_running(
    error: Exception, reason: StepFailure, detail: str
) -> None:
    stage = Stage(backend=lambda settings: Failing(settings, "execute", error))
    stage.worker.send(execute(stage.load(tokens(1)), 4, position=0))
    (failed,) = stage.worker.said(StepFailed)
    assert (failed.reason, failed.detail) == (reason, detail)
    assert stage.consumer.data == b""
    assert stage.worker.harness.state is WorkerState.RUNNING
    stage.worker.send(ResetRole(ROLE))
    assert stage.worker.said(RoleReset) == [RoleReset(ROLE)]
    assert stage.live == 0


def test_an_unexpected_exception_of_role_code_is_fatal(capsys: pytest.CaptureFixture[str]) -> None:
    error = ZeroDivisionError("in a\nkernel")
    stage = Stage(backend=lambda settings: Failing(settings, "execute", error))
    stage.worker.send(execute(stage.load(tokens(1)), 4, position=0))
    fatal = WorkerFatal(WorkerFatalReason.UNHANDLED_EXCEPTION, "ZeroDivisionError: in a kernel")
    assert stage.worker.events[-1] == fatal
    assert stage.worker.harness.exit_code is ExitCode.FATAL
    assert "Traceback" in capsys.readouterr().err


def test_an_exception_while_the_worker_stops_still_gives_an_exit_code() -> None:
    class Stubborn(EchoBackend):
        def close(self) -> None:
            raise RuntimeError("will not close")

    worker = InProcessWorker(Stubborn)
    worker.initialize()
    worker.send(GRACEFUL)
    assert worker.events[-1] == WorkerFatal(
        WorkerFatalReason.UNHANDLED_EXCEPTION, "RuntimeError: will not close"
    )
    assert worker.harness.exit_code is ExitCode.FATAL


def test_role_code_that_returns_another_extent_is_refused() -> None:
    stage = Stage((0, 2))
    stage.worker.send(execute(stage.load(tokens(1, 2)), 32, position=0))
    (failed,) = stage.worker.said(StepFailed)
    assert failed.reason is StepFailure.OUTPUT_EXTENT_INVALID
    assert "returned 64 bytes, the step declares 32" in failed.detail


def test_a_wrong_position_is_a_step_failure_of_the_role() -> None:
    stage = Stage()
    stage.step(tokens(1, 2), 0, 0)
    stage.worker.send(execute(stage.load(tokens(3), 1), 4, position=3, step=1))
    (failed,) = stage.worker.said(StepFailed)
    assert "position 3, but the context holds 2 rows" in failed.detail


def test_reset_releases_everything_and_a_second_run_starts_clean() -> None:
    stage = Stage()
    first = stage.step(tokens(1, 2, 3), 0, 0, release=False)
    assert stage.live == 1
    for ring_id in (IN_RING, OUT_RING):
        stage.worker.send(UninstallRing(ring_id, UninstallReason.EDGE_STOPPED))
    stage.worker.send(ResetRole(ROLE))
    assert stage.live == 0
    assert len(stage.worker.said(DeviceObjectReleased)) == 1
    stage.worker.send(configure(stage_config(0, 4), RoleId(2)))
    assert stage.worker.events[-1] == RoleConfigured(RoleId(2), ECHO)
    assert first == Stage().step(tokens(1, 2, 3), 0, 0)


def test_uninstall_frees_a_half_loaded_object_and_the_handle_is_closed() -> None:
    stage = Stage()
    stage.producer.write(record(0, 0, tokens(1, 2))[:45])
    assert stage.live == 1
    stage.worker.send(UninstallRing(IN_RING, UninstallReason.EDGE_STOPPED))
    assert stage.worker.events[-1] == RingQuiesced(IN_RING)
    assert stage.live == 0
    stage.worker.send(RingReadable(IN_RING))
    stage.worker.send(UninstallRing(IN_RING, UninstallReason.EDGE_STOPPED))
    assert stage.worker.said(RingQuiesced) == [RingQuiesced(IN_RING)] * 2


def test_a_ring_without_header_is_refused_and_can_be_uninstalled() -> None:
    worker = InProcessWorker(EchoBackend)
    worker.initialize()
    layout = ring_layout(IN_RING, 64, offset=0)
    worker.send(install_command(layout, RingDirection.INGRESS, token_spec(4)))
    (fault,) = worker.said(RingFault)
    assert "no ring header" in fault.detail
    worker.send(UninstallRing(IN_RING, UninstallReason.RING_FAULTED))
    assert worker.events[-1] == RingQuiesced(IN_RING)


def test_graceful_shutdown_finishes_a_step_whose_copies_are_in_flight() -> None:
    stage = Stage((0, 2), settings={"copy_polls": 3})
    stage.worker.send(execute(stage.load(tokens(1, 2)), 64, position=0))
    assert stage.worker.harness.copying
    stage.worker.send(GRACEFUL)
    assert stage.worker.harness.exit_code is None
    while stage.worker.harness.exit_code is None:
        stage.worker.harness.progress()
    assert len(stage.worker.said(StepCompleted)) == 1
    assert stage.worker.said(WorkerStopped) == [WorkerStopped(WorkerStoppedReason.GRACEFUL)]
    assert stage.worker.harness.exit_code is ExitCode.STOPPED
    assert stage.live == 0


def test_graceful_shutdown_gives_up_a_step_when_its_copies_end_without_room() -> None:
    stage = Stage((0, 2), capacity=64, settings={"copy_polls": 3})
    stage.worker.send(execute(stage.load(tokens(1, 2)), 64, position=0))
    stage.worker.send(GRACEFUL)
    for _ in range(20):
        if stage.worker.harness.exit_code is None:
            stage.worker.harness.progress()
    (failed,) = stage.worker.said(StepFailed)
    assert failed.reason is StepFailure.WORKER_SHUTTING_DOWN
    assert stage.worker.harness.exit_code is ExitCode.STOPPED


def test_abort_waits_only_for_copies_in_flight() -> None:
    stage = Stage((0, 2), settings={"copy_polls": 3})
    stage.worker.send(execute(stage.load(tokens(1, 2)), 64, position=0))
    stage.worker.send(ABORT)
    (failed,) = stage.worker.said(StepFailed)
    assert failed.reason is StepFailure.WORKER_SHUTTING_DOWN
    assert stage.worker.said(WorkerStopped) == []
    while stage.worker.harness.exit_code is None:
        stage.worker.harness.progress()
    assert stage.worker.said(WorkerStopped) == [WorkerStopped(WorkerStoppedReason.ABORT_IN_FLIGHT)]
    assert len(stage.worker.said(RingQuiesced)) == 2
    assert stage.worker.said(ObjectProduced) == []


def test_a_forbidden_command_is_fatal_and_what_comes_after_is_not_heard() -> None:
    stage = Stage()
    stage.worker.initialize()
    fatal = WorkerFatal(
        WorkerFatalReason.MALFORMED_CONTROL_MESSAGE, "InitializeWorker is not allowed while Running"
    )
    assert stage.worker.events[-1] == fatal
    stage.worker.send(ResetRole(ROLE))
    assert stage.worker.events[-1] == fatal


@pytest.mark.parametrize(
    ("event", "code"),
    [(ControlClosed(), ExitCode.CONTROL_LOST), (MalformedCommand("bad"), ExitCode.FATAL)],
)
def test_what_the_command_stream_says_last_decides_the_exit_code(event: object, code: ExitCode) -> None:
    stage = Stage()
    stage.worker.send(event)
    assert stage.worker.harness.exit_code is code


def test_an_object_that_does_not_fit_the_device_is_reported() -> None:
    stage = Stage(settings={"memory_bytes": 8})
    stage.producer.write(record(0, 0, tokens(1, 2, 3)))
    (failed,) = stage.worker.said(ObjectFailed)
    assert "DeviceAllocationFailed" in failed.reason
    assert stage.worker.said(WorkerReady)[0].worker_generation == GENERATION
    assert OUT_RING in {event.ring_id for event in stage.worker.said(RingInstalled)}


def test_progress_is_limited_but_first_last_and_phases_are_always_told() -> None:
    now = 0.0
    told: list[RoleProgress] = []
    reports = ProgressReports(ROLE, told.append, clock=lambda: now)
    for done in range(1025):
        now = done / 1024
        reports(LoadProgress(LoadPhase.WEIGHTS, done, 1024))
    every = int(PROGRESS_INTERVAL * 1024) + 1
    assert [report.done for report in told] == list(range(0, 1025, every))
    assert told[-1].done != 1024
    for done in range(3):
        reports(LoadProgress(LoadPhase.COMPILE, done, 2))
    reports.finish()
    reports.finish()
    assert [(report.phase, report.done) for report in told[-3:]] == [
        ("weights", 1024),
        ("compile", 0),
        ("compile", 2),
    ]
