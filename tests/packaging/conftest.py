"""What the packaging tests share: uv, and a command run away from this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="session")
def uv() -> str:
    """The uv of the development environment, else of the machine."""
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else os.environ.get("UV") or shutil.which("uv")
    assert found, "uv is in the development group: set up with scripts/test"
    return found


@pytest.fixture(scope="session")
def run() -> Run:
    """`run(command, …, folder=…)` gives stdout and stderr of a command that ends with `code`, with nothing
    of this environment on its path."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    kept = {k: v for k, v in kept.items() if not k.startswith("SWACTOR_")}

    def run(*command: str | Path, folder: Path, timeout: float = 600, code: int = 0) -> tuple[str, str]:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            env={**kept, "NO_COLOR": "1"},
            check=False,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout, done.stderr

    return run
