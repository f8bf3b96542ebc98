"""The command line as a user runs it, in a session of its own, and everything that can be seen of it outside.

Knows /proc, signals and files. Every process that a command starts inherits a mark in its environment; `left`
finds them all, whoever their parent is by then. Waits are polls of a condition with a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import event_checker

MARK = "SWACTOR_TEST_RUN"
CLI = (sys.executable, "-m", "swactor_cli")
POLL_SECONDS = 0.01
END_SECONDS = 60.0
GONE_SECONDS = 5.0
PACED = ("--worker-option", "copy_polls=4")
"""For the echo worker: a token takes some 13 ms, so a run of 400 lasts until the test has acted."""

T = TypeVar("T")


def until(condition: Callable[[], T], *, within: float, what: Callable[[], str] | str) -> T:
    """The first true value of `condition()`; an AssertionError that says `what` after `within` seconds."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        if time.monotonic() > deadline:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {within:g} s: {text}")
        time.sleep(POLL_SECONDS)
    return value


class Places:
    """Private directories of one command: what it may leave behind, and where to look for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.temporary, self.runtime, self.state = root / "tmp", root / "runtime", root / "state"
        for folder in (self.temporary, self.runtime, self.state):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def environment(self, mark: str, extra: dict[str, str | None] | None = None) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SWACTOR_")}
        kept |= {
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "SWACTOR_STATE_DIR": str(self.state),
            "PYTHONUNBUFFERED": "",
            MARK: mark,
        }
        for name, value in (extra or {}).items():
            if value is None:
                kept.pop(name, None)
            else:
                kept[name] = value
        return kept

    def leftovers(self) -> list[str]:
        found = [*self.temporary.rglob("*"), *self.runtime.rglob("*")]
        return [str(path.relative_to(self.root)) for path in found]


class Command:
    """One process of `arguments` and all that it starts. stdout, stderr and events are files in `places`."""

    def __init__(
        self,
        arguments: Sequence[str],
        places: Places,
        *,
        environment: dict[str, str | None] | None = None,
        program: Sequence[str] = CLI,
        stdout: Any = None,
        **popen: Any,
    ) -> None:
        self.places = places
        self.mark = secrets.token_hex(8)
        self._out, self._err = places.root / f"out-{self.mark}", places.root / f"err-{self.mark}"
        self.events_path = places.root / f"events-{self.mark}"
        self.sockets: set[str] = set()
        self.started = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            popen.setdefault("stdin", subprocess.DEVNULL)
            popen.setdefault("stderr", err)
            self.process = subprocess.Popen(
                [*program, *arguments],
                stdout=out if stdout is None else stdout,
                env=places.environment(self.mark, environment),
                start_new_session=True,
                **popen,
            )

    # --- what it says ---

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def records(self) -> list[dict[str, Any]]:
        """The whole lines of `--json`."""
        return _json_lines(self._out)

    def events(self) -> list[dict[str, Any]]:
        return _json_lines(self.events_path)

    def event(self, name: str, **identity: object) -> dict[str, Any] | None:
        """The first event of that name and identity, if it has been written."""
        for event in self.events():
            if event["event"] == name and all(event.get(k) == v for k, v in identity.items()):
                return event
        return None

    def said(self) -> str:
        names = [event["event"] for event in self.events()[-12:]]
        talk = f"stderr:\n{self.err}\nstdout:\n{self.out[-600:]}"
        return f"exit {self.process.poll()}, last events {names}, {talk}"

    # --- its processes ---

    def left(self) -> dict[int, str]:
        """Living processes that carry the mark: pid to command line."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            if f"{MARK}={self.mark}" in _nul_separated(f"/proc/{name}/environ"):
                found[int(name)] = " ".join(_nul_separated(f"/proc/{name}/cmdline"))
        return found

    def worker_pid(self, stage: int) -> int:
        """The worker of a planned stage, from events alone, as an operator would find it."""
        return int(self._of_stage("worker_started", stage)["pid"])

    def node_id(self, stage: int) -> str:
        plan = until(lambda: self.event("run_planned"), within=END_SECONDS, what=self.said)
        return str(plan["stages"][stage]["node_id"])

    def _of_stage(self, name: str, stage: int) -> dict[str, Any]:
        node = self.node_id(stage)
        event = self.event(name, node_id=node)
        assert event is not None, f"no {name} of node {node}"
        return event

    def node_pid(self, stage: int) -> int:
        return parent_of(self.worker_pid(stage))

    def watch_sockets(self) -> None:
        """Notes the sockets that its processes hold now, to see afterwards that they are gone."""
        for pid in self.left():
            with contextlib.suppress(OSError):
                for number in os.listdir(f"/proc/{pid}/fd"):
                    target = os.readlink(f"/proc/{pid}/fd/{number}")
                    if target.startswith("socket:["):
                        self.sockets.add(target[8:-1])

    # --- its end ---

    def wait_event(self, name: str, within: float = END_SECONDS, **identity: object) -> dict[str, Any]:
        def seen() -> dict[str, Any] | None:
            event = self.event(name, **identity)
            if event is None and self.process.poll() is not None:
                raise AssertionError(f"ended before {name}: {self.said()}")
            return event

        event = until(seen, within=within, what=lambda: f"{name} {identity}: {self.said()}")
        self.watch_sockets()
        return event

    def interrupt(self) -> None:
        """Ctrl-C as a terminal does it: to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, within: float = END_SECONDS) -> int:
        """The exit code; afterwards nothing of the command may be left."""
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {within:g} s: {self.said()}") from None
        return code

    def assert_nothing_left(self, within: float = GONE_SECONDS) -> None:
        until(lambda: not self.left(), within=within, what=lambda: f"processes are left: {self.left()}")
        # A process is gone from /proc a moment before its descriptors are closed.
        until(lambda: not _udp_inodes() & self.sockets, within=1, what="sockets are left open")
        assert not self.places.leftovers(), f"files are left: {self.places.leftovers()}"
        shared = [name for name in os.listdir("/dev/shm") if "swactor" in name]
        assert not shared, f"shared memory is left: {shared}"

    def kill(self) -> None:
        """Ends whatever still lives of this command; for the cleanup of a failed test."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


class Run(Command):
    """`swactor-cli run … --json --events FILE`."""

    def __init__(self, arguments: Sequence[str], places: Places, **options: Any) -> None:
        self.events_path = Path()
        events = places.root / f"events-{secrets.token_hex(8)}"
        super().__init__(["run", *arguments, "--json", "--events", str(events)], places, **options)
        self.events_path = events
        self.veterans = False

    def result(self) -> dict[str, Any]:
        last = self.records()[-1:]
        assert [record["type"] for record in last] == ["result"], self.said()
        return last[0]

    def tokens(self) -> list[int]:
        return [record["id"] for record in self.records() if record["type"] == "token"]

    def finish(self, code: int, *, within: float = END_SECONDS, **judged: Any) -> dict[str, Any]:
        """Waits for the expected exit code, judges the events and that nothing is left; gives the result."""
        got = self.wait(within)
        assert got == code, self.said()
        self.assert_nothing_left()
        event_checker.check(self.events(), veterans=self.veterans, **judged)
        assert "Traceback" not in self.err, self.err
        result = self.result()
        assert result["token_ids"] == self.tokens()
        return result

    def error_line(self) -> str:
        """The one line that says why it failed."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _nul_separated(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace").split("\0")
    except OSError:  # ended meanwhile, or not ours to look at
        return []


def _udp_inodes() -> set[str]:
    inodes = set()
    for table in ("/proc/net/udp", "/proc/net/udp6"):
        with contextlib.suppress(OSError), open(table) as file:
            inodes |= {line.split()[9] for line in list(file)[1:]}
    return inodes


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the writer may be in the middle of one."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
