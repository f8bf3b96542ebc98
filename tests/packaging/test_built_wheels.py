"""The wheels as people get them: built without workspace sources, looked into, installed outside the tree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(file.parent.name for file in ROOT.glob("packages/*/pyproject.toml"))
PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
pytestmark = pytest.mark.timeout(900)  # third parties may have to be fetched
NEWER_NAMES = """
import importlib.machinery
suffixes = importlib.machinery.EXTENSION_SUFFIXES
suffixes.insert(suffixes.index(".abi3.so"), ".abi3-x86_64-linux-gnu.so")
"""


@pytest.fixture(scope="module")
def wheels(uv: str, run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source distributions first and wheels from them, out of a copy of the files that git would take.
    Whichever Python builds, it is told the names of libraries that 3.15 prefers: the older ones have to find
    what it makes too."""
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build", "dist", "_native.c")
    shutil.copytree(ROOT / "packages", tree / "packages", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tree)
    (folder / "newer").mkdir()
    (folder / "newer" / "sitecustomize.py").write_text(NEWER_NAMES)
    run(
        *("env", f"PYTHONPATH={folder / 'newer'}", uv, "build", "--python", sys.executable),
        *("--all-packages", "--no-sources", "--out-dir", folder / "dist"),
        folder=tree,
    )
    return folder / "dist"


def wheel_of(wheels: Path, name: str) -> Path:
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_there_is_one_wheel_a_package_and_one_of_them_is_native(wheels: Path) -> None:
    tags = {wheel.name.split("-")[0]: wheel.stem.split("-", 2)[2] for wheel in wheels.glob("*.whl")}
    assert sorted(tags) == sorted(name.replace("-", "_") for name in NAMES)
    arena = tags.pop("swactor_arena")
    assert arena.startswith("cp311-abi3-linux_")
    assert set(tags.values()) == {"py3-none-any"}


@pytest.mark.parametrize("name", NAMES)
def test_a_wheel_holds_its_sources_and_no_test(wheels: Path, name: str) -> None:
    module = name.replace("-", "_")
    source = ROOT / "packages" / name / "src" / module
    names = names_in(wheel_of(wheels, name))
    wanted = {
        f"{module}/{file.relative_to(source)}"
        for file in source.rglob("*")
        if file.is_file() and file.suffix in (".py", ".pyi", ".typed", ".c", ".h", ".json", ".toml")
        if "__pycache__" not in file.parts and file.name != "_native.c"
    } | {f"{module}/py.typed"}
    assert wanted <= names, wanted - names
    info = [entry for entry in names if ".dist-info/" in entry]
    assert any(entry.endswith("/LICENSE") for entry in info)
    top = {entry.split("/")[0] for entry in names if ".dist-info/" not in entry}
    assert top == {module}
    assert not [entry for entry in names if "/tests/" in entry or "__pycache__" in entry]


def test_the_native_wheel_holds_library_and_c_sources(wheels: Path) -> None:
    names = names_in(wheel_of(wheels, "swactor-arena"))
    assert "swactor_arena/_native.abi3.so" in names
    assert {"swactor_arena/_csrc/ring.c", "swactor_arena/_csrc/ring.h"} <= names


def test_the_worker_wheel_holds_its_kernels(wheels: Path) -> None:
    source = ROOT / "packages/swactor-worker-tinygrad/src/swactor_worker_tinygrad"
    kernels = {f"swactor_worker_tinygrad/{file.relative_to(source)}" for file in source.rglob("*.c")}
    assert kernels
    assert kernels <= names_in(wheel_of(wheels, "swactor-worker-tinygrad"))


@pytest.mark.parametrize("name", NAMES)
def test_the_metadata_of_a_wheel_names_version_licence_and_page(wheels: Path, name: str) -> None:
    version = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]["version"]
    with zipfile.ZipFile(wheel_of(wheels, name)) as archive:
        (entry,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        text = archive.read(entry).decode()
    head = text.partition("\n\n")[0].splitlines()
    assert f"Version: {version}" in head
    assert "License-Expression: Apache-2.0" in head
    assert "Description-Content-Type: text/markdown" in head


@pytest.fixture(scope="module")
def installed(uv: str, run: Any, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`swactor[all]` from the wheels in an environment outside the checkout; gives its bin folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (version,) = {wheel.name.split("-")[1] for wheel in wheels.glob("*.whl")}
    run(uv, "venv", "--python", PYTHON, folder / "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    constraints = folder / "constraints.txt"  # third parties as the lock has them; ours from the wheels
    run(
        *(uv, "export", "-q", "--frozen", "--all-packages", "--no-emit-workspace", "--no-hashes"),
        *("--no-header", "-o", constraints),
        folder=ROOT,
    )
    run(
        *(uv, "pip", "install", "--python", python, "--find-links", wheels),
        *("--constraints", constraints, f"swactor[all]=={version}"),
        folder=folder,
    )
    yield python.parent
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_package_imports_in_isolated_mode(installed: Path, run: Any, tmp_path: Path, name: str) -> None:
    program = f"import {name.replace('-', '_')} as m; print(m.__file__)"
    out, _ = run(installed / "python", "-I", "-c", program, folder=tmp_path)
    assert Path(out.strip()).is_relative_to(installed.parent)


def test_every_plugin_is_found_and_loaded(installed: Path, run: Any, tmp_path: Path) -> None:
    out, err = run(installed / "swactor-cli", "plugins", "--json", folder=tmp_path)
    records = [json.loads(line) for line in out.splitlines()]
    assert {record["state"] for record in records} == {"loaded"}
    assert sorted(record["distribution"] for record in records) == [
        "swactor-arena",
        "swactor-loader-gguf",
        "swactor-membership-swim",
        "swactor-testing",
        "swactor-transport-quic",
        "swactor-worker-tinygrad",
    ]
    assert err == ""


def test_the_command_shows_its_help(installed: Path, run: Any, tmp_path: Path) -> None:
    out, _ = run(installed / "swactor-cli", "--help", folder=tmp_path)
    assert "doctor" in out


def test_a_run_streams_tokens(installed: Path, run: Any, tmp_path: Path) -> None:
    model = ROOT / "tests" / "data" / "tiny" / "llama-tied.gguf"
    out, _ = run(
        *(installed / "swactor-cli", "run", model, "--worker", "echo", "--prompt-ids", "1,2,3"),
        *("--max-tokens", "4", "--json"),
        folder=tmp_path,
        timeout=120,
    )
    *tokens, result = [json.loads(line) for line in out.splitlines()]
    assert len(tokens) == 4
    assert result["outcome"] == "completed"


def test_the_core_alone_says_which_plugin_is_missing(uv: str, run: Any, wheels: Path, tmp_path: Path) -> None:
    """Without extras there is a command line and no plug-in: an error with the remedy, no traceback."""
    run(uv, "venv", "--python", PYTHON, tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(uv, "pip", "install", "--python", python, "--find-links", wheels, "swactor", folder=tmp_path)
    out, err = run(python.parent / "swactor-cli", "plan", "demo", folder=tmp_path, code=2)
    assert out == ""
    assert "no loader plug-in named 'gguf'" in err
    assert "swactor[all]" in err
    assert "Traceback" not in err


def test_the_source_distributions_are_there_too(wheels: Path) -> None:
    assert len(list(wheels.glob("*.tar.gz"))) == len(NAMES)
    listed = subprocess.run(
        ["tar", "tzf", next(wheels.glob("swactor_arena-*.tar.gz"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "_csrc/ring.c" in listed
