"""A managed node process: `python -m swactor_core.node`, settings as one JSON line on standard input.

Standard input stays open as the lifeline to the parent: its end stops the node. Standard output says nothing;
standard error is talk. Exit 0 after an ordered stop, 1 after a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys

from swactor_core.config import NodeSettings, validated
from swactor_core.errors import SwactorError
from swactor_core.node.node import Node
from swactor_core.node.process import die_with_parent, ignore_terminal_interrupt
from swactor_core.plugins import load_plugins


async def serve(settings: NodeSettings, *, lifeline: bool) -> int:
    """Runs one node until it is told to stop. Returns the exit code."""
    node = Node(settings, load_plugins(blocked=settings.plugins.blocked))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, node.stop)
    if lifeline:
        loop.add_reader(sys.stdin.fileno(), _lifeline, loop, node)
    fault = await node.run()
    if lifeline:
        loop.remove_reader(sys.stdin.fileno())
    if fault is not None:
        print(f"error: {fault.line()}", file=sys.stderr)  # noqa: T201 - stderr is this process's voice
    return 1 if fault is not None else 0


def _lifeline(loop: asyncio.AbstractEventLoop, node: Node) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        node.stop()


def main() -> int:
    die_with_parent(int(os.environ["SWACTOR_PARENT"]))
    ignore_terminal_interrupt()
    logging.basicConfig(level=os.environ.get("SWACTOR_LOG", "WARNING"), format="%(name)s: %(message)s")
    try:
        line = _read_line(sys.stdin.fileno())
        settings = validated(NodeSettings, json.loads(line), origin="node settings")
        return asyncio.run(serve(settings, lifeline=True))
    except SwactorError as error:
        print(f"error: {error.message}{f' ({error.hint})' if error.hint else ''}", file=sys.stderr)  # noqa: T201
        return 1


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
