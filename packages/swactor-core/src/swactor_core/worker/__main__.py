"""Entry of the worker process: `python -m swactor_core.worker --worker NAME --arena NAME`.

Owns the process: its descriptors, signals, environment and exit status. Commands come on stdin, events leave
on stdout, everything else goes to stderr. The process never outlives its node.
"""

from __future__ import annotations

import gc

# What a start makes stays: it is walked over neither now nor later (`_Process.emit`).
if __name__ == "__main__":
    gc.disable()

import argparse
import faulthandler
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from swactor_core.errors import ResourceError
from swactor_core.machines.worker_effects import ExitCode
from swactor_core.messages import RoleConfigured, RoleReset, WorkerReady
from swactor_core.node.process import WORKER_GOES, first_to_go, ignore_terminal_interrupt, tied_to_parent
from swactor_core.plugins import Plugins, load_modules, load_plugins
from swactor_core.spi.arena import ArenaPlugin, ArenaView
from swactor_core.spi.provider import Kind
from swactor_core.spi.worker import WorkerBackend
from swactor_core.worker.adapter import CommandReader, EventWriter
from swactor_core.worker.harness import Harness, Surroundings

ARENA_FD = "SWACTOR_ARENA_FD"
ARENA_BYTES = "SWACTOR_ARENA_BYTES"
COPY_POLL_MS = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one worker until its exit code is known."""
    gc.disable()
    options = _parser().parse_args(arguments)
    if not tied_to_parent(options.parent_pid or os.getppid()):
        sys.stderr.write("worker: the node that started this process is not its parent any more\n")
        return ExitCode.CONTROL_LOST
    first_to_go(WORKER_GOES)
    ignore_terminal_interrupt()
    commands_fd, events_fd = _claim_stdio()
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, format="worker: %(name)s: %(message)s")
    reader, writer = CommandReader(commands_fd), EventWriter(events_fd)
    code = serve(_Process(options, reader, writer).harness(), reader, writer)
    if code is not ExitCode.STOPPED:
        # A library's exit handler or thread must not hold up a process that has already failed.
        sys.stderr.flush()
        os._exit(code)
    gc.freeze()  # nor at the end: the system takes memory back at once
    return code


def serve(harness: Harness, reader: CommandReader, writer: EventWriter) -> ExitCode:
    """Commands in, progress, events out in one write a turn, until the harness knows its exit code."""
    copying = False
    while harness.exit_code is None:
        reader.fill(COPY_POLL_MS if copying else None)
        while harness.exit_code is None and (event := reader.take()) is not None:
            harness.take(event)
        copying = harness.copying
        if copying:
            harness.progress()
            copying = harness.copying
        writer.flush()
        if writer.lost and harness.exit_code is None:
            return ExitCode.CONTROL_LOST
    return harness.exit_code


class _Process:
    """The harness's surroundings as this process has them."""

    def __init__(self, options: argparse.Namespace, reader: CommandReader, writer: EventWriter) -> None:
        self._options = options
        self._reader = reader
        self._writer = writer
        self._plugins: Plugins | None = None

    def harness(self) -> Harness:
        surroundings = Surroundings(
            pid=os.getpid(),
            arena=self._arena,
            attach=_attach,
            backend=self._backend,
            emit=self.emit,
            flush=self._writer.flush,
            should_abort=lambda: self._writer.lost or self._reader.should_abort(),
        )
        return Harness(surroundings)

    def emit(self, event: object) -> None:
        self._writer.emit(event)
        if isinstance(event, (WorkerReady, RoleConfigured)):
            gc.freeze()
            gc.enable()
        elif isinstance(event, RoleReset):  # what was frozen with the role is collected, or never is
            self._writer.flush()
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    def _loaded(self) -> Plugins:
        if self._plugins is None:
            options = self._options
            if options.plugin_module:
                self._plugins = load_modules(options.plugin_module)
            else:
                self._plugins = load_plugins(blocked=options.block_plugin, only=options.only_plugin or None)
        return self._plugins

    def _arena(self) -> ArenaPlugin:
        arena: ArenaPlugin = self._loaded().select(Kind.ARENA, self._options.arena).make()
        return arena

    def _backend(self, settings: dict[str, Any]) -> WorkerBackend:
        provider = self._loaded().select(Kind.WORKER, self._options.worker)
        backend: WorkerBackend = provider.make(settings=settings)
        return backend


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m swactor_core.worker",
        description="Worker process of a swactor node. The node starts it; it is of no use alone.",
    )
    parser.add_argument("--worker", required=True, metavar="NAME", help="worker plug-in")
    parser.add_argument("--arena", required=True, metavar="NAME", help="arena plug-in")
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="exit unless this is the parent")
    parser.add_argument(
        "--block-plugin", action="append", default=[], metavar="NAME", help="do not load it; may be repeated"
    )
    parser.add_argument(
        "--only-plugin", action="append", default=[], metavar="NAME", help="load only these; may be repeated"
    )
    parser.add_argument(
        "--plugin-module", action="append", default=[], metavar="MODULE",
        help="load only the plug-ins in these modules, without looking at what is installed; may be repeated",
    )  # fmt: skip
    return parser


def _claim_stdio() -> tuple[int, int]:
    """Private descriptors of stdin and stdout. What a library or a child prints goes to stderr from now on,
    and what it reads is empty: neither can touch the control stream."""
    commands, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return commands, events


def _attach(plugin: ArenaPlugin, ceiling: int) -> ArenaView:
    """The arena named by the environment. Raises ResourceError."""
    hint = "the node that starts a worker sets it"
    values = []
    for name in (ARENA_FD, ARENA_BYTES):
        text = os.environ.get(name, "")
        if not text.isascii() or not text.isdigit():
            raise ResourceError(f"{name} is {text!r}, expected a number", hint=hint)
        values.append(int(text))
    fd, reserved = values
    if reserved != ceiling:
        raise ResourceError(f"{ARENA_BYTES} is {reserved}, InitializeWorker says {ceiling}", hint=hint)
    arena = plugin.attach(fd, ceiling)
    os.set_inheritable(fd, False)
    return arena


if __name__ == "__main__":
    sys.exit(main())
