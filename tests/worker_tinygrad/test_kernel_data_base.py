"""What is wrong with the data base of compiled kernels is told with the remedy for that, and no other."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from swactor_core.faults import RoleFailure
from swactor_worker_tinygrad.backend import _role_error


def corrupt(path: Path) -> None:
    path.write_bytes(b"no data base at all" * 100)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table kernels (code)")


def held(path: Path) -> None:
    with closing(sqlite3.connect(path)) as holder, closing(sqlite3.connect(path, timeout=0)) as other:
        holder.execute("begin exclusive")
        other.execute("create table kernels (code)")


def full(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma max_page_count = 2")
        connection.execute("create table kernels (code)")
        connection.execute("insert into kernels values (zeroblob(100000))")


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (corrupt, "remove '{path}': it is made anew"),
        (held, "another process holds it"),
        (full, "make room on that disk"),
    ],
)
def test_the_remedy_is_of_what_is_wrong(
    wrong: object, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(wrong)
    path = tmp_path / "kernels.db"
    monkeypatch.setenv("CACHEDB", str(path))
    with pytest.raises(sqlite3.Error) as caught:
        wrong(path)
    made = _role_error(caught.value, "")
    assert made.reason is RoleFailure.BACKEND_ERROR
    assert made.message == f"compiled kernels cannot be kept in {str(path)!r}: {caught.value}"
    assert made.hint.startswith(remedy.format(path=path))


def test_what_the_machine_has_run_out_of_is_told_with_its_remedy() -> None:
    full = _role_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/kernel.c"), "")
    assert (full.reason, full.hint) == (RoleFailure.BACKEND_ERROR, "free some space on that disk")
    assert _role_error(ValueError("a defect"), "").hint == ""
