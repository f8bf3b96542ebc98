"""Worker rigs: a worker harness inside the test, a real worker process, and the node's ends of their rings.

Knows the worker's commands and events. It holds no expectations: a test reads `events` or waits for one.
Every wait is bounded by `WAIT` seconds.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter
from swactor_core.codec import MessageCodec
from swactor_core.ids import (
    INPUT_PORT,
    OUTPUT_PORT,
    DeviceObjectHandle,
    EdgeId,
    ObjectId,
    RingId,
    RoleId,
    Sequence,
    StepId,
    WorkerGeneration,
)
from swactor_core.messages import (
    WORKER_COMMANDS,
    WORKER_EVENTS,
    ConfigureRole,
    ExecuteStep,
    InitializeWorker,
    InputBinding,
    InstallRing,
    ObjectLoaded,
    OutputBinding,
    RingReadable,
    RingWritable,
    StepRuntime,
)
from swactor_core.plan import SamplingPolicy, TokenOutputPolicy
from swactor_core.plugins import load_plugins
from swactor_core.specs import (
    CACHE_LINE,
    RING_HEADER_BYTES,
    DTypeFamily,
    ObjectKind,
    ObjectSpec,
    RingDirection,
    RingLayout,
    align_up,
)
from swactor_core.spi.arena import Arena, ArenaPlugin, Ring
from swactor_core.spi.loader import StageManifest
from swactor_core.spi.provider import Kind
from swactor_core.spi.worker import StageConfig, WorkerBackend
from swactor_core.wire import ObjectHeader
from swactor_core.worker.harness import Harness, Surroundings

from swactor_testing.heap import HeapArena, HeapArenas

WAIT = 30.0
CEILING = 1 << 20
GENERATION = WorkerGeneration(1)
ROLE = RoleId(1)
IN_RING, OUT_RING = RingId(1), RingId(2)
E = TypeVar("E")


def token_spec(rows: int) -> ObjectSpec:
    """Token ids as 32-bit unsigned numbers, at most `rows` of them."""
    return ObjectSpec(ObjectKind.TOKENS, rows * 4, DTypeFamily.UNSIGNED, 4, 1)


def activation_spec(rows: int, hidden_dim: int) -> ObjectSpec:
    """f32 rows [rows, hidden_dim]."""
    return ObjectSpec(ObjectKind.ACTIVATION, rows * hidden_dim * 4, DTypeFamily.FLOAT, 4, hidden_dim)


def logits_spec(vocab_size: int) -> ObjectSpec:
    """One f32 row [vocab_size]."""
    return ObjectSpec(ObjectKind.LOGITS, vocab_size * 4, DTypeFamily.FLOAT, 4, vocab_size)


def stage_config(
    layer_start: int,
    layer_end_exclusive: int,
    *,
    num_layers: int = 4,
    hidden_dim: int = 8,
    vocab_size: int = 101,
    max_context: int = 64,
    policy: TokenOutputPolicy = TokenOutputPolicy.TOKEN_IDS,
) -> StageConfig:
    """A stage without tensors, with the edge specs that its place in the pipeline has."""
    manifest = StageManifest(
        architecture="echo",
        metadata={},
        num_layers=num_layers,
        layer_start=layer_start,
        layer_end_exclusive=layer_end_exclusive,
        hidden_dim=hidden_dim,
        vocab_size=vocab_size,
        token_count=vocab_size,
        tied_head=True,
        tensors=(),
    )
    between = activation_spec(max_context, hidden_dim)
    out = token_spec(1) if policy is TokenOutputPolicy.TOKEN_IDS else logits_spec(vocab_size)
    return StageConfig(
        manifest=manifest,
        max_context=max_context,
        prefill_chunk=max_context,
        input_spec=token_spec(max_context) if manifest.first else between,
        output_spec=out if manifest.last else between,
        sampling=SamplingPolicy(),
        token_output_policy=policy,
    )


def configure(config: StageConfig, role_id: RoleId = ROLE) -> ConfigureRole:
    return ConfigureRole(role_id, TypeAdapter(StageConfig).dump_python(config, mode="json"))


def ring_layout(ring_id: RingId, capacity: int, *, offset: int) -> RingLayout:
    total = align_up(RING_HEADER_BYTES + capacity, 4096)
    data = offset + RING_HEADER_BYTES
    return RingLayout(ring_id, offset, total, offset, data, capacity, CACHE_LINE)


def execute(
    loaded: ObjectLoaded, extent: int, *, position: int, step: int = 0, release: bool = True
) -> ExecuteStep:
    """The step that a stage controller makes of a loaded object; the output goes to `OUT_RING`."""
    return ExecuteStep(
        role_id=ROLE,
        step_id=StepId(step),
        inputs=(InputBinding(loaded.port_id, loaded.object_id, loaded.sequence, loaded.device_handle),),
        outputs=(
            OutputBinding(OUTPUT_PORT, OUT_RING, ObjectId(500 + loaded.sequence), loaded.sequence, extent),
        ),
        runtime=StepRuntime(position),
        release_inputs_after=release,
    )


class _Worker(Protocol):
    def send(self, command: object) -> None: ...


class NodeProducer:
    """The recv pump's end of an ingress ring: takes any number of bytes, commits what has room."""

    def __init__(self, ring: Ring, worker: _Worker) -> None:
        self.ring = ring
        self._worker = worker
        self._waiting = b""

    @property
    def done(self) -> bool:
        """Every byte is committed."""
        return not self._waiting

    def write(self, data: bytes, *, chunk: int = 1 << 20) -> None:
        """Queues `data` and commits what fits, `chunk` bytes at a time."""
        self._waiting += data
        self._commit(chunk)

    def on_writable(self, hint: RingWritable) -> None:
        if hint.ring_id == self.ring.layout.ring_id:
            self.ring.acknowledge_writable()
            self._commit(1 << 20)

    def _commit(self, chunk: int) -> None:
        wanted = False
        while self._waiting and len(span := self.ring.writable_span()):
            count = min(len(span), chunk, len(self._waiting))
            span[:count] = self._waiting[:count]
            self._waiting = self._waiting[count:]
            wanted |= self.ring.advance_commit(count)
        if wanted:
            self._worker.send(RingReadable(self.ring.layout.ring_id))


class NodeConsumer:
    """The send pump's end of an egress ring: collects what the worker committed into `data`."""

    def __init__(self, ring: Ring, worker: _Worker) -> None:
        self.ring = ring
        self._worker = worker
        self.data = b""

    def read(self, *, chunk: int = 1 << 20) -> bytes:
        """Takes all committed bytes, `chunk` at a time, and returns everything collected so far."""
        self.ring.acknowledge_readable()
        wanted = False
        while len(span := self.ring.readable_span()):
            count = min(len(span), chunk)
            self.data += bytes(span[:count])
            wanted |= self.ring.advance_consume(count)
        if wanted:
            self._worker.send(RingWritable(self.ring.layout.ring_id))
        return self.data


class InProcessWorker:
    """A harness on this thread over a heap arena. `events` is everything it has said."""

    def __init__(
        self,
        backend: Callable[[dict[str, Any]], WorkerBackend],
        *,
        should_abort: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plugin = HeapArenas()
        self.arena: HeapArena = self.plugin.create(CEILING)
        self.events: list[Any] = []
        self._next_offset = 0
        self.harness = Harness(
            Surroundings(
                pid=os.getpid(),
                arena=lambda: self.plugin,
                attach=lambda plugin, ceiling: plugin.attach(-1, ceiling),
                backend=backend,
                emit=self.events.append,
                flush=lambda: None,
                should_abort=should_abort,
            )
        )

    def initialize(self, settings: Mapping[str, object] | None = None) -> None:
        self.send(InitializeWorker(GENERATION, CEILING, self.plugin.abi, dict(settings or {})))

    def send(self, command: object) -> None:
        self.harness.take(command)

    def said(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def install(
        self, direction: RingDirection, spec: ObjectSpec, *, capacity: int, ring_id: RingId | None = None
    ) -> Ring:
        """Creates a ring and installs it; returns the node's end."""
        layout = ring_layout(
            ring_id or (IN_RING if direction is RingDirection.INGRESS else OUT_RING),
            capacity,
            offset=self._next_offset,
        )
        self._next_offset += layout.total_len
        ring = self.arena.create_ring(layout)
        self.send(install(layout, direction, spec))
        return ring


def install(layout: RingLayout, direction: RingDirection, spec: ObjectSpec) -> InstallRing:
    port = INPUT_PORT if direction is RingDirection.INGRESS else OUTPUT_PORT
    return InstallRing(layout.ring_id, EdgeId(100 + layout.ring_id), port, direction, layout, spec)


class WorkerProcess:
    """`python -m swactor_core.worker` over pipes with an inherited arena. A context manager that reaps it."""

    def __init__(
        self,
        worker: str = "echo",
        *,
        arena: str = "memfd",
        ceiling: int = CEILING,
        arguments: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.plugin: ArenaPlugin = load_plugins().select(Kind.ARENA, arena).factory()
        self.arena: Arena = self.plugin.create(ceiling)
        self.events: list[Any] = []
        self._commands = MessageCodec(WORKER_COMMANDS)
        self._decoder = MessageCodec(WORKER_EVENTS)
        self._partial = b""
        self._next_offset = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        arena_variables = {"SWACTOR_ARENA_FD": str(self.arena.fd), "SWACTOR_ARENA_BYTES": str(ceiling)}
        #: when the process was started, on `time.perf_counter`
        self.spawned = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swactor_core.worker", "--worker", worker, "--arena", arena, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            pass_fds=(self.arena.fd,),
            env={**os.environ, **arena_variables, **(environment or {})},
            bufsize=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(WAIT)
        self.stdin.close()
        self.stdout.close()
        if error is not None:
            sys.stderr.write(self.log())
        self._log.close()
        self.arena.close()

    def log(self) -> str:
        """What the worker wrote to stderr so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def send(self, command: object) -> None:
        self.write(self._commands.encode(command) + b"\n")

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.stdin.write(view) or 0 :]

    def initialize(self, settings: Mapping[str, object] | None = None) -> None:
        self.send(InitializeWorker(GENERATION, self.arena.ceiling, self.plugin.abi, dict(settings or {})))

    def install(self, direction: RingDirection, spec: ObjectSpec, *, capacity: int) -> Ring:
        """Creates a ring and sends InstallRing; returns the node's end."""
        ring_id = IN_RING if direction is RingDirection.INGRESS else OUT_RING
        layout = ring_layout(ring_id, capacity, offset=self._next_offset)
        self._next_offset += layout.total_len
        ring = self.arena.create_ring(layout)
        self.send(install(layout, direction, spec))
        return ring

    def next_event(self) -> Any:
        """The next event line. Raises EOFError at the end of stdout, TimeoutError after `WAIT` seconds."""
        deadline = time.monotonic() + WAIT
        stdout = select.poll()
        stdout.register(self.stdout, select.POLLIN)
        while b"\n" not in self._partial:
            if not stdout.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise TimeoutError(f"no event for {WAIT} s; stderr: {self.log()}")
            data = os.read(self.stdout.fileno(), 1 << 16)
            if not data:
                raise EOFError(f"the worker closed stdout after {self.events[-3:]}; stderr: {self.log()}")
            self._partial += data
        line, _, self._partial = self._partial.partition(b"\n")
        event = self._decoder.decode(line)
        self.events.append(event)
        return event

    def said(self, kind: type[E], count: int) -> list[E]:
        """The events of this kind that were read so far, once there are `count`; else none."""
        found = [event for event in self.events if isinstance(event, kind)]
        return found if len(found) >= count else []

    def expect(self, kind: type[E]) -> E:
        """Reads events until one of this kind."""
        while True:
            event = self.next_event()
            if isinstance(event, kind):
                return event

    def exit_code(self) -> int:
        """Waits for the end of the process."""
        return self.process.wait(WAIT)


def record(object_id: int, sequence: int, payload: bytes) -> bytes:
    """The bytes of one object record."""
    return ObjectHeader(ObjectId(object_id), Sequence(sequence), len(payload)).encode() + payload


def handle(number: int, generation: int = GENERATION) -> DeviceObjectHandle:
    return DeviceObjectHandle(WorkerGeneration(generation), number)
