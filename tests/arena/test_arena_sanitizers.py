"""The C helper under sanitizers and real threads: boundaries, damage, and hints that must never be lost."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("ring_driver.c")
SOURCES = Path(str(resources.files("swactor_arena"))) / "_csrc"
COMPILER = shutil.which("gcc") or shutil.which("clang") or "cc"
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-g"]


def build(folder: Path, *flags: str) -> Path:
    program = folder / "ring_driver"
    inputs = [str(DRIVER), str(SOURCES / "ring.c"), f"-I{SOURCES}"]
    command = [COMPILER, *WARNINGS, *flags, *inputs, "-o", str(program), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *words: str) -> None:
    done = subprocess.run([str(program), *words], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_boundaries_and_damage_under_address_and_undefined_behaviour_sanitizers(tmp_path) -> None:
    program = build(tmp_path, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    run(program, "boundaries")
    run(program, "threads", "61", "300000")


@pytest.mark.parametrize("flag", ["-O0", "-O2", "-O3"])
def test_no_hint_is_lost_between_two_threads(tmp_path, flag) -> None:
    program = build(tmp_path, flag)
    for capacity, total in (("1", "30000"), ("2", "100000"), ("8", "500000"), ("4096", "10000000")):
        run(program, "threads", capacity, total)


def test_payload_bytes_are_ordered_for_the_thread_sanitizer(tmp_path) -> None:
    """Its view of memory order is the language's: it reports a payload access that no release covers."""
    program = build(tmp_path, "-O1", "-fsanitize=thread", "-Wno-error=tsan")
    for capacity, total in (("1", "20000"), ("61", "300000"), ("4096", "3000000")):
        run(program, "threads", capacity, total)
