"""header.py over a file that is cut short while it is read: an error says so. A map would end the process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_loader_gguf import header as module
from swactor_loader_gguf.index import GgufIndex


@pytest.fixture
def model(raw: Any, tmp_path: Path) -> Path:
    """Its header is longer than what is read of it at once, a page and more."""
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.small_model(keys={"words": raw.strings("words", ["word"] * 4000)}))
    return path


def read_in_pieces(
    monkeypatch: pytest.MonkeyPatch, before: Any = lambda number: None
) -> list[tuple[int, int]]:
    """Notes what is read, as (bytes, offset); `before(number)` is called before each."""
    reads: list[tuple[int, int]] = []

    def pread(descriptor: int, nbytes: int, offset: int) -> bytes:
        before(len(reads))
        reads.append((nbytes, offset))
        return os.pread(descriptor, nbytes, offset)

    monkeypatch.setattr(module, "FIRST_READ", 4096)
    monkeypatch.setattr(module, "os", SimpleNamespace(**{**vars(os), "pread": pread}))
    return reads


def test_no_weight_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.open("ab") as file:
        file.truncate(1 << 34)  # sparse
    reads = read_in_pieces(monkeypatch)
    index = GgufIndex(str(model))
    assert len(reads) > 1
    assert max(nbytes for nbytes, _ in reads) <= 4 * index.header_bytes
    assert index.strings("words") == [b"word"] * 4000


@pytest.mark.parametrize("left", [0, 100, 5000])
def test_a_file_that_is_shortened_while_it_is_read_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    whole = model.stat().st_size
    read_in_pieces(monkeypatch, lambda number: os.truncate(model, left) if number == 1 else None)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError, match="was shortened while it was read") as caught:
        GgufIndex(str(model))
    assert f"{whole} bytes when opened, {left} now" in caught.value.message
    assert caught.value.cause is ModelFailure.CONTENT_CHANGED
    assert "rename" in caught.value.hint
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_that_is_shortened_later_is_said_when_it_is_asked(model: Path) -> None:
    index = GgufIndex(str(model))
    digest = index.digest()
    os.truncate(model, 0)
    assert index.digest() == digest
    for ask in (lambda: index.strings("words"), lambda: index.text("general.architecture")):
        with pytest.raises(ModelError, match="was shortened while it was read"):
            ask()
    index.close()
    index.close()


def test_strings_that_are_others_than_before_are_said(model: Path) -> None:
    """They are read again when they are asked for: a file may have been written to meanwhile."""
    index = GgufIndex(str(model))
    at = index.entries["words"].offset
    with model.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 8)
    with pytest.raises(ModelError, match="'words' is not what it was"):
        index.strings("words")


def test_a_disk_that_fails_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        raise OSError(5, os.strerror(5))

    read_in_pieces(monkeypatch, fail)
    with pytest.raises(ModelError, match="cannot be read: Input/output error") as caught:
        GgufIndex(str(model))
    assert str(model) in caught.value.message
    assert caught.value.hint


def test_a_header_without_end_is_not_read_to_it(
    raw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HEADER", 1 << 20)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file([raw.array("k", 0, 1 << 22, bytes(1 << 22))]))
    with pytest.raises(ModelError, match="the header goes beyond 1 MiB"):
        GgufIndex(str(path))
