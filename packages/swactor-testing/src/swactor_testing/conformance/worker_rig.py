"""Stages of a worker backend under test: called directly, with objects as bytes, or by its harness.

Knows the worker interface and `worker_kit`. Every wait is bounded by the capabilities' `copy_polls`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from swactor_core.messages import (
    ObjectLoaded,
    RingReadable,
    RingWritable,
    StepCompleted,
    StepFailed,
    WorkerFatal,
)
from swactor_core.plan import SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import OBJECT_HEADER_BYTES, RingDirection
from swactor_core.spi.worker import (
    DeviceBridge,
    LoadProgress,
    StageConfig,
    StageRole,
    StepInput,
    WorkerBackend,
)

from swactor_testing.conformance.capabilities import WorkerCapabilities
from swactor_testing.worker_kit import (
    InProcessWorker,
    NodeConsumer,
    NodeProducer,
    activation_spec,
    configure,
    execute,
    logits_spec,
    record,
    token_spec,
)


class WorkerFactory(Protocol):
    """A provider's factory, called as the runtime calls it: by the argument's name."""

    def __call__(self, *, settings: Mapping[str, object]) -> WorkerBackend: ...


PREFILL_CHUNK = 8


def never() -> bool:
    return False


def tokens(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def stage_of(
    capabilities: WorkerCapabilities,
    layer_start: int,
    layer_end_exclusive: int,
    *,
    policy: TokenOutputPolicy = TokenOutputPolicy.TOKEN_IDS,
) -> StageConfig:
    """The configuration of some layers of the capabilities' model, sampling greedily."""
    manifest, rows = capabilities.manifest(layer_start, layer_end_exclusive), capabilities.max_context
    between = activation_spec(rows, manifest.hidden_dim)
    out = token_spec(1) if policy is TokenOutputPolicy.TOKEN_IDS else logits_spec(manifest.vocab_size)
    return StageConfig(
        manifest=manifest,
        max_context=rows,
        prefill_chunk=PREFILL_CHUNK,
        input_spec=token_spec(rows) if manifest.first else between,
        output_spec=out if manifest.last else between,
        sampling=SamplingPolicy(),
        token_output_policy=policy,
    )


@dataclass(slots=True)
class Device:
    """A bridge, and copies through it that are over when they return."""

    bridge: DeviceBridge
    polls: int

    def wait(self, event: Any) -> None:
        """Raises AssertionError when the copy is never complete."""
        for _ in range(self.polls):
            if self.bridge.copy_event_complete(event):
                return
            time.sleep(0.001)
        raise AssertionError(f"a copy was not complete after {self.polls} questions")

    def fill(self, allocation: Any, data: bytes, offset: int = 0) -> None:
        """Copies `data` to the device; the host memory is overwritten as soon as the copy is complete."""
        source = bytearray(data)
        self.wait(self.bridge.host_to_device(memoryview(source), allocation, offset))
        source[:] = b"\xdd" * len(source)

    def read(self, allocation: Any, count: int, offset: int = 0) -> bytes:
        target = bytearray(b"\xee" * count)
        self.wait(self.bridge.device_to_host(allocation, offset, memoryview(target)))
        return bytes(target)


@dataclass(slots=True)
class Stages:
    """A model over consecutive stages of one backend, driven as the harness drives one."""

    backend: WorkerBackend
    configs: list[StageConfig]
    device: Device
    roles: list[StageRole] = field(default_factory=list)
    progress: list[LoadProgress] = field(default_factory=list)
    _sequence: int = 0

    @classmethod
    def of(
        cls,
        backend: WorkerBackend,
        capabilities: WorkerCapabilities,
        *,
        cuts: Sequence[int] = (),
        policy: TokenOutputPolicy = TokenOutputPolicy.TOKEN_IDS,
    ) -> Stages:
        """Cut before each layer of `cuts`; one stage without."""
        bounds = (0, *cuts, capabilities.num_layers)
        configs = [stage_of(capabilities, *part, policy=policy) for part in pairwise(bounds)]
        made = cls(backend, configs, Device(backend.bridge, capabilities.copy_polls))
        for config in configs:
            made.roles.append(backend.configure(config, progress=made.progress.append, should_abort=never))
        return made

    def step(self, ids: Sequence[int], position: int) -> bytes:
        """The last stage's output for these token ids from `position` on."""
        data = tokens(ids)
        for config, role in zip(self.configs, self.roles, strict=True):
            data = self.run(config, role, data, position)
        self._sequence += 1
        return data

    def run(self, config: StageConfig, role: StageRole, data: bytes, position: int) -> bytes:
        bridge = self.device.bridge
        given = bridge.alloc_device(config.input_spec, len(data))
        try:
            self.device.fill(given, data)
            made, extent = role.execute(StepInput(given, len(data), self._sequence, position), never)
            return self.device.read(made, extent)
        finally:
            bridge.free_device(given)

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Prefill and decode steps: `count` token ids."""
        made = [int.from_bytes(self.step(prompt, 0), "little")]
        while len(made) < count:
            made.append(int.from_bytes(self.step(made[-1:], len(prompt) + len(made) - 1), "little"))
        return made

    def close(self) -> None:
        for role in self.roles:
            role.close()


class HarnessedStage:
    """The whole model behind its harness, with rings that are smaller than its objects."""

    def __init__(self, factory: WorkerFactory, capabilities: WorkerCapabilities) -> None:
        self.capabilities = capabilities
        self.backends: list[WorkerBackend] = []

        def backend(settings: dict[str, Any]) -> WorkerBackend:
            self.backends.append(factory(settings=settings))
            return self.backends[-1]

        self.config = stage_of(capabilities, 0, capabilities.num_layers)
        self.worker = InProcessWorker(backend)
        self.worker.initialize(capabilities.settings)
        self._seen = 0

    def ready(self, *, capacity: int = OBJECT_HEADER_BYTES + 3) -> None:
        """Configures the role and installs both rings."""
        worker = self.worker
        worker.send(configure(self.config))
        into = worker.install(RingDirection.INGRESS, self.config.input_spec, capacity=capacity)
        out = worker.install(RingDirection.EGRESS, self.config.output_spec, capacity=capacity)
        self.producer, self.consumer = NodeProducer(into, worker), NodeConsumer(out, worker)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Carries hints and looks for complete copies until the condition holds. Raises AssertionError."""
        idle = 0
        while idle < self.capabilities.copy_polls:
            fatal = self.worker.said(WorkerFatal)
            assert not fatal, f"waiting for {what}: {fatal}"
            if condition():
                return
            if self._carry():
                idle = 0
                continue
            if not self.worker.harness.copying:
                break  # one thread, no hint under way and no copy: nothing will ever move again
            idle += 1
            time.sleep(0.001)
        raise AssertionError(f"waited in vain for {what}; the last events: {self.worker.events[-4:]}")

    def _carry(self) -> bool:
        events = self.worker.events[self._seen :]
        self._seen += len(events)
        for event in events:
            if isinstance(event, RingWritable):
                self.producer.on_writable(event)
            elif isinstance(event, RingReadable):
                self.consumer.read(chunk=7)
        if self.worker.harness.copying:
            self.worker.harness.progress()
        return bool(events) or len(self.worker.events) > self._seen

    def load(self, ids: Sequence[int], sequence: int) -> ObjectLoaded:
        """Sends token ids through the ring; the loaded object."""
        count = len(self.worker.said(ObjectLoaded)) + 1
        self.producer.write(record(sequence, sequence, tokens(ids)), chunk=5)
        self.until(lambda: len(self.worker.said(ObjectLoaded)) == count, f"ObjectLoaded {sequence}")
        return self.worker.said(ObjectLoaded)[-1]

    def step(self, loaded: ObjectLoaded, position: int, *, step: int) -> int:
        """Executes it; the token id that came out of the ring. Raises AssertionError for a failed step."""
        self.worker.send(execute(loaded, 4, position=position, step=step))
        wanted = (step + 1) * (OBJECT_HEADER_BYTES + 4)

        def produced() -> bool:
            failed = self.worker.said(StepFailed)
            assert not failed, f"step {step}: {failed}"
            return len(self.consumer.data) >= wanted and len(self.worker.said(StepCompleted)) > step

        self.until(produced, f"the output of step {step}")
        assert len(self.consumer.data) == wanted, "more bytes than one record came out"
        return int.from_bytes(self.consumer.data[-4:], "little")

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        made: list[int] = []
        batch, position = list(prompt), 0
        for step in range(count):
            made.append(self.step(self.load(batch, step), position, step=step))
            position += len(batch)
            batch = made[-1:]
        return made
