"""What one hop adds to a token, by part.

    python bench/hop.py [--worker echo|native] [--model MODEL] [--tokens N] [--repeats R]

First: milliseconds of a token with the echo worker, which computes nothing worth mentioning, for pools of
one, two and three nodes that take turns; a hop is what one node more adds, from its datagram to the next.
Then, with stamps in every process of a pool of one node, where a token's time goes (medians; what is stamped
costs a little more than what is not). `--worker native` takes the stamps around the real model instead: its
weights have gone through the caches between two tokens, so the same way costs a multiple.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent

WAY = (
    ("first", "endpoint>", "", ""),
    ("first", "send>", "orchestrator: token to datagram", "actors, ring, QUIC"),
    ("node", "read>", "system call, datagram to the node's loop", "kernel, wake"),
    ("node", "pump>", "datagram to the ring", "QUIC"),
    ("node", "command>", "ring to the hint", "actors, ring, QUIC"),
    ("worker", "wait<", "hint written, to the worker", "NDJSON, wake"),
    ("worker", "flush<", "ring to device, ObjectLoaded", "worker"),
    ("node", "events>", "ObjectLoaded to the node's loop", "wake"),
    ("node", "command>", "ObjectLoaded to ExecuteStep", "NDJSON, actors"),
    ("worker", "wait<", "ExecuteStep written, to the worker", "NDJSON, wake"),
    ("worker", "wait<", "ExecuteStep to the role code", "worker"),
    ("worker", "flush>", "role code, output to the ring", "compute"),
    ("node", "events>", "hint to the node's loop", "wake"),
    ("node", "pump>", "hint to the pump", "NDJSON, actors"),
    ("node", "send>", "ring to datagram", "QUIC"),
    ("first", "read>", "system call, datagram to the orchestrator", "kernel, wake"),
    ("first", "pump>", "datagram to the ring", "QUIC"),
    ("first", "endpoint>", "ring to the token", "actors, ring, QUIC"),
)
"""(process, stamp, what lies between the stamp before and this one, its part), in the order of one token.

Where somebody is told something, the stamp before it is that of the one who tells: whom a system call wakes
may run before it returns."""


def model_of(worker: str, name: str) -> tuple[str, str]:
    """Loader and model."""
    if worker == "echo":
        return "synthetic", "demo"
    from swactor_core.config import PluginChoice
    from swactor_core.plugins import load_plugins
    from swactor_core.spi.provider import Kind

    loader = PluginChoice().loader
    return loader, str(Path(load_plugins().select(Kind.LOADER, loader).factory().resolve(name)).resolve())


def child(options: argparse.Namespace) -> None:
    """One run in this process and its children; prints the seconds of each token."""
    from swactor_core.config import PluginChoice
    from swactor_core.machines.run import RunOutcome
    from swactor_core.orchestrator.orchestrator import RunRequest
    from swactor_core.orchestrator.session import LocalSession
    from swactor_core.plan import GgufSource
    from swactor_core.plugins import load_plugins
    from swactor_core.spi.provider import Kind

    async def run() -> list[float]:
        plugins = load_plugins()
        loader, path = model_of(options.worker, options.model)
        echo = options.worker == "echo"
        choice = PluginChoice(worker="echo", loader=loader) if echo else PluginChoice(loader=loader)
        model = plugins.select(Kind.LOADER, loader).factory().open(path)
        request = RunRequest(
            GgufSource(path, model.digest()), model.facts, (1, 2) if echo else (28120, 905), options.tokens
        )
        model.close()
        settings = {} if echo else {"kernels": options.worker}
        async with LocalSession(plugins, choice, nodes=options.nodes, worker=settings) as session:
            result = await session.run(request)
        if result.outcome is not RunOutcome.COMPLETED:
            raise SystemExit(f"the run ended with {result.fault.line() if result.fault else result.outcome}")
        return [after - before for before, after in pairwise(result.token_times)]

    print(json.dumps(asyncio.run(run())))


def token_seconds(
    options: argparse.Namespace, nodes: int, *, stamps: str = "", worker: str = ""
) -> list[float]:
    """The seconds of each token of a run in a process of its own, the first tenth left out."""
    command = [sys.executable, __file__, "--child", "--nodes", str(nodes), "--model", options.model]
    command += ["--tokens", str(options.tokens), "--worker", worker or options.worker]
    environment = dict(os.environ)
    if stamps:
        path = os.pathsep.join(filter(None, (str(HERE / "hop_trace"), environment.get("PYTHONPATH", ""))))
        environment |= {"SWACTOR_HOP_TRACE": stamps, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"a run with {nodes} nodes failed:\n{done.stderr[-2000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds[len(seconds) // 10 :]


def ways(folder: str) -> list[list[int]]:
    """The stamps of each token's whole way, nanoseconds."""
    stamps = sorted(
        (int(line.split()[0]), file.name.split(".")[0], line.split()[1])
        for file in Path(folder).iterdir()
        for line in file.read_text().splitlines()
    )
    whole: list[list[int]] = []
    way: list[int] = []
    for at, process, label in stamps:
        if (process, label) == WAY[len(way)][:2]:
            way.append(at)
            if len(way) == len(WAY):
                whole.append(way)
                way = []
    return whole[len(whole) // 5 :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", default="echo", choices=("echo", "native", "graph"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    pools: dict[int, list[float]] = {nodes: [] for nodes in (1, 2, 3)}
    for _ in range(options.repeats):
        for nodes, seconds in pools.items():
            seconds.append(statistics.median(token_seconds(options, nodes, worker="echo")) * 1e3)
    middles = {nodes: statistics.median(values) for nodes, values in pools.items()}
    for nodes, middle in middles.items():
        more = f"   one hop more: {middle - middles[nodes - 1]:6.3f} ms" if nodes > 1 else ""
        print(f"echo, {nodes} nodes: {middle:6.3f} ms a token{more}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        seconds = token_seconds(options, 1, stamps=folder)
        found = ways(folder)
    print(f"\n{options.worker}, 1 node: {statistics.median(seconds) * 1e3:.3f} ms a token with stamps")
    if len(found) < 10:
        raise SystemExit("the stamps do not show a token's whole way: has its order changed?")
    parts: dict[str, float] = {}
    for index, (_, _, what, part) in enumerate(WAY[1:], 1):
        middle = statistics.median((way[index] - way[index - 1]) / 1e3 for way in found)
        parts[part] = parts.get(part, 0.0) + middle
        print(f"{middle:9.0f} us  {what:42} {part}")
    print()
    for part, total in sorted(parts.items(), key=lambda entry: -entry[1]):
        print(f"{total:9.0f} us  {part}")


if __name__ == "__main__":
    main()
