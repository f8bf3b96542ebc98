"""`--device` and `--worker-option` to a worker plug-in's settings.

Must not know which keys there are: the plug-in does.
"""

from __future__ import annotations

from typing import Any

from swactor_core.errors import UsageError


def worker_settings(device: str | None, options: tuple[str, ...]) -> dict[str, Any]:
    """The worker plug-in's settings: whole numbers as such, everything else as text. Raises UsageError."""
    settings: dict[str, Any] = {"device": device} if device else {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise UsageError(f"--worker-option {option!r}", hint="write it like threads=2")
        if key in settings:
            other = "--device" if key == "device" and device else "another --worker-option"
            raise UsageError(
                f"--worker-option {option!r} and {other} exclude each other", hint="give one of them"
            )
        settings[key] = int(value) if value.isdecimal() else value
    return settings
