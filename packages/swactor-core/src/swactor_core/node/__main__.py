"""A managed node process: `python -m swactor_core.node`, settings as one JSON line on standard input.

Standard input stays open as the lifeline to the parent: its end stops the node. Standard output has a faulted
node's last words, messages of the control border, one a line: nobody else may have heard of a node that could
not start. Standard error is talk. Exit 0 after an ordered stop, 1 after a fault.
"""

from __future__ import annotations

import gc

# What imports make stays: going over it again and again is a twentieth of a start.
if __name__ == "__main__":
    gc.set_threshold(50_000)

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys

from swactor_core.codec import CodecError
from swactor_core.config import NodeSettings, validated
from swactor_core.errors import SwactorError
from swactor_core.faults import Fault
from swactor_core.node.control import CONTROL
from swactor_core.node.node import Node
from swactor_core.node.process import NODE_GOES, die_with_parent, first_to_go, ignore_terminal_interrupt
from swactor_core.node.serve import serve
from swactor_core.plugins import load_plugins
from swactor_core.unwaited import EventLoop


def report(message: str) -> None:
    """The one typed line; the parent's pool looks for its beginning."""
    print(f"error: {message}", file=sys.stderr)  # noqa: T201 - stderr is this process's voice


def main() -> int:
    die_with_parent(int(os.environ["SWACTOR_PARENT"]))
    first_to_go(NODE_GOES)
    ignore_terminal_interrupt()
    logging.basicConfig(level=os.environ.get("SWACTOR_LOG", "WARNING"), format="%(name)s: %(message)s")
    try:
        line = _read_line(sys.stdin.fileno())
        if not line:  # the parent started this process ahead, and had no use for it
            return 0
        settings = validated(NodeSettings, json.loads(line), origin="node settings")
        plugins = load_plugins(blocked=settings.plugins.blocked)
        stdin = sys.stdin.fileno()
        built: list[Node] = []
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            fault = runner.run(
                serve(settings, plugins, stop_on=(signal.SIGTERM,), lifeline=stdin, on_built=built.append)
            )
        gc.freeze()  # the process ends: nothing that it made need be walked over once more
    except SwactorError as error:
        report(error.line)
        return 1
    if fault is not None:
        report(fault.line())
        # Of a node that began anew (`serve`), the one that ended now is the last.
        say_last_words(built[-1], fault, sys.stdout.fileno())
        return 1
    return 0


def say_last_words(node: Node, fault: Fault, descriptor: int) -> None:
    """Messages of the control border, one a line, as far as anybody listens."""
    with contextlib.suppress(OSError):
        for message in node.last_words(fault):
            with contextlib.suppress(CodecError):  # too long: the fault itself is not
                os.write(descriptor, CONTROL.encode(message) + b"\n")


def _read_line(descriptor: int) -> bytes:
    """One line, read unbuffered so that the rest stays with the lifeline."""
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(descriptor, 1)
        if not chunk:
            break
        line += chunk
    return bytes(line)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
