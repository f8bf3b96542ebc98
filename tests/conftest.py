"""What holds for every test: the suite's own surroundings do not reach the processes that it starts."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C and hands that on to the commands under test."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
