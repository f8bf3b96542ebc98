"""What a start costs by part, how prefill compares with decode, what a stage holds: real worker processes.

    python bench/load.py [MODEL] [--prompt N] [--tokens N] [--chunk N] [--repeats R] [--kinds native,graph]

A worker is spawned `--repeats` times for each kind, after one that fills the caches on disk (compiled
kernels, and Python's bytecode, which goes to a folder of this program's own). Figures are medians.
"libraries" is from spawn to WorkerReady: the interpreter and its imports, for graphs tinygrad's device too;
"weights" and "compile" are the two halves of ConfigureRole, divided at the first compiled kernel; "prompt" is
the first one, until its token. "floor" is reading the stage's bytes from the file plus one prompt when
everything is warm; "of floor" is the whole start over it, "role" the same without "libraries". "held" is what
the worker's resident memory grew by since WorkerReady, over the bytes of its weights and KV cache. "times
graph" is tokens per second over those of tinygrad's own kernels in this run.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kinds import settings_of
from swactor_core.messages import (
    ObjectLoaded,
    RingReadable,
    RingWritable,
    RoleConfigured,
    RoleFailed,
    RoleProgress,
    ShutdownMode,
    ShutdownWorker,
    StepCompleted,
    StepFailed,
    WorkerFatal,
    WorkerReady,
)
from swactor_core.plan import SamplingPolicy, TokenOutputPolicy
from swactor_core.plugins import load_plugins
from swactor_core.specs import PREFILL_CHUNK, RingDirection
from swactor_core.spi.loader import StageManifest
from swactor_core.spi.provider import Kind
from swactor_core.spi.worker import StageConfig
from swactor_loader_gguf.loader import GgufLoader
from swactor_testing.worker_kit import (
    NodeConsumer,
    NodeProducer,
    WorkerProcess,
    configure,
    execute,
    record,
    token_spec,
)


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds, but for `held`: bytes."""

    libraries: float
    weights: float
    compile: float
    prompt: float
    read: float
    warm_prompt: float
    token: float
    held: int

    @property
    def whole(self) -> float:
        return self.libraries + self.weights + self.compile + self.prompt

    @property
    def floor(self) -> float:
        return self.read + self.warm_prompt


def resident(pid: int) -> int:
    """Bytes in memory, the mapped file's own pages included."""
    found = re.search(r"^Rss:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("this system does not say what a process holds")
    return int(found[1]) << 10


def read_seconds(manifest: StageManifest) -> float:
    """Seconds that reading the stage's tensors takes, into one buffer."""
    buffer = bytearray(1 << 20)
    started = time.perf_counter()
    for path in {tensor.path for tensor in manifest.tensors}:
        with open(path, "rb", buffering=0) as file:
            for tensor in (each for each in manifest.tensors if each.path == path):
                file.seek(tensor.offset)
                left = tensor.nbytes
                while left > 0:
                    left -= file.readinto(memoryview(buffer)[:left]) or left
    return time.perf_counter() - started


class Stage(WorkerProcess):
    """One worker with the whole model; steps are given to it as a node would."""

    def __init__(self, config: StageConfig, settings: dict[str, object], bytecode: str) -> None:
        environment = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        plugins = load_plugins()
        needed = ((Kind.ARENA, "memfd"), (Kind.WORKER, "tinygrad"))
        arguments = [f"--plugin-module={plugins.module_of(*each)}" for each in needed]  # as a node says it
        super().__init__("tinygrad", arguments=arguments, environment=environment)
        self.config, self.sequence = config, 0
        self.initialize(settings)
        self._until(WorkerReady)
        self.ready = time.perf_counter()
        self.bare = resident(self.process.pid)
        self.send(configure(config))
        while not isinstance(event := self._until(RoleProgress), RoleConfigured):
            if event.phase == "weights":
                self.bound = time.perf_counter()
        self.configured = time.perf_counter()
        self.producer = NodeProducer(
            self.install(RingDirection.INGRESS, config.input_spec, capacity=1 << 16), self
        )
        self.consumer = NodeConsumer(
            self.install(RingDirection.EGRESS, config.output_spec, capacity=1 << 16), self
        )

    def _until(self, kind: type) -> object:
        """The next event of this kind, or RoleConfigured. Raises SystemExit when the worker failed."""
        while not isinstance(event := self.next_event(), kind | RoleConfigured):
            if isinstance(event, WorkerFatal | RoleFailed | StepFailed):
                raise SystemExit(f"the worker failed: {event.reason}: {getattr(event, 'detail', '')}")
        return event

    def step(self, ids: list[int], position: int) -> tuple[int, float]:
        """The next token and the seconds that role code took for it."""
        self.consumer.data = b""
        payload = np.asarray(ids, "<u4").tobytes()
        self.producer.write(record(self.sequence, self.sequence, payload))
        loaded = self._until(ObjectLoaded)
        self.send(execute(loaded, 4, position=position, step=self.sequence))
        self.sequence += 1
        while not isinstance(
            event := self._until(StepCompleted | RingReadable | RingWritable), StepCompleted
        ):
            if isinstance(event, RingReadable):
                self.consumer.read()
            else:
                self.producer.on_writable(event)
        return int.from_bytes(self.consumer.read()[-4:], "little"), event.compute_seconds


def measure(
    manifest: StageManifest,
    settings: dict[str, object],
    *,
    prompt: list[int],
    tokens: int,
    chunk: int,
    bytecode: str,
) -> Start:
    context = len(prompt) + tokens
    config = StageConfig(
        manifest=manifest,
        max_context=context,
        prefill_chunk=chunk,
        input_spec=token_spec(context),
        output_spec=token_spec(1),
        sampling=SamplingPolicy(),
        token_output_policy=TokenOutputPolicy.TOKEN_IDS,
    )
    with Stage(config, settings, bytecode) as stage:
        begun = time.perf_counter()
        token, _ = stage.step(prompt, 0)
        first = time.perf_counter() - begun
        seconds = []
        for position in range(len(prompt), context - 1):
            token, taken = stage.step([token], position)
            seconds.append(taken)
        held = resident(stage.process.pid) - stage.bare
        _, warm = stage.step(prompt, 0)
        stage.send(ShutdownWorker(ShutdownMode.GRACEFUL))
        stage.exit_code()
    return Start(
        libraries=stage.ready - stage.spawned,
        weights=stage.bound - stage.ready,
        compile=stage.configured - stage.bound,
        prompt=first,
        read=read_seconds(manifest),
        warm_prompt=warm,
        token=statistics.median(seconds),
        held=held,
    )


def middle(starts: list[Start], name: str) -> float:
    return statistics.median(getattr(start, name) for start in starts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=PREFILL_CHUNK, help="rows of the prompt at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", default="native:mapped,native:packed,native:packed:fast,graph")
    options = parser.parse_args()
    loader = GgufLoader()
    path = options.model if Path(options.model).exists() else loader.resolve(options.model)
    model = loader.open(str(path))
    manifest, facts = model.manifest(0, model.facts.num_layers), model.facts
    model.close()
    prompt = [int(i) for i in np.random.default_rng(0).integers(10, manifest.vocab_size - 10, options.prompt)]
    weights = sum(tensor.nbytes for tensor in manifest.tensors)
    cache = sum(facts.kv_bytes_per_token) * (options.prompt + options.tokens)
    print(f"{Path(path).name}: {weights >> 20} MiB of weights, {cache >> 20} MiB of KV cache,")
    print(f"prompt of {options.prompt} in chunks of {options.chunk}, {options.threads} thread(s), ", end="")
    print(f"medians of {options.repeats}")
    print(
        "kernels weights numerics libraries weights compile  prompt   whole   floor of floor  role"
        "  ms/row ms/token token in rows times graph  held"
    )
    kinds = [settings_of(kind) for kind in options.kinds.split(",")]
    starts: dict[tuple[str, ...], list[Start]] = {}
    with tempfile.TemporaryDirectory() as bytecode:
        for repeat in range(options.repeats + 1):
            for kind in kinds:
                settings: dict[str, object] = {**kind, "threads": options.threads}
                made = measure(
                    manifest,
                    settings,
                    prompt=prompt,
                    tokens=options.tokens,
                    chunk=options.chunk,
                    bytecode=bytecode,
                )
                if repeat:
                    starts.setdefault(tuple(kind.values()), []).append(made)
    base = next((middle(each, "token") for kind, each in starts.items() if kind[0] == "graph"), math.nan)
    for (kernels, layout, numerics), each in starts.items():
        whole, floor, token = (middle(each, figure) for figure in ("whole", "floor", "token"))
        row = middle(each, "warm_prompt") / options.prompt
        libraries, *parts = (middle(each, part) for part in ("libraries", "weights", "compile", "prompt"))
        spent = " ".join(f"{seconds:7.2f}" for seconds in (*parts, whole, floor))
        ratios = f"{whole / floor:8.2f} {(whole - libraries) / floor:5.2f}"
        speeds = f"{row * 1e3:7.2f} {token * 1e3:8.2f} {token / row:12.2f} {base / token:11.1f}"
        held = middle(each, "held") / (weights + cache)
        print(f"{kernels:7} {layout:7} {numerics:8} {libraries:9.2f} {spent} {ratios} {speeds} {held:5.2f}")


if __name__ == "__main__":
    main()
