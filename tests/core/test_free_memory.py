"""What memory is left, as the machine and the control groups say it, whoever asks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from swactor_core import free_memory
from swactor_core.free_memory import (
    available_memory,
    available_swap,
    file_system,
    lies_in_memory,
    machine,
    machine_rest,
    rest_in_words,
    rest_of_groups,
    swap_of_groups,
    within_limits,
)


def write(group: Path, limit: str, used: int, *, high: str = "max") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.high").write_text(f"{high}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text("anon 3\ninactive_file 20\nactive_file 5\nfile 700\n")


def write_version_1(group: Path, limit: int, used: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(
        "inactive_file 1\nactive_file 1\ntotal_inactive_file 20\ntotal_active_file 5\n"
    )


def test_the_narrowest_control_group_counts_with_what_the_kernel_would_drop(tmp_path: Path) -> None:
    write(tmp_path / "outer" / "inner", "max", 5)
    write(tmp_path / "outer", "1000", 900)
    assert rest_of_groups("0::/outer/inner\n", tmp_path) == 125
    assert rest_of_groups("0::/outer/absent\n", tmp_path) == 125
    assert rest_of_groups("0::/\n", tmp_path) is None
    assert rest_of_groups("3:memory:/outer\n", tmp_path) is None
    write(tmp_path / "outer", "1000", 5000)
    assert rest_of_groups("0::/outer/inner\n", tmp_path) == 0


def test_where_a_control_group_is_held_up_its_memory_ends_too(tmp_path: Path) -> None:
    write(tmp_path / "outer", "1000", 100)
    write(tmp_path / "outer" / "inner", "max", 100, high="300")
    assert rest_of_groups("0::/outer/inner\n", tmp_path) == 225
    write(tmp_path / "outer" / "inner", "200", 100, high="300")
    assert rest_of_groups("0::/outer/inner\n", tmp_path) == 125


@pytest.mark.parametrize("controllers", ["memory", "cpuset,memory"])
def test_groups_of_version_1_lie_within_one_another_too(tmp_path: Path, controllers: str) -> None:
    write_version_1(tmp_path / "memory", 1 << 62, 600)
    write_version_1(tmp_path / "memory" / "a", 700, 600)
    write_version_1(tmp_path / "memory" / "a" / "b", 1 << 62, 50)
    assert rest_of_groups(f"0::/\n3:{controllers}:/a/b\n", tmp_path) == 125
    assert rest_of_groups("3:pids:/a/b\n", tmp_path) is None


def test_a_container_of_version_1_has_its_limit_at_the_root(tmp_path: Path) -> None:
    write_version_1(tmp_path / "memory", 700, 600)
    assert rest_of_groups("3:memory:/docker/x\n", tmp_path) == 125


def test_version_2_beside_version_1_has_a_folder_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "unified" / "a", "1000", 900)
    assert rest_of_groups("4:memory:/\n0::/a\n", tmp_path) == 125


@pytest.mark.parametrize(
    ("machine", "group", "least"), [(10, 4, 4), (4, 10, 4), (None, 4, 4), (4, None, 4), (None, None, None)]
)
def test_the_lesser_of_machine_and_control_group(
    monkeypatch: pytest.MonkeyPatch, machine: int | None, group: int | None, least: int | None
) -> None:
    monkeypatch.setattr(free_memory, "machine_rest", lambda: machine)
    monkeypatch.setattr(free_memory, "group_rest", lambda: group)
    assert available_memory() == least
    assert rest_in_words() == ("in this control group" if least == 4 and group == 4 else "on this machine")


@pytest.mark.parametrize(
    ("text", "rest"),
    [("MemTotal: 9 kB\nMemAvailable: 64 kB\n", 65536), ("nothing", None), ("MemAvailable:", None)],
)
def test_the_machine_says_it_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, text: str, rest: int | None
) -> None:
    files(monkeypatch, {"/proc/meminfo": text})
    assert machine_rest() == rest


def files(monkeypatch: pytest.MonkeyPatch, known: dict[str, str]) -> None:
    def read(self: Path) -> str:
        if str(self) not in known:
            raise FileNotFoundError(2, "No such file", str(self))
        return known[str(self)]

    monkeypatch.setattr(Path, "read_text", read)


@pytest.mark.parametrize(
    ("rows", "given_back"),
    [
        ("13 1 0x01 147 39984 1 2\nname type data\nsize 4 9000\nc_min 4 4000\nc 4 1\n", 5000),
        ("size 4 3000\nc_min 4 4000\n", 0),
        ("size 4 many\n", 0),
    ],
)
def test_what_zfs_keeps_of_files_is_given_back(
    monkeypatch: pytest.MonkeyPatch, rows: str, given_back: int
) -> None:
    files(monkeypatch, {"/proc/meminfo": "MemAvailable: 64 kB\n", "/proc/spl/kstat/zfs/arcstats": rows})
    assert machine_rest() == 65536 + given_back


def test_swap_is_what_machine_and_control_groups_leave_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    assert swap_of_groups("0::/outer/inner\n", tmp_path) == []
    (group / "memory.swap.max").write_text("max\n")
    (group / "memory.swap.current").write_text("7\n")
    assert swap_of_groups("0::/outer/inner\n", tmp_path) == []
    (tmp_path / "outer" / "memory.swap.max").write_text("100\n")
    (tmp_path / "outer" / "memory.swap.current").write_text("30\n")
    assert swap_of_groups("0::/outer/inner\n", tmp_path) == [70]
    first = tmp_path / "memory" / "a"
    write_version_1(first, 1 << 63, 600)
    (first / "memory.memsw.limit_in_bytes").write_text(f"{1 << 63}\n")
    assert swap_of_groups("3:memory:/a\n", tmp_path) == []
    write_version_1(first, 700, 600)
    (first / "memory.memsw.limit_in_bytes").write_text("1000\n")
    (first / "memory.memsw.usage_in_bytes").write_text("650\n")
    assert swap_of_groups("3:memory:/a\n", tmp_path) == [250]
    monkeypatch.setattr(free_memory, "GROUP_ROOT", tmp_path)
    known = {
        "/proc/meminfo": "MemAvailable: 4 kB\nSwapFree: 1 kB\n",
        "/proc/self/cgroup": "0::/outer/inner\n",
    }
    for file in (tmp_path / "outer").rglob("*"):
        if file.is_file():
            known[str(file)] = file.read_text()
    files(monkeypatch, known)
    assert available_swap() == 70
    files(monkeypatch, {"/proc/meminfo": "SwapFree: 1 kB\n"})
    assert available_swap() == 1024
    files(monkeypatch, {})
    assert available_swap() == 0


@pytest.mark.parametrize(
    ("overcommit", "data", "space", "rest"),
    [
        ("0", -1, -1, 9000),
        ("1", -1, -1, 9000),
        ("2", -1, -1, 4096),
        ("0", 700, -1, 700),
        ("0", -1, 600, 600),
        ("2", 1 << 40, 1 << 40, 4096),
    ],
)
def test_memory_of_its_own_is_bounded_where_pages_of_files_are_not(
    monkeypatch: pytest.MonkeyPatch, overcommit: str, data: int, space: int, rest: int
) -> None:
    limits = {resource.RLIMIT_DATA: data, resource.RLIMIT_AS: space}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1))
    meminfo = "CommitLimit: 10 kB\nCommitted_AS: 6 kB\n"
    files(monkeypatch, {"/proc/meminfo": meminfo, "/proc/sys/vm/overcommit_memory": overcommit})
    assert within_limits(9000) == rest
    assert within_limits(None) is None


def test_a_machine_without_proc_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise FileNotFoundError(2, "No such file", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert available_memory() is None


MOUNTS = """\
22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
25 22 0:24 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw
31 22 0:27 / /a\\040b rw master:5 propagate_from:2 - ramfs none rw
torn
"""


@pytest.mark.parametrize(
    ("device", "kind"), [((8, 2), "ext4"), ((0, 24), "tmpfs"), ((0, 27), "ramfs"), ((0, 99), "")]
)
def test_the_file_system_of_a_device_is_its_mount_s(device: tuple[int, int], kind: str) -> None:
    assert file_system(os.makedev(*device), MOUNTS) == kind


def test_a_file_lies_in_memory_where_its_file_system_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(free_memory, "_MOUNTS", mounts)
    assert not lies_in_memory(str(tmp_path))
    mounts.write_text(f"25 22 {os.major(device)}:{os.minor(device)} / /x rw - tmpfs tmpfs rw\n")
    assert lies_in_memory(str(tmp_path))
    assert not lies_in_memory("https://host.test/m.gguf")
    assert not lies_in_memory("a\0b")


def test_a_machine_is_the_same_for_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = subprocess.run(
        [sys.executable, "-c", "from swactor_core.free_memory import machine; print(machine())"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert machine() == other.stdout.strip()
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(free_memory, "_BOOT", boot)
    assert machine() == ""
    boot.write_text("a1b2\n")
    assert machine() == "a1b2"
