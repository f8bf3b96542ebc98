"""The import contracts of pyproject.toml: kept, and able to fail."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = Path(sys.executable).parent / "lint-imports"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_there_is_a_contract_for_each_border() -> None:
    assert [contract["id"] for contract in CONTRACTS] == [
        "core",
        "plug-ins",
        "command-line",
        "machines",
        "vocabulary",
    ]


@pytest.mark.parametrize("module", ["asyncio", "socket", "time", "threading", "os", "random", "subprocess"])
def test_a_machine_that_imports_a_module_of_the_world_is_caught(tmp_path: Path, module: str) -> None:
    """The tool must see the standard library as it sees third parties: an ignored name passes silently."""
    package = tmp_path / "house" / "machines"
    package.mkdir(parents=True)
    (tmp_path / "house" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "clock.py").write_text(f"import {module}\n")
    (tmp_path / "pyproject.toml").write_text(
        '[tool.importlinter]\nroot_packages = ["house"]\ninclude_external_packages = true\n'
        '[[tool.importlinter.contracts]]\nname = "machines"\ntype = "forbidden"\nid = "machines"\n'
        f'source_modules = ["house.machines"]\nforbidden_modules = ["{module}"]\n'
    )
    done = subprocess.run(
        [LINT, "--no-cache", "--no-logo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"house.machines.clock -> {module}" in done.stdout
