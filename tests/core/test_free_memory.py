"""What memory is left, as the machine and the control groups say it, whoever asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from swactor_core import free_memory
from swactor_core.free_memory import available_memory, machine_rest, rest_of_groups


def write(
    group: Path, limit: str, used: int, *, names: tuple[str, str] = ("memory.max", "memory.current")
) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text("anon 3\ninactive_file 25\n")


def test_the_narrowest_control_group_counts_with_what_the_kernel_would_drop(tmp_path: Path) -> None:
    write(tmp_path / "outer" / "inner", "max", 5)
    write(tmp_path / "outer", "1000", 900)
    assert rest_of_groups("0::/outer/inner\n", tmp_path) == 125
    assert rest_of_groups("0::/outer/absent\n", tmp_path) == 125
    assert rest_of_groups("0::/\n", tmp_path) is None
    assert rest_of_groups("3:memory:/outer\n", tmp_path) is None
    write(tmp_path / "outer", "1000", 5000)
    assert rest_of_groups("0::/outer/inner\n", tmp_path) == 0


def test_a_container_of_version_1_has_its_limit_at_the_root(tmp_path: Path) -> None:
    names = "memory.limit_in_bytes", "memory.usage_in_bytes"
    write(tmp_path / "memory", "700", 600, names=names)
    assert rest_of_groups("3:memory:/docker/x\n", tmp_path) == 125


@pytest.mark.parametrize(
    ("machine", "group", "least"), [(10, 4, 4), (4, 10, 4), (None, 4, 4), (4, None, 4), (None, None, None)]
)
def test_the_lesser_of_machine_and_control_group(
    monkeypatch: pytest.MonkeyPatch, machine: int | None, group: int | None, least: int | None
) -> None:
    monkeypatch.setattr(free_memory, "machine_rest", lambda: machine)
    monkeypatch.setattr(free_memory, "group_rest", lambda: group)
    assert available_memory() == least


@pytest.mark.parametrize(
    ("text", "rest"),
    [("MemTotal: 9 kB\nMemAvailable: 64 kB\n", 65536), ("nothing", None), ("MemAvailable:", None)],
)
def test_the_machine_says_it_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, text: str, rest: int | None
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: {"/proc/meminfo": text}[str(self)])
    assert machine_rest() == rest


def test_a_machine_without_proc_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise FileNotFoundError(2, "No such file", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert available_memory() is None
