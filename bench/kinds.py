"""Ways to compute, as these programs take them: KERNELS[:WEIGHTS[:NUMERICS]], such as native:packed:fast."""

from __future__ import annotations

DEFAULTS = {"kernels": "native", "weights": "mapped", "numerics": "exact"}


def settings_of(kind: str, threads: int = 0) -> dict[str, object]:
    """The worker's settings of a kind; parts that are left out have their defaults, and `threads` 0 is the
    worker's own choice. Raises SystemExit."""
    parts = kind.split(":")
    if len(parts) > len(DEFAULTS):
        raise SystemExit(f"{kind!r} is no kind: write KERNELS:WEIGHTS:NUMERICS, such as native:packed:fast")
    given = {name: part for name, part in zip(DEFAULTS, parts, strict=False) if part}
    return {**DEFAULTS, **given, **({"threads": threads} if threads else {})}
