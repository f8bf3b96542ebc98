"""`cache`: what was fetched or compiled is listed with its size, goes when asked to, and stays while somebody
has it."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from swactor_loader_gguf.fetch import WheelFile
from swactor_loader_gguf.known import Identity, Known, keep
from swactor_loader_gguf.packages import request_key
from swactor_loader_gguf.sparse import SparseFile

DAY = 86400.0
DIGEST = "ab" * 32


@pytest.fixture(autouse=True)
def own_kernels(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the kernels of whoever runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "compiled"))


@pytest.fixture
def kernels(home: Path) -> Path:
    """The data base of one compiler's kernels, as tinygrad keeps it, and one of a former tinygrad."""
    folder = home / "compiled" / "swactor"
    (folder / "tinygrad-0.0.1" / "ab").mkdir(parents=True)
    (folder / "tinygrad-0.0.1" / "ab" / "kernels.db").write_bytes(b"k" * 4096)
    path = folder / "tinygrad-0.14.0" / "cd" / "kernels.db"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    return path


@pytest.fixture
def leftover(home: Path) -> Path:
    """What a fetch that was killed has left."""
    folder = home / "cache" / "tmp" / "model==1.0_file.gguf-12ab.x7_k2"
    folder.mkdir(parents=True)
    (folder / "file.whl").write_bytes(b"w" * 12288)
    (home / "cache" / "locks").mkdir()
    (home / "cache" / "locks" / "model==1.0_file.gguf-12ab").write_bytes(b"")
    return folder


@pytest.fixture
def whole(home: Path) -> Path:
    """A whole model out of a package, with the note of its digest."""
    path = home / "cache" / "gguf" / DIGEST / "whole.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 8192)
    names = home / "cache" / "names"
    names.mkdir()
    (names / "package").write_text(DIGEST + "\npypi:tiny-model==1.0#folder/whole.gguf\n")
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


@pytest.fixture
def known(home: Path) -> Path:
    """4 KiB of a model of 1 MiB, with what its address was."""
    said = Known("https://host.test/folder/known.gguf", Identity(1 << 20, '"a tag"'), asked=1_700_000_000.25)
    keep("https://host.test/folder/known.gguf?signature=s1gned", said)
    file = SparseFile(said.path.parent, said.path.name, 1 << 20)
    file.write(0, b"y" * 4096)
    file.commit(0, 4096)
    file.close()
    return said.path


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
    assert call("cache", "clear", "--temporary", "--kernels").out == "removed nothing\n"


def test_sizes_on_disk_are_those_of_what_is_here(call: Any, whole: Path, partial: Path) -> None:
    found = listed(call)
    assert found["whole.gguf"]["disk_bytes"] == 8192
    assert found["partial.gguf"]["file_bytes"] == 1 << 20
    assert 0 < found["partial.gguf"]["disk_bytes"] < 1 << 17
    assert not any(model["in_use"] for model in found.values())
    said = call("cache", "list")
    assert "2 models" in said.out
    assert "partial.gguf" in said.out


def test_where_a_model_is_from_is_listed_and_goes_with_it(
    call: Any, known: Path, partial: Path, home: Path
) -> None:
    found = listed(call)
    address = "https://host.test/folder/known.gguf"
    assert found["known.gguf"]["sources"] == [{"address": address, "asked": 1_700_000_000.25}]
    assert found["partial.gguf"]["sources"] == []
    said = call("cache", "list")
    assert address in said.out
    assert "s1gned" not in said.out
    (home / "cache" / "addresses" / ".of a killed writer").write_text("torn")
    assert call("cache", "clear", "known.gguf").code == 0
    assert not list((home / "cache" / "addresses").iterdir())
    assert list(listed(call)) == ["partial.gguf"]


def test_a_model_of_a_package_is_listed_with_the_name_that_fetches_it(
    call: Any, whole: Path, home: Path
) -> None:
    note = home / "cache" / "names" / "package"
    os.utime(note, (1_700_000_000.0, 1_700_000_000.25))
    (source,) = listed(call)["whole.gguf"]["sources"]
    assert source == {"address": "pypi:tiny-model==1.0#folder/whole.gguf", "asked": 1_700_000_000.25}
    assert "pypi:tiny-model==1.0#folder/whole.gguf" in call("cache", "list").out.replace("\n", "")
    # what is no note, or is cleared at this moment
    (home / "cache" / "names" / "folder").mkdir()
    (home / "cache" / "names" / "gone").symlink_to(home / "nowhere")
    assert listed(call)["whole.gguf"]["sources"] == [source]
    # as earlier versions have noted it
    wheel = WheelFile("tiny_model", "2.0", "a_b.gguf")
    note.unlink()
    (home / "cache" / "names" / request_key(wheel)).write_text(DIGEST + "\n")
    (source,) = listed(call)["whole.gguf"]["sources"]
    assert source["address"] == "pypi:tiny_model==2.0#a_b.gguf"
    (home / "cache" / "names" / request_key(wheel)).rename(home / "cache" / "names" / "cut-0123456789abcdef")
    assert listed(call)["whole.gguf"]["sources"] == []


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


def besides(call: Any) -> dict[str, list[dict[str, Any]]]:
    """What is listed that is no model, by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in call("cache", "list", "--json").out.splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record)
    return found


def test_leftovers_and_kernels_are_listed_with_what_they_take(
    call: Any, leftover: Path, kernels: Path
) -> None:
    found = besides(call)
    assert [(record["path"], record["disk_bytes"]) for record in found["temporary"]] == [
        (str(leftover), 12288)
    ]
    assert [record["disk_bytes"] for record in found["kernels"]] == [4096, 0]
    assert not any(record["in_use"] for records in found.values() for record in records)
    said = call("cache", "list")
    assert re.search(r"temporary files +12\.0 KiB .*" + re.escape(str(leftover)), said.out)
    assert re.search(r"compiled kernels +4\.0 KiB .*tinygrad-0\.0\.1/ab", said.out)
    assert leftover.is_dir()
    assert kernels.is_file()


def test_all_is_all(call: Any, whole: Path, leftover: Path, kernels: Path, home: Path) -> None:
    words = "1 model, 8.0 KiB; temporary files, 12.0 KiB; compiled kernels, 4.0 KiB\n"
    assert call("cache", "clear", "--all", "--dry-run").out == f"would remove {words}"
    assert leftover.is_dir()
    assert call("cache", "clear", "--all").out == f"removed {words}"
    assert besides(call) == {}
    assert not list((home / "cache" / "tmp").iterdir())
    assert not list((home / "compiled" / "swactor").iterdir())


@pytest.mark.parametrize(
    ("option", "words", "left"),
    [
        ("--temporary", "removed temporary files, 12.0 KiB\n", {"model", "kernels"}),
        ("--kernels", "removed compiled kernels, 4.0 KiB\n", {"model", "temporary"}),
        ("whole.gguf", "removed 1 model, 8.0 KiB\n", {"temporary", "kernels"}),
    ],
)
def test_what_is_named_goes_alone(
    call: Any, whole: Path, leftover: Path, kernels: Path, option: str, words: str, left: set[str]
) -> None:
    said = call("cache", "clear", option)
    assert (said.code, said.out) == (0, words)
    assert set(besides(call)) == left


def test_an_age_is_meant_of_everything(call: Any, whole: Path, leftover: Path, kernels: Path) -> None:
    for path in (leftover / "file.whl", leftover):
        age(path, 40)
    former = kernels.parents[2] / "tinygrad-0.0.1" / "ab"
    for path in (former / "kernels.db", former):
        age(path, 40)
    said = call("cache", "clear", "--older-than", "30d")
    assert said.out == ("removed 0 models, 0 B; temporary files, 12.0 KiB; compiled kernels, 4.0 KiB\n")
    assert kernels.exists()
    assert whole.exists()
    assert not former.exists()


def test_what_a_fetch_fills_now_stays(call: Any, leftover: Path) -> None:
    with (leftover.parent.parent / "locks" / "model==1.0_file.gguf-12ab").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert besides(call)["temporary"][0]["in_use"]
        said = call("cache", "clear", "--temporary")
        assert (said.code, said.out) == (1, "removed nothing\n")
        assert f"temporary files in {leftover}: it is being fetched, and so it stays" in said.err
        kept = call("cache", "clear", "--all", "--json")
        assert [json.loads(line)["type"] for line in kept.out.splitlines()] == ["kept"]
        assert (leftover / "file.whl").exists()
    assert call("cache", "clear", "--temporary").code == 0
    assert not leftover.exists()


def test_kernels_that_a_worker_has_open_stay(call: Any, kernels: Path) -> None:
    data_base = sqlite3.connect(kernels)
    data_base.execute("CREATE TABLE kernels (code BLOB)")
    data_base.commit()
    said = call("cache", "clear", "--kernels")
    assert (said.code, said.out) == (1, "removed compiled kernels, 4.0 KiB\n")
    assert f"compiled kernels in {kernels.parent}: a process has them open, and so it stays" in said.err
    data_base.execute("INSERT INTO kernels VALUES (?)", (b"x",))
    data_base.close()
    assert call("cache", "clear", "--kernels").code == 0
    assert not kernels.parent.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing says what to remove"),
        (("--all", "--older-than", "3d"), "narrower choice"),
        (("--all", "--kernels"), "narrower choice"),
        (("--older-than", "soon"), "like 30d"),
        (("nothing.gguf",), "no model 'nothing.gguf'"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: Any, arguments: tuple[str, ...], words: str) -> None:
    said = call("cache", "clear", *arguments)
    assert said.code == 2
    assert words in said.err


@pytest.mark.parametrize(
    ("value", "statuses", "words"),
    [("1", ("ok", "warn"), "SWACTOR_OFFLINE is set: nothing is fetched"), ("no way", ("fail",), "'no way'")],
)
def test_doctor_says_what_the_switch_means(
    call: Any, monkeypatch: pytest.MonkeyPatch, value: str, statuses: tuple[str, ...], words: str
) -> None:
    monkeypatch.setenv("SWACTOR_OFFLINE", value)
    records = [json.loads(line) for line in call("doctor", "--json").out.splitlines()]
    (check,) = [record for record in records if record.get("id") == "gguf.cache"]
    assert check["status"] in statuses
    assert words in check["detail"]


def test_doctor_says_what_the_cache_takes(call: Any, whole: Path) -> None:
    said = call("doctor", "--json")
    records = [json.loads(line) for line in said.out.splitlines()]
    detail = next(record["detail"] for record in records if record.get("id") == "gguf.cache")
    assert "1 models, 0 MiB" in detail
