"""The worker contract (spec sections 28 to 32): events in order behind the harness, and as a process.

With `setting.py`, `judging.py`, `stages.py` and `device.py` below it; the guarantees are those of
`swactor_core.spi.worker`.
The harness around a backend is the core's; what is tested is that a backend does not make it lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from swactor_core.faults import ReleaseFailure, StepFailure, UninstallReason, WorkerStoppedReason
from swactor_core.ids import INPUT_PORT, DeviceObjectHandle, WorkerGeneration
from swactor_core.machines.worker_effects import ExitCode
from swactor_core.messages import (
    DeviceObjectReleased,
    ExecuteStep,
    ObjectLoaded,
    ObjectProduced,
    ReleaseDeviceObject,
    ReleaseFailed,
    ResetRole,
    RingInstalled,
    RingQuiesced,
    RingWritable,
    RoleConfigured,
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
from swactor_core.specs import RingDirection
from swactor_core.spi.provider import Kind

from swactor_testing.conformance.bounds import same_bytes
from swactor_testing.conformance.setting import SettingsContract
from swactor_testing.conformance.worker_rig import (
    HarnessedStage,
    Stages,
    WorkerFactory,
    stage_of,
    tokens,
)
from swactor_testing.worker_kit import (
    IN_RING,
    OUT_RING,
    ROLE,
    NodeConsumer,
    NodeProducer,
    WorkerProcess,
    configure,
    execute,
    handle,
    record,
)


class WorkerContract(SettingsContract):
    """Everything a worker backend keeps. Heirs give the fixture `plugin`, which is the provider's factory,
    and `capabilities`."""

    kind = Kind.WORKER

    @pytest.fixture
    def stage(self, plugin: WorkerFactory) -> Iterator[HarnessedStage]:
        made = HarnessedStage(plugin, self.capabilities)
        yield made
        for backend in made.backends:
            backend.close()

    def test_it_is_registered_under_its_name(self) -> None:
        """Configuration chooses a provider by kind and name, in the worker process; `in_process` is asked
        before several are put into one."""
        assert self.provider().capabilities.get("in_process", False) == self.capabilities.in_process

    # --- behind the harness ---

    def test_a_run_through_rings_smaller_than_its_objects(self, stage: HarnessedStage) -> None:
        """Section 34: the ring is a transfer window, not object storage; the ids are those of a direct
        run. The node overwrites every byte that was released, and reads every byte that was committed."""
        stage.ready()
        made = stage.generate(self.capabilities.prompt, self.count)
        direct = Stages.of(stage.backends[0], self.capabilities)
        if self.capabilities.deterministic:
            assert direct.generate(self.capabilities.prompt, self.count) == made
        direct.close()

    def test_events_come_in_order(self, stage: HarnessedStage) -> None:
        """Section 30: ready, configured, installed; then of each object loaded, produced, completed,
        released, and nothing twice."""
        stage.ready(capacity=512)
        stage.generate(self.capabilities.prompt, 2)
        kinds = (WorkerReady, RoleConfigured, RingInstalled, ObjectLoaded, ObjectProduced, StepCompleted)
        said = [type(e) for e in stage.worker.events if isinstance(e, (*kinds, DeviceObjectReleased))]
        of_a_step = [ObjectLoaded, ObjectProduced, StepCompleted, DeviceObjectReleased]
        assert said == [WorkerReady, RoleConfigured, RingInstalled, RingInstalled, *of_a_step, *of_a_step]

    def test_a_step_without_a_role_is_refused(self, stage: HarnessedStage) -> None:
        """Section 29: validate that the role is available; one refusal, and the worker goes on."""
        stage.ready()
        stage.worker.send(ResetRole(ROLE))
        stage.until(lambda: stage.worker.said(RoleReset), "RoleReset")
        loaded = stage.load(self.capabilities.prompt, 0)
        stage.worker.send(execute(loaded, 4, position=0))
        (failed,) = stage.worker.said(StepFailed)
        assert failed.reason is StepFailure.ROLE_UNAVAILABLE
        stage.worker.send(configure(stage.config))
        stage.until(lambda: len(stage.worker.said(RoleConfigured)) == 2, "a second RoleConfigured")

    def test_handles_of_another_generation_are_refused(self, stage: HarnessedStage) -> None:
        """Section 39: worker restart invalidates all prior handles; using one is an error and no access."""
        stage.ready()
        loaded = stage.load(self.capabilities.prompt, 0)
        old = DeviceObjectHandle(WorkerGeneration(99), loaded.device_handle.id)
        step: ExecuteStep = execute(replace(loaded, device_handle=old), 4, position=0)
        stage.worker.send(step)
        (failed,) = stage.worker.said(StepFailed)
        assert failed.reason is StepFailure.INVALID_INPUT_HANDLE
        stage.worker.send(ReleaseDeviceObject(old))
        stage.worker.send(ReleaseDeviceObject(handle(12345)))
        reasons = [event.reason for event in stage.worker.said(ReleaseFailed)]
        assert reasons == [ReleaseFailure.STALE_GENERATION, ReleaseFailure.UNKNOWN_HANDLE]

    def test_a_ring_is_quiet_once_it_is_quiesced(self, stage: HarnessedStage) -> None:
        """Section 32: RingQuiesced only when copy lifetimes have ended; from then on the range is somebody
        else's, and no copy, later, reads or writes it."""
        stage.ready(capacity=256)
        arena = stage.worker.arena
        stage.producer.write(record(0, 0, tokens(self.capabilities.prompt))[:-2])
        for ring_id in (IN_RING, OUT_RING):
            stage.worker.send(UninstallRing(ring_id, UninstallReason.EDGE_STOPPED))
        stage.until(lambda: len(stage.worker.said(RingQuiesced)) == 2, "both RingQuiesced")
        assert not stage.worker.harness.copying, "a copy is in flight after RingQuiesced"
        arena.discard(0, arena.ceiling)
        for _ in range(20):
            stage.worker.harness.progress()
        left = bytes(arena.memory[: 1 << 16])
        same_bytes(left, b"\xdd" * len(left), "memory that was released")
        assert not stage.worker.said(ObjectLoaded)

    @pytest.mark.parametrize("mode", list(ShutdownMode))
    def test_a_shutdown_is_answered_once_and_last(self, stage: HarnessedStage, mode: ShutdownMode) -> None:
        """Section 31: rings quiesce, WorkerStopped, exit; nothing after it."""
        stage.ready()
        stage.load(self.capabilities.prompt, 0)
        stage.worker.send(ShutdownWorker(mode))
        stage.until(lambda: stage.worker.said(WorkerStopped), "WorkerStopped")
        assert isinstance(stage.worker.events[-1], WorkerStopped)
        assert len(stage.worker.said(RingQuiesced)) == 2
        assert stage.worker.harness.exit_code is ExitCode.STOPPED

    def test_a_fatal_is_one_fatal(self, stage: HarnessedStage) -> None:
        """Section 31: WorkerFatal, and nothing after it, whatever else comes."""
        stage.ready()
        for _ in range(2):
            stage.worker.initialize(self.capabilities.settings)  # a second time: out of order
        assert [type(event) for event in stage.worker.events].count(WorkerFatal) == 1
        assert isinstance(stage.worker.events[-1], WorkerFatal)
        assert stage.worker.harness.exit_code is ExitCode.FATAL

    def test_two_workers_of_one_process_are_apart(self, plugin: WorkerFactory) -> None:
        """`in_process`: several may live in one process. Two runs, step by step in turn, are each as if
        alone; a backend that says nothing of the kind is never put there."""
        if not self.capabilities.in_process:
            return
        prompts = self.capabilities.prompt, self.capabilities.prompt[::-1]
        alone = [self._generated(plugin, prompt) for prompt in prompts]
        stages = [HarnessedStage(plugin, self.capabilities) for _ in prompts]
        batches, positions = [list(prompt) for prompt in prompts], [0, 0]
        made: list[list[int]] = [[], []]
        for stage in stages:
            stage.ready()
        for step in range(self.count):
            for number, stage in enumerate(stages):
                loaded = stage.load(batches[number], step)
                made[number].append(stage.step(loaded, positions[number], step=step))
                positions[number] += len(batches[number])
                batches[number] = made[number][-1:]
        for stage in stages:
            stage.backends[0].close()
        if self.capabilities.deterministic:
            assert made == alone, "two workers of one process disturb each other"

    def _generated(self, plugin: WorkerFactory, prompt: Sequence[int]) -> list[int]:
        stage = HarnessedStage(plugin, self.capabilities)
        stage.ready(capacity=256)
        made = stage.generate(prompt, self.count)
        stage.backends[0].close()
        return made

    # --- as a process ---

    def test_a_process_runs_the_same(self, plugin: WorkerFactory) -> None:
        """Section 28: one JSON object a line, stdout is reserved for events, the end is in order: a library
        that prints, or leaves a thread behind, is found here."""
        capabilities = self.capabilities
        config = stage_of(capabilities, 0, capabilities.num_layers)
        made: list[int] = []
        with WorkerProcess(capabilities.provider) as worker:
            worker.initialize(capabilities.settings)
            worker.expect(WorkerReady)
            worker.send(configure(config))
            worker.expect(RoleConfigured)
            producer = NodeProducer(
                worker.install(RingDirection.INGRESS, config.input_spec, capacity=64), worker
            )
            consumer = NodeConsumer(
                worker.install(RingDirection.EGRESS, config.output_spec, capacity=64), worker
            )
            batch, position = list(capabilities.prompt), 0
            for step in range(self.count):
                producer.write(record(step, step, tokens(batch)))
                while not worker.said(ObjectLoaded, step + 1):
                    if isinstance(event := worker.next_event(), RingWritable):
                        producer.on_writable(event)
                loaded = worker.said(ObjectLoaded, step + 1)[-1]
                assert loaded.port_id == INPUT_PORT
                worker.send(execute(loaded, 4, position=position, step=step))
                while not worker.said(StepCompleted, step + 1):
                    failed = worker.said(StepFailed, 1)
                    assert not failed, f"step {step}: {failed}"
                    worker.next_event()
                    consumer.read()
                position += len(batch)
                made.append(int.from_bytes(consumer.read()[-4:], "little"))
                batch = made[-1:]
            worker.send(ShutdownWorker(ShutdownMode.GRACEFUL))
            assert worker.expect(WorkerStopped).reason is WorkerStoppedReason.GRACEFUL
            with pytest.raises(EOFError):
                worker.next_event()
            assert worker.exit_code() == ExitCode.STOPPED
        inside = self._generated(plugin, capabilities.prompt)
        if capabilities.deterministic:
            assert made == inside, "the process generates other tokens than the same backend here"
