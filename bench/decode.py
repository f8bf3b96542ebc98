"""Decode speed of a pipeline beside a plain loop over the same role code, in one run.

    python bench/decode.py [MODEL] [--tokens N] [--repeats R] [--kinds graph,native] [--nodes 1,2]
                           [--threads N]

For each kind, KERNELS[:WEIGHTS[:NUMERICS]] such as native:packed:fast: tokens per second of a plain
single-process loop (`plain_decode.py`: no runtime, no rings, no transport), then of `--nodes 1` and
`--nodes 2` as `swactor-cli run` would run them. The three take turns, `--repeats` times; a figure is the
median over all its tokens: a disturbed moment counts little. Without `--threads` native kernels use all
cores, as `swactor-cli run` does; what is said of one core is measured with `--threads 1`.
"added" is the time that the pipeline adds to a token; "ratio" is tokens per second over those of the plain
loop of the same kind; "of tinygrad" over those of the plain loop in tinygrad's own kernels (`graph`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from kinds import settings_of
from swactor_core.config import PluginChoice
from swactor_core.machines.run import RunOutcome
from swactor_core.orchestrator.orchestrator import RunRequest
from swactor_core.orchestrator.session import LocalSession
from swactor_core.plan import GgufSource
from swactor_core.plugins import load_plugins
from swactor_core.spi.provider import Kind

PROMPT = (28120, 905)  # "hello world" of the demo model


def plain(path: str, tokens: int, kind: str, *, threads: int) -> tuple[list[float], list[int]]:
    """Seconds per token and the ids of the plain loop, in a process of its own."""
    command = [sys.executable, __file__, path, "--plain", "--tokens", str(tokens), "--kinds", kind]
    command += ["--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the plain loop failed:\n{done.stderr}")
    record = json.loads(done.stdout.splitlines()[-1])
    return record["seconds"], record["ids"]


def plain_child(path: str, tokens: int, kind: str, *, threads: int) -> None:
    from plain_decode import plain_run

    run = plain_run(path, PROMPT, tokens, settings=settings_of(kind, threads))
    print(json.dumps({"seconds": run.token_seconds, "ids": run.ids}))


def pipeline(path: str, tokens: int, kind: str, *, nodes: int, threads: int) -> tuple[list[float], list[int]]:
    """Seconds per token and the ids of a local pool of `nodes` node processes."""

    async def run() -> tuple[list[float], list[int]]:
        plugins = load_plugins()
        choice = PluginChoice()
        model = plugins.select(Kind.LOADER, choice.loader).factory().open(path)
        request = RunRequest(GgufSource(path, model.digest()), model.facts, PROMPT, tokens)
        model.close()
        settings = dict(settings_of(kind, threads))
        async with LocalSession(plugins, choice, nodes=nodes, worker=settings) as session:
            result = await session.run(request)
        if result.outcome is not RunOutcome.COMPLETED:
            raise SystemExit(f"nodes={nodes}: {result.fault.line() if result.fault else result.outcome}")
        return [after - before for before, after in pairwise(result.token_times)], list(result.token_ids)

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", default="graph,native")
    parser.add_argument("--nodes", default="1,2")
    parser.add_argument("--threads", type=int, default=0, help="of native kernels; 0: as many as cores")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain_child(options.model, options.tokens, options.kinds, threads=options.threads)
        return
    loader = load_plugins().select(Kind.LOADER, PluginChoice().loader).factory()
    path = str(Path(loader.resolve(options.model)).resolve())
    node_counts = [int(count) for count in options.nodes.split(",")]
    print(f"{Path(path).name}, {options.tokens} tokens, {options.repeats} repeats, medians")
    ratios = f"{'ratio':>6} {'of tinygrad':>11}"
    print(f"{'kind':18} {'what':12} {'ms/token':>9} {'tokens/s':>9} {'added ms':>9} {ratios}")
    tinygrad_loop = math.nan  # seconds per token of the plain loop in tinygrad's own kernels
    for kind in options.kinds.split(","):
        seconds: dict[str, list[float]] = {}
        ids: dict[str, list[int]] = {}
        for _ in range(options.repeats):
            for nodes in (0, *node_counts):
                what = f"--nodes {nodes}" if nodes else "plain loop"
                measured, ids[what] = (
                    pipeline(path, options.tokens, kind, nodes=nodes, threads=options.threads)
                    if nodes
                    else plain(path, options.tokens, kind, threads=options.threads)
                )
                seconds.setdefault(what, []).extend(measured)
        base = statistics.median(seconds["plain loop"])
        tinygrad_loop = base if kind.startswith("graph") else tinygrad_loop
        for what, values in seconds.items():
            median = statistics.median(values)
            ratios = f"{base / median:6.3f} {tinygrad_loop / median:11.3f}"
            figures = f"{median * 1e3:9.2f} {1 / median:9.2f} {(median - base) * 1e3:9.2f}"
            print(f"{kind:18} {what:12} {figures} {ratios}", flush=True)
        same = len({tuple(made) for made in ids.values()}) == 1
        print(f"{kind:18} token ids are {'the same in all' if same else 'NOT the same'}", flush=True)


if __name__ == "__main__":
    main()
