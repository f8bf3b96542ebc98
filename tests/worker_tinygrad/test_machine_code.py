"""Machine code that is kept between processes, and memory that is had without tinygrad."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stage_support import DATA, config_of, manifest_of
from swactor_core.spi.worker import RoleError
from swactor_worker_tinygrad import building

TWICE = "void kernel(unsigned long long *p) { p[0] *= 2; }"


@pytest.fixture
def folder(backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where finished code is kept; the backend has prepared this process."""
    monkeypatch.setenv("CACHEDB", str(tmp_path / "kernels.db"))
    return tmp_path


def doubled(function: Any) -> int:
    cell = np.array([21], np.uint64)
    function.function(ctypes.c_uint64(cell.ctypes.data))
    return int(cell[0])


def test_code_is_built_once(folder: Path) -> None:
    from swactor_worker_tinygrad.machine_code import NativeFunction

    first = NativeFunction(TWICE)
    (path,) = folder.glob("*.code")
    second = NativeFunction(TWICE)
    assert (first.kept, second.kept) == (False, True)
    assert path.stat().st_mode & 0o077 == 0
    assert doubled(first) == doubled(second) == 42
    assert NativeFunction(TWICE.replace("2", "4")).kept is False
    path.unlink()  # what runs lives on
    assert doubled(second) == 42


def test_another_processor_has_other_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swactor_worker_tinygrad.machine_code import NativeFunction

    NativeFunction(TWICE)
    monkeypatch.setenv("DEV", "CPU::x86_64,x86-64-v2")
    assert NativeFunction(TWICE).kept is False


@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_damaged_code_is_built_anew(folder: Path, damage: str) -> None:
    from swactor_worker_tinygrad.machine_code import NativeFunction

    NativeFunction(TWICE)
    (path,) = folder.glob("*.code")
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-3], "empty": b"", "changed": b"\xcc" + whole[1:]}[damage])
    function = NativeFunction(TWICE)
    assert function.kept is False
    assert doubled(function) == 42
    assert path.read_bytes() == whole


@pytest.mark.parametrize("whose", ["others may write", "another user's"])
def test_code_that_another_may_have_written_is_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Whatever has become of the folder: in a temporary folder without a sticky bit any user can put another
    one in its place."""
    from swactor_worker_tinygrad import machine_code

    machine_code.NativeFunction(TWICE)
    (path,) = folder.glob("*.code")
    assert machine_code._mapped(path) is not None
    if whose == "others may write":
        path.chmod(0o666)
    else:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert machine_code._mapped(path) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swactor_worker_tinygrad.machine_code import NativeFunction

    monkeypatch.setenv("CACHEDB", str(folder / "gone" / "kernels.db"))
    for _ in range(2):
        function = NativeFunction(TWICE)
        assert (function.kept, doubled(function)) == (False, 42)


def test_code_that_calls_others_is_not_kept(tmp_path: Path) -> None:
    """In a process of its own: where much is mapped, others may lie too far away for tinygrad's loader."""
    code = (
        "from swactor_worker_tinygrad import environment, settings\n"
        "environment.prepare(settings.read_settings({}))\n"
        "from swactor_worker_tinygrad.machine_code import NativeFunction, _kept_at\n"
        "source = 'extern double cos(double); void kernel(double *p) { p[0] = cos(p[0]); }'\n"
        "print(*(NativeFunction(source).kept for _ in range(2)), _kept_at(source).exists())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.split() == ["False"] * 3, done.stderr


def test_all_kernels_are_kept(folder: Path, kernels: Any) -> None:
    """None of them calls what only tinygrad's loader would find."""
    from swactor_worker_tinygrad.native import TYPES, Kernels

    made = Kernels()
    wanted = [(name, None) for name in ("run", "norm", "rope", "attention", "gate", "route", "group", "cap")]
    wanted += [("pack", None), ("round", None)]
    wanted += [(name, kind) for name, kind in (("matmul", 3), ("rows", 3), ("experts", 8))]
    wanted += [("matmul_lanes", 3), ("matmul_fast", 3)]
    assert {3, 8} <= set(TYPES)
    for each in wanted:
        made.address(*each)
    assert len(list(folder.glob("*.code"))) == len(wanted)


def test_a_start_with_native_kernels_imports_no_tinygrad(tmp_path: Path) -> None:
    """The first one neither: another process builds the kernels. Nor what only tinygrad needs."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from stage_support import DATA, Pipeline, reference\n"
        "from swactor_worker_tinygrad import create\n"
        "made = create({'threads': 1})\n"
        "pipeline = Pipeline(made, DATA / 'llama-gqa.gguf', 2)\n"
        "expected = reference('llama-gqa')\n"
        "assert pipeline.generate(expected['prompt'], 3) == expected['greedy'][:3]\n"
        "kernels = pipeline.roles[0].engine._kernels._built.values()\n"
        "needless = {'tinygrad', 'sqlite3'} & sys.modules.keys()\n"
        "print(bool(needless), all(each.kept for each in kernels))\n"
        "made.close()\n"
    )
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said == [["False", "False"], ["False", "True"]]


@pytest.fixture
def builder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from swactor_worker_tinygrad.building import Builder

    # as in a process that has no tinygrad; what is imported here stays what it is
    monkeypatch.setattr(building, "sys", SimpleNamespace(modules={}, executable=sys.executable))
    made = Builder()
    yield made
    made.close()
    made.close()


def test_another_process_builds_one_source_after_the_other(folder: Path, builder: Any) -> None:
    from swactor_worker_tinygrad.machine_code import NativeFunction

    for factor in (2, 3):
        function = NativeFunction(TWICE.replace("2", str(factor)), builder)
        assert doubled(function) == 21 * factor
        child = builder._child
    assert len(list(folder.glob("*.code"))) == 2
    assert child.poll() is None
    builder.close()
    assert child.returncode is not None


def test_what_the_other_process_cannot_build_is_built_here(folder: Path, builder: Any) -> None:
    from swactor_worker_tinygrad.machine_code import NativeFunction

    assert not builder.build("no C at all")
    with pytest.raises(subprocess.CalledProcessError):
        NativeFunction("no C at all", builder)
    builder._child.kill()
    builder._child.wait()
    assert doubled(NativeFunction(TWICE, builder)) == 42


def test_where_no_process_can_be_started_it_is_built_here(folder: Path, builder: Any) -> None:
    from swactor_worker_tinygrad.machine_code import NativeFunction

    building.sys.executable = os.devnull
    assert not builder.build(TWICE)
    assert doubled(NativeFunction(TWICE, builder)) == 42


def test_a_role_without_tinygrad_to_build_with_says_so(
    backend: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swactor_worker_tinygrad import environment

    monkeypatch.setattr(environment, "TINYGRAD_VERSION", "0.99.0")
    config = config_of(manifest_of(DATA / "llama-gqa.gguf"))
    with pytest.raises(RoleError, match=r"tinygrad 0\.99\.0 is needed, found 0\.14\.0") as caught:
        backend.configure(config, progress=lambda _: None, should_abort=lambda: False)
    assert caught.value.hint == "pip install tinygrad==0.99.0"


def test_host_memory_is_zeroed_and_may_fail() -> None:
    from swactor_worker_tinygrad.device_memory import HostMemory, large_memory

    room = large_memory(1 << 22)
    assert room.flags.writeable
    assert not room.any()
    memory = HostMemory(100)
    assert bytes(memory.view) == bytes(100)
    memory.view[99] = 7
    assert ctypes.string_at(memory.address + 99, 1) == b"\x07"
    for taken in (large_memory, HostMemory):
        for nbytes in (1 << 60, 1 << 70):
            with pytest.raises(MemoryError, match=f"{nbytes} bytes cannot be had"):
                taken(nbytes)
