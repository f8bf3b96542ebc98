#!/usr/bin/env python3
"""Holds docs/spec.md beside the code: which module implements each section, and which test shows it.

Modules and tests cite the spec themselves, in docstrings (in comments, where the language is C): "spec
section 19", "spec sections 14 to 16", "spec sections 26, 38 and 39". A section's named parts, such as
"Ingress ring FSM", count as cited where a docstring that cites the section has the part's name.

    scripts/spec_map.py           writes docs/spec-map.md
    scripts/spec_map.py --check   writes nothing; fails when the page is out of date

Both fail, naming them, when a section that a program must fulfil has no module or no test.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPEC = "docs/spec.md"
PAGE = "docs/spec-map.md"
BEHAVIOUR = range(7, 41)
"""Sections that say what the system does; those before give terms, those after what is to come of it."""
PARTS_OF = (37, 38, 39)
"""Sections whose every titled part is a requirement of its own; elsewhere a part is a state machine."""

_HEADING = re.compile(r"^(\d+)\. (.+)$")
_PART = re.compile(r"^([A-Z][A-Za-z -]+):$")
_MACHINE = re.compile(r"^(?:[\w-]+ ){1,3}FSM$")
_CITATION = re.compile(r"\b[Ss]pec sections? (\d+(?:(?:, and |, | to | and )\d+)*)")

INTRODUCTION = f"""# The spec, section by section

Which module implements each section of [the spec](spec.md), and which test shows it; of the parts of a
section that have names, too. Paths of modules are below `packages/*/src/`. Modules and tests cite the spec in
their docstrings; this page is their index, written by `scripts/spec_map.py` and kept true by a test. Nothing
in sections {BEHAVIOUR.start} to {BEHAVIOUR.stop - 1} is without both.
"""


@dataclass(slots=True)
class Place:
    """A section of the spec, or a named part of one, and who cites it."""

    number: int
    title: str
    modules: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    parts: list[Place] = field(default_factory=list)


def read_spec(text: str) -> dict[int, Place]:
    """The numbered sections in order, with their named parts."""
    sections: dict[int, Place] = {}
    blank = True
    for line in text.splitlines():
        heading, part = _HEADING.match(line), _PART.match(line)
        if heading and int(heading[1]) == len(sections) + 1:
            sections[len(sections) + 1] = Place(len(sections) + 1, heading[2])
        elif part and blank and sections:
            section = sections[len(sections)]
            if section.number in PARTS_OF or _MACHINE.match(part[1]):
                section.parts.append(Place(section.number, part[1]))
        blank = not line.strip()
    return sections


def cited(text: str) -> set[int]:
    """The numbers of the sections that a docstring or comment cites."""
    numbers: set[int] = set()
    for citation in _CITATION.finditer(" ".join(text.split())):
        last = 0
        for separator, number in re.findall(r"(, and |, | to | and |^)(\d+)", citation[1]):
            first = last + 1 if separator == " to " else int(number)
            last = int(number)
            numbers.update(range(first, last + 1))
    return numbers


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """(name, docstring) of the module, with an empty name, and of its classes, functions and methods."""
    tree = ast.parse(source)

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, ast.get_docstring(node) or ""
            for child in node.body:
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from walk(child, f"{name}::{child.name}")

    yield from walk(tree, "")


def citations(root: Path) -> Iterator[tuple[str, bool, str]]:
    """(where, whether it is a test, text) of everything that may cite the spec."""
    for path in sorted((root / "packages").glob("*/src/**/*")):
        where = path.relative_to(root).as_posix().split("/src/", 1)[1]
        if path.suffix == ".py":
            for name, text in docstrings(path.read_text()):
                yield where + name, False, text
        elif path.suffix in (".c", ".h"):
            yield where, False, path.read_text()
    for path in sorted((root / "tests").glob("**/*.py")):
        where = path.relative_to(root).as_posix()
        for name, text in docstrings(path.read_text()):
            if path.name.startswith("test_"):
                yield where + name, True, text


def build(root: Path) -> tuple[dict[int, Place], list[str]]:
    """The map, and what is wrong with its sources: citations of sections that are not there."""
    sections = read_spec((root / SPEC).read_text())
    problems = []
    for where, is_test, text in citations(root):
        for number in sorted(cited(text)):
            if number not in sections:
                problems.append(f"{where} cites section {number}, and the spec has {len(sections)}")
                continue
            section = sections[number]
            said = " ".join(text.split()).lower()
            for place in (section, *(part for part in section.parts if part.title.lower() in said)):
                (place.tests if is_test else place.modules).append(where)
    return sections, problems


def gaps(sections: dict[int, Place]) -> list[str]:
    """What of the sections that a program must fulfil has no module or no test."""
    missing = []
    for number in BEHAVIOUR:
        for place in (sections[number], *sections[number].parts):
            what = f"section {number}, {place.title}" if place in sections[number].parts else ""
            what = what or f"section {number}. {place.title}"
            missing += [f"{what}: no module cites it"] if not place.modules else []
            missing += [f"{what}: no test cites it"] if not place.tests else []
    return missing


def page(sections: dict[int, Place]) -> str:
    """docs/spec-map.md."""
    lines = [INTRODUCTION]
    for section in sections.values():
        lines += [f"## {section.number}. {section.title}", ""]
        lines += _cell("Modules", section.modules) + _cell("Tests", section.tests) + [""]
        for part in section.parts:
            lines += [f"**{part.title}**", ""]
            lines += _cell("Modules", part.modules) + _cell("Tests", part.tests) + [""]
    return "\n".join(lines).rstrip() + "\n"


def _cell(name: str, places: list[str]) -> list[str]:
    """Whole files first; of a file that is named as a whole, its parts are not named again."""
    files = dict.fromkeys(place.partition("::")[0] for place in places)
    shown = []
    for file in files:
        names = [place.partition("::")[2] for place in places if place.partition("::")[0] == file]
        some = "" if "" in names else ": " + ", ".join(f"`{name.replace('::', '.')}`" for name in names)
        shown.append(f"  - `{file}`{some}")
    return [f"- {name}", *shown] if shown else [f"- {name}: none"]


def main(arguments: list[str]) -> int:
    sections, problems = build(ROOT)
    problems += gaps(sections)
    text = page(sections)
    target = ROOT / PAGE
    if "--check" in arguments:
        if not target.exists() or target.read_text() != text:
            problems.append(f"{PAGE} is out of date: run scripts/spec_map.py")
    else:
        target.write_text(text)
    for problem in problems:
        sys.stderr.write(f"scripts/spec_map.py: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
