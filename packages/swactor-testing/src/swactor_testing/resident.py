"""What a stage's worker process holds behind a prompt and its answer, by what the pages belong to.

Knows a process's maps as Linux shows them, and how a node drives a worker. It holds no expectations.
"""

from __future__ import annotations

import os
import random
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swactor_core.machines.provisioning import stage_config
from swactor_core.messages import (
    ObjectLoaded,
    ProvisionStage,
    RingReadable,
    RingWritable,
    RoleConfigured,
    RoleFailed,
    StepCompleted,
    StepFailed,
    WorkerFatal,
    WorkerReady,
)
from swactor_core.specs import RingDirection
from swactor_core.spi.loader import StageManifest
from swactor_core.values import frozen

from swactor_testing.worker_kit import (
    NodeConsumer,
    NodeProducer,
    WorkerProcess,
    configure,
    execute,
    record,
)

ARENA_BYTES = 1 << 24


@frozen
class Resident:
    """Bytes in memory: pages of the model's files, of device allocations and rings, of nothing but the
    process, and of libraries. `peak` is the most that all of them ever were."""

    file: int
    buffers: int
    anonymous: int
    libraries: int
    peak: int

    @property
    def total(self) -> int:
        return self.file + self.buffers + self.anonymous + self.libraries


def resident(pid: int, paths: set[str]) -> Resident:
    """What a process holds now; `paths` are the model's files."""
    held = dict.fromkeys(("file", "buffers", "anonymous", "libraries"), 0)
    kind = "anonymous"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := re.match(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)$", line):
            shared = found[1].startswith(("/dev/zero", "/memfd"))
            kind = "file" if found[1] in paths else "buffers" if shared else "libraries"
            kind = kind if found[1].startswith("/") else "anonymous"
        elif found := re.match(r"^Rss: +(\d+) kB", line):
            held[kind] += int(found[1]) << 10
    most = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if most is None:
        raise RuntimeError(f"this system does not say what process {pid} held")
    return Resident(**held, peak=int(most[1]) << 10)


def held_by_stage(
    provision: ProvisionStage,
    manifest: StageManifest,
    settings: Mapping[str, object],
    *,
    worker: str,
    prompt: int,
    tokens: int,
    environment: Mapping[str, str] | None = None,
) -> tuple[Resident, Resident]:
    """What a process of `worker` with this stage holds when it is ready for a role, and behind a prompt of
    `prompt` rows and an answer of `tokens`: random ids, or one random row of activations. Raises
    RuntimeError when it failed."""
    config = stage_config(provision, manifest)
    paths = {os.path.realpath(tensor.path) for tensor in manifest.tensors}
    generator = random.Random(0)  # noqa: S311 - what it gives only has to look like a prompt
    row = struct.pack(
        f"<{manifest.hidden_dim}f", *(generator.gauss(0.0, 1.0) for _ in range(manifest.hidden_dim))
    )
    with WorkerProcess(worker, environment=environment, ceiling=ARENA_BYTES) as process:
        process.initialize(settings)

        def until(*kinds: type) -> Any:
            while not isinstance(event := process.next_event(), kinds):
                if isinstance(event, WorkerFatal | RoleFailed | StepFailed):
                    raise RuntimeError(f"the worker failed: {event}")
            return event

        until(WorkerReady)
        ready = resident(process.process.pid, paths)
        process.send(configure(config))
        until(RoleConfigured)
        inbound, outbound = provision.inbound.ring_spec, provision.outbound.ring_spec
        ingress = process.install(RingDirection.INGRESS, config.input_spec, capacity=inbound.data_capacity)
        egress = process.install(RingDirection.EGRESS, config.output_spec, capacity=outbound.data_capacity)
        producer, consumer = NodeProducer(ingress, process), NodeConsumer(egress, process)
        position = 0
        for step, count in enumerate((prompt, *[1] * (tokens - 1))):
            consumer.data = b""
            if manifest.first:
                payload = struct.pack(f"<{count}I", *generator.choices(range(manifest.vocab_size), k=count))
            else:
                payload = row * count
            extent = config.output_spec.max_extent if manifest.last else count * manifest.hidden_dim * 4
            producer.write(record(step, step, payload))
            while not isinstance(
                event := until(ObjectLoaded, RingReadable, RingWritable, StepCompleted), StepCompleted
            ):
                if isinstance(event, ObjectLoaded):
                    process.send(execute(event, extent, position=position, step=step))
                elif isinstance(event, RingReadable):
                    consumer.read()
                else:
                    producer.on_writable(event)
            position += count
        return ready, resident(process.process.pid, paths)
