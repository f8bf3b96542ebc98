"""Doctor checks: what `swactor-cli doctor` asks of the machine and of each plug-in.

The shape of a check alone. Must not know which checks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from swactor_core.values import frozen


class CheckStatus(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@frozen
class CheckResult:
    """`detail` is what was found, `remedy` what to do, one line each."""

    status: CheckStatus
    detail: str
    remedy: str = ""


@frozen
class DoctorCheck:
    """`run` must be bounded by a few seconds and must not raise for a missing tool."""

    id: str
    summary: str
    run: Callable[[], CheckResult]
