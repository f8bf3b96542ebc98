"""Runs of the real command on loopback: private places, models, and a guard that ends what a test left."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from local_command import Command, Places, Run
from web_servers import Nginx

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Python's bytecode in a folder of its own: some hundred processes start here, and where nobody lets
    them keep it each would compile everything again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.mktemp("bytecode")))
        yield


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


@pytest.fixture
def command(places: Places) -> Iterator[Callable[..., Command]]:
    """Starts a command; whatever lives after the test is ended and is the test's failure."""
    started: list[Command] = []

    def start(*arguments: str, kind: type[Command] = Command, **options: Any) -> Command:
        started.append(kind([*arguments], options.pop("places", places), **options))
        return started[-1]

    yield start
    left = {pid: line for one in started for pid, line in one.left().items()}
    for one in started:
        one.kill()
    assert not left, f"the test left processes: {left}"


@pytest.fixture
def run(command: Callable[..., Command]) -> Callable[..., Run]:
    """Starts `swactor-cli run …` with events and JSON lines."""

    def start(*arguments: str, **options: Any) -> Run:
        started = command(*arguments, kind=Run, **options)
        assert isinstance(started, Run)
        return started

    return start


@pytest.fixture
def echo(run: Callable[..., Run]) -> Callable[..., Run]:
    """A run on the echo worker and a tiny model: quick, and its tokens are known without a model."""

    def start(*arguments: str, **options: Any) -> Run:
        return run(tiny("llama-gqa"), "--worker", "echo", *arguments, **options)

    return start


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Nginx]:
    """Serves the folder `served`."""
    root, folder = tmp_path / "served", tmp_path / "nginx"
    root.mkdir()
    folder.mkdir()
    server = Nginx(root, folder)
    yield server
    server.stop()


def tiny(name: str) -> str:
    return str(DATA / "tiny" / f"{name}.gguf")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], str]:
    return tiny


@pytest.fixture(scope="session")
def reference() -> Callable[[str], dict[str, Any]]:
    """Token ids and logits of llama.cpp, by name."""

    def load(name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
        return loaded

    return load


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The path of `demo`, fetched once if this machine does not have it."""
    from swactor_core.plugins import load_plugins
    from swactor_core.spi.provider import Kind

    path: str = load_plugins().select(Kind.LOADER, "gguf").factory().resolve("demo")
    return path
