"""Settings, the compiler and the kernel cache, without starting tinygrad."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swactor_core.errors import ConfigError, ResourceError
from swactor_worker_tinygrad import environment
from swactor_worker_tinygrad.kept_kernels import KeptKernels
from swactor_worker_tinygrad.settings import read_settings


def program(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    return folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu": "0"}, "no setting 'gpu'"),
        ({"device": 3}, "device = 3 is not a string"),
        ({"device": "TPU"}, "device 'TPU' is not known"),
        ({"kernels": "fast"}, "kernels = 'fast'"),
        ({"weights": "copied"}, "weights = 'copied'"),
        ({"numerics": "quick"}, "numerics = 'quick' is not known"),
        ({"numerics": 8}, "numerics = 8 is not a string"),
        ({"numerics": "fast", "kernels": "graph"}, "numerics = 'fast' does not go with kernels = 'graph'"),
        ({"numerics": "fast", "weights": "mapped"}, "numerics = 'fast' does not go with weights = 'mapped'"),
        ({"numerics": "fast", "device": "cuda"}, "numerics = 'fast' does not go with device = 'CUDA'"),
        ({"threads": 0}, "threads = 0"),
        ({"threads": "2"}, "threads = '2'"),
        ({"threads": True}, "threads = True"),
        ({"search": "wide"}, "search = 'wide' is not known"),
        ({"search": 0}, "search = 0 is not known"),
        ({"search": 17}, "search = 17 is not known"),
        ({"search": True}, "search = True is not known"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_settings(settings)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("device", "name", "selection"),
    [
        ("", "CPU", "CPU"),
        ("cpu", "CPU", "CPU"),
        ("CUDA:PTX", "CUDA", "CUDA:PTX"),
        ("cuda:1", "CUDA:1", "CUDA"),
    ],
)
def test_devices_as_tinygrad_wants_them(device: str, name: str, selection: str) -> None:
    settings = read_settings({"device": device})
    assert (settings.device_name, settings.selection) == (name, selection)
    assert settings.threads >= 1


def test_native_kernels_are_the_cpu_s() -> None:
    for device in ("", "cpu", "CPU:0", "cpu:clang", "CPU::x86_64,x86-64-v3"):
        assert read_settings({"device": device}).has_native_kernels, device
    for device in ("CPU:LLVM", "CUDA", "CUDA:1", "PYTHON"):
        assert not read_settings({"device": device}).has_native_kernels, device


def test_searches_are_asked_for() -> None:
    for given, read in (
        ({}, "found"),
        ({"search": ""}, "found"),
        ({"search": "off"}, "off"),
        ({"search": 2}, 2),
    ):
        assert read_settings(given).search == read


def test_fast_numerics_pack_weights() -> None:
    for given in ({}, {"weights": "packed"}, {"weights": "auto"}, {"kernels": "native"}):
        settings = read_settings({"numerics": "fast", **given})
        assert (settings.numerics, settings.weights) == ("fast", "packed")
    settings = read_settings({})
    assert (settings.numerics, settings.weights) == ("exact", "auto")


def test_the_newest_compiler_is_preferred(bare_path: Path) -> None:
    program(bare_path / "clang", "echo clang version 14")
    program(bare_path / "clang-16", "echo clang version 16")
    assert environment.find_compiler() == "clang-16"


def test_a_named_compiler_wins_and_must_be_clang(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare_path / "clang-19", "echo clang version 19")
    program(bare_path / "mine", "echo Debian clang version 14.0.6")
    program(bare_path / "gcc", "echo gcc 12")
    program(bare_path / "broken", "exit 1")
    assert environment.find_compiler("mine") == "mine"
    monkeypatch.setenv("CC", "mine")
    assert environment.find_compiler() == "mine"
    for name in ("gcc", "broken"):
        with pytest.raises(ResourceError, match="is not clang"):
            environment.find_compiler(name)


def test_no_compiler_is_an_error_with_the_remedy(bare_path: Path) -> None:
    with pytest.raises(ResourceError, match="needs clang") as caught:
        environment.find_compiler()
    assert caught.value.hint == "apt-get install clang"
    with pytest.raises(ResourceError, match="'clang-99' is not on PATH"):
        environment.find_compiler("clang-99")


def give_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on it is another user's, who may be anybody but root."""
    stated = Path.stat

    def stat(self: Path, **options: Any) -> Any:
        state = stated(self, **options)
        if self != folder:
            return state
        return SimpleNamespace(st_uid=os.geteuid() + 1, st_gid=state.st_gid, st_mode=state.st_mode)

    monkeypatch.setattr(Path, "stat", stat)


def test_the_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = environment.cache_folder("clang")
    assert folder.is_relative_to(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert environment.cache_folder("clang").stat().st_mode & 0o022 == 0


def test_what_others_could_put_into_the_cache_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in it is unpickled, or run as machine code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = environment.cache_folder("clang")
    (folder / environment.DATA_BASE).write_text("ours")
    assert environment.cache_folder("clang") == folder
    assert (folder / environment.DATA_BASE).read_text() == "ours"
    folder.chmod(0o730)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (folder / "link").symlink_to(outside)
    (folder / "folder").mkdir()
    (folder / "folder" / "file").touch()
    assert environment.cache_folder("clang") == folder
    assert list(folder.iterdir()) == []
    assert (outside / "file").exists()
    assert f"others could write into the kernel cache {folder}" in caplog.text


def test_a_file_system_without_modes_keeps_no_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = environment.cache_folder("clang")
    folder.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    assert environment.kept_folder("clang") is None


def test_a_disk_that_fails_keeps_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def statvfs(path: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert environment.kept_folder("clang") is None


@pytest.mark.parametrize("name", ["swactor", f"swactor/tinygrad-{environment.TINYGRAD_VERSION}"])
def test_within_another_user_s_folder_no_kernels_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """As where XDG_CACHE_HOME is a temporary folder for all, and another user was first."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert environment.cache_folder("clang").is_relative_to(home)
    give_away(home / name, monkeypatch)
    assert environment.cache_folder("clang").parent == temporary
    assert f"{home / name} belongs to another user, or others write into it: set SWACTOR" in caplog.text


def test_kernels_lie_where_the_models_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "chosen"))
    folder = environment.cache_folder("clang")
    assert folder.is_relative_to(tmp_path / "chosen")
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("SWACTOR_CACHE_DIR")
    former = environment.cache_folder("clang")
    assert former.is_relative_to(tmp_path / "own")
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "chosen"))
    kept = KeptKernels()
    assert {stored.path for stored in kept.stored()} == {str(folder), str(former)}
    for stored in kept.stored():
        assert kept.remove(stored)
    assert kept.stored() == []


def test_kernels_of_another_user_are_neither_listed_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside models that many share, in a folder with a sticky bit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "chosen"))
    folder = environment.cache_folder("clang")
    (stored,) = KeptKernels().stored()
    give_away(folder, monkeypatch)
    assert KeptKernels().stored() == []
    with pytest.raises(ResourceError, match="is no folder of compiled kernels"):
        KeptKernels().remove(stored)
    assert folder.exists()


@pytest.mark.parametrize(
    ("mode", "shared"), [(0o777, True), (0o1777, False), (0o775, False), (0o2775, True), (0o755, False)]
)
def test_in_a_cache_that_others_write_into_no_kernels_are_kept_but_in_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, shared: bool
) -> None:
    """A folder of models that many share: whoever may write into it can exchange a folder within."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "chosen"))
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen").chmod(mode)
    monkeypatch.setattr(environment, "_own_group", lambda _: mode != 0o2775)
    where = "own" if shared else "chosen"
    assert environment.cache_folder("clang").is_relative_to(tmp_path / where)
    if shared:
        give_away(tmp_path / "own" / "swactor", monkeypatch)
        assert environment.kept_folder("clang") is None


@pytest.mark.parametrize(
    ("group", "members", "alone"),
    [("me", [], True), ("me", ["me"], True), ("users", [], False), ("me", ["me", "you"], False)],
)
def test_the_first_group_of_a_user_may_be_that_of_others_too(
    monkeypatch: pytest.MonkeyPatch, group: str, members: list[str], alone: bool
) -> None:
    """As on systems that make no group for each user, but have one for all of them."""
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    assert environment._own_group(os.getegid()) is alone


def test_a_user_without_an_entry_has_the_group_of_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert environment._own_group(os.geteuid())
    assert not environment._own_group(os.geteuid() + 1)


@pytest.mark.parametrize("lack", ["writable", "room", "owned"])
def test_a_cache_of_models_that_takes_no_kernels_leaves_them_to_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    """As models that root has put on the machine for all: they are read, and nothing is written there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "chosen"))
    folder = environment.cache_folder("clang")
    assert folder.is_relative_to(tmp_path / "chosen")
    if lack == "writable":
        monkeypatch.setattr(os, "access", lambda path, _: not Path(path).is_relative_to(tmp_path / "chosen"))
    elif lack == "room":
        monkeypatch.setattr(environment, "has_room", lambda path, **_: path.is_relative_to(tmp_path / "own"))
    else:
        give_away(folder, monkeypatch)
    assert environment.cache_folder("clang").is_relative_to(tmp_path / "own")


def test_the_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    give_away(environment.cache_folder("clang"), monkeypatch)
    with pytest.raises(ResourceError, match="belongs to another user"):
        environment.cache_folder("clang")


def test_without_a_writable_home_the_cache_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = environment.cache_folder("clang")
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0


def test_a_full_disk_keeps_no_kernels_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A data base on a full disk fails in the middle of a run; what is kept already is used all the same."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    free = {home: 8 << 20, temporary: 64 << 20}

    def statvfs(path: Path) -> Any:
        disk = next(disk for disk in free if Path(path).is_relative_to(disk))
        return SimpleNamespace(f_bavail=free[disk], f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert environment.cache_folder("clang").parent == temporary
    assert f"make {home}/swactor writable, with 32 MiB free, or set SWACTOR_CACHE_DIR" in caplog.text
    kept = home / "swactor" / f"tinygrad-{environment.TINYGRAD_VERSION}" / environment.cpu_key("clang")
    (kept / environment.DATA_BASE).touch()
    assert environment.cache_folder("clang") == kept
    free[home] = 1 << 20
    assert environment.cache_folder("clang").parent == temporary
    free[temporary] = 1 << 20
    with pytest.raises(ResourceError, match="no folder for compiled kernels has 32 MiB free") as caught:
        environment.cache_folder("clang")
    assert "TMPDIR" in caught.value.hint


def test_the_cache_key_is_of_processor_and_compiler(bare_path: Path) -> None:
    program(bare_path / "clang-15", "echo 15")
    program(bare_path / "clang-16", "echo clang 16")
    keys = {environment.cpu_key(name) for name in ("", "clang-15", "clang-16")}
    assert len(keys) == 3
    assert environment.cpu_key("clang-15") == environment.cpu_key("clang-15")


def test_another_tinygrad_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "TINYGRAD_VERSION", "0.99.0")
    with pytest.raises(ResourceError, match=r"tinygrad 0.99.0 is needed, found 0.14.0") as caught:
        environment.require_tinygrad()
    assert caught.value.hint == "pip install tinygrad==0.99.0"


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (8, 8), (64, 8)])
def test_each_core_has_a_thread_up_to_eight(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr("swactor_worker_tinygrad.settings.available_cores", lambda: cores)
    assert read_settings({}).threads == threads
    assert read_settings({"threads": 3}).threads == 3


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_plugin_is_light_until_its_factory_is_called() -> None:
    code = (
        "import sys; from swactor_worker_tinygrad import plugin; "
        "made = plugin.swactor_register_workers(); plugin.swactor_doctor_checks(); "
        "assert [(p.kind.value, p.name) for p in made] == [('worker', 'tinygrad')]; "
        "assert not {'tinygrad', 'numpy', 'gguf'} & set(sys.modules), sorted(sys.modules)"
    )
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr


FAILURE = (
    "from swactor_core.errors import SwactorError\n"
    "from swactor_worker_tinygrad import create, drivers\n"
    "drivers.cuda_driver = lambda: None\n"
    "try: create({settings})\n"
    "except SwactorError as error: print(type(error).__name__, error.message, '|', error.hint)\n"
)


def test_a_device_without_driver_is_a_typed_failure() -> None:
    done = in_a_process(FAILURE.format(settings={"device": "CUDA"}))
    assert done.stdout.startswith("ResourceError NVIDIA's driver (libcuda.so.1) is not found"), done.stderr
    assert "docker run --gpus all" in done.stdout
    done = in_a_process(FAILURE.format(settings={"device": "METAL"}))
    assert done.stdout.startswith("ResourceError device 'METAL' cannot be opened"), done.stderr
    assert "known devices are CPU, CUDA" in done.stdout


def test_a_missing_compiler_is_a_typed_failure(tmp_path: Path) -> None:
    done = in_a_process(FAILURE.format(settings={}), PATH=str(tmp_path), CC="")
    assert "ResourceError tinygrad's CPU device needs clang" in done.stdout, done.stderr
    assert "apt-get install clang" in done.stdout


def test_old_and_empty_variables_do_not_break_the_start() -> None:
    code = "from swactor_worker_tinygrad import create; b = create({}); print(b.facts()['device']); b.close()"
    done = in_a_process(code, CPU="1", DEBUG="", BEAM="", DEV="NULL")
    assert done.stdout.strip() == "CPU", done.stderr


def test_a_process_without_a_path() -> None:
    code = (
        "import os; del os.environ['PATH']\n"
        "from swactor_worker_tinygrad import create; b = create({}); print(b.facts()['device']); b.close()"
    )
    done = in_a_process(code)
    assert done.stdout.strip() == "CPU", done.stderr


def test_one_process_serves_one_device(backend: Any) -> None:
    with pytest.raises(ResourceError, match="already started in this process with DEV='CPU'"):
        environment.prepare(read_settings({"device": "CUDA"}))


def test_facts_name_device_and_versions(backend: Any) -> None:
    facts = backend.facts()
    assert facts["device"] == "CPU"
    assert facts["tinygrad"] == "0.14.0"
    assert facts["free_bytes"] > 0
    assert "clang" in facts["compiler"]
