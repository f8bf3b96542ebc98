"""What holds for every test: the suite's own surroundings do not reach the processes that it starts."""

from __future__ import annotations

import os
import signal


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and nohup a lost terminal; both hand that on to the commands
    under test. A cache that is named for the suite would take the place of tests' own."""
    os.environ.pop("SWACTOR_CACHE_DIR", None)
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)
