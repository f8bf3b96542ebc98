"""Builds machine code in a process of its own: what importing tinygrad takes there ends with it.

Knows how that process is started, asked and ended. `python -m swactor_worker_tinygrad.building PID` is it: C
sources come on standard input from the worker that it belongs to, each behind its length; a byte says for
each whether its code is on the disk now. The environment is what `environment.prepare` made it in the worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Callable

from swactor_core.node.process import die_with_parent

BUILD_SECONDS = 120.0
_LENGTH_BYTES = 4


class Builder:
    """That process, started with the first source. Not needed where tinygrad is imported anyway."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def build(self, source: str) -> bool:
        """Whether the code is on the disk now; if not, whoever asks builds it itself and has the error."""
        if "tinygrad" in sys.modules:
            return False
        if self._child is None:
            command = [sys.executable, "-m", "swactor_worker_tinygrad.building", str(os.getpid())]
            try:
                self._child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
                )
            except OSError:  # no further process is allowed, or none of this interpreter
                return False
            assert self._child.stdin is not None
            os.set_blocking(self._child.stdin.fileno(), False)
            self._end = weakref.finalize(self, _end, self._child)
        child, data = self._child, source.encode()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _write(child.stdin.fileno(), len(data).to_bytes(_LENGTH_BYTES, "little") + data)
            _wait(child.stdout.fileno(), select.POLLIN)
        except BrokenPipeError:
            return False
        except TimeoutError:
            self.close()
            return False
        return os.read(child.stdout.fileno(), 1) == b"y"

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._end()
        self._child = None


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with child:
        pass


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        _wait(descriptor, select.POLLOUT)
        rest = rest[os.write(descriptor, rest) :]


def _wait(descriptor: int, what: int) -> None:
    """Raises TimeoutError."""
    poll = select.poll()
    poll.register(descriptor, what)
    if not poll.poll(BUILD_SECONDS * 1e3):
        raise TimeoutError(f"the process that builds kernels did nothing for {BUILD_SECONDS:g} s")


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    while len(head := sys.stdin.buffer.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        source = sys.stdin.buffer.read(int.from_bytes(head, "little")).decode()
        kept = False
        with contextlib.suppress(Exception):  # the worker then tries by itself, and says what is wrong
            from swactor_worker_tinygrad import internals
            from swactor_worker_tinygrad.machine_code import keep

            image = internals.NativeFunction(source, "kernel").image
            kept = image is not None and keep(source, image)
        os.write(out, b"y" if kept else b"n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
