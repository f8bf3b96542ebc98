"""Exceptions to messages and exit codes, in one place. A traceback appears only with SWACTOR_DEBUG=1."""

from __future__ import annotations

import os
import traceback
from enum import IntEnum

from swactor_core.errors import SwactorError, UsageError

from swactor_cli.output import Output


class ExitCode(IntEnum):
    COMPLETED = 0
    FAULTED = 1
    USAGE = 2
    OPERATOR_STOPPED = 130


def report(error: BaseException, output: Output) -> ExitCode:
    """Says what went wrong on stderr and gives the exit code."""
    if os.environ.get("SWACTOR_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.OPERATOR_STOPPED
    if isinstance(error, SwactorError):
        output.error(error.message, error.hint)
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAULTED
    output.error(
        f"{type(error).__name__}: {error}", "this is a defect of swactor; SWACTOR_DEBUG=1 shows where"
    )
    return ExitCode.FAULTED
