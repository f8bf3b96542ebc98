"""`cache`: what was fetched is listed with its size, goes when asked to, and stays while somebody has it."""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest
from swactor_loader_gguf.sparse import SparseFile

DAY = 86400.0
DIGEST = "ab" * 32


@pytest.fixture
def whole(home: Path) -> Path:
    """A whole model out of a package, with the note of its digest."""
    path = home / "cache" / "gguf" / DIGEST / "whole.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 8192)
    names = home / "cache" / "names"
    names.mkdir()
    (names / "package").write_text(DIGEST + "\n")
    (names / "another").write_text("cd" * 32 + "\n")
    return path


@pytest.fixture
def partial(home: Path) -> Path:
    """4 KiB of a model of 1 MiB on the web."""
    file = SparseFile(home / "cache" / "remote" / ("12" * 32), "partial.gguf", 1 << 20)
    file.write(0, b"y" * 4096)
    file.commit(0, 4096)
    file.close()
    return Path(file.path)


def listed(call: Any) -> dict[str, dict[str, Any]]:
    said = call("cache", "list", "--json")
    assert said.code == 0, said.err
    records = [json.loads(line) for line in said.out.splitlines()]
    return {record["name"]: record for record in records}


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def test_an_empty_cache_is_listed(call: Any) -> None:
    said = call("cache", "list")
    assert (said.code, said.err) == (0, "")
    assert "0 models, 0 B" in said.out
    assert call("cache", "clear", "--all").out == "removed 0 models, 0 B\n"


def test_sizes_on_disk_are_those_of_what_is_here(call: Any, whole: Path, partial: Path) -> None:
    found = listed(call)
    assert found["whole.gguf"]["disk_bytes"] == 8192
    assert found["partial.gguf"]["file_bytes"] == 1 << 20
    assert 0 < found["partial.gguf"]["disk_bytes"] < 1 << 17
    assert not any(model["in_use"] for model in found.values())
    said = call("cache", "list")
    assert "2 models" in said.out
    assert "partial.gguf" in said.out


def test_what_is_older_goes_and_what_is_not_stays(call: Any, whole: Path, partial: Path) -> None:
    age(whole, 40)
    age(partial, 20)
    assert call("cache", "clear", "--older-than", "30d", "--dry-run").out == "would remove 1 model, 8.0 KiB\n"
    assert whole.exists()
    said = call("cache", "clear", "--older-than", "30d")
    assert (said.code, said.out) == (0, "removed 1 model, 8.0 KiB\n")
    assert not whole.parent.exists()
    assert partial.exists()
    assert not list((whole.parent.parent.parent / "names").iterdir())


@pytest.mark.parametrize("by", ["name", "key"])
def test_a_named_model_goes_alone(call: Any, whole: Path, partial: Path, by: str) -> None:
    named = listed(call)["partial.gguf"][by]
    assert call("cache", "clear", named).code == 0
    assert not partial.parent.exists()
    assert list(listed(call)) == ["whole.gguf"]


def test_an_open_or_mapped_model_stays(call: Any, whole: Path, partial: Path) -> None:
    with partial.open("rb") as file, whole.open("rb") as other:
        held = mmap.mmap(other.fileno(), 8192, access=mmap.ACCESS_READ)
        other.close()
        assert all(model["in_use"] for model in listed(call).values())
        said = call("cache", "clear", "--all")
        assert said.code == 1
        assert "partial.gguf" in said.err
        assert "is in use and stays" in said.err
        assert said.out == "removed 0 models, 0 B\n"
        assert file.read(1) == b"y"
        held.close()
    assert call("cache", "clear", "--all").code == 0
    assert listed(call) == {}


def test_a_model_that_is_being_fetched_stays(call: Any, partial: Path) -> None:
    file = SparseFile(partial.parent, partial.name, 1 << 20)
    claim = file.claim(1 << 19, 1 << 20)
    file.close()  # its own claim keeps the lock, its descriptors do not
    assert claim is not None
    with claim:
        assert listed(call)["partial.gguf"]["in_use"]
        assert call("cache", "clear", "--all").code == 1
        assert partial.exists()
    assert call("cache", "clear", "--all").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing says what to remove"),
        (("--all", "--older-than", "3d"), "narrower choice"),
        (("--older-than", "soon"), "like 30d"),
        (("nothing.gguf",), "no model 'nothing.gguf'"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: Any, arguments: tuple[str, ...], words: str) -> None:
    said = call("cache", "clear", *arguments)
    assert said.code == 2
    assert words in said.err


def test_doctor_says_what_the_cache_takes(call: Any, whole: Path) -> None:
    said = call("doctor", "--json")
    records = [json.loads(line) for line in said.out.splitlines()]
    detail = next(record["detail"] for record in records if record.get("id") == "gguf.cache")
    assert "1 models, 0 MiB" in detail
