"""Baseline of the decode benchmark: the same role code in one process, without runtime, rings or transport.

Run as a script, it prints one line: python bench/plain_decode.py MODEL [--tokens N] [--prompt "1,2,3"].
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from swactor_core.plan import SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import PREFILL_CHUNK, DTypeFamily, ObjectKind, ObjectSpec
from swactor_core.spi.worker import StageConfig, StepInput
from swactor_loader_gguf.loader import GgufLoader
from swactor_worker_tinygrad import create


@dataclass(frozen=True, slots=True)
class PlainRun:
    """`ids` as generated; seconds of configuration, of the prompt, and of each further token."""

    ids: tuple[int, ...]
    configure_seconds: float
    prefill_seconds: float
    token_seconds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_seconds) / sum(self.token_seconds)


def plain_run(
    model_path: str | Path,
    prompt_ids: Sequence[int],
    tokens: int,
    *,
    settings: Mapping[str, object] | None = None,
) -> PlainRun:
    """Generates `tokens` (at least 2) greedily after `prompt_ids` with the whole model as one stage."""
    if tokens < 2 or not prompt_ids:
        raise ValueError("a prompt and at least two tokens are needed")
    model = GgufLoader().open(str(model_path))
    manifest = model.manifest(0, model.facts.num_layers)
    model.close()
    context = len(prompt_ids) + tokens
    spec = ObjectSpec(ObjectKind.TOKENS, context * 4, DTypeFamily.UNSIGNED, 4, 1)
    config = StageConfig(
        manifest=manifest,
        max_context=context,
        prefill_chunk=PREFILL_CHUNK,
        input_spec=spec,
        output_spec=spec,
        sampling=SamplingPolicy(),
        token_output_policy=TokenOutputPolicy.TOKEN_IDS,
    )
    started = time.perf_counter()
    backend = create(dict(settings or {}))
    try:
        role = backend.configure(config, progress=lambda _: None, should_abort=lambda: False)
        configured = time.perf_counter()
        bridge = backend.bridge
        made: list[int] = []
        seconds: list[float] = []
        given, position = list(prompt_ids), 0
        while len(made) < tokens:
            begun = time.perf_counter()
            payload = np.asarray(given, "<u4").tobytes()
            allocation = bridge.alloc_device(spec, len(payload))
            bridge.host_to_device(memoryview(payload), allocation, 0)
            output, extent = role.execute(
                StepInput(allocation, len(payload), len(made), position), lambda: False
            )
            raw = bytearray(extent)
            bridge.device_to_host(output, 0, memoryview(raw))
            bridge.free_device(allocation)
            position += len(given)
            made.append(int.from_bytes(raw, "little"))
            given = made[-1:]
            seconds.append(time.perf_counter() - begun)
        role.close()
    finally:
        backend.close()
    return PlainRun(tuple(made), configured - started, seconds[0], tuple(seconds[1:]))


def plain_decode(model_path: str | Path, prompt_ids: Sequence[int], tokens: int) -> float:
    """Tokens per second of decoding (the prompt's step is not counted) in one process."""
    return plain_run(model_path, prompt_ids, tokens).tokens_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a path, or a name that the loader resolves (demo)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", default="28120,905", help="token ids, separated by commas")
    parser.add_argument("--threads", type=int, default=0, help="0 is the worker's default")
    parser.add_argument("--kernels", default="auto", choices=("auto", "native", "graph"))
    asked = parser.parse_args()
    prompt = [int(part) for part in asked.prompt.split(",")]
    settings: dict[str, object] = {"kernels": asked.kernels}
    if asked.threads:
        settings["threads"] = asked.threads
    path = asked.model if Path(asked.model).exists() else GgufLoader().resolve(asked.model)
    made = plain_run(path, prompt, asked.tokens, settings=settings)
    typical = sorted(made.token_seconds)[len(made.token_seconds) // 2]
    print(
        f"{made.tokens_per_second:.1f} tokens/s, median {typical * 1e3:.2f} ms a token; "
        f"prompt of {len(prompt)} in {made.prefill_seconds * 1e3:.1f} ms; "
        f"ready after {made.configure_seconds:.2f} s"
    )


if __name__ == "__main__":
    main()
