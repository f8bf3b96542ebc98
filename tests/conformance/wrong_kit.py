"""Wrong plug-ins and the runs that must catch them.

A module `wrong_*.py` holds one class of tests per defect, each a contract over a mock with one thing broken;
`caught_by` says which test of the contract must fail, and how. `TestUnbroken` of the same module is the same
wrapping with nothing broken. Pytest does not collect these modules by itself: `run` does, in a process of its
own, so that what a wrong plug-in leaves behind harms nobody. Modules of the same wrapping share one of them.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UNBROKEN = "TestUnbroken"


class Around:
    """Something whole, whose every part is reached through this; a defect overrides one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def plain(test: str) -> str:
    """A test's name without its parameters."""
    return re.sub(r"\[.*", "", test)


def caught_by(test: str, saying: str) -> Callable[[type], type]:
    """The defect of this class makes `test` fail with a text that `saying` (a regular expression) finds."""

    def mark(cls: type) -> type:
        assert hasattr(cls, plain(test)), f"the contract of {cls.__name__} has no {test}"
        cls.caught_by = (test, saying)
        return cls

    return mark


@dataclass(frozen=True)
class Defect:
    module: str
    name: str
    test: str
    saying: str


@dataclass
class Outcome:
    """What one run reported: how many tests passed by class, and the texts of those that failed."""

    passed: dict[str, int] = field(default_factory=dict)
    failed: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    output: str = ""


@cache
def load(module: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module, HERE / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def defects_of(module: str) -> list[Defect]:
    classes = [c for c in vars(load(module)).values() if isinstance(c, type) and "caught_by" in vars(c)]
    return [Defect(module, cls.__name__, *cls.caught_by) for cls in classes]


def has_unbroken(module: str) -> bool:
    return hasattr(load(module), UNBROKEN)


def run(module: str) -> Outcome:
    """The named test of every defect, and everything of the unbroken one where the module has it."""
    file = HERE / f"{module}.py"
    chosen = [f"{file}::{defect.name}::{defect.test}" for defect in defects_of(module)]
    if has_unbroken(module):
        chosen.insert(0, f"{file}::{UNBROKEN}")
    options = ["-q", "-p", "no:cacheprovider", "--timeout=20", "--timeout-method=signal", "--tb=short"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                *options,
                f"--junitxml={report}",
                *chosen,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        outcome = Outcome(output=f"{done.stdout[-3000:]}\n{done.stderr[-1000:]}")
        assert report.exists(), f"the run gave no report: {outcome.output}"
        cases = list(ET.parse(report).iter("testcase"))
    for case in cases:
        owner = case.attrib["classname"].rpartition(".")[2]
        test = plain(case.attrib["name"])
        troubles = [one for one in case if one.tag in ("failure", "error")]
        if any(one.tag == "skipped" for one in case):
            outcome.skipped.append(f"{owner}.{test}")
        elif troubles:
            texts = [f"{one.attrib.get('message', '')}\n{one.text or ''}" for one in troubles]
            outcome.failed.setdefault((owner, test), []).extend(texts)
        else:
            outcome.passed[owner] = outcome.passed.get(owner, 0) + 1
    return outcome
