"""How many cores a process has: by the hardware, by what it may run on, by its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from swactor_core import processors
from swactor_core.processors import available_cores, cores_of, quota_of_groups


def machine(root: Path, siblings: dict[int, str], *, file: str = "core_cpus_list") -> Path:
    for cpu, said in siblings.items():
        (root / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (root / f"cpu{cpu}" / "topology" / file).write_text(f"{said}\n")
    return root


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_hardware_threads_of_one_core_count_once(tmp_path: Path, file: str) -> None:
    root = machine(tmp_path, {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}, file=file)
    assert cores_of({0, 1, 4, 5}, root) == 2
    assert cores_of({0, 4}, root) == 1
    assert cores_of({0, 5}, root) == 2


def test_a_machine_without_hardware_threads_has_as_many_cores_as_processors(tmp_path: Path) -> None:
    root = machine(tmp_path, {cpu: str(cpu) for cpu in range(6)})
    assert cores_of(range(6), root) == 6


@pytest.mark.parametrize(("cpus", "cores"), [(1, 1), (4, 4), (5, 2), (16, 8)])
def test_where_nobody_says_whose_threads_they_are_many_are_two_a_core(
    tmp_path: Path, cpus: int, cores: int
) -> None:
    assert cores_of(range(cpus), tmp_path) == cores


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_narrowest_quota_of_groups_within_one_another_counts(tmp_path: Path) -> None:
    group(tmp_path / "outer" / "inner", cpu__max="max 100000\n")
    group(tmp_path / "outer", cpu__max="250000 100000\n")
    assert quota_of_groups("0::/outer/inner\n", tmp_path) == 2.5
    group(tmp_path / "outer" / "inner", cpu__max="50000 100000\n")
    assert quota_of_groups("0::/outer/inner\n", tmp_path) == 0.5
    assert quota_of_groups("0::/\n", tmp_path) is None
    assert quota_of_groups("", tmp_path) is None


@pytest.mark.parametrize("said", ["", "max", "much 100000\n", "100000 0\n"])
def test_a_quota_that_cannot_be_read_is_none(tmp_path: Path, said: str) -> None:
    group(tmp_path, cpu__max=said)
    assert quota_of_groups("0::/\n", tmp_path) is None


def test_a_quota_of_version_1_counts_too(tmp_path: Path) -> None:
    group(tmp_path / "cpu" / "job", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    assert quota_of_groups("4:cpu,cpuacct:/job\n0::/\n", tmp_path) == 3.0
    group(tmp_path / "cpu" / "job", cpu__cfs_quota_us="-1\n")
    assert quota_of_groups("4:cpu,cpuacct:/job\n0::/\n", tmp_path) is None


@pytest.mark.parametrize(("quota", "cores"), [("max", 6), ("350000", 3), ("20000", 1), ("900000", 6)])
def test_cores_are_those_of_the_machine_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(processors, "_CPUS", machine(tmp_path, {cpu: str(cpu) for cpu in range(6)}))
    monkeypatch.setattr(processors, "GROUP_ROOT", tmp_path / "groups")
    monkeypatch.setattr(processors, "membership", lambda: "0::/\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    group(tmp_path / "groups", cpu__max=f"{quota} 100000\n")
    assert available_cores() == cores


def test_this_machine_has_no_more_cores_than_threads() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))
