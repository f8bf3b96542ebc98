"""What a node says of model files when a page of them could not be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from swactor_core.faults import REMEDIES, REMEDIES_OF_CAUSES, Component, Fault, FaultReason, ModelFailure
from swactor_core.node.model_files import explain_lost_page, facts_of


def _shorten(path: Path) -> None:
    os.truncate(path, 4)


def _lengthen(path: Path) -> None:
    os.truncate(path, 20)


def _write(path: Path) -> None:
    os.utime(path, ns=(1, 1))  # a clock may be too coarse to tell two writes apart


def _replace(path: Path) -> None:
    shutil.copyfile(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shortened": (_shorten, "was shortened while it was in use: 10 bytes when opened, 4 now"),
    "lengthened": (_lengthen, "was written to while it was in use: 10 bytes when opened, 20 now"),
    "written": (_write, "was written to while it was in use: 10 bytes when opened, 10 now"),
    "replaced": (_replace, "was replaced by another while it was in use: 10 bytes when opened, 10 now"),
    "removed": (os.unlink, "is gone while it was in use: 10 bytes when opened"),
}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for path in paths:
        path.write_bytes(b"0123456789")
    return paths


@pytest.mark.parametrize("change", CHANGES)
def test_only_the_changed_file_is_named_with_what_became_of_it(files: list[Path], change: str) -> None:
    opened = facts_of([str(path) for path in files])
    alter, said = CHANGES[change]
    alter(files[1])
    assert explain_lost_page(opened) == (
        f"the model file {str(files[1])!r} {said}",
        ModelFailure.CONTENT_CHANGED,
    )


def test_files_as_they_were_are_all_named(files: list[Path]) -> None:
    words, cause = explain_lost_page(facts_of([str(path) for path in files]))
    assert words == (
        f"a page could not be read, and the model files {str(files[0])!r} (10 bytes), "
        f"{str(files[1])!r} (10 bytes) are as when opened"
    )
    assert cause == "WeightsUnreadable"


def test_nothing_is_said_of_no_file(tmp_path: Path) -> None:
    assert facts_of([str(tmp_path / "none"), "a\0b"]) == ()
    assert explain_lost_page(()) == ("", "")


def test_a_file_of_many_tensors_is_one_file(files: list[Path]) -> None:
    assert [file.path for file in facts_of([str(files[0])] * 3)] == [str(files[0])]


@pytest.mark.parametrize(("reason", "cause"), REMEDIES_OF_CAUSES)
def test_the_remedy_of_a_cause_stands_before_that_of_its_reason(reason: FaultReason, cause: str) -> None:
    assert Fault(reason, Component.GPU_WORKER_CTL, cause=cause).remedy == REMEDIES_OF_CAUSES[reason, cause]
    assert Fault(reason, Component.GPU_WORKER_CTL, cause="other").remedy == REMEDIES[reason]
