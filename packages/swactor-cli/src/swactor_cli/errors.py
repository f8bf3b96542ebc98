"""Exceptions to messages and exit codes, in one place. A traceback appears only with SWACTOR_DEBUG=1."""

from __future__ import annotations

import os
import traceback
from enum import IntEnum

from swactor_core.errors import SwactorError, UsageError, remedy_of_lack

from swactor_cli.output import Output, OutputLost


class ExitCode(IntEnum):
    """READER_GONE is what a shell reports of a program that SIGPIPE ended."""

    COMPLETED = 0
    FAULTED = 1
    USAGE = 2
    OPERATOR_STOPPED = 130
    READER_GONE = 141


def report(error: BaseException, output: Output) -> ExitCode:
    """Says what went wrong on stderr and gives the exit code."""
    if os.environ.get("SWACTOR_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        output.restore_terminal()  # it may have come in the middle of putting up bars or taking them down
        return ExitCode.OPERATOR_STOPPED
    if isinstance(error, OutputLost) and error.reader_gone:
        return ExitCode.READER_GONE
    if isinstance(error, SwactorError):
        output.error(error.message, error.hint)
        return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAULTED
    defect = "this is a defect of swactor or of a plug-in; SWACTOR_DEBUG=1 shows where"
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    output.error(said, remedy_of_lack(error) or defect)
    return ExitCode.FAULTED
