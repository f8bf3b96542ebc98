"""Remote models opened with little patience, and what became of a fetch."""

from __future__ import annotations

import threading

import pytest
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_loader_gguf.model import GgufModel
from swactor_loader_gguf.parts import ModelFiles
from swactor_loader_gguf.remote import RemoteFile
from swactor_loader_gguf.web import Patience, WebFile

HASTY = Patience(connect=2.0, idle=0.4, tries=3, progress_bytes=1 << 12, first_pause=0.01)


def hasty(url: str, wanted: str = "") -> RemoteFile:
    return RemoteFile(WebFile(url, patience=HASTY))


def opened(url: str) -> GgufModel:
    return GgufModel(url, ModelFiles(url, hasty))


def assert_fetched(model: GgufModel, content: bytes, start: int, end: int) -> int:
    """The stage's tensors are in the cache as they are in the file; returns their bytes."""
    total = 0
    for ref in model.manifest(start, end).tensors:
        with open(ref.path, "rb") as file:
            file.seek(ref.offset)
            assert file.read(ref.nbytes) == content[ref.offset : ref.offset + ref.nbytes], ref.name
        total += ref.nbytes
    return total


def wait_until(true, seconds=30.0):
    pause = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if true():
            return
        pause.wait(0.02)
    pytest.fail(f"waited {seconds} s")


def failed(url: str, cause: ModelFailure, *, start: int = 0, end: int = 2) -> ModelError:
    def fetch() -> None:
        model = opened(url)
        try:
            model.fetch(start, end)
        finally:
            model.close()

    with pytest.raises(ModelError) as caught:
        fetch()
    print(caught.value.message, "|", caught.value.hint)
    assert caught.value.cause is cause
    assert caught.value.hint
    return caught.value


def whole(url, content):
    model = opened(url)
    model.fetch(0, 2)
    assert_fetched(model, content, 0, 2)
    model.close()
