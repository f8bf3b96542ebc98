"""Figures of a finished run: rates, per-stage compute, and the share that was neither compute nor a wait."""

from __future__ import annotations

from typing import Any

from swactor_core.orchestrator.orchestrator import RunResult


def statistics(result: RunResult) -> dict[str, Any]:
    """Seconds and rates. `overhead_share` is of decode time: what was not some stage's compute. `numerics`,
    `kernels` and `weights` are those of all stages, as their workers said, joined by a comma where they
    differ.

    One token is in one stage at a time, so the stages' compute adds up along a token's path.
    """
    times = result.token_times
    decode = times[-1] - times[0] if len(times) > 1 else 0.0
    compute = sum(stats.decode_seconds for _, stats in result.stages)
    return {
        "prompt_tokens": len(result.plan.runtime.prompt) if result.plan is not None else 0,
        "generated_tokens": len(result.token_ids),
        "time_to_first_token_seconds": round(times[0] - result.injected, 6) if times else None,
        "decode_seconds": round(decode, 6),
        "tokens_per_second": round((len(times) - 1) / decode, 3) if decode > 0 else None,
        "numerics": _of_all(result, "numerics"),
        "kernels": _of_all(result, "kernels"),
        "weights": _of_all(result, "weights"),
        "stages": [
            {
                **stats.facts,
                "stage_index": index,
                "steps": stats.steps,
                "prefill_seconds": round(stats.prefill_seconds, 6),
                "decode_seconds": round(stats.decode_seconds, 6),
            }
            for index, stats in result.stages
        ],
        "overhead_share": round(max(0.0, decode - compute) / decode, 4)
        if decode > 0 and result.stages
        else None,
        "unproven": list(result.unproven),
    }


def _of_all(result: RunResult, fact: str) -> str | None:
    said = {stats.facts[fact] for _, stats in result.stages if fact in stats.facts}
    return ",".join(sorted(said)) or None


def summary(figures: dict[str, Any]) -> str:
    """The same in one or two lines for people."""
    parts = [f"{figures['prompt_tokens']} prompt + {figures['generated_tokens']} generated tokens"]
    if figures["time_to_first_token_seconds"] is not None:
        parts.append(f"first token {figures['time_to_first_token_seconds']:.2f} s")
    if figures["tokens_per_second"] is not None:
        parts.append(f"{figures['tokens_per_second']:.1f} tokens/s")
    lines = [", ".join(parts)]
    stages = [
        f"stage {s['stage_index']} {(s['decode_seconds'] / (s['steps'] - 1)) * 1000:.1f} ms/token"
        for s in figures["stages"]
        if s["steps"] > 1
    ]
    if stages and figures["overhead_share"] is not None:
        share = f"neither compute nor waiting for it: {figures['overhead_share'] * 100:.1f} %"
        lines.append(", ".join([*stages, share]))
    return "\n".join(lines)
