"""Byte counts as people write and read them. Binary units (KiB) and decimal ones (kB) are told apart."""

from __future__ import annotations

import re

from swactor_core.errors import UsageError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power


def parse_bytes(text: str, *, option: str) -> int:
    """`8GiB`, `8G`, `8GB` or plain bytes to bytes, at least one. Raises UsageError naming the option."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise UsageError(f"{option} {text!r} is not a size", hint="write it like 8GiB, 512MiB or 1073741824")
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise UsageError(f"{option} {text!r} is less than one byte", hint="write it like 8GiB")
    return size


def bytes_text(count: int) -> str:
    """`count` with a binary unit and three digits or so."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
