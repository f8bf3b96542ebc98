"""Kernels of a machine that cannot keep any: gone with their process, or with the next start after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from swactor_core.errors import ResourceError
from swactor_core.spi.storage import Stored, StoredKind
from swactor_worker_tinygrad import passing_kernels
from swactor_worker_tinygrad.kept_kernels import KeptKernels

MAKE = """
import sys
from swactor_worker_tinygrad.environment import cache_folder
folder = cache_folder("")
(folder / "kernels.db").write_text("compiled")
print(folder, flush=True)
sys.stdin.read()
"""
Start = Callable[[], "tuple[subprocess.Popen[str], Path]"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process and its children; kernels cannot be kept."""
    blocked = tmp_path / "file"
    blocked.touch()
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def start(temporary: Path) -> Iterator[Start]:
    begun: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        begun.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], *, killed: bool = False) -> None:
    if killed:
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


def test_the_folder_goes_with_its_process(start: Start, temporary: Path) -> None:
    process, folder = start()
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o077 == 0
    end(process)
    assert process.returncode == 0
    assert not list(temporary.iterdir())


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(
    start: Start, temporary: Path
) -> None:
    killed, left = start()
    _, used = start()
    other = temporary / "swactor-tinygrad-file"
    other.write_text("no folder")
    link = temporary / "swactor-tinygrad-link"
    link.symlink_to(temporary.parent, target_is_directory=True)
    end(killed, killed=True)
    assert left.is_dir()
    process, own = start()
    assert not left.exists()
    assert (used / "kernels.db").is_file()
    end(process)
    assert sorted(temporary.iterdir()) == sorted([used, other, link])
    assert own not in temporary.iterdir()


def test_what_is_left_is_listed_and_removed_and_what_is_used_stays(start: Start) -> None:
    process, folder = start()
    kept = KeptKernels()
    [stored] = kept.stored()
    assert (stored.kind, stored.path) == (StoredKind.TEMPORARY, str(folder))
    assert stored.nbytes >= len("compiled")
    assert stored.user
    assert kept.remove(stored) is False
    assert folder.is_dir()
    end(process, killed=True)
    [stored] = kept.stored()
    assert stored.user == ""
    assert kept.remove(stored) is True
    assert not folder.exists()
    assert kept.stored() == []
    with pytest.raises(ResourceError):
        kept.remove(stored)


def test_a_folder_of_another_user_is_nobodys_business(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = temporary / "swactor-tinygrad-theirs"
    theirs.mkdir()
    own = os.geteuid()
    monkeypatch.setattr(passing_kernels.os, "geteuid", lambda: own + 1)
    passing_kernels.remove_left()
    assert theirs.is_dir()
    assert KeptKernels().stored() == []
    with pytest.raises(ResourceError):
        KeptKernels().remove(Stored(StoredKind.TEMPORARY, str(theirs), 0, 0.0, ""))


def test_without_any_folder_it_is_said_what_to_set(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(ResourceError, match="no folder for compiled kernels") as caught:
        passing_kernels.passing_folder()
    assert "TMPDIR" in caught.value.hint
