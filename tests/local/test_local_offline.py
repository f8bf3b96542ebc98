"""The real command without its model's server, and with a model of several files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_command import Command, Run
from split_models import split
from web_servers import Misbehaving, Nginx

Start = Callable[..., Run]
SHARES = (("token_embd", "output"), ("blk.0.", "blk.1."), ("blk.2.", "blk.3."))


@pytest.fixture
def asked(reference: Callable[[str], dict[str, Any]]) -> tuple[tuple[str, ...], list[int]]:
    """(options of a run, the greedy ids that follow) of the tiny model."""
    known = reference("tiny/llama-gqa")
    ids = ",".join(map(str, known["prompt"]))
    return ("--prompt-ids", ids, "--max-tokens", str(len(known["greedy"])), "--ignore-eos"), known["greedy"]


@pytest.fixture
def server(tiny_model: Callable[[str], str]) -> Iterator[Misbehaving]:
    made = Misbehaving(Path(tiny_model("llama-gqa")).read_bytes())
    yield made
    made.stop()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str | None]:
    return {"SWACTOR_CACHE_DIR": str(tmp_path / "cache"), "SWACTOR_OFFLINE": None, "HF_HUB_OFFLINE": None}


def warnings(started: Command) -> list[str]:
    return [line for line in started.err.splitlines() if "cannot be reached" in line]


def test_a_second_run_needs_no_server(
    run: Start,
    command: Callable[..., Command],
    tmp_path: Path,
    nginx: Nginx,
    tiny_model: Callable[[str], str],
    asked: tuple[tuple[str, ...], list[int]],
    environment: dict[str, str | None],
) -> None:
    options, expected = asked
    shutil.copy(tiny_model("llama-gqa"), tmp_path / "served" / "m.gguf")
    url = f"{nginx.url}/m.gguf"
    assert run(url, *options, environment=environment).finish(0)["token_ids"] == expected
    nginx.stop()
    began = time.monotonic()
    started = run(url, *options, environment=environment)
    assert started.finish(0)["token_ids"] == expected
    print(f"{time.monotonic() - began:.1f} s without a server")
    (line,) = warnings(started)
    assert f"{url}: its server cannot be reached (" in line
    assert "as of 20" in line
    planned = command("plan", url, "--nodes", "2", "--json", environment=environment)
    assert planned.wait() == 0, planned.said()
    assert [record["type"] for record in planned.records()] == ["plan"]
    assert len(warnings(planned)) == 1
    tuned = command("tune", url, "--worker", "echo", "--json", environment=environment)
    assert tuned.wait() == 0, tuned.said()
    assert [record["type"] for record in tuned.records()] == ["tuned", "tuned"]
    assert len(warnings(tuned)) == 1


def test_the_switch_reaches_nodes_and_asks_nobody(
    run: Start, command: Callable[..., Command], server: Misbehaving, environment: dict[str, str | None]
) -> None:
    arguments = (f"{server.url}/m.gguf", "--worker", "echo", "--prompt-ids", "5,6,7", "--max-tokens", "4")
    tokens = run(*arguments, environment=environment).finish(0)["token_ids"]
    before = len(server.requests)
    forbidden = environment | {"SWACTOR_OFFLINE": "1"}
    started = run(*arguments, environment=forbidden)
    assert started.finish(0)["token_ids"] == tokens
    assert not warnings(started)
    for what in ("plan", "tune"):
        done = command(what, arguments[0], "--worker", "echo", environment=forbidden)
        assert done.wait() == 0, done.said()
    assert len(server.requests) == before


@pytest.mark.parametrize("what", ["run", "plan", "tune"])
def test_what_is_not_here_is_bad_input_with_the_switch(
    command: Callable[..., Command], server: Misbehaving, environment: dict[str, str | None], what: str
) -> None:
    prompt = ("--prompt-ids", "5,6,7") if what == "run" else ()
    for name in (f"{server.url}/m.gguf", "hf:owner/repo/m.gguf", "demo"):
        done = command(what, name, *prompt, environment=environment | {"HF_HUB_OFFLINE": "1"})
        assert done.wait() == 2, done.said()
        assert "which is not in the cache, is not asked for: HF_HUB_OFFLINE is set" in done.err
        assert "unset HF_HUB_OFFLINE" in done.err
    assert not server.requests


def test_a_model_that_is_here_in_part_is_bad_input_with_the_switch(
    command: Callable[..., Command], server: Misbehaving, environment: dict[str, str | None]
) -> None:
    """`plan` brings the header, which is all that it needs itself."""
    url, forbidden = f"{server.url}/m.gguf", environment | {"SWACTOR_OFFLINE": "1"}
    assert command("plan", url, environment=environment).wait() == 0
    before = len(server.requests)
    assert command("plan", url, environment=forbidden).wait() == 0
    for arguments in (("run", url, "--prompt-ids", "5,6,7"), ("tune", url, "--worker", "echo")):
        done = command(*arguments, environment=forbidden)
        assert done.wait() == 2, done.said()
        assert "of what is needed are not in the cache" in done.err
        assert "unset SWACTOR_OFFLINE" in done.err
    assert len(server.requests) == before


def test_a_switch_that_says_neither_is_bad_input(
    command: Callable[..., Command], server: Misbehaving, environment: dict[str, str | None]
) -> None:
    done = command("plan", f"{server.url}/m.gguf", environment=environment | {"SWACTOR_OFFLINE": "perhaps"})
    assert done.wait() == 2, done.said()
    assert "SWACTOR_OFFLINE is 'perhaps'" in done.err


def test_stages_go_by_the_content_that_their_orchestrator_goes_by(
    run: Start, server: Misbehaving, environment: dict[str, str | None]
) -> None:
    """The address has another content when stages could ask; what they need of the planned one is here."""
    arguments = (f"{server.url}/m.gguf", "--worker", "echo", "--prompt-ids", "5,6,7", "--max-tokens", "4")
    tokens = run(*arguments, environment=environment).finish(0)["token_ids"]
    old = server.behaviour.content
    server.behaviour.content, server.behaviour.etag = old[:-1] + bytes([old[-1] ^ 1]), '"two"'
    server.behaviour.answers = [503, 503]  # to the orchestrator, which asks first
    before = len(server.requests)
    started = run(*arguments, environment=environment)
    assert started.finish(0)["token_ids"] == tokens
    assert len(warnings(started)) == 1
    assert len(server.requests) - before == 2


# parts


def test_a_split_model_behind_links(
    run: Start,
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    asked: tuple[tuple[str, ...], list[int]],
) -> None:
    """As the hub's own cache has it: what a link leads to has no part's name."""
    options, expected = asked
    blobs, links = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    links.mkdir()
    for part in split(tiny_model("llama-gqa"), blobs, SHARES):
        blob = part.rename(blobs / f"blob-{part.name[2:7]}")
        os.symlink(blob, links / part.name)
    started = run(str(links / "m-00002-of-00003.gguf"), *options)
    assert started.finish(0)["token_ids"] == expected
