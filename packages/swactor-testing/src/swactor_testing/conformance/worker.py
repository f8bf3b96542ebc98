"""The worker contract (spec sections 16, 29 to 33): device copies, roles, steps, events, and a process.

The guarantees are those of `swactor_core.spi.worker`. The harness around a backend is the core's; what is
tested is that a backend does not make it lie.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from swactor_core.faults import ReleaseFailure, StepFailure, UninstallReason, WorkerStoppedReason
from swactor_core.ids import INPUT_PORT, DeviceObjectHandle, WorkerGeneration
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
from swactor_core.plan import TokenOutputPolicy
from swactor_core.specs import RingDirection
from swactor_core.spi.provider import Kind
from swactor_core.spi.worker import LoadProgress, RoleError, StepError, StepInput, WorkerBackend
from swactor_core.worker import ExitCode

from swactor_testing.conformance.base import Contract
from swactor_testing.conformance.bounds import same_bytes, seeded
from swactor_testing.conformance.capabilities import WorkerCapabilities
from swactor_testing.conformance.worker_rig import (
    Device,
    HarnessedStage,
    Stages,
    WorkerFactory,
    never,
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
    activation_spec,
    configure,
    execute,
    handle,
    record,
    token_spec,
)

_PHASES = ("weights", "compile", "ready")


class WorkerContract(Contract[WorkerFactory, WorkerCapabilities]):
    """Everything a worker backend keeps. Heirs give the fixture `plugin`, which is the provider's factory,
    and `capabilities`."""

    kind = Kind.WORKER
    count = 5
    """Token ids that a run of these tests generates."""

    @pytest.fixture
    def backend(self, plugin: WorkerFactory) -> Iterator[WorkerBackend]:
        made = plugin(dict(self.capabilities.settings))
        yield made
        made.close()

    @pytest.fixture
    def device(self, backend: WorkerBackend) -> Device:
        return Device(backend.bridge, self.capabilities.copy_polls)

    @pytest.fixture
    def stage(self, plugin: WorkerFactory) -> Iterator[HarnessedStage]:
        made = HarnessedStage(plugin, self.capabilities)
        yield made
        for backend in made.backends:
            backend.close()

    def test_it_is_registered_under_its_name(self) -> None:
        """Configuration chooses a provider by kind and name, in the worker process."""
        assert self.provider().kind is Kind.WORKER

    def test_its_facts_are_small_json(self, backend: WorkerBackend) -> None:
        """`facts`: small JSON facts for WorkerReady; payload bytes are forbidden in JSON (section 28)."""
        assert len(json.dumps(backend.facts())) < 4096

    # --- the device bridge ---

    @pytest.mark.parametrize("seed", range(3))
    def test_bytes_come_back_from_the_device_as_they_went(self, device: Device, seed: int) -> None:
        """Section 33: range copies, in any order. A copy that is said to be complete is: its host memory is
        the caller's again, and is overwritten at once; the ring's bytes are released on this word."""
        random = seeded(seed)
        data = random.randbytes(4 * random.randint(10, 5000))
        allocation = device.bridge.alloc_device(token_spec(len(data) // 4), len(data))
        cuts = sorted({0, len(data), *(random.randrange(len(data)) for _ in range(6))})
        ranges = list(pairwise(cuts))
        random.shuffle(ranges)
        for start, end in ranges:
            device.fill(allocation, data[start:end], start)
        same_bytes(device.read(allocation, len(data)), data, f"seed {seed}: all at once")
        for start, end in ranges:
            same_bytes(device.read(allocation, end - start, start), data[start:end], f"seed {seed}: {start}")
        device.bridge.free_device(allocation)

    def test_allocations_are_apart(self, device: Device) -> None:
        """`alloc_device`: one object's memory is no other's, also after others were freed."""
        spec = activation_spec(8, 16)
        live: dict[int, object] = {}
        for number in range(40):
            live[number] = device.bridge.alloc_device(spec, spec.max_extent)
            device.fill(live[number], bytes([number]) * spec.max_extent)
            if number % 3 == 2:
                device.bridge.free_device(live.pop(number - 1))
        for number, allocation in live.items():
            found = device.read(allocation, spec.max_extent)
            same_bytes(found, bytes([number]) * spec.max_extent, f"object {number}")
            device.bridge.free_device(allocation)

    @pytest.mark.parametrize(("offset", "count"), [(0, 17), (16, 1), (12, 8), (1 << 40, 4)])
    def test_a_copy_outside_an_allocation_is_an_oserror(
        self, device: Device, offset: int, count: int
    ) -> None:
        """`host_to_device`, `device_to_host`: OSError when the copy fails, and nothing was touched."""
        allocation = device.bridge.alloc_device(token_spec(4), 16)
        device.fill(allocation, bytes(range(16)))
        with pytest.raises(OSError, match=r"\S"):
            device.wait(device.bridge.host_to_device(memoryview(bytearray(count)), allocation, offset))
        with pytest.raises(OSError, match=r"\S"):
            device.wait(device.bridge.device_to_host(allocation, offset, memoryview(bytearray(count))))
        same_bytes(device.read(allocation, 16), bytes(range(16)), "after refused copies")
        device.bridge.free_device(allocation)

    def test_a_device_without_room_is_a_memory_error(self, device: Device) -> None:
        """`alloc_device` raises MemoryError when the device is out of memory; it stays usable."""
        rows = 1 << 56
        with pytest.raises(MemoryError):
            device.bridge.alloc_device(token_spec(rows), rows * 4)
        allocation = device.bridge.alloc_device(token_spec(4), 16)
        device.fill(allocation, b"still here: yes!")
        assert device.read(allocation, 16) == b"still here: yes!"
        device.bridge.free_device(allocation)

    # --- roles ---

    def test_progress_runs_through_its_phases_once(self, backend: WorkerBackend) -> None:
        """`LoadProgress`: weights, then compile, then ready, each from little to all of it (section 15)."""
        stages = Stages.of(backend, self.capabilities)
        phases = [report.phase for report in stages.progress]
        assert phases == sorted(phases, key=_PHASES.index), f"phases out of order: {phases}"
        assert phases[-1] == "ready"
        for phase in dict.fromkeys(phases):
            reports = [report for report in stages.progress if report.phase == phase]
            done = [report.done for report in reports]
            assert done == sorted(done), f"{phase} went back: {done}"
            assert all(0 <= report.done <= report.total for report in reports)
            assert reports[-1].done == reports[-1].total, f"{phase} ended at {reports[-1]}"
        stages.close()

    @pytest.mark.parametrize("layers", [(1, 1), (0, 99), (-1, 1)])
    def test_layers_outside_the_model_are_a_role_error(
        self, backend: WorkerBackend, layers: tuple[int, int]
    ) -> None:
        """`configure` checks before it touches a weight, and raises RoleError; the backend lives on."""
        config = stage_of(self.capabilities, 0, 1)
        start, end = layers
        wrong = replace(config.manifest, layer_start=start, layer_end_exclusive=end)
        progress: list[LoadProgress] = []
        with pytest.raises(RoleError, match=r"\d"):
            backend.configure(replace(config, manifest=wrong), progress=progress.append, should_abort=never)
        assert not [report for report in progress if report.done], "weights were touched before the check"
        Stages.of(backend, self.capabilities).close()

    def test_an_abort_ends_a_configure(self, backend: WorkerBackend) -> None:
        """`should_abort` ends a long load: RoleError, and the same backend configures again."""
        config = stage_of(self.capabilities, 0, self.capabilities.num_layers)
        with pytest.raises(RoleError):
            backend.configure(config, progress=lambda report: None, should_abort=lambda: True)
        Stages.of(backend, self.capabilities).close()

    def test_a_role_closes_twice_and_another_takes_its_place(self, backend: WorkerBackend) -> None:
        """`StageRole.close` frees weights and cache; idempotent. A worker outlives many runs: one that ended
        before its first step, too."""
        for _ in range(3):
            stages = Stages.of(backend, self.capabilities)
            stages.close()
            stages.close()

    # --- steps ---

    def test_the_same_prompt_gives_the_same_tokens(self, backend: WorkerBackend) -> None:
        """Section 16: prefill resets the context, so a second run of one role is as the first; greedy
        sampling has no chance in it."""
        stages = Stages.of(backend, self.capabilities)
        first = stages.generate(self.capabilities.prompt, self.count)
        vocabulary = stages.configs[0].manifest.vocab_size
        assert all(0 <= token < vocabulary for token in first), f"{first} outside 0..{vocabulary - 1}"
        expected = list(self.capabilities.expected)[: self.count]
        assert first[: len(expected)] == expected
        if self.capabilities.deterministic:
            assert stages.generate(self.capabilities.prompt, self.count) == first, "the second run differs"
        stages.close()

    def test_a_longer_context_changes_what_comes(self, backend: WorkerBackend) -> None:
        """A step depends on the rows before it: the cache is there, and it is this run's."""
        stages = Stages.of(backend, self.capabilities, policy=TokenOutputPolicy.LOGITS)
        prompt = self.capabilities.prompt
        whole = stages.step(prompt, 0)
        alone = stages.step(prompt[-1:], 0)
        assert whole != alone, "the last token's logits do not depend on the tokens before it"
        stages.close()

    def test_prefill_and_single_steps_agree(self, backend: WorkerBackend) -> None:
        """Section 16: decode continues where prefill ended; a prompt in two objects is the same prompt."""
        stages = Stages.of(backend, self.capabilities)
        prompt = self.capabilities.prompt
        whole = stages.step(prompt, 0)
        stages.step(prompt[:1], 0)
        parts = [stages.step(prompt[at : at + 1], at) for at in range(1, len(prompt))]
        if self.capabilities.deterministic:
            assert parts[-1] == whole, "the same context, filled in steps, gives another token"
        stages.close()

    def test_layers_divided_over_stages_compute_the_same(self, backend: WorkerBackend) -> None:
        """Section 10: each stage executes its layer range; together they are the model."""
        capabilities = self.capabilities
        single = Stages.of(backend, capabilities)
        tokens_of_one = single.generate(capabilities.prompt, self.count)
        single.close()
        cuts = range(1, capabilities.num_layers)
        divided = Stages.of(backend, capabilities, cuts=cuts)
        tokens_of_many = divided.generate(capabilities.prompt, self.count)
        divided.close()
        assert len(tokens_of_many) == self.count
        if capabilities.split_invariant and capabilities.deterministic:
            assert tokens_of_many == tokens_of_one, f"{capabilities.num_layers} stages differ from one"

    def test_logits_on_the_wire_agree_with_sampled_ids(self, backend: WorkerBackend) -> None:
        """Section 10: the plan says whether ids or logits travel; greedily the largest is the id, ties
        to the lowest."""
        ids = Stages.of(backend, self.capabilities)
        token = int.from_bytes(ids.step(self.capabilities.prompt, 0), "little")
        ids.close()
        rows = Stages.of(backend, self.capabilities, policy=TokenOutputPolicy.LOGITS)
        logits = list(memoryview(rows.step(self.capabilities.prompt, 0)).cast("f"))
        rows.close()
        assert len(logits) == rows.configs[-1].manifest.vocab_size
        if self.capabilities.deterministic:
            assert logits.index(max(logits)) == token

    def test_an_output_stays_until_the_next_step(self, backend: WorkerBackend, device: Device) -> None:
        """`execute`: the allocation stays valid until the next `execute` or `close`; the harness copies it in
        pieces while the node is slow, after the input was freed."""
        stages = Stages.of(backend, self.capabilities)
        config, role = stages.configs[0], stages.roles[0]
        data = tokens(self.capabilities.prompt)
        given = device.bridge.alloc_device(config.input_spec, len(data))
        device.fill(given, data)
        made, extent = role.execute(StepInput(given, len(data), 0, 0), never)
        first = device.read(made, extent)
        device.bridge.free_device(given)
        others = [device.bridge.alloc_device(config.input_spec, len(data)) for _ in range(4)]
        for other in others:
            device.fill(other, b"\xaa" * len(data))
        same_bytes(device.read(made, extent), first, "the output, read a second time")
        for other in others:
            device.bridge.free_device(other)
        stages.close()

    def test_a_position_that_leaves_a_gap_fails_the_step_only(self, backend: WorkerBackend) -> None:
        """`execute` raises StepError with a reason; a role that refused a step can start over."""
        stages = Stages.of(backend, self.capabilities)
        good = stages.step(self.capabilities.prompt, 0)
        with pytest.raises(StepError):
            stages.step(self.capabilities.prompt[:1], len(self.capabilities.prompt) + 3)
        again = stages.step(self.capabilities.prompt, 0)
        if self.capabilities.deterministic:
            assert again == good
        stages.close()

    def test_a_context_that_is_full_fails_the_step(self, backend: WorkerBackend) -> None:
        """`max_context` is the rows of the KV cache: nothing is written behind it."""
        stages = Stages.of(backend, self.capabilities)
        prompt, rows = self.capabilities.prompt, self.capabilities.max_context
        full = [prompt[at % len(prompt)] for at in range(rows)]
        stages.step(full, 0)
        with pytest.raises(StepError):
            stages.step(prompt[:1], rows)
        stages.close()

    def test_an_abort_ends_a_step(self, backend: WorkerBackend, device: Device) -> None:
        """`should_abort` is polled between chunks: StepError with the reason WorkerShuttingDown."""
        stages = Stages.of(backend, self.capabilities)
        data = tokens(self.capabilities.prompt)
        given = device.bridge.alloc_device(stages.configs[0].input_spec, len(data))
        device.fill(given, data)
        with pytest.raises(StepError) as caught:
            stages.roles[0].execute(StepInput(given, len(data), 0, 0), lambda: True)
        assert caught.value.reason is StepFailure.WORKER_SHUTTING_DOWN
        device.bridge.free_device(given)
        stages.close()

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
        stage = HarnessedStage(plugin, capabilities)
        stage.ready(capacity=256)
        inside = stage.generate(capabilities.prompt, self.count)
        stage.backends[0].close()
        if capabilities.deterministic:
            assert made == inside, "the process generates other tokens than the same backend here"
