"""docs/spec-map.md indexes who cites which section of the spec: up to date, complete, and able to fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def spec_map() -> ModuleType:
    source = spec_from_file_location("spec_map", ROOT / "scripts" / "spec_map.py")
    assert source is not None
    assert source.loader is not None
    module = module_from_spec(source)
    sys.modules["spec_map"] = module
    source.loader.exec_module(module)
    return module


def test_every_section_is_there_with_its_title(spec_map: ModuleType) -> None:
    sections = spec_map.read_spec((ROOT / "docs" / "spec.md").read_text())
    assert list(sections) == list(range(1, 44))
    assert (sections[7].title, sections[40].title) == ("System Lifecycle", "Observability Surface")
    assert [part.title for part in sections[32].parts] == ["Ingress ring FSM", "Egress ring FSM"]
    assert [part.title for part in sections[39].parts] == [
        "Authority", "Readiness", "Weight use", "Edge identity", "Sequence", "Payload isolation",
        "Compute visibility", "Backpressure", "Terminal outcome", "Quiescence", "Worker restart",
    ]  # fmt: skip


def test_nothing_of_the_behaviour_is_without_module_and_test(spec_map: ModuleType) -> None:
    sections, problems = spec_map.build(ROOT)
    assert problems + spec_map.gaps(sections) == []


def test_the_page_is_up_to_date() -> None:
    command = (sys.executable, ROOT / "scripts" / "spec_map.py", "--check")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("spec section 19", {19}),
        ("(spec sections 14 to 16): more", {14, 15, 16}),
        ("spec sections 26, 38 and 39.", {26, 38, 39}),
        ("Spec sections 4, and 9", {4, 9}),
        ("spec sections 14 to 16, 38", {14, 15, 16, 38}),
        ("spec\n    section 7", {7}),
        ("RFC 9000 section 2.1", set()),
        ("architecture section 7", set()),
    ],
)
def test_citations_are_read(spec_map: ModuleType, text: str, numbers: set[int]) -> None:
    assert spec_map.cited(text) == numbers


def test_a_citation_that_goes_is_missed(spec_map: ModuleType, tmp_path: Path) -> None:
    """A copy where no test cites one section, no module another, and one cites what is not there."""
    for folder in ("docs", "packages", "tests"):
        ignore = shutil.ignore_patterns("data", "__pycache__", "*.egg-info", "_native*", "build")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)

    def without(path: Path, number: int) -> None:
        text = path.read_text()
        citation = re.compile(r"\b[Ss]pec sections? [\d, andto]+\d")
        path.write_text(citation.sub(lambda m: "" if number in spec_map.cited(m[0]) else m[0], text))

    for test in (tmp_path / "tests").rglob("*.py"):
        without(test, 27)
    for module in (tmp_path / "packages").rglob("*.py"):
        without(module, 33)
    gates = tmp_path / "tests/core/test_machine_gates.py"
    gates.write_text('"""Spec section 99."""\n')
    sections, problems = spec_map.build(tmp_path)
    assert problems == ["tests/core/test_machine_gates.py cites section 99, and the spec has 43"]
    assert {
        "section 27. Tx And Rx Edge Actors: no test cites it",
        "section 33. Device Bridge: no module cites it",
    } <= set(spec_map.gaps(sections))
    assert spec_map.page(sections) != (ROOT / "docs" / "spec-map.md").read_text()
