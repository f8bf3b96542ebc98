"""Documentation that must not lie: hooks, commands, options, events, files, links, a runnable example."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from swactor_cli.app import app
from swactor_core.events import EventName
from swactor_core.hookspecs import ALL_SPECS
from swactor_core.plugins import PluginState
from swactor_core.spi.provider import Kind
from typer.main import get_command

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")],
    key=lambda page: str(page),
)
HOOKS = {
    name: hook for specs in ALL_SPECS for name, hook in vars(specs).items() if name.startswith("swactor_")
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented_with_its_signature(name: str) -> None:
    signature = inspect.signature(HOOKS[name])
    parameters = [f"{p.name}: {p.annotation}" for p in signature.parameters.values() if p.name != "self"]
    written = f"- `{name}({', '.join(parameters)}) -> {signature.return_annotation}`: "
    assert written in text_of("docs/plugins.md"), written


def test_no_hook_is_documented_that_is_none() -> None:
    named = set(re.findall(r"\bswactor_(?:register|add|doctor|node)_\w+", text_of("docs/plugins.md")))
    assert named <= set(HOOKS) | {"swactor_node_started", "swactor_node_stopping"}


def test_every_kind_and_state_is_documented() -> None:
    page = text_of("docs/plugins.md")
    assert all(f"| `{word}` |" in page for word in [*Kind, *PluginState])


def test_every_event_is_documented() -> None:
    page = text_of("docs/architecture.md")
    assert [name for name in EventName if f"`{name}`" not in page] == []


def commands() -> dict[str, set[str]]:
    """Every command with its options, as typer builds them."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, path: str) -> None:
        for name, below in getattr(command, "commands", {}).items():
            walk(below, f"{path} {name}".strip())
        if not hasattr(command, "commands"):
            options = {option for parameter in command.params for option in parameter.opts}
            found[path] = options | {"--help"}

    walk(get_command(app), "")
    return found


def test_every_command_is_in_the_tables() -> None:
    for page in ("README.md", "packages/swactor-cli/README.md"):
        missing = [name for name in commands() if f"swactor-cli {name}" not in text_of(page)]
        assert missing in ([], ["version"]), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_in_the_text_exist(page: Path) -> None:
    known = commands()
    for line in page.read_text(encoding="utf-8").splitlines():
        for use in re.findall(r"swactor-cli ([a-z][^`|#]*)", line):
            words = use.split()
            name = next((n for n in (" ".join(words[:2]), words[0]) if n in known), None)
            if name is None:
                assert words[0] in ("cluster", "starts"), use
                continue
            for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", use):
                assert option in known[name], f"{name} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, target


def test_files_that_the_architecture_names_exist() -> None:
    core = ROOT / "packages/swactor-core/src/swactor_core"
    places = [core, ROOT, ROOT / "packages/swactor-arena/src/swactor_arena"]
    places += [folder / "src" for folder in ROOT.glob("packages/*")]
    named = re.findall(r"`([\w/.-]+\.(?:py|c|md|toml))`", text_of("docs/architecture.md"))
    assert len(named) > 30
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert missing == []


def test_the_glossary_is_in_order_and_defines_each_word_once() -> None:
    glossary = text_of("docs/architecture.md").partition("## Glossary")[2]
    words = re.findall(r"^\| (?!word|-)([a-z -]+) \|", glossary, re.MULTILINE)
    assert len(words) > 50
    assert words == sorted(set(words), key=lambda word: word.replace("-", ""))


def test_the_example_of_the_core_runs(run: Any, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", text_of("packages/swactor-core/README.md"), re.DOTALL)
    program = tmp_path / "example.py"
    model = ROOT / "tests" / "data" / "tiny" / "llama-tied.gguf"
    program.write_text(block.replace('"model.gguf"', repr(str(model))))
    out, err = run(sys.executable, program, folder=tmp_path, timeout=100)
    assert re.fullmatch(r"completed \(\d+, \d+, \d+, \d+\)\n", out), out
    assert err == ""
