"""What the worker harness itself costs per decode token: one real worker process, echo backend, memfd arena.

Prints wall time per token as the node sees it (both pipe round trips and the node's own codec included), the
worker's CPU time per token, and the time that role code took of it. Run on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

from swactor_core.messages import (
    ObjectLoaded,
    RingReadable,
    RingWritable,
    RoleConfigured,
    ShutdownMode,
    ShutdownWorker,
    StepCompleted,
    WorkerReady,
)
from swactor_core.specs import RingDirection
from swactor_testing.worker_kit import (
    NodeConsumer,
    NodeProducer,
    WorkerProcess,
    activation_spec,
    configure,
    execute,
    record,
    stage_config,
    token_spec,
)


def worker_cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--hidden", type=int, default=8)
    parser.add_argument("--middle", action="store_true", help="a middle stage: activations in and out")
    options = parser.parse_args()
    layers = (1, 2) if options.middle else (0, 4)
    config = stage_config(*layers, hidden_dim=options.hidden, max_context=options.tokens + 1)
    spec = activation_spec(1, options.hidden) if options.middle else token_spec(1)
    size = options.hidden * 4 if options.middle else 4
    with WorkerProcess() as worker:
        worker.initialize()
        worker.expect(WorkerReady)
        worker.send(configure(config))
        worker.expect(RoleConfigured)
        producer = NodeProducer(worker.install(RingDirection.INGRESS, spec, capacity=1 << 16), worker)
        consumer = NodeConsumer(worker.install(RingDirection.EGRESS, spec, capacity=1 << 16), worker)
        walls, loads, computes = [], [], []
        cpu = (0.0, 0.0)
        for sequence in range(options.tokens):
            if sequence == options.tokens // 10:
                cpu = worker_cpu_seconds(worker.process.pid)
            consumer.data = b""
            begin = time.perf_counter()
            producer.write(record(sequence, sequence, bytes(size)))
            loaded = worker.expect(ObjectLoaded)
            middle = time.perf_counter()
            worker.send(execute(loaded, size, position=sequence, step=sequence))
            while not isinstance(event := worker.next_event(), StepCompleted):
                if isinstance(event, RingReadable):
                    consumer.read()
                elif isinstance(event, RingWritable):
                    producer.on_writable(event)
            end = time.perf_counter()
            walls.append(end - begin)
            loads.append(middle - begin)
            computes.append(event.compute_seconds)
        after = worker_cpu_seconds(worker.process.pid)
        worker.send(ShutdownWorker(ShutdownMode.GRACEFUL))
        worker.exit_code()
    steady = slice(options.tokens // 10, None)
    count = len(walls[steady])
    for name, values in (("token", walls), ("  of it until ObjectLoaded", loads), ("role code", computes)):
        ordered = sorted(values[steady])
        half, tail = ordered[count // 2] * 1e6, ordered[count * 99 // 100] * 1e6
        print(f"{name:28} median {half:7.0f} us   p99 {tail:7.0f} us")
    user, system = ((late - early) / count * 1e6 for late, early in zip(after, cpu, strict=True))
    print(f"{'worker CPU per token':28} user   {user:7.0f} us   system {system:4.0f} us")
    print(f"{'node CPU (this process)':28} total  {resource.getrusage(resource.RUSAGE_SELF).ru_utime:7.2f} s")


if __name__ == "__main__":
    main()
