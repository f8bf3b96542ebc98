"""The command line as tests call it: in this process for speed, as a process where its life matters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TINY = Path(__file__).parent.parent / "data" / "tiny"
ENTRY = [sys.executable, "-m", "swactor_cli"]
LONGEST = 60.0


@dataclass(frozen=True, slots=True)
class Said:
    code: int
    out: str
    err: str


Call = Callable[..., Said]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State and cache of their own, no colour, and nothing of the caller's plug-in choice."""
    for name in [n for n in os.environ if n.startswith("SWACTOR_") or n in ("FORCE_COLOR", "COLUMNS")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWACTOR_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SWACTOR_LOG", "WARNING")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@pytest.fixture
def call(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """`call("plan", model)` runs the entry point in this process."""
    from swactor_cli.app import main

    def call(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["swactor-cli", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Said(int(ended.value.code), out, err)

    return call


@pytest.fixture
def spawn(home: Path) -> Call:
    """The same as a process of its own, for what needs a fresh interpreter."""

    def spawn(*arguments: str | Path, **environment: str) -> Said:
        done = subprocess.run(
            [*ENTRY, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=LONGEST,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    return spawn


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    """`start("node", …)` begins a process whose stderr is read line by line; killed if a test leaves it."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*ENTRY, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait(LONGEST)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


Distribution = Callable[[str, str], Path]


@pytest.fixture
def distribution(tmp_path: Path) -> Distribution:
    """Writes an installed-looking plug-in distribution; the folder goes onto PYTHONPATH."""

    def distribution(name: str, source: str) -> Path:
        folder = tmp_path / "site"
        module = name.replace("-", "_")
        info = folder / f"{module}-1.2.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(textwrap.dedent(source))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[swactor]\n{module} = {module}\n")
        return folder

    return distribution
