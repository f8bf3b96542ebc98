"""The model files of the stage that is served, as they were when it was prepared, and what became of them.

A worker reads weights through a map of the file. A page that the file does not have any more, or that its
disk cannot give, ends the worker by SIGBUS (mmap(2)), without a word: what can be said of it is said here.
Knows files by their facts only. Must not know what is in them, nor who reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from swactor_core.faults import ModelFailure, RoleFailure
from swactor_core.values import frozen


@frozen
class FileFacts:
    """Of one file: its size in bytes, which file it is, and when it was last written to (nanoseconds)."""

    path: str
    nbytes: int
    identity: tuple[int, int]
    written: int


def facts_of(paths: Iterable[str]) -> tuple[FileFacts, ...]:
    """Of each distinct path that is a file on this machine now; others are left out."""
    found = (_facts(path) for path in dict.fromkeys(paths))
    return tuple(facts for facts in found if facts is not None)


def explain_lost_page(opened: Iterable[FileFacts]) -> tuple[str, str]:
    """Why a page of these files could not be read: words for people, and a fault's cause. Both are empty when
    no file was open."""
    files = tuple(opened)
    changes = [change for file in files if (change := _change(file))]
    if changes:
        return "; ".join(changes), ModelFailure.CONTENT_CHANGED
    if not files:
        return "", ""
    names = ", ".join(f"{file.path!r} ({file.nbytes} bytes)" for file in files)
    which = f"the model file {names} is" if len(files) == 1 else f"the model files {names} are"
    return f"a page could not be read, and {which} as when opened", RoleFailure.WEIGHTS_UNREADABLE


def _facts(path: str) -> FileFacts | None:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return FileFacts(path, state.st_size, (state.st_dev, state.st_ino), state.st_mtime_ns)


def _change(file: FileFacts) -> str:
    now = _facts(file.path)
    then = f"{file.nbytes} bytes when opened"
    if now is None:
        return f"the model file {file.path!r} is gone while it was in use: {then}"
    if now.identity != file.identity:
        what = "was replaced by another"
    elif now.nbytes < file.nbytes:
        what = "was shortened"
    elif now != file:
        what = "was written to"
    else:
        return ""
    return f"the model file {file.path!r} {what} while it was in use: {then}, {now.nbytes} now"
