"""Files that are overwritten are whole at every moment: the old one, or the new one, and no half is left."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from swactor_core import whole_files
from swactor_core.whole_files import WholeFile

MODEL = Path(__file__).parent.parent / "data" / "tiny" / "llama-tied.gguf"
ENTRY = [sys.executable, "-m", "swactor_cli"]
MOCKS = (
    "--transport", "memory", "--membership", "static", "--worker", "echo", "--loader", "synthetic",
    "--arena", "heap",
)  # fmt: skip
RUN = ("run", "demo", *MOCKS, "--prompt", "hello", "--sample-on", "orchestrator")
OLD = b"what was there before\n"


@pytest.fixture(params=["unnamed", "named"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with files that have no name yet, and one without, such as NFS."""
    if request.param == "unnamed":
        return
    opened = os.open

    def without(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(whole_files.os, "open", without)


@pytest.mark.usefixtures("system")
def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    path.chmod(0o640)
    with closing(WholeFile(str(path))) as file:
        file.write(b"new")
        assert path.read_bytes() == OLD
        file.commit()
        assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.usefixtures("system")
def test_what_is_not_committed_never_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for old in (None, OLD):
        if old is not None:
            path.write_bytes(old)
        with closing(WholeFile(str(path))) as file:
            file.write(b"new")
        assert os.listdir(tmp_path) == ([] if old is None else ["file"])
    assert path.read_bytes() == OLD


@pytest.mark.usefixtures("system")
def test_a_file_that_came_meanwhile_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with closing(WholeFile(str(path), private=True, replace=False)) as file:
        file.write(b"new")
        path.write_bytes(OLD)
        with pytest.raises(FileExistsError):
            file.commit()
    assert path.read_bytes() == OLD
    path.unlink()
    with closing(WholeFile(str(path), private=True, replace=False)) as file:
        file.commit(durable=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        WholeFile(str(path), replace=False)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.usefixtures("system")
def test_a_link_stays_a_link_and_a_new_file_has_the_umask_s_mode(tmp_path: Path) -> None:
    link, path = tmp_path / "link", tmp_path / "below" / "file"
    path.parent.mkdir()
    link.symlink_to(path)
    before = os.umask(0o027)
    try:
        with closing(WholeFile(str(link))) as file:
            file.write(b"new")
            file.commit()
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


KILLED = """
import errno, os, signal, sys
opened = os.open
def without(path, flags, *rest, **options):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "")
    return opened(path, flags, *rest, **options)
os.open = without
from swactor_core.whole_files import WholeFile
file = WholeFile(sys.argv[1])
file.write(b"half")
print("here", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("system", ["named"], indirect=True)
def test_what_a_killed_writer_left_goes_a_day_later_and_a_living_one_s_part_stays(
    tmp_path: Path, system: None
) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "theirs")], text=True, **pipes)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "here\n"
        (left,) = tmp_path.glob(".swactor-*.part")
        others = [tmp_path / ".swactor-user", tmp_path / "a.part", tmp_path / ".swactor-folder.part"]
        others[2].mkdir()
        for path in others[:2]:
            path.touch()
        (tmp_path / ".swactor-link.part").symlink_to(others[1])

        def write_beside(age: float) -> bool:
            for path in (left, *others):
                os.utime(path, (time.time() - age,) * 2)
            whole_files.write_whole(tmp_path / "mine", b"new")
            assert all(path.exists() for path in others)
            return left.exists()

        assert write_beside(age=48 * 3600), "its writer lives"
        writer.communicate("go\n", timeout=60)
        assert write_beside(age=3600), "another machine's lock may not be seen here"
        assert not write_beside(age=48 * 3600)
        assert (tmp_path / "mine").read_bytes() == b"new"
    finally:
        writer.kill()
        writer.communicate(timeout=60)


def test_what_is_no_file_is_written_as_it_is(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with closing(WholeFile(f"/dev/fd/{writer}")) as file:
        file.write(b"new")
        file.commit()
    os.close(writer)
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        WholeFile(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        WholeFile(str(tmp_path / "no" / "file"))


def limited(nbytes: int) -> Callable[[], None]:
    """Files of the process end there, as they do on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def run(*arguments: str | Path, limit: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ENTRY, *map(str, arguments)],
        preexec_fn=limited(limit),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def test_a_cluster_file_survives_a_full_disk(call: Any, home: Path) -> None:
    out = home / "cluster" / "cluster.toml"
    out.parent.mkdir()
    new = ("cluster", "new", "--nodes", "a", "--seed", "h:1", "--out", out)
    assert call(*new).code == 0
    old = out.read_bytes()
    said = run(*new, "--force", limit=100)
    assert said.returncode == 2
    assert f"error: --out {str(out)!r}: File too large" in said.stderr
    assert "Traceback" not in said.stderr
    assert out.read_bytes() == old
    assert os.listdir(out.parent) == ["cluster.toml"]
    assert call(*new, "--force").code == 0
    assert out.read_bytes() != old
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_logits_survive_a_full_disk(home: Path) -> None:
    rows = home / "out" / "rows"
    rows.parent.mkdir()
    rows.write_bytes(OLD)
    said = run(*RUN, "--max-tokens", "40", "--logits", rows, limit=12_000)
    assert said.returncode == 1
    assert f"error: --logits {str(rows)!r}: File too large" in said.stderr
    assert "hint: " in said.stderr
    assert rows.read_bytes() == OLD
    assert os.listdir(rows.parent) == ["rows"]


def test_logits_of_a_run_that_never_began_leave_the_old_ones(call: Any, home: Path) -> None:
    rows = home / "rows"
    rows.write_bytes(OLD)
    for wrong in (["--events", home / "no" / "file"], ["--transport", "none"]):
        assert call(*RUN, "--max-tokens", "2", "--logits", rows, *wrong).code != 0
        assert rows.read_bytes() == OLD
    assert call(*RUN, "--max-tokens", "2", "--logits", rows).code == 0
    assert len(rows.read_bytes()) % 8 == 0
    assert rows.read_bytes() != OLD


@pytest.mark.parametrize("option", ["--events", "--logits"])
def test_a_file_of_the_run_itself_is_not_written_over(call: Any, home: Path, option: str) -> None:
    model, prompt = home / "m.gguf", home / "prompt"
    model.write_bytes(MODEL.read_bytes())
    prompt.write_text("hello")
    for target, what in ((model, "the model"), (home / "link", "the model")):
        if not target.exists():
            target.symlink_to(model)
        said = call(
            *("run", model, "--prompt-ids", "1", "--worker", "echo", "--sample-on", "orchestrator"),
            option,
            target,
        )
        assert (said.code, said.out) == (2, "")
        assert f"{option} {str(target)!r} is {what}" in said.err
        assert model.read_bytes() == MODEL.read_bytes()
    said = call("run", "demo", *MOCKS, "--prompt-file", prompt, "--sample-on", "orchestrator", option, prompt)
    assert said.code == 2
    assert prompt.read_text() == "hello"
