"""Remedies: of what a machine has run out of, and of names that were nearly right."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from swactor_core.errors import ConfigError, did_you_mean, remedy_of_lack


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "files open"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "ulimit -u"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "ulimit -v"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "space"),
        (MemoryError(), "memory"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (ImportError("x.so: failed to map segment from shared object"), "memory"),
        (ImportError("libx.so.1: cannot allocate memory in static TLS block"), "memory"),
    ],
)
def test_what_a_machine_has_run_out_of_has_its_remedy(error: BaseException, word: str) -> None:
    assert word in remedy_of_lack(error)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "none"), OSError("no number"), ValueError("x"), ImportError("no module")]
)
def test_other_errors_are_no_lack(error: BaseException) -> None:
    assert remedy_of_lack(error) == ""


@pytest.mark.parametrize(("number", "word"), [(errno.EMFILE, "ulimit -n"), (errno.ENOENT, "check the path")])
def test_an_error_made_for_want_of_open_files_has_their_remedy_and_no_other(number: int, word: str) -> None:
    """Whoever raises it: what the file was, or where, is not what is to be changed."""
    try:
        raise OSError(number, os.strerror(number))
    except OSError as error:
        made = ConfigError(f"x: {error}", hint="check the path")
    assert word in made.hint
    assert ConfigError("x", hint="check the path").hint == "check the path"


def test_a_slip_has_the_nearest_name_and_another_word_none() -> None:
    known = ("threads", "weights", "kernels")
    assert did_you_mean("wieghts", known) == "did you mean 'weights'? "
    assert did_you_mean("kernel", known) == "did you mean 'kernels'? "
    assert did_you_mean("colour", known) == did_you_mean("x", ()) == ""


ASKS = """
import sys
from swactor_core.errors import remedy_of_encoding
print(remedy_of_encoding(sys.argv[1], "not UTF-8"))
"""


@pytest.mark.parametrize(
    ("text", "ascii_only", "word"),
    [
        ("ü".encode(), True, "LC_ALL"),
        (b"\xff\xfe", True, "not UTF-8"),
        (b"\xff\xfe", False, "not UTF-8"),
    ],
)
def test_bytes_that_are_utf8_after_all_are_the_locale_s_fault(
    text: bytes, ascii_only: bool, word: str
) -> None:
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0"} if ascii_only else {"LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [sys.executable, "-c", ASKS, text],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        timeout=60,
        check=True,
    )
    assert word in done.stdout


def test_no_process_imports_what_only_a_slip_needs() -> None:
    asks = "import sys, swactor_core.errors; print('difflib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", asks], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False"]
