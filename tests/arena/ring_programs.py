"""Builds of the C helper with a C driver of these tests, outside of Python."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = Path(str(resources.files("swactor_arena"))) / "_csrc"
COMPILERS = tuple(name for name in ("gcc", "clang", "clang-19") if shutil.which(name))
WARNINGS = ("-std=c11", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-g")
LIMIT_SECONDS = 110


def build(folder: Path, driver: str, *flags: str, compiler: str = COMPILERS[0]) -> Path:
    """The program of `driver` (a file beside this one) and ring.c; warnings are errors."""
    program = folder / Path(driver).stem
    inputs = [str(HERE / driver), str(SOURCES / "ring.c"), f"-I{SOURCES}"]
    # Bound at the start: the sweep counts instructions of the helper, not of the dynamic linker.
    command = [compiler, *WARNINGS, *flags, *inputs, "-o", str(program), "-pthread", "-Wl,-z,now"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *words], capture_output=True, text=True, timeout=LIMIT_SECONDS)
