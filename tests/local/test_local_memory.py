"""What `plan` says of a stage's memory is what the stage's worker comes to hold."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_command import Command, Run

PROMPT = 64


def resident(pid: int) -> int:
    """Bytes in memory, of which file pages that are mapped are a part."""
    found = re.search(r"^Rss:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def held_by_workers(run: Callable[..., Run], model: str, tokens: int, nodes: int) -> list[int]:
    """Resident bytes of each stage's worker when most places of its cache have been written. The command is
    stopped for the look: a small model's run would be over before it."""
    started = run(
        model, "--prompt-ids", ",".join(["5"] * PROMPT), "--max-tokens", str(tokens),
        "--nodes", str(nodes), "--ignore-eos",
    )  # fmt: skip
    started.wait_event("token_received", sequence=tokens * 7 // 8, within=150)
    os.kill(started.process.pid, signal.SIGSTOP)
    held = [resident(started.worker_pid(index)) for index in range(nodes)]
    os.kill(started.process.pid, signal.SIGCONT)
    started.wait(60)
    return held


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("nodes", "tokens"), [(1, 300), (2, 300)])
def test_a_stage_holds_what_the_plan_says(
    command: Callable[..., Command],
    run: Callable[..., Run],
    demo_model: str,
    nodes: int,
    tokens: int,
) -> None:
    """Within a tenth, all in all, in a run as people start it."""
    planned = command(
        "plan", demo_model, "--nodes", str(nodes), "--prompt-tokens", str(PROMPT),
        "--max-tokens", str(tokens), "--json",
    )  # fmt: skip
    assert planned.wait() == 0, planned.err
    record: dict[str, Any] = planned.records()[0]
    held_by_workers(run, demo_model, 16, nodes)  # building kernels takes memory too, the first time
    held = held_by_workers(run, demo_model, tokens, nodes)
    for stage, after in zip(record["stages"], held, strict=True):
        ratio = after / stage["need_bytes"]
        print(f"planned {stage['need_bytes'] >> 20} MiB, held {after >> 20} MiB, ratio {ratio:.3f}")
        assert 0.9 < ratio < 1.1
