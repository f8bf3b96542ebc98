"""What the machines may know (architecture: rooms of the core): no I/O, no clock, no chance."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import swactor_core
import swactor_core.machines

MACHINES = sorted(Path(swactor_core.machines.__path__[0]).glob("*.py"))
CORE = Path(swactor_core.__path__[0])
VOCABULARY = [
    path
    for name in ("ids", "specs", "plan", "messages", "faults", "events", "wire", "fsm")
    for path in sorted([*CORE.glob(f"{name}.py"), *CORE.glob(f"{name}/*.py")])
]
FORBIDDEN = {
    "_thread",
    "asyncio",
    "concurrent",
    "ctypes",
    "datetime",
    "io",
    "logging",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
CALLS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
# Rooms of the core that know I/O; machines are below them.
ABOVE = {"actors", "node", "orchestrator", "worker", "observe", "config", "plugins"}


def imported(tree: ast.AST) -> set[str]:
    """Dotted names of all modules that a source imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.add(str(node.module))
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", [*MACHINES, *VOCABULARY], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_input_output_clock_or_chance(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    roots = {name.partition(".")[0] for name in imported(tree)}
    assert not roots & FORBIDDEN
    assert roots <= {"__future__", "swactor_core"} | set(sys.stdlib_module_names), "a third-party import"
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not called & CALLS


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_a_machine_knows_nothing_of_those_who_host_it(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    rooms = {name.split(".")[1] for name in imported(tree) if name.startswith("swactor_core.")}
    assert not rooms & ABOVE


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_a_machine_s_file_says_what_it_knows_and_is_a_chapter(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) < 400


def test_the_contract_sees_the_rooms_and_a_breach() -> None:
    assert len(MACHINES) > 12
    assert len(VOCABULARY) >= 8
    breach = (
        "def f():\n    import socket as s\n    from os import path\n    from swactor_core.actors import x"
    )
    found = imported(ast.parse(breach))
    assert {"socket", "os", "os.path", "swactor_core.actors"} <= found


def test_importing_the_machines_and_the_vocabulary_loads_no_plugin_and_no_heavy_library() -> None:
    modules = ", ".join(f"swactor_core.machines.{path.stem}" for path in MACHINES if path.stem != "__init__")
    code = f"import sys, {modules}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert "swactor_core" in loaded
    assert not loaded & {"tinygrad", "aioquic", "tokenizers", "numpy", "gguf", "httpx", "typer", "asyncio"}
    assert not {name for name in loaded if name.startswith("swactor_")} - {"swactor_core"}


@pytest.mark.parametrize(
    "module", ["node.__main__", "worker.__main__", "orchestrator.session", "orchestrator.local_pool"]
)
def test_what_every_process_imports_at_its_start_is_light(module: str) -> None:
    code = f"import sys, swactor_core.{module}; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"tinygrad", "aioquic", "tokenizers", "numpy", "gguf", "httpx2", "typer", "jinja2"}


def test_a_worker_imports_no_border_that_is_not_its_own() -> None:
    """Nor pydantic, whose own part does what a worker needs of it."""
    code = "import sys, swactor_core.worker.__main__; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert {
        f"swactor_core.messages.{name}" for name in ("address", "worker_commands", "worker_events")
    } <= loaded
    borders = {f"swactor_core.messages.{name}" for name in ("arena", "control", "edges", "run")}
    interfaces = {f"swactor_core.spi.{name}" for name in ("membership", "transport")}
    machines = {f"swactor_core.machines.{name}" for name in ("run", "stage", "edge", "pool", "node", "arena")}
    assert not loaded & (borders | interfaces | machines)
    assert not loaded & {"pydantic", "asyncio", "importlib.metadata", "swactor_core.config"}


def test_every_name_of_a_package_that_imports_lazily_is_there() -> None:
    import swactor_core.messages
    import swactor_core.spi

    for package in (swactor_core.messages, swactor_core.spi):
        for name in package.__all__:
            found = getattr(package, name)
            assert not hasattr(found, "__module__") or found.__module__.startswith(package.__name__), name
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            package.__getattr__("Nothing")
