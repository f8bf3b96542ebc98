"""Nine packages, one version: metadata, pins, and that each declares what it imports and no more."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from swactor_core import __version__

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("packages/*/pyproject.toml"))
PROJECTS = {file.parent.name: tomllib.loads(file.read_text())["project"] for file in FILES}
NAMES = sorted(PROJECTS)
TESTED = [f"3.{minor}" for minor in range(11, 16)]
PLUGINS = [name for name in NAMES if "entry-points" in PROJECTS[name]]


def source_of(name: str) -> Path:
    return ROOT / "packages" / name / "src" / name.replace("-", "_")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return canonical(match[0])


def test_there_are_nine_packages_and_six_plugins() -> None:
    assert len(NAMES) == 9
    assert len(PLUGINS) == 6


@pytest.mark.parametrize("name", NAMES)
def test_a_package_is_whole(name: str) -> None:
    project, folder = PROJECTS[name], ROOT / "packages" / name
    assert project["name"] == name
    assert project["version"] == __version__
    assert project["requires-python"] == ">=3.11"
    pythons = [one for one in project["classifiers"] if one.startswith("Programming Language :: ")]
    assert pythons == [f"Programming Language :: Python :: {version}" for version in TESTED]
    assert project["license"] == "Apache-2.0"
    assert project["description"]
    assert (source_of(name) / "py.typed").is_file()
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    readme = (folder / project["readme"]).read_text()
    assert readme.startswith(f"# {name}\n")
    assert len(readme.splitlines()) > 10, "a README is a page, not a line"


@pytest.mark.parametrize("page", ["README.md", "packages/swactor/README.md"])
def test_a_page_says_which_pythons_are_tested(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert f"Python {TESTED[0]} or later (tested up to {TESTED[-1]}" in text


@pytest.mark.parametrize("name", NAMES)
def test_the_package_under_test_is_the_one_in_this_checkout(name: str) -> None:
    assert metadata.version(name) == __version__


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("swactor", "swactor-core")])
def test_a_package_takes_a_compatible_core(name: str) -> None:
    major, minor = (int(part) for part in __version__.split(".")[:2])
    assert f"swactor-core>={major}.{minor}.0,<{major}.{minor + 1}" in PROJECTS[name]["dependencies"]


def test_the_metapackage_pins_every_other_one_exactly() -> None:
    project = PROJECTS["swactor"]
    extras = project["optional-dependencies"]
    pinned = [*project["dependencies"], *(one for key in extras if key != "all" for one in extras[key])]
    assert sorted(pinned) == sorted(f"{name}=={__version__}" for name in NAMES if name != "swactor")
    assert extras["all"] == [f"swactor[{','.join(key for key in extras if key != 'all')}]"]


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_is_registered_under_the_group_of_the_project(name: str) -> None:
    assert list(PROJECTS[name]["entry-points"]) == ["swactor"]
    (module,) = PROJECTS[name]["entry-points"]["swactor"].values()
    assert module == f"{name.replace('-', '_')}.plugin"


def imports_of(folder: Path) -> set[str]:
    """Top names of every import in the package, those in functions and for type checking included."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module is not None
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {folder.name}


@pytest.mark.parametrize("name", NAMES)
def test_a_package_declares_what_it_imports_and_no_more(name: str) -> None:
    ours = {name.replace("-", "_"): [name] for name in NAMES}  # editable installs are not listed
    distributions = {**metadata.packages_distributions(), **ours}
    declared = {requirement_name(one) for one in PROJECTS[name]["dependencies"]}
    if name == "swactor-testing":  # what only its contracts need comes with the extra of that name
        extra = PROJECTS[name]["optional-dependencies"]["conformance"]
        declared |= {requirement_name(one) for one in extra}
    imported = {canonical(distributions[module][0]) for module in imports_of(source_of(name))}
    if name == "swactor":  # the metapackage brings the command line without importing it
        imported.add("swactor-cli")
    assert imported == declared


PURE = {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math", "typing"}


def test_machines_import_nothing_that_touches_the_world() -> None:
    core = source_of("swactor-core")
    for file in [core / "fsm.py", *sorted((core / "machines").glob("*.py"))]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                names = [node.module]
            for module in names:
                allowed = module.partition(".")[0] in PURE or module.startswith("swactor_core.")
                assert allowed, f"{file.name} imports {module}"


@pytest.mark.parametrize("script", ["scripts/setup", "scripts/demo", "scripts/test", ".ci/run"])
def test_a_script_can_be_run_and_stops_at_the_first_failure(script: str) -> None:
    file = ROOT / script
    assert file.stat().st_mode & 0o111 == 0o111
    lines = file.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
